"""Text that a stranger wrote does not act on a terminal, an editor or a picture."""

import io
import logging
import unicodedata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.turns import episode, turn

from gspo_env.cli.main import main
from gspo_env.config import Config
from gspo_env.env.registration import hide_progress_bars
from gspo_env.episodes.records import to_record
from gspo_env.episodes.text import render_episode
from gspo_env.errors import ConfigError, figure
from gspo_env.model.load import load_model
from gspo_env.model.save import save_model
from gspo_env.redaction import visible
from gspo_env.runs import Run, learning_curve
from gspo_env.tracking.console import Progress
from gspo_env.types import Ending, Episode, StopReason, Task, Turn

HOSTILE = "\x1b]0;owned\x07\x1b[2J\rsuccess\u202e\u2028== forged ==\x85\x9b31m"
ACTS = ("Cc", "Cs", "Zl", "Zp")


@given(st.text(st.characters(exclude_categories=())))
def test_nothing_that_acts_is_left_and_all_else_stays(text):
    shown = visible(text)
    assert not [c for c in shown if unicodedata.category(c) in ACTS and c not in "\t\n"]
    assert not [c for c in shown if unicodedata.bidirectional(c) in ("RLO", "LRO", "RLI", "LRI")]
    shown.encode()
    if text.isprintable():
        assert shown == text or "\u061c" in text


def test_an_episode_file_has_no_escape_sequence_and_no_forged_heading():
    task = Task(env_id="e", seed=0, options={"x": HOSTILE})
    ended = {"reason": StopReason.ERROR, "error": HOSTILE, "final_observation": HOSTILE}
    played = episode(turn(observation=HOSTILE, text=HOSTILE), task=task, **ended)
    shown = render_episode(played)
    assert not {"\x1b", "\x07", "\r", "\u202e", "\u2028", "\x85", "\x9b"} & set(shown)
    assert not [line for line in shown.splitlines() if line.startswith("== forged")]


def test_the_log_and_the_errors_of_the_command_line_have_no_escape_sequence(capsys, monkeypatch):
    def run(self):
        logging.getLogger("gspo_env.x").warning("said %s\nERROR forged", HOSTILE)
        raise ConfigError(HOSTILE)

    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr("gspo_env.cli.envs.Envs.run", run)
    with pytest.raises(SystemExit):
        main(["envs"])
    said = capsys.readouterr().err
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(said)
    assert "\nERROR forged" not in said


def test_the_name_of_a_folder_has_no_escape_sequence(capsys, tmp_path):
    folder = tmp_path / HOSTILE
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "time": 1, "metrics": {"eval/success": 1}}\n'
    )
    (folder / "config.toml").write_text("")
    Progress().line(str(folder))
    main(["view", str(folder), "--no-browser"])
    main(["diagnose", str(folder)])
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set("".join(capsys.readouterr()))


def test_the_names_of_tensors_have_no_escape_sequence(monkeypatch, tmp_path, model, tokenizer):
    save_model(model, tokenizer, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, HOSTILE: torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    hide_progress_bars()
    handler, *_ = logging.getLogger("transformers").handlers
    monkeypatch.setattr(handler, "stream", io.StringIO())
    load_model(str(tmp_path))
    said = handler.stream.getvalue()
    assert "forged" in said or "31m" in said
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(said)


@pytest.mark.parametrize(
    "name", [r"$\frac$", "$", r"\$x$", "$x$ $", HOSTILE, "a_b^c \\", "x" * 10**6]
)
def test_a_name_that_looks_like_a_formula_is_drawn_as_it_is(tmp_path, name):
    run = Run.in_progress(Config(), [(0, {"eval/success": 0.5})])
    figure = learning_curve(run, name)
    figure.savefig(tmp_path / "curve.png")  # a broken formula would raise
    title = figure.get_suptitle()
    assert title == visible(name[:300]).replace("$", r"\$")


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (0.1 + 0.2 - 0.3, ".3g", "0"),
        (-0.0, "+.4g", "+0"),
        (-1.39e-17, ".1%", "0.0%"),
        (0.1 + 0.2, ".3g", "0.3"),
        (-1e-6, ".3g", "-1e-06"),
        (1e-6, "+.4g", "+1e-06"),
    ],
)
def test_what_only_rounding_parts_from_0_is_shown_as_0(value, form, text):
    assert figure(value, form) == text


def test_no_figure_of_an_episode_or_of_progress_is_a_rounding_error(capsys):
    turns = tuple(Turn(observation="", text="x", reward=reward) for reward in (0.1, 0.2, -0.3))
    ending = Ending(reason=StopReason.TERMINATED)
    played = Episode(task=Task(env_id="x", seed=0), turns=turns, ending=ending)
    assert played.outcome != 0
    assert "outcome +0, stopped" in render_episode(played)
    assert ": outcome +0, stopped" in render_episode(to_record(played, "eval", 0))
    Progress().update("evaluate", 1, 1, mean_return=-1e-17, return_std=-0.0, other=5.6e-17)
    assert "return 0.000" in (shown := capsys.readouterr().out)
    assert "other 0\n" in shown
