-- Takes or renews leadership of the pool's scheduler.
-- KEYS: fence, leader lease     ARGV: instance, ttl ms, lease value     Answers the epoch, or 0 if another instance holds it.
local instance = ARGV[1]
local leader = redis.call('HGET', KEYS[1], 'leader')
local held = redis.call('EXISTS', KEYS[2]) == 1
if leader == instance then
  -- Renewal. A lapsed lease that nobody took does not cost the epoch: only the fence decides.
  redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[2])
  return tonumber(redis.call('HGET', KEYS[1], 'epoch'))
end
if held then return 0 end
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[2])
redis.call('HSET', KEYS[1], 'leader', instance)
return redis.call('HINCRBY', KEYS[1], 'epoch', 1)
