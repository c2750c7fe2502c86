-- Runs all operations if and only if the holder's number is current and the sequence is the next one.
-- KEYS: fence, then the key of each operation
-- ARGV: number field, number, sequence field, sequence, digest field, digest, then per operation: kind and its arguments
--   'X' entry id, ttl s, payload  XADD, and EXPIRE unless 0
--   'S' ttl s, value              SET with EX
--   'H' ttl s, n, n × (f, v)      HSET and EXPIRE
-- Answers OK | ALREADY (the same call was applied before, its reply was lost) | STALE
-- Writes of a holder whose number is over are counted by their sequence field, in `refused:<field>` of the fence.
local fence = redis.call('HMGET', KEYS[1], ARGV[1], ARGV[3], ARGV[5])
local sequence = tonumber(ARGV[4])
local last = tonumber(fence[2] or '0')
if fence[1] ~= ARGV[2] then
  redis.call('HINCRBY', KEYS[1], 'refused:' .. ARGV[3], 1)
  return 'STALE'
end
if sequence == last and fence[3] == ARGV[6] then return 'ALREADY' end
if sequence ~= last + 1 then return 'STALE' end

local at = 7
for k = 2, #KEYS do
  local kind = ARGV[at]
  if kind == 'X' then
    redis.call('XADD', KEYS[k], ARGV[at + 1], 'm', ARGV[at + 3])
    if ARGV[at + 2] ~= '0' then redis.call('EXPIRE', KEYS[k], ARGV[at + 2]) end
    at = at + 4
  elseif kind == 'S' then
    redis.call('SET', KEYS[k], ARGV[at + 2], 'EX', ARGV[at + 1])
    at = at + 3
  else
    local n = tonumber(ARGV[at + 2])
    redis.call('HSET', KEYS[k], unpack(ARGV, at + 3, at + 2 + 2 * n))
    redis.call('EXPIRE', KEYS[k], ARGV[at + 1])
    at = at + 3 + 2 * n
  end
end
redis.call('HSET', KEYS[1], ARGV[3], ARGV[4], ARGV[5], ARGV[6])
return 'OK'
