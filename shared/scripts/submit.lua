-- Accepts a request, or says why not; nothing is queued unless everything is.
-- KEYS: record, intake, limits, idempotency
-- ARGV: request id, submission, Submit entry, prompt tokens, record ttl s, idempotency value to store ('' = no key), idempotency ttl s
-- Answers {status, detail}: ACCEPTED | DUPLICATE id | CONFLICT | FULL field
local request_id, submission, entry = ARGV[1], ARGV[2], ARGV[3]
local prompt_tokens, ttl = tonumber(ARGV[4]), tonumber(ARGV[5])
local claim, claim_ttl = ARGV[6], tonumber(ARGV[7])

if claim ~= '' then
  local held = redis.call('GET', KEYS[4])
  if held then
    local split = string.find(held, '|', 1, true)
    local digest, holder = string.sub(held, 1, split - 1), string.sub(held, split + 1)
    if digest ~= string.sub(claim, 1, string.find(claim, '|', 1, true) - 1) then
      return {'CONFLICT', holder}
    end
    return {'DUPLICATE', holder}
  end
end

local stored = redis.call('HGET', KEYS[1], 'submission')
if stored then
  -- The same submission again: the reply of the first try was lost.
  if stored == submission then return {'ACCEPTED', request_id} end
  return {'DUPLICATE', request_id}
end

local l = redis.call('HMGET', KEYS[3], 'submitted', 'left', 'cap_requests', 'submitted_tokens', 'left_tokens', 'cap_tokens')
local function number(i) return tonumber(l[i] or 0) or 0 end
local queued, queued_tokens = number(1) - number(2), number(4) - number(5)
if number(3) > 0 and queued >= number(3) then return {'FULL', 'requests'} end
if number(6) > 0 and queued > 0 and queued_tokens + prompt_tokens > number(6) then return {'FULL', 'tokens'} end

redis.call('HSET', KEYS[1], 'submission', submission)
redis.call('EXPIRE', KEYS[1], ttl)
if claim ~= '' then redis.call('SET', KEYS[4], claim, 'EX', claim_ttl) end
redis.call('HINCRBY', KEYS[3], 'submitted', 1)
redis.call('HINCRBY', KEYS[3], 'submitted_tokens', prompt_tokens)
redis.call('XADD', KEYS[2], '*', 'm', entry)
return {'ACCEPTED', request_id}
