"""`gspo-env play`."""

from __future__ import annotations

import io
import shlex
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from annotated_types import Interval

from gspo_env.errors import ConfigError
from gspo_env.redaction import visible
from gspo_env.registry import check_values
from gspo_env.seeding import SEEDS

if TYPE_CHECKING:
    from gspo_env.rollout.play import PolicyInput, PolicyOutput
    from gspo_env.types import Episode

_HELP = """Type an action, or one of:
  /TOOL name=value ...  a call of a tool; a value is JSON, or else text
  /expert               what the environment's own demonstrator would do
  /quit                 end the episode
  \"\"\"                   begins and ends an action of several lines"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Play:
    """Play an episode by hand."""

    env: tyro.conf.Positional[str] = "gspo/Lookup-v0"
    """Environment: a registered id, `module:id`, or `path/to/file.py:Class`."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment, such as `hops=4`."""
    seed: Annotated[int, Interval(ge=0, lt=SEEDS)] = 0
    """Seed of the task."""

    def run(self) -> None:
        """Shows what the policy would read, reads actions, and shows what they earn."""
        from gspo_env.env.registration import make_env, resolve_env
        from gspo_env.rollout.failures import close_quietly
        from gspo_env.rollout.play import play_now
        from gspo_env.types import Task

        check_values(self)
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="backslashreplace")
        env_id = resolve_env(self.env)
        env = make_env(env_id, **self.env_kwargs)
        try:
            print(_HELP)
            _end(play_now(env, Task(env_id=env_id, seed=self.seed), _ask))
        finally:
            close_quietly(env)


def _ask(now: PolicyInput) -> str | PolicyOutput:
    """Shows the situation and reads the action of a person; see `gspo_env.rollout.play.Policy`."""
    from gspo_env.rollout.play import PolicyOutput
    from gspo_env.types import StopReason

    if now.turn == 0:
        _begin(now)
    else:
        print(f"(reward {now.reward:+.4g})")
    print(f"{now.role}: {visible(now.observation)}")
    while True:
        try:
            line = input("> ")
            if line.strip() == '"""':
                return _several_lines()
        except EOFError:
            line = "/quit"
        if line == "/quit":
            return PolicyOutput(stop=StopReason.MAX_TURNS)
        if not line.startswith("/"):
            return line
        try:
            action = _special(line, now)
        except ConfigError as error:
            print(f"{visible(str(error))}\n{_HELP}")
            continue
        print(visible(action))
        return action


def _begin(now: PolicyInput) -> None:
    if now.prompt.system:
        print(f"system: {visible(now.prompt.system)}")
    for message in now.prompt.messages:
        print(f"{message.role}: {visible(message.content)}")
    for tool in _tools(now).values():
        names = ", ".join(tool.parameters.get("properties", {}))
        print(f"tool {visible(tool.name)}({visible(names)}): {visible(tool.description)}")


def _tools(now: PolicyInput) -> dict[str, Any]:
    tools = now.prompt.tools if now.request.tools is None else now.request.tools
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
    from gspo_env.env.tools import format_tool_call
    from gspo_env.rollout.play import demonstrator

    try:
        name, *rest = shlex.split(line[1:]) or [""]
    except ValueError as error:
        raise ConfigError(f"{line!r} cannot be read: {error}") from error
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
        raise ConfigError(f"{bad[0]!r} is no argument; expected name=value")
    return format_tool_call(name, {key: literal(text) for key, _, text in pairs})


def _end(episode: Episode) -> None:
    """Prints how the episode ended and what each turn earned."""
    if episode.turns:
        print(f"(reward {episode.turns[-1].reward:+.4g})")
    if episode.error:
        print(f"The environment failed: {visible(episode.error)}")
        return
    if episode.turns and episode.final_observation:
        print(visible(episode.final_observation))
    rewards = " ".join(f"{reward:+.4g}" for reward in episode.rewards)
    count = len(episode.turns)
    # nothing but /quit sets a limit here
    is_quit = episode.stop_reason == "max_turns"
    print(
        f"{'Success' if episode.success else 'No success'}: outcome {episode.outcome:+.4g}, "
        f"{count} turn{'s' * (count != 1)} with rewards {rewards or 'none'}, "
        f"ended by {'you' if is_quit else episode.stop_reason.value}"
    )
