"""Checks a custom environment before training.

from gspo_env.check.environment import check_env
check_env("examples/shop.py:ShopEnv")
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import types
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, NoReturn

import gymnasium
import numpy as np
from gymnasium.utils.env_checker import check_env as check_by_gymnasium
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.wrappers import OrderEnforcing

from gspo_env.check.actions import HOSTILE, bug_in, random_policy, valid_call
from gspo_env.credit.scores import ScoreChoice
from gspo_env.env.base import Action, TextEnv, attribute
from gspo_env.env.info import declared_score, parse_step
from gspo_env.env.registration import make_env
from gspo_env.errors import ConfigError, EnvironmentCheckError, EnvironmentContractError
from gspo_env.health.findings import Finding
from gspo_env.redaction import clean
from gspo_env.rollout.play import PolicyInput, PolicyOutput, demonstrator, play
from gspo_env.runtime.threads import EnvThread, call_env, watched
from gspo_env.seeding import global_generators_kept
from gspo_env.types import Episode, Prompt, ResetInfo, Score, StepInfo, Task

Policy = Callable[[random.Random, str], str]
"""Chooses an action for an observation."""
Running = Coroutine[Any, None, Episode]
"""An episode that is being played."""
_CALLS = 8
"""Calls of a tool with other arguments, if it has a fault in each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What training makes of an environment that has no fault."""

    score: Score | None
    """The rewards that it uses: those that the environment declares, or else what the episodes of
    the check contain; None if these do not decide it."""
    reason: str
    """Why."""
    declares_success: bool
    """Whether `info` says what a success is; otherwise every outcome above 0 is one."""
    ends: bool = True
    """Whether an episode ended before the check abandoned it."""
    demonstrated: tuple[bool, ...] = ()
    """Whether each episode of the environment's own demonstrator succeeded; empty without one."""
    silent_tools: tuple[str, ...] = ()
    """The tools that returned None."""

    @property
    def findings(self) -> Iterator[Finding]:
        """What a person should know before training."""
        yield Finding(
            name="ending",
            text="Episodes end by themselves."
            if self.ends
            else "No episode of the check ended by itself.",
            advice=""
            if self.ends
            else "Return terminated or truncated, or training cuts each episode at "
            "--rollout.max-turns.",
            ok=self.ends,
        )
        score = f"{self.score or 'Not decided'}, because {self.reason}."
        yield Finding(name="score", text=score, ok=True)
        if not self.declares_success:
            yield Finding(
                name="success",
                text="Every outcome above 0, because the last `info` has no `success`.",
                advice="Give it if a partial outcome is not a success.",
                ok=True,
            )
        if self.silent_tools:
            names = ", ".join(self.silent_tools)
            text = f"{names} returned None, which the policy reads as 'None'."
            yield Finding(name="tools", text=text, advice="Return a text.", ok=False)
        won, played = sum(self.demonstrated), len(self.demonstrated)
        shown = f"{won} of {played} episodes succeeded." if played else "None: no expert_action()."
        yield Finding(name="demonstrator", text=shown, ok=True)


