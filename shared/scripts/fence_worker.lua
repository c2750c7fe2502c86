-- Ends a worker incarnation for good and names the holder of the next one.
-- KEYS: fence, step log
-- ARGV: epoch, worker, new holder ('' = nobody), WorkerFenced entry, expected incarnation, the next incarnation, ttl s
-- Answers the new incarnation; 0 if the epoch is stale; the present one, negated, if it is not the expected one.
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
local worker = ARGV[2]
local current = tonumber(redis.call('HGET', KEYS[1], 'inc:' .. worker) or '0')
if current ~= tonumber(ARGV[5]) then return -current end
redis.call('HSET', KEYS[1], 'inc:' .. worker, ARGV[6],
  'holder:' .. worker, ARGV[3], 'step:' .. worker, 0, 'step_digest:' .. worker, '')
redis.call('XADD', KEYS[2], '*', 'm', ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[7])
return tonumber(ARGV[6])
