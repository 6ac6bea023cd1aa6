from __future__ import annotations

import io
import math

import numpy as np

from gspo_env.episodes import render_episode
from gspo_env.report.curves import learning_curve
from gspo_env.types import Episode, Message, Prompt, StopReason, Task, Turn


def make_episode(**changes: object) -> Episode:
    turn = Turn(
        prompt_ids=(1, 2, 3),
        action_ids=(4, 5),
        logprobs=(-0.1, -0.2),
        text="guess 7",
        observation="Guess a number.\n\nBe quick.",
        reward=0.5,
    )
    fields: dict[str, object] = {
        "task": Task(env_id="gspo/Guess-v0", seed=11, options={"high": 9}),
        "turns": (turn,),
        "outcome": 1.0,
        "stop_reason": StopReason.TERMINATED,
        "terminated": True,
        "truncated": False,
        "success": True,
    }
    return Episode(**{**fields, **changes})  # type: ignore[arg-type]


def test_an_episode_shows_task_turns_and_how_it_ended() -> None:
    text = render_episode(make_episode(final_observation="Right!"))
    assert "gspo/Guess-v0, seed 11, high=9" in text
    assert "turn 1: reward +0.5, 3 tokens read, 2 sampled" in text
    assert "  | Guess a number.\n  | \n  | Be quick." in text
    assert "  | guess 7" in text
    assert "success: outcome +1, stopped by terminated" in text
    assert "  | Right!" in text


def test_an_episode_shows_what_the_policy_was_told_and_no_tokens_of_a_text_policy() -> None:
    prompt = Prompt(system="Be quick.", messages=(Message(role="user", content="hello"),))
    turn = Turn(text="7", observation="Guess.", reward=0.0)
    text = render_episode(make_episode(prompt=prompt, turns=(turn,)))
    assert "system prompt:\n  | Be quick." in text
    assert "earlier user message:\n  | hello" in text
    assert "tokens read" not in text


def test_an_episode_that_broke_shows_its_error() -> None:
    episode = make_episode(
        turns=(), success=None, outcome=0.0, stop_reason=StopReason.ERROR, error="boom"
    )
    text = render_episode(episode)
    assert "its environment failed" in text
    assert "stopped by error" in text
    assert "  | boom" in text


def test_a_cut_episode_with_rewards_is_no_success_and_not_called_a_failure() -> None:
    episode = make_episode(success=False, outcome=1.0, stop_reason=StopReason.MAX_TURNS)
    assert "no success: outcome +1, stopped by max_turns" in render_episode(episode)


def panels(history: list[tuple[int, dict[str, float]]]) -> list[list[str]]:
    figure = learning_curve(history, "")
    return [[str(line.get_label()) for line in axes.get_lines()] for axes in figure.axes]


def test_rewards_that_say_more_than_success_have_a_panel_with_their_parts() -> None:
    history = [
        (n, {"rollout/success": n / 4, "rollout/return": n * 2.5, "rollout/reward/style": -n})
        for n in range(1, 4)
    ]
    assert panels(history) == [["train (75%)"], ["return, train (7.5)", "style (-3)"]]


def test_rewards_that_equal_success_or_never_vary_have_no_panel() -> None:
    history = [
        (n, {"rollout/success": n / 4, "rollout/outcome": n / 4, "rollout/return": 0.0})
        for n in range(4)
    ]
    assert panels(history) == [["train (75%)"]]


def test_a_success_that_is_always_zero_is_not_drawn_beside_dense_rewards() -> None:
    history = [(n, {"rollout/success": 0.0, "rollout/return": n - 9.0}) for n in range(4)]
    assert panels(history) == [["return, train (-6)"]]
    assert panels([(n, {"rollout/success": 0.0, "rollout/return": 0.0}) for n in range(4)]) == [
        ["train (0%)"]
    ]


def test_lines_that_coincide_are_told_apart_and_those_at_the_edge_are_seen() -> None:
    alike = {"rollout/success": 1.0, "eval/success": 1.0, "eval/success_greedy": 1.0}
    axes = learning_curve([(n, alike) for n in range(3)], "").axes[0]
    assert len({str(line.get_linestyle()) for line in axes.get_lines()}) > 1
    dashes = {str(line._dash_pattern) for line in axes.get_lines()}  # type: ignore[attr-defined]
    assert len(dashes) == 3
    assert axes.get_ylim()[1] > 1.0


def test_the_learning_curve_is_1200_by_675_and_holds_three_series() -> None:
    history = [
        (step, {"rollout/success": step / 10, "train/loss": 1.0}) for step in range(10, 0, -1)
    ]
    history += [(5, {"eval/success": 0.4, "eval/success_greedy": 0.6})]
    history += [(10, {"eval/success": 0.9, "eval/success_greedy": math.nan})]
    figure = learning_curve(history, "Guess")
    lines = figure.axes[0].get_lines()
    assert [list(np.asarray(line.get_xdata())) for line in lines] == [
        list(range(1, 11)),
        [5, 10],
        [5],
    ]
    assert [line.get_marker() for line in lines] == ["None", "o", "s"]
    figure.savefig(image := io.BytesIO(), format="png")
    width, height = image.getvalue()[16:20], image.getvalue()[20:24]
    assert (int.from_bytes(width), int.from_bytes(height)) == (1200, 675)


def test_an_empty_history_still_draws() -> None:
    figure = learning_curve([], "nothing")
    assert len(figure.axes[0].get_lines()) == 0


def test_a_lone_surrogate_of_an_environment_can_be_written_to_a_file(tmp_path):
    text = render_episode(make_episode(final_observation="half \ud83d of a pair"))
    (tmp_path / "episode.txt").write_text(text, encoding="utf-8")
    assert r"half \ud83d of a pair" in text