def check_env(
    env: gymnasium.Env[str, str] | str | type,
    *,
    episodes: int = 2,
    seed: int = 0,
    actions: Policy | None = None,
    max_turns: int = 32,
    timeout: float = 60.0,
    env_kwargs: Mapping[str, Any] | None = None,
) -> Checked:
    """Checks that an environment keeps the contract of `TextEnv`, and closes it.

    Runs Gymnasium's own checker, then plays episodes. The checks are: types and spaces; finite
    rewards; no exception on hostile actions; a call of each tool with arguments that fit its
    schema; no control token from environment text; the same episode for the same seed and actions,
    also beside another copy of the environment and in any state of the global random generators;
    its own demonstrator; `reset` in the middle of an episode and after `close`; `restore` of a
    `snapshot`, if it has them; task keys that fit `num_tasks`.

    Args:
        env: The environment, or a specification for `make_env`.
        episodes: Seeds to play.
        seed: The first seed.
        actions: Policy that plays the episodes; by default a random and hostile one.
        max_turns: Turns after which an episode is abandoned.
        timeout: Seconds that one call of the environment may take. For an environment that was made
            before, a call that takes long is only mentioned, since it may belong to this thread.
        env_kwargs: Arguments of an environment that is given by its specification.

    Returns:
        The rewards that training uses, and whether the environment says what a success is.

    Raises:
        EnvironmentCheckError: A check failed; the message says which and how.
        EnvironmentHangError: A call did not return in time; the message has its line.
        ConfigError: `episodes` or `max_turns` is below 1.
    """
    if episodes < 1 or max_turns < 1:
        raise ConfigError(
            f"check_env: episodes is {episodes} and max_turns {max_turns}, expected at least 1."
        )
    settings = (actions or random_policy, max_turns)
    if isinstance(env, (str, type)):
        thread = EnvThread()
        try:
            name = env if isinstance(env, str) else env.__name__
            instance = thread.guard(name, timeout, make_env, env, **(env_kwargs or {}))
            return thread.guard(name, timeout, _checked, instance, seed, episodes, *settings)
        finally:
            thread.stop()
    with watched(_name(env)):
        return _checked(env, seed, episodes, *settings)


def _name(env: gymnasium.Env[str, str]) -> str:
    return env.spec.id if env.spec else type(env.unwrapped).__name__


def _checked(env: Any, seed: int, episodes: int, policy: Policy, max_turns: int) -> Checked:
    """Makes all checks and closes the environment."""
    check = _Check(env, _name(env), policy, max_turns)
    with global_generators_kept():
        try:
            check.everything(seed, episodes)
            return check.result()
        except EnvironmentCheckError:
            raise
        except (ConfigError, EnvironmentContractError) as error:
            raise EnvironmentCheckError(str(error)) from error
        finally:
            with contextlib.suppress(Exception):  # the check of `close` reports it
                call_env(env.close)


