"""`pagewire simulate`: the real core under synthetic or recorded load, in virtual time and without a model.

trace.py        requests and their texts; generators.py makes them, trace_files.py and recorded_traces.py read them
latency.py      how long a step takes
worker.py       carries plans out; pool.py: seats that workers take and leave
run.py          the simulation: `simulate(config, workers, trace, latency) -> Report`
clients.py      what clients see; figures.py gathers, measures.py adds up, report.py tells
plots.py        curves as pictures (the only part that needs matplotlib)
"""

from services.scheduler.simulator.latency import LatencyModel
from services.scheduler.simulator.pool import WorkerChange, WorkerSpec
from services.scheduler.simulator.report import ClientReport, Report
from services.scheduler.simulator.run import simulate
from services.scheduler.simulator.trace import Piece, Trace, TraceRequest

__all__ = [
    "ClientReport",
    "LatencyModel",
    "Piece",
    "Report",
    "Trace",
    "TraceRequest",
    "WorkerChange",
    "WorkerSpec",
    "simulate",
]
