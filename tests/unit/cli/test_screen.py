"""What is shown where there is no terminal, and that bars do not break where there is one."""

import io

from services.cli.screen import PlainScreen, RichScreen


def test_plain_progress_is_a_line_per_quarter() -> None:
    out = io.StringIO()
    with PlainScreen(out) as screen:
        for done in range(101):
            screen.progress("loading worker-0", done / 100)
        screen.finish("loading worker-0")
        screen.finish("never started")
    assert out.getvalue().splitlines() == [f"loading worker-0 {share} %" for share in (0, 25, 50, 75, 100)]


def test_plain_progress_of_unknown_length() -> None:
    out = io.StringIO()
    with PlainScreen(out) as screen:
        screen.progress("starting Redis", None, "7.0")
        screen.progress("starting Redis", None, "7.0")
        screen.finish("starting Redis")
    assert out.getvalue().splitlines() == ["starting Redis 7.0", "starting Redis done"]


def test_rich_notes_show_brackets_as_they_are() -> None:
    out = io.StringIO()
    with RichScreen(out) as screen:
        screen.progress("loading worker-0", 0.5)
        screen.note("[red]worker-0[/red] died")
        screen.finish("loading worker-0")
    assert "[red]worker-0[/red] died" in out.getvalue()
