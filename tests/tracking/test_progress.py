from __future__ import annotations

import io
import itertools

import pytest

from gspo_env.tracking.progress import Progress, _duration


def test_plain_mode_writes_one_line_per_update() -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress.update("warm-up", 1, 4, loss=0.5)
        progress.update("train", 2, 10, success=0.5, return_=0.25, tokens_per_second=1234.4)
        progress.line("saved")
    assert stream.getvalue().splitlines() == [
        "warm-up 1/4  loss 0.5000",
        "train 2/10  success 50.0%  return 0.250  1,234 tokens/s",
        "saved",
    ]


def test_time_left_follows_the_pace_and_a_phase_can_begin_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = itertools.count(step=30)
    monkeypatch.setattr("gspo_env.tracking.progress.time.monotonic", lambda: float(next(ticks)))
    stream = io.StringIO()
    progress = Progress(stream)
    progress.update("train", 5, 9)  # a resumed run: steps 1 to 5 do not count for the speed
    progress.update("train", 6, 9)
    progress.update("evaluate", 1, 2)
    progress.update("evaluate", 2, 2)
    progress.update("evaluate", 1, 2)
    assert stream.getvalue().splitlines() == [
        "train 5/9",
        "train 6/9  1m30s left",
        "evaluate 1/2",
        "evaluate 2/2",
        "evaluate 1/2",
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
        progress.update("train", 1, 2, success=1.0)
        progress.line("[bold]not markup[/bold]")
        progress.update("train", 2, 2)
    text = stream.getvalue()
    assert "train 1/2" in text
    assert "[bold]not markup[/bold]" in text
    assert "\x1b[?25h" in text  # the cursor is visible again


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (185, "3m05s"), (7440, "2h04m")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert _duration(seconds) == text
