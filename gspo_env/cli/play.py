"""`gspo-env play`."""

from __future__ import annotations

import asyncio
import io
import shlex
import sys
from collections.abc import Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from annotated_types import Ge, Interval

from gspo_env.engines.base import Completion, Sampling
from gspo_env.errors import ConfigError, figure, raised_as
from gspo_env.redaction import visible
from gspo_env.rollout.scripted import ScriptedEngine
from gspo_env.seeding import SEEDS
from gspo_env.settings import settings

if TYPE_CHECKING:
    from gspo_env.rollout.play import PolicyInput, PolicyOutput
    from gspo_env.rollout.policy import EnginePolicy
    from gspo_env.types import Episode

_HELP = """Type an action, or one of:
  /TOOL name=value ...  a call of a tool; a value is JSON, or else text
  /expert               what the environment's own demonstrator would do
  /quit                 end the episode
  \"\"\"                   begins and ends an action of several lines"""
MODEL_HELP = f"""Press Enter to let the model act, or take over the turn.
  /go                   let the model play the rest of the episode
{_HELP}"""


@settings
class Play:
    """Play an episode by hand, or watch a model play it and take over any turn."""

    env: tyro.conf.Positional[str] = ""
    """Environment: a registered id, `module:id`, or `path/to/file.py:Class`; by default that of the
    model's run, or `gspo/Lookup-v0`."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment, such as `hops=4`."""
    model: str = ""
    """A trained folder or a hub id that acts; by default you do."""
    step: Annotated[int, Ge(0)] | None = None
    """Step of the run whose weights to use; the newest by default."""
    best: bool = False
    """Whether to use the weights of the best evaluation."""
    temperature: Annotated[float, Ge(0)] | None = None
    """Sampling temperature of the model; that of the training by default, 0 is greedy."""
    max_turn_tokens: Annotated[int, Ge(1)] | None = None
    """Most tokens of an action of the model; those of the training by default."""
    seed: Annotated[int, Interval(ge=0, lt=SEEDS)] = 0
    """Seed of the task."""

    def run(self) -> None:
        """Shows what the policy would read, reads or samples actions, and shows what they earn."""
        from gspo_env.env.registration import make_env, resolve_env
        from gspo_env.rollout.failures import close_quietly
        from gspo_env.rollout.play import play_now
        from gspo_env.types import Task

        for name in ("temperature", "max_turn_tokens", "step", "best"):
            value = getattr(self, name)
            if not self.model and value is not None and value is not False:  # 0 is a value
                raise ConfigError(f"{name} is {value}, and no model plays; expected --model")
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="backslashreplace")
        if self.model:
            self._watch()
            return
        spec = self.env or "gspo/Lookup-v0"
        env_id, env = resolve_env(spec), make_env(spec, **self.env_kwargs)
        try:
            print(_HELP)
            _end(play_now(env, Task(env_id=env_id, seed=self.seed), _ask))
        finally:
            close_quietly(env)

    def _watch(self) -> None:
        """Lets a model play, except for the turns that a person takes over."""
        from gspo_env.env.registration import hide_progress_bars, load_agent
        from gspo_env.model.head import usable_ids
        from gspo_env.model.weights import find_weights
        from gspo_env.rollout.collector import Collector
        from gspo_env.rollout.pool import play_pooled
        from gspo_env.seeding import derive_seed
        from gspo_env.types import Task

        hide_progress_bars()
        weights = find_weights(self.model, self.step, best=self.best)
        print(f"loading {visible(str(weights))}", flush=True)
        changes: dict[str, Any] = {"step": self.step, "best": self.best}
        length = {"max_turn_tokens": self.max_turn_tokens} if self.max_turn_tokens else {}
        changes |= {"env_kwargs": self.env_kwargs} if self.env_kwargs else {}
        agent = load_agent("gspo").load(self.model, self.env, **changes, rollout=length)
        limits = agent.config.rollout
        started = agent.config.engine.start(
            agent.model, max_slots=_SLOTS, max_context=limits.max_context
        )
        engine = ShownEngine(started, agent.chat)
        task = Task(env_id=next(iter(agent.environments.envs)), seed=self.seed)
        print(MODEL_HELP)
        with agent.environments.pool() as pool:
            plain = Collector(engine, agent.chat, pool, limits, usable_ids(agent.model))
            collector: Collector = agent.config.compaction.wrap(plain)
            seed, heat = derive_seed(agent.config.seed, 0, 0), limits.temperature
            heat = heat if self.temperature is None else self.temperature
            policy = collector.policy(collector, collector.progress.begin(task), seed, heat)
            turns, most = SharedTurns(policy, engine), limits.max_turns
            try:
                playing = play_pooled(pool, task, turns, timeout=_PATIENCE, max_turns=most)
                _end(asyncio.run(playing), most)
            finally:
                engine.close()


_SLOTS = 8
"""Sequences in the cache of the engine: an episode whose prompts are rewritten has several."""
_PATIENCE = 1e6
"""Seconds of an episode, in most of which a person may think."""


