"""Lines of all logs, whole, once, with their names."""

import io
from pathlib import Path

from services.cli.log_follower import LogFollower


def test_new_lines_are_copied_with_the_name(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_text("from the last run\n")
    out = io.StringIO()
    follower = LogFollower(tmp_path, out).start()
    with (tmp_path / "worker-0.log").open("a") as log:
        log.write("one\ntwo\nhalf")
    (tmp_path / "redis.log").write_text("ready\n")
    (tmp_path / "other.txt").write_text("no\n")
    follower.stop()
    assert sorted(out.getvalue().splitlines()) == ["redis | ready", "worker-0 | one", "worker-0 | two"]


def test_a_rotated_log_is_followed_from_its_start(tmp_path: Path) -> None:
    log = tmp_path / "gateway-0.log"
    log.write_text("a long line of the last run\n")
    out = io.StringIO()
    follower = LogFollower(tmp_path, out).start()
    log.replace(tmp_path / "gateway-0.log.1")
    log.write_text("new\n")
    follower.stop()
    assert out.getvalue() == "gateway-0 | new\n"
