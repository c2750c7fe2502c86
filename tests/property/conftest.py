"""Says how many examples each property was tried on: `make test-property` promises 2,000."""

from typing import Any

from tests.property.examples import NUM_EXAMPLES


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if NUM_EXAMPLES:
        terminalreporter.section("examples")
        for name, count in NUM_EXAMPLES.items():
            terminalreporter.line(f"{count:7,} {name}")
