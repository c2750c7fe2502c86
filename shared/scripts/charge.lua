-- Takes tokens from a caller's bucket, which may be overdrawn.
-- KEYS: bucket     ARGV: tokens, tokens/s
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local full_at = math.max(now, tonumber(redis.call('GET', KEYS[1]) or '0')) + ARGV[1] / ARGV[2] * 1000
redis.call('SET', KEYS[1], string.format('%.0f', full_at), 'PX', math.ceil(full_at - now) + 1)
