from __future__ import annotations

from dataclasses import replace

from turns import episode, turn

from gspo_env.episodes import render_episode
from gspo_env.types import Message, Prompt, StopReason, Task, Turn


def make_episode(**changes):
    played = turn(text="guess 7", observation="Guess a number.\n\nBe quick.")
    fields = {
        "task": Task(env_id="gspo/Guess-v0", seed=11, options={"high": 9}),
        "turns": (played,),
        "success": True,
    }
    return replace(episode(), **{**fields, **changes})


def test_an_episode_shows_task_turns_and_how_it_ended():
    text = render_episode(make_episode(final_observation="Right!"))
    assert "gspo/Guess-v0, seed 11, high=9" in text
    assert "turn 1: reward +0.5, 3 tokens read, 2 sampled" in text
    assert "  | Guess a number.\n  | \n  | Be quick." in text
    assert "  | guess 7" in text
    assert "success: outcome +1, stopped by terminated" in text
    assert "  | Right!" in text


def test_an_episode_shows_what_the_policy_was_told_and_no_tokens_of_a_text_policy():
    prompt = Prompt(system="Be quick.", messages=(Message(role="user", content="hello"),))
    turn = Turn(text="7", observation="Guess.", reward=0.0)
    text = render_episode(make_episode(prompt=prompt, turns=(turn,)))
    assert "system prompt:\n  | Be quick." in text
    assert "earlier user message:\n  | hello" in text
    assert "tokens read" not in text


def test_an_episode_that_broke_shows_its_error():
    broken = {"stop_reason": StopReason.ERROR, "error": "boom", "success": None, "outcome": 0.0}
    text = render_episode(make_episode(turns=(), **broken))
    assert "its environment failed" in text
    assert "stopped by error" in text
    assert "  | boom" in text


def test_a_cut_episode_with_rewards_is_no_success_and_not_called_a_failure():
    text = render_episode(make_episode(success=False, stop_reason=StopReason.MAX_TURNS))
    assert "no success: outcome +1, stopped by max_turns" in text
