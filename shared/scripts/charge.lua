-- Takes a response's tokens from its caller's bucket, which may be overdrawn. Once: a second time its reply was lost.
-- KEYS: bucket, record of the response's first request     ARGV: tokens, tokens/s
if redis.call('HEXISTS', KEYS[2], 'submission') == 1 and redis.call('HSETNX', KEYS[2], 'charged', 1) == 0 then return end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local full_at = math.max(now, tonumber(redis.call('GET', KEYS[1]) or '0')) + ARGV[1] / ARGV[2] * 1000
redis.call('SET', KEYS[1], string.format('%.0f', full_at), 'PX', math.ceil(full_at - now) + 1)
