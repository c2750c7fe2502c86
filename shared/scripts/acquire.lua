-- Takes or renews leadership of the pool's scheduler.
-- KEYS: fence, leader lease
-- ARGV: instance, ttl ms, lease value, the epoch that it holds (0 = none), the highest that it knows
-- Answers the epoch, or 0 if another instance holds the lease.
local fence = redis.call('HMGET', KEYS[1], 'leader', 'epoch')
local epoch, held = tonumber(fence[2] or '0'), tonumber(ARGV[4])
-- Who holds nothing renews nothing, even where the fence lost its epoch: it would keep the lease from everybody.
if held > 0 and fence[1] == ARGV[1] and epoch == held then
  -- Renewal. A lapsed lease that nobody took does not cost the epoch: only the fence decides.
  -- A full Redis stores nothing new; the lease that is there may go on.
  if redis.pcall('SET', KEYS[2], ARGV[3], 'PX', ARGV[2]).err then redis.call('PEXPIRE', KEYS[2], ARGV[2]) end
  return epoch
end
if fence[1] ~= ARGV[1] and redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
-- A Redis that lost its last second, or everything, may have numbered lower already than what is on its way.
epoch = math.max(epoch, tonumber(ARGV[5])) + 1
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[2])
redis.call('HSET', KEYS[1], 'leader', ARGV[1], 'epoch', epoch)
return epoch
