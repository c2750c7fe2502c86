"""The scheduler as a pure machine: no clock, no randomness, no I/O. Same inputs, byte-identical plans.

ticks.py        one tick: its inputs in their order, then one plan
scheduler.py    SchedulerCore: a request's life, one plan per call
beams.py        beam search, without rows and blocks; on a lane in beam_rows.py
lane.py         one worker incarnation: rows, plans in flight; when they yield, grow and end: decode_clock.py
contradiction.py whether a result can be that of its plan
placement.py    which worker takes a waiting request
victims.py      who is preempted
refusals.py     what can never be served
admission.py    who of those that wait gets a seat
queue.py        the waiting queue, by class; policies/ rank the classes
blocks.py       KV blocks of one worker, ref-counted; free ones in extents.py
cpu_tier.py     host blocks of one worker: what was swapped out, what the cache gave up
swap.py         preemption by swap, there and back; when it pays: cost_model.py
copies.py       blocks that the plan in the making copies
forks.py        choices of one prompt share its blocks
prefix_cache.py full blocks by what they hold; those that nobody uses in evictable.py
residency.py    what of a request is cached on a lane, and what its table leaves
history.py      tokens of answered steps, as the arrays that came
request.py      a request and its state machine
snapshot.py     the whole state to bytes and back, in one piece or in parts: saved_lane.py, saved_pool.py, …
report.py       figures and committed output, for others
diagnostics.py  why does this request wait
integrity.py    every invariant, checked
"""