class ShownEngine(ScriptedEngine):
    """Prints what an engine samples while it is sampled, or takes the action of a person."""

    async def sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, session: str | None
    ) -> Completion:
        """See `ScriptedEngine.sample`."""
        shown = ""

        def show(ids: Sequence[int]) -> bool:
            nonlocal shown
            text = visible(self.chat.decode_all(ids))
            if text.startswith(shown) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                print(text[len(shown) :], end="", flush=True)
                shown = text
            return bool(sampling.ends and sampling.ends(ids))

        print("model: ", end="", flush=True)
        done = await self.engine.generate(prompt_ids, replace(sampling, ends=show), session)
        cut = f" (cut after {len(done.token_ids)} tokens)" if done.finish_reason == "length" else ""
        print(visible(self.chat.decode(done.token_ids))[len(shown) :] + cut, flush=True)
        return done


class SharedTurns:
    """The turns of a model, any of which a person takes over."""

    def __init__(self, policy: EnginePolicy, engine: ShownEngine) -> None:
        self._policy, self._engine, self._alone = policy, engine, False

    async def __call__(self, now: PolicyInput) -> PolicyOutput:
        """See `gspo_env.rollout.play.Policy`."""
        action: str | PolicyOutput | None = None
        if self._alone or self._policy.answers_itself(now):
            _show(now)
        else:
            action = _ask(now, beside_model=True)
            self._alone = action is None
        if action is not None and not isinstance(action, str):
            return action
        self._engine.next = action or None
        return await self._policy(now)


def _ask(now: PolicyInput, *, beside_model: bool = False) -> Any:
    """Shows the situation and reads the action of a person; see `gspo_env.rollout.play.Policy`.

    Beside a model, an empty line lets it act, and None lets it play the rest.
    """
    from gspo_env.rollout.play import PolicyOutput
    from gspo_env.types import StopReason

    _show(now)
    while True:
        try:
            line = input("> ")
            if line.strip() == '"""':
                return _several_lines()
        except EOFError:
            line = "/go" if beside_model else "/quit"
        if line == "/quit":
            return PolicyOutput(stop=StopReason.MAX_TURNS)
        if beside_model and line == "/go":
            return None
        if not line.startswith("/"):
            return line
        try:
            action = _special(line, now)
        except ConfigError as error:
            print(f"{visible(str(error))}\n{_HELP}")
            continue
        print(visible(action))
        return action


def _show(now: PolicyInput) -> None:
    if now.turn == 0:
        _begin(now)
    else:
        print(f"(reward {figure(now.reward, '+.4g')})")
    print(f"{now.role}: {visible(now.observation)}", flush=True)


def _begin(now: PolicyInput) -> None:
    if now.prompt.system:
        print(f"system: {visible(now.prompt.system)}")
    for message in now.prompt.messages:
        print(f"{message.role}: {visible(message.content)}")
    for tool in _tools(now).values():
        names = ", ".join(tool.parameters.get("properties", {}))
        print(f"tool {visible(tool.name)}({visible(names)}): {visible(tool.description)}")


def _tools(now: PolicyInput) -> dict[str, Any]:
    tools = now.prompt.tools if now.info.tools is None else now.info.tools
    return {tool.name: tool for tool in tools}


def _several_lines() -> str:
    lines: list[str] = []
    while (line := input("... ")).strip() != '"""':
        lines.append(line)
    return "\n".join(lines)


def _special(line: str, now: PolicyInput) -> str:
    """Returns the action of a line that begins with a slash.

    Raises:
        ConfigError: It is neither a command nor a call of a tool.
    """
    from gspo_env.cli.options import literal
    from gspo_env.rollout.play import demonstrator
    from gspo_env.tools.tool import format_tool_call

    with raised_as(ConfigError, f"{line!r} cannot be read", ValueError):
        name, *rest = shlex.split(line[1:]) or [""]
    if name == "expert":
        try:
            return str(demonstrator()(now))
        except NotImplementedError as error:
            raise ConfigError("this environment has no demonstrator") from error
    tools = _tools(now)
    if name not in tools:
        raise ConfigError(
            f"there is no tool {name!r}; expected one of {', '.join(tools) or 'none'}"
        )
    pairs = [part.partition("=") for part in rest]
    if bad := [part for part, (_, equals, _) in zip(rest, pairs, strict=True) if not equals]:
        raise ConfigError(f"{bad[0]!r} is not an argument; expected name=value")
    return format_tool_call(name, {key: literal(text) for key, _, text in pairs})


def _end(episode: Episode, most: int | None = None) -> None:
    """Prints the end and what each turn earned; exits with 1 if the environment failed.

    Args:
        episode: The episode.
        most: The limit on turns.
    """
    if episode.turns:
        print(f"(reward {figure(episode.turns[-1].reward, '+.4g')})")
    if episode.error:
        print(f"The environment failed: {visible(episode.error)}")
        sys.exit(1)
    if episode.ending.ended and episode.final_observation:  # else it has been shown
        print(visible(episode.final_observation))
    from gspo_env.rollout.failures import is_unscored

    unscored = is_unscored(episode)
    success = "Not scored" if unscored else "Success" if episode.success else "No success"
    rewards = " ".join(figure(reward, "+.4g") for reward in episode.rewards)
    count = len(episode.turns)
    is_quit = episode.stop_reason == "max_turns" and count != most
    print(
        f"{success}: "
        f"outcome {figure(episode.outcome, '+.4g')}, "
        f"{count} turn{'s' * (count != 1)} with rewards {rewards or 'none'}, "
        f"ended by {'you' if is_quit else episode.stop_reason.value}"
    )
