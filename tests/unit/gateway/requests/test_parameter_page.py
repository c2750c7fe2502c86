"""The page of parameters says what the table says."""

from pathlib import Path

from services.gateway.requests.parameter_table import parameter_table

PAGE = Path(__file__).parents[4] / "infra" / "parameters.md"


def test_the_page_holds_the_table() -> None:
    assert PAGE.read_text().endswith("\n\n" + parameter_table())
