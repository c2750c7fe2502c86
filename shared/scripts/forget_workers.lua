-- Takes workers out of the fence that nobody holds and that are not expected back.
-- KEYS: fence     ARGV: epoch, then of each worker: name, its incarnation
-- Answers 1; 0 if the epoch is stale. Whoever is held, or has another incarnation, stays. `forgotten` becomes the highest
-- incarnation of all that went: a worker of any such name begins above it, so none is given twice.
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
local forgotten = tonumber(redis.call('HGET', KEYS[1], 'forgotten') or '0')
for i = 2, #ARGV, 2 do
  local worker = ARGV[i]
  local seat = redis.call('HMGET', KEYS[1], 'inc:' .. worker, 'holder:' .. worker)
  if seat[1] == ARGV[i + 1] and seat[2] == '' then
    forgotten = math.max(forgotten, tonumber(seat[1]))
    redis.call('HDEL', KEYS[1], 'inc:' .. worker, 'holder:' .. worker, 'step:' .. worker, 'step_digest:' .. worker,
      'refused:step:' .. worker)
  end
end
redis.call('HSET', KEYS[1], 'forgotten', forgotten)
return 1
