"""`pagewire simulate`: flags are those of the scheduler's core, errors are one line."""

import json
from dataclasses import fields
from pathlib import Path

from typer.testing import CliRunner

from services.cli.main import app
from services.cli.settings import Settings
from services.cli.simulate import core_config
from services.scheduler.core.config import SchedulerConfig

SMALL = ["simulate", "poisson:prompt=30,output=10", "--requests", "12", "--rate", "5"]


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.stdout, done.stderr


def test_prints_figures_for_people_and_programs(tmp_path: Path) -> None:
    code, text, _ = run(*SMALL)
    assert code == 0 and "TTFT" in text and "hit rate" in text
    code, text, _ = run(*SMALL, "--json", "--workers", "2", "--plots", str(tmp_path / "plots"))
    assert code == 0 and sum(json.loads(text)["finished"].values()) == 12
    assert len(json.loads(text)["workers"]) == 2
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"ttft.png", "itl.png", "blocks.png", "queue.png"}


def test_every_scheduler_option_is_a_flag_and_reaches_the_core() -> None:
    _, text, _ = run("simulate", "--help")
    shown = "".join(text.split())
    for field in fields(SchedulerConfig):
        if field.name in Settings.model_fields:
            assert f"--{field.name.replace('_', '-')}"[:16] in shown, field.name
    settings = Settings(block_size=8, eviction="fifo", plan_ahead=1, enable_prefix_caching=False)
    config = core_config(settings, 100)
    assert (config.block_size, config.eviction, config.plan_ahead) == (8, "fifo", 1)
    assert not config.enable_prefix_caching and config.max_model_len == 100


def test_errors_are_one_line() -> None:
    for arguments in (
        ("simulate", "nothing"),
        ("simulate", "none.jsonl"),
        ("simulate", "--latency", "speed=3"),
        ("simulate", "--latency", "base_s=-1"),
        ("simulate", "--change", "5:explode:worker-0"),
        ("simulate", "--change", "5:kill:worker-9"),
        ("simulate", "--block-size", "0"),
        ("simulate", "--tenant-weights", "a=0"),
        ("simulate", "--num-blocks", "99999999999"),
        ("simulate", "poisson:prompt=1000000000000", "--requests", "1"),
    ):
        code, out, error = run(*arguments)
        assert code == 1 and not out, arguments
        assert error.startswith("error: ") and error.count("\n") == 1, error
