-- Who answers for a response, and how long it goes on without anybody.
-- KEYS: record of its first request, windows, intake     ARGV: verb, response id, then
--   adopt, window ms             a gateway takes it over. Answers its attach number, or 0 if there is no such record
--   leave, number, window ms, least window ms, aborts…   its client left the gateway that holds this number ('' = all).
--                                Unless others hold it, it goes on for the window, or is given up. If they do, and there
--                                is no window, the least one: those that live push it ahead
--   expire, aborts…              given up if nobody has answered for it within its window
-- A response that has ended, or was given up, is no member of windows: then nothing is aborted.
-- Who holds it stands in the record, as numbers between commas. A gateway that died still does, but pushes nothing.
local verb, id = ARGV[1], ARGV[2]
local ON_ITS_WAY_S = 60
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function give_up(first)
  if not redis.call('ZSCORE', KEYS[2], id) then return 0 end
  -- First, because a Redis without memory refuses it: then it stays a member, and is given up another time.
  for i = first, #ARGV do redis.call('XADD', KEYS[3], '*', 'm', ARGV[i]) end
  return redis.call('ZREM', KEYS[2], id)
end

-- Takes a number out of the holders; whether others are left.
local function release(number)
  local holders = redis.call('HGET', KEYS[1], 'holders')
  if not holders then return false end
  local left = number == '' and ',' or string.gsub(holders, ',' .. number .. ',', ',', 1)
  if left ~= holders then redis.call('HSET', KEYS[1], 'holders', left) end
  return left ~= ','
end

if verb == 'adopt' then
  if redis.call('HEXISTS', KEYS[1], 'head') == 0 then return 0 end
  redis.call('ZADD', KEYS[2], 'XX', 'GT', now + tonumber(ARGV[3]), id)
  local number = redis.call('HINCRBY', KEYS[1], 'attach', 1)
  if redis.call('ZSCORE', KEYS[2], id) then
    redis.call('HSET', KEYS[1], 'holders', (redis.call('HGET', KEYS[1], 'holders') or ',') .. number .. ',')
  end
  return number
elseif verb == 'leave' then
  local number, window = ARGV[3], tonumber(ARGV[4])
  if window == 0 and redis.call('HEXISTS', KEYS[1], 'submission') == 0 then
    -- Its submission may still be on its way: it is not to be queued.
    redis.call('HSET', KEYS[1], 'gone', 1)
    redis.call('EXPIRE', KEYS[1], ON_ITS_WAY_S)
    return 0
  end
  if release(number) then
    if window > 0 then redis.call('ZADD', KEYS[2], 'XX', 'GT', now + window, id)
    else redis.call('ZADD', KEYS[2], 'XX', 'LT', now + tonumber(ARGV[5]), id) end
    return 0
  end
  if window == 0 then return give_up(6) end
  redis.call('ZADD', KEYS[2], 'XX', now + window, id)
  return 1
end
local until_ms = redis.call('ZSCORE', KEYS[2], id)
if not until_ms or tonumber(until_ms) > now then return 0 end
return give_up(3)