class _Check:
    """The checks of one environment."""

    def __init__(self, env: Any, name: str, policy: Policy, max_turns: int) -> None:
        self.env, self.name, self.policy, self.max_turns = env, name, policy, max_turns
        self.chat = _chat()
        self.played: list[Episode] = []
        self.shown: tuple[bool, ...] = ()
        """Which episodes of the demonstrator succeeded."""
        self.silent: tuple[str, ...] = ()
        """The tools that returned None."""
        self.num_tasks = attribute(env, "num_tasks", None)
        self.tasks: set[str | None] = set()
        """The task keys that were drawn."""

    def fail(self, what: str, cause: BaseException | None = None) -> NoReturn:
        named = what.startswith(f"{self.name}: ")
        raise EnvironmentCheckError(what if named else f"{self.name}: {what}") from cause

    def everything(self, seed: int, episodes: int) -> None:
        self.spaces()
        self.hostile_actions(seed)
        self.tool_calls(seed)
        for n in range(seed, seed + episodes):
            self.repeats(n)
        self.reset_at_any_time(seed)
        self.restores(seed)
        self.demonstrations(seed, episodes)
        self.by_gymnasium()

    def result(self) -> Checked:
        """Returns what training would make of the episodes."""
        declared = declared_score(self.name, self.env)
        choice = ScoreChoice(self.name, declared, "the environment declares it" if declared else "")
        choice.see(self.played)
        ended = [e.turns[-1].info for e in self.played if e.turns and e.ending.ended]
        declares_success = all(info.success is not None for info in ended)
        return Checked(
            score=choice.score,
            reason=choice.reason,
            declares_success=declares_success,
            ends=bool(ended),
            demonstrated=self.shown,
            silent_tools=self.silent,
        )

    def spaces(self) -> None:
        for name in ("observation_space", "action_space"):
            if not isinstance(getattr(self.env, name, None), gymnasium.spaces.Text):
                self.fail(f"its {name} is not text, expected gspo_env.UnicodeText.")

    def by_gymnasium(self) -> None:
        """Runs Gymnasium's checker on a TextEnv; below wrappers, others may have any spaces."""
        bare = self.env.unwrapped
        if not isinstance(bare, TextEnv):
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                check_by_gymnasium(bare, skip_render_check=True, skip_close_check=True)
            except Exception as error:
                if "truncates after 1 step" in str(error):  # an episode of one turn may
                    return
                self.fail(f"Gymnasium's checker says: {type(error).__name__}: {error}", error)

    def hostile_actions(self, seed: int) -> None:
        """Plays each hostile action as the first of an episode."""
        for n, action in enumerate(HOSTILE):
            self.finish(self.running(self.env, seed + n, action))

    def tool_calls(self, seed: int) -> None:
        """Calls each tool with arguments that fit its schema, as the first action of an episode."""
        seen = self.played[0]
        words = re.findall(r"\w+", seen.turns[0].observation if seen.turns else "") or ["yes"]
        for n, tool in enumerate(seen.prompt.tools):
            for number in range(_CALLS):
                call = valid_call(tool, random.Random(seed + n + 1000 * number), words)
                fault = ""
                if call is not None:
                    called = self.finish(self.running(self.env, seed, call))
                    fault = bug_in(called)[1]
                if not fault:
                    break
            else:
                self.fail(
                    f"tool {tool.name} raised in each of {_CALLS} calls whose arguments fit its "
                    f"schema, at last {fault}; expected a result."
                )
            if call is not None:
                again = self.finish(self.running(self.env, seed, call))
                self.same(called, again, f"tool {tool.name}: seed {seed} played again")
                self.silent += (tool.name,) * (called.final_observation == "None")

    def demonstrations(self, seed: int, episodes: int) -> None:
        """Plays what the environment's own `expert_action` does, if it has one."""
        for n in range(seed, seed + episodes):
            task = Task(env_id=self.name, seed=n)
            try:
                shown, again = [
                    self.finish(play(self.env, task, demonstrator(), max_turns=self.max_turns))
                    for _ in range(2)
                ]
            except NotImplementedError:
                return
            self.shown += (bool(shown.success),)
            if (bug := bug_in(shown))[1]:
                self.fail(f"tool {bug[0]} raised in a call of expert_action(): {bug[1]}")
            self.same(shown, again, f"expert_action(): seed {n} played again")

    def repeats(self, seed: int) -> None:
        """Plays three times: twice alone, then beside a copy that plays another seed."""
        random.seed(1)
        np.random.seed(1)
        before = (random.getstate(), np.random.get_state())
        first = self.episode(seed)
        if not data_equivalence(before, (random.getstate(), np.random.get_state())):
            self.fail("it moves a global random generator; draw from self.np_random.")
        random.seed(2)
        np.random.seed(2)
        self.same(first, self.episode(seed), f"seed {seed} played again")
        if (twin := self.twin()) is None:
            return
        try:
            other = self.running(twin, seed + 1)
            beside = self.finish(self.running(self.env, seed), other)
            other.close()
            self.same(first, beside, f"seed {seed} played beside another copy")
            again = self.finish(self.running(twin, seed))
            self.same(first, again, f"seed {seed} played in a new copy")
        finally:
            self.close(twin)

    def reset_at_any_time(self, seed: int) -> None:
        """Resets in the middle of an episode and after `close`."""
        first = self.episode(seed)
        self.finish(self.running(self.env, seed + 1, "leave"))
        self.same(first, self.episode(seed), "after a reset in mid-episode")
        for _ in range(2):
            self.close(self.env)
        try:
            again = self.episode(seed)
        except EnvironmentCheckError as error:
            advice = "after close(), and training may reset again: open in reset() what it closes"
            self.fail(f"{error}; this was {advice}.", error)
        self.same(first, again, "after close()")

    def restores(self, seed: int) -> None:
        """Saves the state in the middle of an episode, and plays the rest from there again."""
        if not _has_snapshots(self.env):
            return
        first = self.episode(seed)
        half = len(first.turns) // 2
        running = self.running(self.env, seed)
        for _ in range(half + 1):  # it pauses before each turn
            running.send(None)
        state = call_env(self.env.get_wrapper_attr("snapshot"))
        self.same(first, self.finish(running), "after snapshot()")
        call_env(self.env.reset, seed=seed + 1)
        call_env(self.env.get_wrapper_attr("restore"), state)
        for number, turn in enumerate(first.turns[half:], half):
            result = call_env(self.env.step, Action(turn.text, turn.action_ids))
            observation, reward, *_, info = parse_step(self.name, result, None)
            again = (turn.text, observation, reward, replace(info, extra={}), first.stop_reason)
            if not data_equivalence(_records(first)[number + 1], again, exact=True):
                before = _short(_records(first)[number + 1])
                self.fail(f"after restore(): turn {number} was {before} and is {_short(again)}.")

    def close(self, env: Any) -> None:
        try:
            call_env(env.close)
        except Exception as error:
            self.fail(f"close() raised {type(error).__name__}: {error}", error)

    def episode(self, seed: int) -> Episode:
        return self.finish(self.running(self.env, seed))

    def running(self, env: Any, seed: int, action: str | None = None) -> Running:
        """Begins an episode that pauses before each turn; with an action, it is one turn long.

        The episode depends on the seed alone.
        """
        rng = random.Random(seed)

        async def act(now: PolicyInput) -> PolicyOutput:
            prompt = now.prompt if now.turn == 0 else None
            self.text(now.observation, prompt)
            await _pause()
            text = self.policy(rng, now.observation) if action is None else action
            # as the ids that a model would have sampled, so that values for each are counted
            ids = (*self.chat.encode(clean(text)), self.chat.stop_ids[0])
            return PolicyOutput(text=text, action_ids=ids)

        task = Task(env_id=self.name, seed=seed)
        return play(env, task, act, max_turns=self.max_turns if action is None else 1)

    def finish(self, running: Running, beside: Running | None = None) -> Episode:
        """Plays an episode to its end, turn by turn with another one."""
        while True:
            try:
                running.send(None)
            except StopIteration as done:
                episode: Episode = done.value
                break
            if beside is not None:
                try:
                    beside.send(None)
                except StopIteration:
                    beside = None
        if episode.error is not None:
            self.fail(episode.error)
        self.played.append(episode)
        self.text(episode.final_observation, None if episode.turns else episode.prompt)
        self.task(episode)
        self.misplaced("reset", episode.reset.extra, StepInfo)
        for turn in episode.turns:
            self.misplaced("step", turn.info.extra, ResetInfo)
        return episode

    def task(self, episode: Episode) -> None:
        """Checks that all resets have a task key or none has, and that there are not too many."""
        key, seed, number = episode.reset.task_key, episode.task.seed, self.num_tasks
        if self.tasks and (key is None) != (None in self.tasks):
            self.fail(f"reset has a task_key only for some seeds; seed {seed} gave {key!r}.")
        self.tasks.add(key)
        if number is not None and (not isinstance(number, Integral) or number < len(self.tasks)):
            drawn = f"{len(self.tasks)} task{'s' * (len(self.tasks) > 1)}"
            self.fail(f"num_tasks is {number!r}, expected at least the {drawn} that were drawn.")

    def misplaced(self, method: str, extra: Mapping[str, Any], other: type) -> None:
        """Rejects keys that are read only from the other method's `info`."""
        for key in {field.name for field in dataclasses.fields(other)} & set(extra):
            belongs = "step" if method == "reset" else "reset"
            self.fail(f"the key {key!r} of info belongs to {belongs}(), {method}() has it.")

    def text(self, observation: str, prompt: Prompt | None) -> None:
        """Checks that a text fits its space and can be tokenised without a control token."""
        if not self.env.observation_space.contains(observation):
            space = self.env.observation_space
            self.fail(f"an observation of {len(observation)} characters is outside {space}.")
        if observation != clean(observation):
            self.fail(f"{_short(observation)} cannot be tokenised: it has lone surrogates.")
        plain = prompt
        if prompt is not None:
            prompt = replace(prompt, system=prompt.system or "x")
            messages = tuple(replace(message, content="x") for message in prompt.messages)
            plain = Prompt(system="x", messages=messages)
        if self.controls(self.ids(observation, prompt)) != self.controls(self.ids("x", plain)):
            self.fail("its text became a control token when it was tokenised.")

    def ids(self, observation: str, prompt: Prompt | None) -> tuple[int, ...]:
        if prompt is None:
            return tuple(self.chat.follow(observation, -1))
        return tuple(self.chat.start(observation, prompt))

    def controls(self, ids: tuple[int, ...]) -> list[int]:
        special = set(self.chat.tokenizer.all_special_ids)
        return [i for i in ids if i in special]

    def same(self, first: Episode, again: Episode, when: str) -> None:
        pairs, cause = zip(_records(first), _records(again), strict=False), ""
        if getattr(self.env.unwrapped, "_np_random_seed", None) != again.task.seed:
            cause = "; reset() must call super().reset(seed=seed), which seeds self.np_random"
        for turn, (one, two) in enumerate(pairs):
            for part, now in zip(one, two, strict=True):
                if not data_equivalence(part, now, exact=True):
                    was = f"turn {turn} was {_short(part)} and is {_short(now)}"
                    self.fail(f"{when}: {was}{cause}.")
        if len(first.turns) != len(again.turns):
            self.fail(f"{when}: it had {len(first.turns)} turns and has {len(again.turns)}{cause}.")

    def twin(self) -> Any:
        """Returns a second copy, or None if the environment was not made by an id."""
        spec = self.env.spec
        return None if spec is None else gymnasium.make(spec, disable_env_checker=True)


