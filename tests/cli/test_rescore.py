"""`gspo-env rescore`: the rewards read what they read while the run trained."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.cli_errors import refused

from gspo_env.cli.main import main
from gspo_env.config import Config, override, to_toml
from gspo_env.env.registration import make_env
from gspo_env.episodes.writer import to_table
from gspo_env.rollout.play import PolicyOutput, play_now
from gspo_env.types import Group, Task

REWARDS = """
import json

def trl(prompts, completions, completion_ids, answer, **others):
    seen = [prompts[0], completions[0], completion_ids[0], answer[0]]
    return [len(json.dumps(seen)) / 1000 + isinstance(completions[0], str)]

def own(attempt):
    seen = [attempt.prompt, attempt.completion, attempt.plain, attempt.token_ids, attempt.row]
    return len(json.dumps(seen)) / 1000
"""
TEXTS = [{"prompt": f"What is {n}?" * n, "answer": "x" * n} for n in range(1, 9)]
CHATS = [
    {
        "messages": [
            *([{"role": "system", "content": "Be brief."}] if n % 2 else []),
            *({"role": role, "content": f"{role} {n}"} for role in ("user", "assistant")),
            {"role": "user", "content": "and?" * n},
        ],
        "answer": "x" * n,
    }
    for n in range(1, 9)
]
ALONE = [
    {"question": [{"role": "user", "content": f"What is {n}?"}], "answer": "x" * n}
    for n in range(1, 9)
]


def answer(turn):
    """Summarises the conversation after its first turn."""
    question = "And in short?" if turn.turn == 1 else None
    ids = (5, 6, 7 + turn.turn)
    return PolicyOutput(text=f"it is {turn.turn}", action_ids=ids, question=question)


NAMED = ["rewards.py:trl", "rewards.py:own"]


def write_run(rows, settings, system=None):
    """Writes the folder `run` with the episodes of three groups."""
    Path("rewards.py").write_text(REWARDS)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kwargs = {"data": "rows.jsonl", "rewards": NAMED, **settings}
    kwargs |= {"system_prompt": system} if system else {}
    env = make_env("gspo/Dataset-v0", **kwargs)
    groups = {}
    for seed in (0, 1, 2):
        task = Task(env_id="gspo/Dataset-v0", seed=seed)
        episodes = tuple(play_now(env, task, answer, max_turns=9) for _ in range(2))
        groups[seed] = Group(task=task, episodes=episodes)
    config = override(Config(), {"env": "gspo/Dataset-v0", "env_kwargs": kwargs})
    Path("run/episodes").mkdir(parents=True)
    Path("run/config.toml").write_text(to_toml(config))
    Path("run/metrics.jsonl").write_text("")
    pq.write_table(to_table(1, "train", groups, {}), "run/episodes/000001-train.parquet")


@pytest.mark.parametrize("system", [None, "Answer in one word."])
@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (TEXTS, {}),
        (CHATS, {}),
        (ALONE, {"column": "question"}),
        (CHATS, {"chat": "turns", "score": "turn"}),
    ],
)
def test_the_rewards_of_a_run_score_its_episodes_as_they_did_in_training(
    in_folder, capsys, rows, settings, system
):
    write_run(rows, settings, system)
    main(["rescore", "run", "--rewards", *NAMED, "--data", "rows.jsonl", "--out", "again.jsonl"])
    scored = [json.loads(line) for line in Path("again.jsonl").read_text().splitlines()]
    assert len(scored) == 6
    assert {row["before"] for row in scored} != {0.0}
    assert [row["now"] for row in scored] == [row["before"] for row in scored]


FAULTY = """
def sometimes(prompts, completions, answer, **others):
    return [1.0 / (len(answer[0]) - 4)]

def never(attempt):
    return None

def broken(attempt):
    return 1 / 0
"""


def test_a_reward_that_raises_costs_its_episodes_and_is_named_with_its_line(
    in_folder, capsys, caplog
):
    write_run(TEXTS, {})
    Path("faulty.py").write_text(FAULTY)
    flags = ("--data", "rows.jsonl", "--out", "again.jsonl")
    main(["rescore", "run", "--rewards", "faulty.py:sometimes", *flags])
    output = capsys.readouterr().out
    scored = [json.loads(line) for line in Path("again.jsonl").read_text().splitlines()]
    failed = [row for row in scored if row["error"]]
    assert 0 < len(failed) < len(scored) == 6  # of the fourth row
    assert f"episodes  6 in 3 groups, {len(failed)} lost" in output
    error = "a reward raised ZeroDivisionError: float division by zero (faulty.py:3 in sometimes)"
    assert {row["error"] for row in failed} == {error}
    assert caplog.text.count(error) == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("never", "nothing scored the episode: each of its rewards is None"),
        ("broken", "a reward raised ZeroDivisionError: division by zero (faulty.py:9 in broken)"),
    ],
)
def test_where_no_episode_has_a_score_rescore_says_why_and_writes_nothing(
    in_folder, capsys, name, reason
):
    write_run(TEXTS, {})
    Path("faulty.py").write_text(FAULTY)
    output = refused(capsys, "rescore", "run", "--rewards", f"faulty.py:{name}", "--out", "o.jsonl")
    assert f"none of 6 episodes has a score; the first error: {reason}" in output
    assert not Path("o.jsonl").exists()
    refused(capsys, "rescore", "run", "--rewards", NAMED[1], "--phases", "greedy")
