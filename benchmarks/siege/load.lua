-- Mixed traffic for wrk: wrk … -s load.lua URL -- FOLDER RATE SEED
--
-- FOLDER has plan.lua, with the questions and their right answers, and gets a file from each thread.
-- Run with as many threads as connections: then a thread's answer is that to its last request, so
-- that times and answers can be told apart by kind. RATE is that of all threads together, 0: as fast
-- as answers come.
--
-- A request that was not answered at all is asked once more, as HTTP allows for what may be repeated;
-- events carry keys, so they may be.

local ffi = require("ffi")
ffi.cdef [[
typedef struct { long seconds; long nanoseconds; } moment;
int clock_gettime(int clock, moment *now);
int usleep(unsigned microseconds);
]]
local MONOTONIC = 1  -- the clock of Python's time.monotonic()
local STEP = math.log(1.02)  -- of the histogram of times: each bucket ends 2 % after the one before
local CLOSING = 0.02  -- of requests ask for the connection to be closed, so that workers get others
local EVENTS_OF_USER = 500  -- fewer than the service keeps of one

local threads = {}
local moment = ffi.new("moment")

local function clock()
  ffi.C.clock_gettime(MONOTONIC, moment)
  return tonumber(moment.seconds) + tonumber(moment.nanoseconds) / 1e9
end

function setup(thread)
  threads[#threads + 1] = thread
  thread:set("id", #threads)
end

-- In each thread ------------------------------------------------------------------------------------

local plan, file, folder, interval, due
local asked         -- what is not answered yet: kind, text, expected answers, since, times
local calls = 0
local events = 0
local second = 0
local tally = {}
rest = {}           -- lines of a second that is not over; global, so that `done` can read them

function init(args)
  folder = args[1]
  local rate, seed = tonumber(args[2]), tonumber(args[3])
  plan = dofile(folder .. "/plan.lua")
  math.randomseed(1000 * seed + id)
  file = io.open(string.format("%s/load-%d-%d.txt", folder, seed, id), "w")
  if rate > 0 then
    interval = plan.connections / rate
    due = clock() + math.random() * interval
  end
end

-- Wait for the next turn. A thread has one connection, so it may simply sleep; wrk's own `delay` sends
-- two requests at once after a connection was closed meanwhile. Called after an answer, so that such an
-- end is noticed before the next request.
local function pace()
  if not interval then return end
  local now = clock()
  due = math.max(due + interval, now - 1)  -- what is late by more than a second is left out
  if due > now then ffi.C.usleep((due - now) * 1e6) end
end

local function new_event()
  local user = string.format("load-%d-%d-%d", plan.run, id, math.floor(events / EVENTS_OF_USER))
  local item = string.format("e%d", events)
  events = events + 1
  local body = string.format(
    '{"events":[{"user":"%s","item":"%s","timestamp":%d,"key":"%s"}]}', user, item, events, item)
  return {kind = "events", method = "POST", path = "/events", body = body, user = user, item = item}
end

local function choose()
  local at = math.random()
  for _, group in ipairs(plan.groups) do
    at = at - group.share
    if at < 0 then
      if group.kind == "events" then return new_event() end
      return group[math.random(#group)]
    end
  end
  local last = plan.groups[#plan.groups]
  return last[math.random(#last)]
end

local function note(kind, outcome, seconds)
  local now = math.floor(clock())
  if now ~= second then
    for _, line in ipairs(rest) do file:write(line, "\n") end
    second, tally, rest = now, {}, {}
  end
  local name = kind .. " " .. outcome
  local entry = tally[name]
  if not entry then
    entry = {line = #rest + 1, count = 0, times = {}}
    tally[name] = entry
  end
  entry.count = entry.count + 1
  if seconds then
    local bucket = math.floor(math.log(math.max(seconds, 1e-6) * 1e6) / STEP)
    entry.times[bucket] = (entry.times[bucket] or 0) + 1
  end
  local parts = {"s", second, kind, outcome, entry.count}
  for bucket, count in pairs(entry.times) do parts[#parts + 1] = bucket .. ":" .. count end
  rest[entry.line] = table.concat(parts, " ")
end

function request()
  calls = calls + 1
  if asked then
    note(asked.question.kind, asked.times == 1 and "cut" or "cut-again", nil)
    if asked.times > 1 then asked = nil end
  end
  if asked then
    asked.times = asked.times + 1
  else
    asked = {question = choose(), since = clock(), times = 1}
  end
  local question = asked.question
  local headers = {["content-type"] = "application/json"}
  if math.random() < CLOSING then headers["connection"] = "close" end
  local text = wrk.format(question.method, question.path, headers, question.body)
  if id == 1 and calls == 1 then asked = nil end  -- wrk looks at a first one that it does not send
  return text
end

local function is_right(question, body)
  local expected = question.expected
  if not expected then return true end
  local numbers = expected[body:match('"version":"(%x+)"') or ""]
  if not numbers then return false end
  local at = 0
  for item, score in body:gmatch('{"item":([^,]+),"name":null,"score":([^}]+)}') do
    if numbers[at + 1] ~= tonumber(item) or numbers[at + 2] ~= tonumber(score) then return false end
    at = at + 2
  end
  return at == #numbers
end

local function outcome_of(question, status, headers, body)
  if status == 200 then
    return is_right(question, body) and "right" or "wrong"
  elseif status == 503 or status == 429 then
    if not headers["retry-after"] then return "no-retry-after" end
    return body:find('"overloaded"', 1, true) and "turned-away"
      or body:find('"histories_unavailable"', 1, true) and "no-store" or "status-" .. status
  end
  return "status-" .. status
end

function response(status, headers, body)
  if not asked then return end
  local question = asked.question
  local outcome = outcome_of(question, status, headers, body)
  note(question.kind, outcome, clock() - asked.since)
  if outcome == "right" and question.item then
    file:write("a ", question.user, " ", question.item, "\n")
  elseif outcome ~= "right" and outcome ~= "turned-away" and outcome ~= "no-store" then
    file:write("x ", question.kind, " ", outcome, " ", question.body or "", " -> ", body, "\n")
  end
  asked = nil
  pace()
end

-- In the end, once ----------------------------------------------------------------------------------

function done(summary)
  for _, thread in ipairs(threads) do
    for _, line in ipairs(thread:get("rest")) do print(line) end
  end
  local errors = summary.errors
  print(string.format("e connect %d", errors.connect))
  print(string.format("e read %d", errors.read))
  print(string.format("e write %d", errors.write))
  print(string.format("e timeout %d", errors.timeout))
end
