from __future__ import annotations

from dataclasses import replace

from turns import episode, turn

from gspo_env.episodes import render_episode
from gspo_env.types import Message, Prompt, StopReason, Task


def make_episode(**changes):
    played = turn(text="guess 7", observation="Guess a number.\n\nBe quick.")
    fields = {
        "task": Task(env_id="gspo/Guess-v0", seed=11, options={"high": 9}),
        "turns": (played,),
        "success": True,
    }
    return replace(episode(), **{**fields, **changes})


def test_an_episode_shows_task_prompt_turns_and_how_it_ended():
    prompt = Prompt(system="Be quick.", messages=(Message(role="user", content="hello"),))
    text = render_episode(make_episode(prompt=prompt, final_observation="Right!"))
    for part in (
        *("gspo/Guess-v0, seed 11, high=9", "turn 1: reward +0.5, 3 tokens read, 2 sampled"),
        *("  | Guess a number.\n  | \n  | Be quick.", "  | guess 7", "  | Right!"),
        *("system prompt:\n  | Be quick.", "earlier user message:\n  | hello"),
        "success: outcome +1, stopped by terminated",
    ):
        assert part in text


def test_an_episode_that_was_cut_is_no_failure_and_one_that_broke_shows_its_error():
    text = render_episode(make_episode(success=False, stop_reason=StopReason.MAX_TURNS))
    assert "no success: outcome +1, stopped by max_turns" in text
    broken = {"stop_reason": StopReason.ERROR, "error": "boom", "success": None, "outcome": 0.0}
    text = render_episode(make_episode(turns=(), **broken))
    for part in ("its environment failed", "stopped by error", "  | boom"):
        assert part in text
