"""Says how many examples each property was tried on: `make test-property` promises 2,000."""

from typing import Any

import pytest

from tests.property.examples import NUM_EXAMPLES


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of several processes (`-n`)
        session.config.workeroutput["num_examples"] = dict(NUM_EXAMPLES)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    NUM_EXAMPLES.update(getattr(node, "workeroutput", {}).get("num_examples", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if NUM_EXAMPLES:
        terminalreporter.section("examples")
        for name, count in NUM_EXAMPLES.items():
            terminalreporter.line(f"{count:7,} {name}")
