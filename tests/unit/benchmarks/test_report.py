"""What benchmarks print and decide by."""

import json
from pathlib import Path

import pytest

from benchmarks.report import Bar, Report, Row, Times, middle_of, shown, table


def test_a_bar_is_a_ceiling_or_a_floor() -> None:
    assert Bar("x", 300.0, 300.0, "µs").is_met
    assert not Bar("x", 300.1, 300.0, "µs").is_met
    assert Bar("x", 20.0, 20.0, "/s", at_least=True).is_met
    assert not Bar("x", 19.9, 20.0, "/s", at_least=True).is_met
    assert str(Bar("a step", 512.4, 500.0, "µs")) == "MISSED  a step: 512 µs (≤ 500)"


def test_of_several_rounds_the_middle_one_counts() -> None:
    rounds: list[Row] = [{"µs": 9.0, "n": 1.0}, {"µs": 5.0, "n": 2.0}, {"µs": 7.0, "n": 3.0}]
    assert middle_of(rounds, "µs") == {"µs": 7.0, "n": 3.0, "quietest": 5.0, "noisiest": 9.0}


def test_times_are_microseconds() -> None:
    times = Times.of([n / 1e6 for n in range(101)])
    assert (times.mean, times.p50, times.p99) == pytest.approx((50.0, 50.0, 99.0))
    assert Times.of([1e-6] * 99 + [1.0]).p99 > 1.0, "the slowest one in a hundred is not forgotten"


def test_tables_align_and_name_what_is_absent() -> None:
    rows: list[Row] = [{"kind": "a", "µs": 1234.5, "peer": None}, {"kind": "long", "µs": 0.5, "peer": 7.0}]
    assert table(rows).splitlines() == ["kind     µs  peer", "a     1,234     –", "long    0.5     7"]
    assert (shown(99.96), shown(100.4), shown(0)) == ("100", "100", "0")


@pytest.mark.parametrize(("measured", "code"), [(4.0, 0), (6.0, 1)])
def test_a_missed_bar_is_the_exit_code_and_stands_in_the_json(
    measured: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("title")
    report.add("first", [{"rows": 1.0}], [Bar("good", 1.0, 2.0, "µs")])
    report.add("second", [{"rows": 2.0}], [Bar("judged", measured, 5.0, "µs")])
    assert report.finish(tmp_path / "out.json") == code
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["tables"] == {"first": [{"rows": 1.0}], "second": [{"rows": 2.0}]}
    assert [bar["met"] for bar in content["bars"]] == [True, not code]
    assert content["machine"]["cores"] >= 1
    assert ("MISSED" in capsys.readouterr().out) == bool(code)
