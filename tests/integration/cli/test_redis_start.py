"""The script that starts Redis in a container: what it hands over."""

import os
import subprocess
from pathlib import Path

import pytest

FILES = Path(__file__).parents[3] / "infra" / "redis"


def start(folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """With a Redis that prints the configuration that it is given."""
    program = folder / "redis-server"
    program.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo "v=7.4.0"; else cat; fi\n')
    program.chmod(0o755)
    given = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "REDIS_PASSWORD": "x",
        "PAGEWIRE_REDIS_FILES": str(FILES),
        "PAGEWIRE_REDIS_DATA": str(folder),
    }
    return subprocess.run(["sh", FILES / "start.sh"], env=given | environment, capture_output=True, text=True)


def last(lines: str, name: str) -> str:
    """The value that holds: the last one."""
    return [line for line in lines.splitlines() if line.startswith(f"{name} ")][-1].split()[1]


@pytest.mark.parametrize(
    ("asked", "appendonly", "appendfsync"),
    [("", "yes", "everysec"), ("everysec", "yes", "everysec"), ("always", "yes", "always"), ("none", "no", "everysec")],
)
def test_durability(tmp_path: Path, asked: str, appendonly: str, appendfsync: str) -> None:
    lines = start(tmp_path, PAGEWIRE_DURABILITY=asked).stdout
    assert (last(lines, "appendonly"), last(lines, "appendfsync")) == (appendonly, appendfsync)
    assert last(lines, "maxmemory-policy") == "noeviction"


def test_an_unknown_durability_starts_nothing(tmp_path: Path) -> None:
    answer = start(tmp_path, PAGEWIRE_DURABILITY="sometimes")
    assert answer.returncode == 1 and not answer.stdout and "sometimes" in answer.stderr


def test_without_a_password_nothing_starts(tmp_path: Path) -> None:
    """Case 136."""
    answer = start(tmp_path, REDIS_PASSWORD="")
    assert answer.returncode != 0 and not answer.stdout and "REDIS_PASSWORD" in answer.stderr


def test_what_a_killed_redis_left_of_a_new_file_goes(tmp_path: Path) -> None:
    kept, remains = tmp_path / "appendonly.aof", tmp_path / "temp-rewriteaof-17.aof"
    for file in (kept, remains):
        file.write_text("prompts")
    start(tmp_path)
    assert kept.exists() and not remains.exists()
