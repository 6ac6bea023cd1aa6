"""An episode that nothing scores is lost: it is counted, and never a reward of 0."""

import asyncio

import pytest
from support.scripted_engine import Scripted

from gspo_agents.scripted import ScriptedAgent
from gspo_env.credit.estimate import estimate
from gspo_env.credit.estimators import Outcome
from gspo_env.env.registration import make_env
from gspo_env.rewards import GroupReward, Rating
from gspo_env.rollout.collector import Collector, RolloutConfig
from gspo_env.rollout.metrics import Evaluation, RolloutStats
from gspo_env.rollout.pool import EnvPool
from gspo_env.types import StopReason, Task
from gspo_envs.data.rescore import rescore

ROWS = [{"prompt": f"Say {n}", "answer": str(n)} for n in range(20)]
TASKS = [Task(env_id="gspo/Dataset-v0", seed=n) for n in range(2)]


def unless_marked(attempt):
    return None if "?" in attempt.text else float("0" in attempt.text) - 0.5


def never(attempt):
    return None


def trl(completions):
    return [None if "?" in text else 0.25 for text in completions]


async def later(attempt):
    await asyncio.sleep(0)
    return unless_marked(attempt)


class Ranks(GroupReward):
    async def __call__(self, group):
        marked = [any("?" in turn.text for turn in e.turns) for e in group.episodes]
        turns = [len(e.turns) for e in group.episodes]
        return [
            Rating() if lacks else Rating(rewards=(0.5,) * n)
            for lacks, n in zip(marked, turns, strict=True)
        ]


def length(attempt):
    return float(len(attempt.text))


class Length(GroupReward):
    async def __call__(self, group):
        return [Rating(rewards=(2.0,) * len(e.turns)) for e in group.episodes]


def play(chat, size=6, **arguments):
    """Plays tasks with answers of which every third is marked."""
    words = [chat.tokenizer.encode(text)[0] for text in ("?", "0", "1")]

    class Marks(Scripted):
        async def generate(self, prompt_ids, sampling, session=None):
            self.answer = lambda *_: (words[sampling.seed % 3], chat.stop_ids[0])
            return await super().generate(prompt_ids, sampling, session)

    config = RolloutConfig(max_turn_tokens=8, max_context=256)
    pool = EnvPool(lambda: make_env("gspo/Dataset-v0", data=ROWS, **arguments))
    running = Collector(Marks(None), chat, pool, config)
    try:
        return asyncio.run(running.collect(TASKS, seed=0, group_size=size)), pool.faults
    finally:
        pool.close()


@pytest.mark.parametrize("score", ["end", "turn"])
@pytest.mark.parametrize(
    "rewards",
    [
        [unless_marked],
        [never, unless_marked],
        [unless_marked, trl],
        [later],
        [trl],
        [Ranks()],
        [Ranks(), unless_marked],
        [length, unless_marked],
        [Length(), unless_marked],
        [length, Ranks()],
    ],
)
def test_an_episode_that_every_reward_leaves_out_is_lost_and_no_zero(chat, rewards, score):
    weights = [float(r is not length and not isinstance(r, Length)) for r in rewards]
    groups, faults = play(chat, rewards=rewards, weights=weights, score=score, success=0.3)
    episodes = [e for group in groups for e in group.episodes]
    marked = ["?" in e.turns[0].text for e in episodes]
    assert {True, False} == set(marked)
    assert [e.failed for e in episodes] == marked
    lost = [e for e in episodes if e.failed]
    assert {e.stop_reason for e in lost} == {StopReason.UNSCORED}
    assert all(not e.retried and "nothing scored" in e.error for e in lost)
    assert faults.counts == {StopReason.UNSCORED: len(lost)}
    for group, row in zip(groups, estimate(groups, Outcome()).advantages, strict=True):
        scored = [a for e, a in zip(group.episodes, row, strict=True) if not e.failed]
        assert sum(a[0] for a in scored) == pytest.approx(0)
        assert all(a[0] == 0 for e, a in zip(group.episodes, row, strict=True) if e.failed)
    metrics = RolloutStats(groups, 1.0).metrics()
    assert metrics["rollout/stop/unscored"] == pytest.approx(len(lost) / len(episodes))
    assert metrics["rollout/lost_episodes"] == metrics["rollout/env_errors"] == len(lost)
    played = [e for e in episodes if not e.failed]
    assert metrics["rollout/success"] == sum(e.success for e in played) / len(played)
    assert Evaluation(groups, groups, 1.0).sampled.episodes == len(played)


def test_a_turn_that_is_scored_scores_the_episode(chat):
    def second(attempt):
        return 1.0 if len(attempt.texts) == 2 else None

    groups, _ = play(chat, rewards=[second], score="turn", reply=lambda attempt: "on", max_turns=2)
    episodes = [e for group in groups for e in group.episodes]
    assert not any(e.failed for e in episodes)
    assert {tuple(e.rewards.tolist()) for e in episodes} == {(0.0, 1.0)}


def test_a_kept_episode_that_the_new_rewards_leave_out_is_lost_too(chat, tmp_path):
    groups, _ = play(chat, rewards=[lambda attempt: 0.5])
    (tmp_path / "mine.py").write_text(
        "def some(attempt): return None if '?' in attempt.text else 1.0\n"
    )
    place = f"{tmp_path}/mine.py:some"
    scored = asyncio.run(rescore(groups, [place], [], {"data": ROWS}))
    episodes = [e for group in scored for e in group.episodes]
    assert [e.failed for e in episodes] == ["?" in e.turns[0].text for e in episodes]


@pytest.mark.parametrize("rewards", [[unless_marked], [Ranks()], [never, Ranks()]])
def test_episodes_of_the_scripted_agent_are_scored_as_those_of_a_rollout_are(rewards):
    rows = [row | {"completion": "?" if n % 4 == 3 else "0"} for n, row in enumerate(ROWS)]
    agent = ScriptedAgent("gspo/Dataset-v0", data=rows, rewards=rewards, held_out=0)
    groups = agent.evaluate([Task(env_id=agent.env_id, seed=n) for n in range(12)], samples=2)
    episodes = [e for group in groups for e in group.episodes]
    marked = [e.turns[0].text == "?" for e in episodes]
    assert {True, False} == set(marked)
    assert [e.stop_reason is StopReason.UNSCORED for e in episodes] == marked
    assert {e.turns[0].reward for e in episodes if not e.failed} == {0.5}
