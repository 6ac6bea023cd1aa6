"""Plays an episode of a kept batch again up to a turn, and on from there in another way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np

from gspo_agents.engine_loop import EngineLoop
from gspo_agents.environments import Environments
from gspo_agents.replay import Replay, Update
from gspo_agents.setup import start_engine
from gspo_agents.whatif import Advantages, effect, gradient
from gspo_env.batch.sample import to_samples
from gspo_env.chat.messages import read_messages
from gspo_env.config import Config
from gspo_env.env.base import StepResult, TextEnvironment
from gspo_env.errors import ConfigError, RolloutError
from gspo_env.learner.learner import Learner
from gspo_env.model.export import named_weights
from gspo_env.model.head import usable_ids
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.play import PolicyInput, PolicyOutput, demonstrator
from gspo_env.rollout.policy import EnginePolicy
from gspo_env.rollout.pool import make_member
from gspo_env.rollout.scripted import ScriptedEngine
from gspo_env.runs.effects import Effect
from gspo_env.training.resume import read_checkpoint
from gspo_env.types import Episode, FloatArray, Group, Message, StopReason

By = Literal["policy", "expert", "kept"]
"""Who acts: the policy, the environment's demonstrator, or the kept episode again."""
Then = Callable[[PolicyInput], Awaitable[PolicyOutput]]
Hand = Callable[[EnginePolicy, ScriptedEngine], Then]
"""Makes what acts from the turn on, such as a person beside the policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """What the update does with the edited episode in place of the kept one."""

    effects: Mapping[str, Effect]
    """Of the two updates, `as kept` and `edited`, beside the first."""
    advantages: tuple[FloatArray, FloatArray]
    """(K,) of each turn, of the kept and of the edited episode; the mean over its tokens."""
    kept_change: tuple[FloatArray, FloatArray]
    """(K,) by how many nats the update changes the log-probability of each turn of the kept
    episode: the update as kept, and the edited one."""
    edited_change: FloatArray
    """(K,) the same of the edited episode, by the edited update."""


class Rewind:
    """An episode of a kept batch that can be played on from a turn.

    The environment gets the task and the actions before the turn again, and each observation and
    reward must be the kept one.

    Args:
        run: See `Replay`.
        step: See `Replay`.
        config: See `Replay`.
        episode: Its group and the index in it.
        turn: The turn, counted from 1.

    Raises:
        ConfigError: There is no such episode or turn.
        OutputError: See `Replay`.
    """

    def __init__(
        self,
        run: str | Path,
        step: int | None = None,
        config: Config | None = None,
        *,
        episode: tuple[int, int] = (0, 0),
        turn: int = 1,
    ) -> None:
        self.batch, self.place, self.turn = Replay(run, step, config), episode, turn - 1
        groups = self.batch.batch.groups
        sizes = [len(group.episodes) for group in groups]
        if not (0 <= episode[0] < len(sizes) and 0 <= episode[1] < sizes[episode[0]]):
            raise ConfigError(
                f"there is no episode {episode[0]}-{episode[1]} in the batch of step "
                f"{self.batch.step}; expected a group from 0 to {len(sizes) - 1} and an episode "
                f"from 0 to {max(sizes) - 1}"
            )
        self.kept: Episode = groups[episode[0]].episodes[episode[1]]
        if not 1 <= turn <= len(self.kept.turns):
            count = len(self.kept.turns)
            raise ConfigError(f"turn is {turn}; expected one from 1 to {count}")

    def play(
        self,
        *,
        action: str | None = None,
        result: str | None = None,
        reward: float | None = None,
        by: By = "policy",
        times: int = 1,
        weights: int | None = None,
        hand: Hand | None = None,
    ) -> list[Episode]:
        """Plays the episode again up to the turn, and on from there.

        Args:
            action: Another action in the turn.
            result: Another answer of the environment to it; its state is not changed. Of one that
            answers with whole conversations, the text of the last message.
            reward: Another reward of the turn; on the last turn also the `episodic_reward`.
            by: Who acts from the turn on, or after it if its action is edited.
            times: The number of episodes.
            weights: The updates after which the weights of the policy are taken; by default those
                before the update of the batch, which sampled the episode.
            hand: Acts in place of `by`.

        Raises:
            ConfigError: The run has no such weights, or the environment has no demonstrator.
            RolloutError: The environment does not repeat the episode.
        """
        edit, config = _Edit(action, result, reward), self.batch.own
        if edit != _Edit() and self.kept.turns[self.turn].kind == "summary":
            raise ConfigError(
                f"turn {self.turn + 1} is a summary, which the environment does not see; expected "
                "another turn, or nothing to change"
            )
        learner = self._learner(weights)

        def make(*args: Any) -> TextEnvironment:
            env = make_member(*args)
            return env if edit.result is None and edit.reward is None else _EditedEnv(env, edit)

        environments = Environments(config, self, make)
        environments.close()
        limits, chat = config.rollout, self.batch.chat
        with environments.pool() as pool:
            if pool.of(self.kept.task.env_id).group_reward is not None:
                raise RolloutError(
                    f"{self.kept.task.env_id}: its group_reward compares whole groups; expected "
                    "an environment that scores each episode alone"
                )
            model = learner.policy
            engine = start_engine(model, config)
            plain = Collector(engine, chat, pool, limits, usable_ids(model))
            collector: Collector = config.compaction.wrap(plain)
            repeated = len(self.kept.turns) if by == "kept" and hand is None else self.turn
            hand = hand or (_expert if by == "expert" else _policy)
            again: Any = partial(_Again, self, edit, repeated, collector.policy, hand)
            collector.policy = again

            async def collect() -> list[Group]:
                version = self.batch.step - 1 if weights is None else weights
                named = named_weights(model, adapter=engine.adapter_only)
                await engine.update_weights(named, version)
                seed, tasks = config.seed, [self.kept.task]
                return await collector.collect(tasks, seed=seed, group_size=times)

            try:
                (group,) = EngineLoop().run(collect())
            except NotImplementedError as error:
                raise ConfigError(f"by is 'expert': {error}; expected 'policy'") from error
            finally:
                engine.close()
        for episode in group.episodes:
            if episode.ending.ended and len(episode.turns) <= self.turn:
                raise self.refusal(len(episode.turns), "it has ended")
        return list(group.episodes)

    def update(self, episode: Episode) -> Difference:
        """Takes the update with another episode in place of the kept one, and without it.

        Actions that no policy sampled get the log-probabilities of the learner before the update.
        """
        config, place = self.batch.config, self.place
        before = gradient(self.batch, config)
        rows = zip(episode.turns, logprobs(before.learner, episode), strict=True)
        turns = [t if any(t.logprobs) else replace(t, logprobs=tuple(row)) for t, row in rows]
        episode = replace(episode, turns=tuple(turns))
        edited = self.batch.edited(place, episode)
        after = gradient(edited, config)
        first, second = self.batch.update(config), edited.update(config)

        def change(update: Update, played: Episode) -> FloatArray:
            pairs = zip(
                logprobs(before.learner, played), logprobs(update.learner, played), strict=True
            )
            return np.array([after_N.sum() - before_N.sum() for before_N, after_N in pairs])

        return Difference(
            effects={
                "as kept": effect(self.batch, first, before, before),
                "edited": effect(edited, second, after, before),
            },
            advantages=(
                _by_turn(before.advantages, place, self.kept),
                _by_turn(after.advantages, place, episode),
            ),
            kept_change=(change(first, self.kept), change(second, self.kept)),
            edited_change=change(second, episode),
        )

    def refusal(self, turn: int, what: str) -> RolloutError:
        """Returns the error about an environment that does not repeat the episode."""
        task = self.kept.task
        return RolloutError(
            f"{task.env_id}: seed {task.seed} with the same actions does not repeat the kept "
            f"episode: at turn {turn + 1} {what}; expected an environment without a model, a clock "
            "or files that change"
        )

    def _learner(self, weights: int | None) -> Learner:
        if weights is None or weights == self.batch.step - 1:
            return self.batch.learner(self.batch.own)
        folders = self.batch.weights()
        if weights not in folders:
            raise ConfigError(
                f"weights is {weights}, and the run has those after {', '.join(map(str, folders))} "
                "updates; expected one of them"
            )
        return self.batch.learner(self.batch.own, read_checkpoint(folders[weights]))


def logprobs(learner: Learner, episode: Episode) -> list[FloatArray]:
    """Returns the log-probabilities of the tokens of each turn; 0 of those that are not trained."""
    values = np.zeros(episode.model_tokens)
    for sample in to_samples([episode], [np.zeros(len(episode.turns))]):
        if sample.sampled is not None and sample.mask.any():
            values[sample.sampled] = learner.logprobs(learner.pack([sample])).cpu().numpy()
    return np.split(values, np.cumsum([len(turn.action_ids) for turn in episode.turns])[:-1])


def _by_turn(advantages: Advantages, place: tuple[int, int], episode: Episode) -> FloatArray:
    means = [advantages.get((*place, k), np.zeros(1)).mean() for k in range(len(episode.turns))]
    return np.array(means)


@dataclass(frozen=True, slots=True)
class _Edit:
    """What is changed at the turn; None changes nothing. See `Rewind.play`."""

    action: str | None = None
    result: str | None = None
    reward: float | None = None


class _EditedEnv(gymnasium.Wrapper[str, str, str, str]):
    """Changes what one step returns.

    An environment may answer with its whole conversation: then the last message is changed, also
    in the conversations after it, in which the environment has its own message.
    """

    def __init__(self, env: TextEnvironment, edit: _Edit) -> None:
        super().__init__(env)
        self.edit, self.edits_next = edit, False
        self.answer: tuple[int, list[Message]] = 0, []
        """The place of the environment's own answer in its conversation, with the action before."""

    def step(self, action: str) -> StepResult:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.edit.result is not None and info.get("messages"):
            info = info | {"messages": self._edited(read_messages(info["messages"]))}
        if not self.edits_next:
            return observation, float(reward), terminated, truncated, info
        self.edits_next, edit = False, self.edit
        if edit.reward is not None:
            reward = edit.reward
            if info.get("episodic_reward") is not None:
                info = info | {"episodic_reward": reward}
        text = observation if edit.result is None else edit.result
        return text, float(reward), terminated, truncated, info

    def _edited(self, messages: list[Message]) -> list[Message]:
        """Returns a conversation with the edited answer, also where it has moved up."""
        last = len(messages) - 1
        if self.edits_next:
            self.answer = last, messages[last - 1 :]
        place, pair = self.answer
        places = [
            n for n in range(last + 1) if pair and messages[n - len(pair) + 1 : n + 1] == pair
        ]
        if places:
            place = place if place in places else places[-1]
            messages[place] = replace(messages[place], content=str(self.edit.result))
        return messages


