"""`python -m tests.fault`: the fault tests in their long form, every scenario or those of `--only`.

Prints its figures, writes JSON, a page of Markdown and a plot, and fails if a bar is missed. A later `--model` wins.
"""

import argparse
import sys
import time
import traceback
from dataclasses import fields
from pathlib import Path

from benchmarks.termination import exit_on_sigterm
from tests.fault.scenarios import SCENARIOS
from tests.harness.fault_model import DEFAULT, TINY
from tests.harness.fault_run import FaultRun, Options, fault_run


def main() -> int:
    """Run; the exit code is 1 if a bar was missed."""
    arguments = _parse()
    exit_on_sigterm()
    known = {field.name for field in fields(Options)}
    options = Options(**{name: value for name, value in vars(arguments).items() if name in known})
    with fault_run(options, arguments.keep) as run:
        for name in arguments.only or [name for name in SCENARIOS if name not in (arguments.all_but or ())]:
            started = time.monotonic()
            _try(name, run)
            print(f"  {name}: {time.monotonic() - started:.0f} s", flush=True)
            _write(run, arguments.out)
        return run.report.finish(arguments.out / "fault.json" if arguments.out else None)


def _try(name: str, run: FaultRun) -> None:
    """A scenario that breaks off is a bar missed; the others go on."""
    try:
        SCENARIOS[name](run)
    except Exception as error:
        traceback.print_exc()
        run.report.lacks(f"{name}: {type(error).__name__}: {str(error).splitlines()[:1]}")
        run.keep = True


def _write(run: FaultRun, out: Path | None) -> None:
    """The pages so far: whoever ends a long run keeps what it found."""
    if out is None:
        return
    from tests.harness.fault_pages import write_pages

    out.mkdir(parents=True, exist_ok=True)
    write_pages(run, out)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fault", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(SCENARIOS), help="may be repeated")
    parser.add_argument("--all-but", action="append", choices=list(SCENARIOS), help="may be repeated")
    parser.add_argument("--model", choices=(TINY, DEFAULT), default=TINY)
    parser.add_argument("--out", type=Path, help="folder for fault.json, fault.md and fault.png")
    parser.add_argument("--keep", action="store_true", help="keep state and logs of the stacks")
    for field in fields(Options):
        if field.name != "model":
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default, metavar="N")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