@types.coroutine
def _pause() -> Iterator[None]:
    """Suspends an episode, so that another one can take a turn."""
    yield


def _records(episode: Episode) -> list[tuple[object, ...]]:
    """Returns what has to repeat: the beginning, then each turn with its response."""
    observations = [turn.observation for turn in episode.turns] + [episode.final_observation]
    opening = episode.prompt.system, episode.prompt.messages
    start = (observations[0], *opening, replace(episode.reset, extra={}, tools=None))
    turns = [
        (turn.text, answer, turn.reward, replace(turn.info, extra={}), episode.stop_reason)
        for turn, answer in zip(episode.turns, observations[1:], strict=True)
    ]
    return [start, *turns]


def _chat() -> Any:
    from gspo_env.chat.tokenizer import ChatTokenizer
    from gspo_env.recipes.build import TEMPLATE, build_tokenizer

    tokenizer = build_tokenizer(["x"])
    # show the whole tool and not only its name, as real models' templates do
    tokenizer.chat_template = TEMPLATE.replace("t.function.name", "t | tojson")
    return ChatTokenizer(tokenizer)


def _has_snapshots(env: Any) -> bool:
    """Returns whether an environment can be put into a saved state.

    A wrapper other than Gymnasium's check of the order of calls may have a state of its own.
    """
    while isinstance(env, OrderEnforcing):
        env = env.env
    takes_cuts = getattr(env, "takes_cut_actions", False)
    return hasattr(env, "snapshot") and hasattr(env, "restore") and not takes_cuts


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 200 else f"{shown[:140]}...{shown[-50:]}"