def _policy(policy: EnginePolicy, engine: ScriptedEngine) -> Then:
    return policy


def _expert(policy: EnginePolicy, engine: ScriptedEngine) -> Then:
    act: Any = demonstrator()

    async def follow(inputs: PolicyInput) -> PolicyOutput:
        if not policy.answers_itself(inputs):
            engine.next = act(inputs)
        return await policy(inputs)

    return follow


class _Again:
    """The policy of an episode that repeats turns of a kept one first.

    Args:
        rewind: The kept episode and the turn.
        edit: What is changed at the turn.
        repeated: The number of turns that are repeated.
        make: Makes the policy that reads and writes the tokens.
        hand: Makes what acts after the turns that are repeated.
        collector: Plays the episode.
        others: See `EnginePolicy`.
    """

    def __init__(
        self,
        rewind: Rewind,
        edit: _Edit,
        repeated: int,
        make: Callable[..., EnginePolicy],
        hand: Hand,
        collector: Collector,
        *others: Any,
    ) -> None:
        self.rewind, self.edit, self.repeated = rewind, edit, repeated
        self.engine = ScriptedEngine(collector.engine, collector.chat)
        self.policy = make(collector, *others)
        self.policy.engine = self.engine
        self.then = hand(self.policy, self.engine)
        self.count, self.release = self.policy.count, self.policy.release

    async def __call__(self, inputs: PolicyInput) -> PolicyOutput:
        """See `gspo_env.rollout.play.Policy`."""
        k, last, turns = inputs.turn, self.rewind.turn, self.rewind.kept.turns
        if k <= last:
            self._compare(inputs)
        if k == last and inputs.env.has_wrapper_attr("edits_next"):
            inputs.env.set_wrapper_attr("edits_next", True)
        if k == last and self.edit.action is not None:
            self.engine.next = self.edit.action
            return await self.policy(inputs)
        if k >= self.repeated:
            ends = self.repeated > last  # with the kept episode
            return PolicyOutput(stop=StopReason.MAX_TURNS) if ends else await self.then(inputs)
        self.engine.next = turns[k]
        output = await self.policy(inputs)
        if k <= last and output.prompt_ids != turns[k].prompt_ids:
            raise self.rewind.refusal(k, "its prompt has other tokens")
        return output

    def _compare(self, inputs: PolicyInput) -> None:
        turn, turns = inputs.turn, self.rewind.kept.turns
        pairs: dict[str, tuple[Any, Any]] = {
            "reward": (inputs.reward, turns[turn - 1].reward if turn else 0.0)
        }
        if turns[turn].kind == "action":
            pairs["observation"] = inputs.observation, turns[turn].observation
        for name, (value, earlier) in pairs.items():
            if value != earlier:
                what = f"its {name} is {value!r:.200}, not {earlier!r:.200}"
                raise self.rewind.refusal(turn, what)
