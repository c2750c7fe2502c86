-- Accepts one or more requests together, or says why not; nothing is queued unless everything is.
-- KEYS: intake, limits, idempotency, windows, the caller's live responses, its token bucket, then the record of each
--       request
-- ARGV: record ttl s, idempotency value to store ('' = no key), idempotency ttl s, response head ('' = none), window ms,
--       id of a step-log entry before the tokens, the caller's most live responses, tokens/s, burst in ms (0: no limit),
--       then of each request: id, submission, Submit entry, prompt tokens
-- Answers ACCEPTED, id of the first | DUPLICATE, id | CONFLICT, id | GONE, id: its client left before | FULL, field, 1 if not even one has room
--         | LIMITED, concurrency or tokens, retry after ms
local ttl, claim, claim_ttl, head, window = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local log_id, most_live, rate, burst = ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local FIRST_KEY, FIRST_ARG, WIDTH = 7, 10, 4
local count = #KEYS - FIRST_KEY + 1
local function key(i) return KEYS[FIRST_KEY + i] end
local function arg(i, part) return ARGV[FIRST_ARG + WIDTH * i + part] end
local request_id = arg(0, 0)

if claim ~= '' then
  local held = redis.call('GET', KEYS[3])
  if held then
    local split = string.find(held, '|', 1, true)
    local digest, holder = string.sub(held, 1, split - 1), string.sub(held, split + 1)
    if digest ~= string.sub(claim, 1, string.find(claim, '|', 1, true) - 1) then
      return {'CONFLICT', holder}
    end
    -- A holder of the same id is this request itself: the reply of the first try was lost.
    if holder ~= request_id then return {'DUPLICATE', holder} end
  end
end

local prompt_tokens, taken, own = 0, nil, 0
for i = 0, count - 1 do
  prompt_tokens = prompt_tokens + tonumber(arg(i, 3))
  local stored = redis.call('HGET', key(i), 'submission')
  if stored then
    taken = taken or arg(i, 0)
    if stored == arg(i, 1) then own = own + 1 end
  end
end
-- The same submissions again: the reply of the first try was lost.
if own == count then return {'ACCEPTED', request_id} end
if taken then return {'DUPLICATE', taken} end
if redis.call('HEXISTS', key(0), 'gone') == 1 then return {'GONE', request_id} end

local l = redis.call('HMGET', KEYS[2], 'submitted', 'left', 'cap_requests', 'submitted_tokens', 'left_tokens', 'cap_tokens')
local function number(i) return tonumber(l[i] or 0) or 0 end
local queued, queued_tokens = number(1) - number(2), number(4) - number(5)
if number(3) > 0 and queued + count > number(3) then
  return {'FULL', 'requests', queued >= number(3) and 1 or 0}
end
if number(6) > 0 and queued > 0 and queued_tokens + prompt_tokens > number(6) then return {'FULL', 'tokens', 0} end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if most_live > 0 and redis.call('SCARD', KEYS[5]) >= most_live then
  for _, id in ipairs(redis.call('SMEMBERS', KEYS[5])) do
    if not redis.call('ZSCORE', KEYS[4], id) then redis.call('SREM', KEYS[5], id) end
  end
  if redis.call('SCARD', KEYS[5]) >= most_live then return {'LIMITED', 'concurrency', 1000} end
end
if rate > 0 then
  -- The bucket's value is the time (ms) at which it will be full again.
  local full_at = math.max(now, tonumber(redis.call('GET', KEYS[6]) or '0'))
  if full_at - now >= burst then return {'LIMITED', 'tokens', math.ceil(full_at - now - burst) + 1} end
  full_at = full_at + prompt_tokens / rate * 1000
  redis.call('SET', KEYS[6], string.format('%.0f', full_at), 'PX', math.ceil(full_at - now) + 1)
end

if claim ~= '' then redis.call('SET', KEYS[3], claim, 'EX', claim_ttl) end
redis.call('HINCRBY', KEYS[2], 'submitted', count)
redis.call('HINCRBY', KEYS[2], 'submitted_tokens', prompt_tokens)
for i = 0, count - 1 do
  redis.call('HSET', key(i), 'submission', arg(i, 1), 'log_id', log_id)
  redis.call('EXPIRE', key(i), ttl)
  redis.call('XADD', KEYS[1], '*', 'm', arg(i, 2))
end
if head ~= '' then
  redis.call('HSET', key(0), 'head', head, 'holders', ',0,')
  redis.call('ZADD', KEYS[4], now + window, request_id)
  if most_live > 0 then
    redis.call('SADD', KEYS[5], request_id)
    redis.call('EXPIRE', KEYS[5], ttl)
  end
end
return {'ACCEPTED', request_id}
