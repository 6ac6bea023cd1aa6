from __future__ import annotations

import io

import pytest

from gspo_env.tracking.console import Numbers
from gspo_env.tracking.progress import Progress


def test_plain_mode_writes_one_line_per_update() -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress.update("warm-up", 1, 4, Numbers(loss=0.5))
        numbers = Numbers(success=0.5, return_=0.25, tokens_per_second=1234.4)
        progress.update("train", 2, 10, numbers)
        progress.line("saved")
    assert stream.getvalue().splitlines() == [
        "warm-up 1/4  loss 0.5000",
        "train 2/10  success 50.0%  return 0.250  1,234 tokens/s",
        "saved",
    ]


def test_time_left_follows_the_pace_and_a_phase_can_begin_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("gspo_env.tracking.console.time.monotonic", lambda: now)
    stream = io.StringIO()
    progress = Progress(stream)
    progress.update("train", 5, 9)  # a resumed run: steps 1 to 5 do not count for the speed
    now += 20.0
    progress.update("train", 6, 9)
    now += 3600.0
    progress.update("evaluate", 1, 2)
    progress.update("evaluate", 2, 2)
    progress.update("evaluate", 1, 2)
    progress.update("train", 8, 9)
    assert stream.getvalue().splitlines() == [
        "train 5/9",
        "train 6/9  0:01:00 left",
        "evaluate 1/2",
        "evaluate 2/2",
        "evaluate 1/2",
        "train 8/9  0:20:07 left",
    ]


def test_every_plain_line_is_flushed() -> None:
    class Stream(io.StringIO):
        flushed = 0

        def flush(self) -> None:
            self.flushed += 1

    stream = Stream()
    progress = Progress(stream)
    progress.update("train", 1, 2)
    progress.line("lasting")
    assert stream.flushed >= 2


def test_live_mode_keeps_lasting_lines_and_markup_like_text_intact() -> None:
    stream = io.StringIO()
    with Progress(stream, live=True) as progress:
        progress.update("train", 1, 2, Numbers(success=1.0))
        progress.line("[bold]not markup[/bold]")
        progress.update("train", 2, 2)
    text = stream.getvalue()
    assert "1 of 2" in text
    assert "[bold]not markup[/bold]" in text
    assert "\x1b[?25h" in text  # the cursor is visible again


def test_a_long_line_is_not_wrapped() -> None:
    stream = io.StringIO()
    Progress(stream).line("a folder: " + "x" * 300)
    assert stream.getvalue() == "a folder: " + "x" * 300 + "\n"


def test_what_takes_long_is_shown_every_few_seconds_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("gspo_env.tracking.progress.time.monotonic", lambda: now)
    stream = io.StringIO()
    show = Progress(stream).when_slow()
    for step in range(1, 10):
        now += 0.5
        show("demonstrations", step, 9)
    assert stream.getvalue().splitlines()[0] == "demonstrations 4/9"
    assert len(stream.getvalue().splitlines()) == 2


def test_the_best_score_the_spread_and_the_clipped_share_are_in_the_line() -> None:
    stream = io.StringIO()
    numbers = Numbers(success=0.5, return_=0.25, best=0.75, spread=0.125, clipped=0.031)
    Progress(stream).update("train", 1, 9, numbers)
    assert stream.getvalue() == (
        "train 1/9  success 50.0%  best 75.0%  return 0.250  spread 0.125  clipped 3.1%\n"
    )


def test_a_terminal_without_unicode_gets_a_line_that_it_can_show() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Progress(stream).line("a folder: \N{GREEK SMALL LETTER ALPHA}")
    stream.seek(0)
    assert stream.read() == "a folder: ?\n"
