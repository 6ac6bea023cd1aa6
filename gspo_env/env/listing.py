"""Describes the environments that can be named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gspo_env.env.registration import listed_envs, load_creator


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvDescription:
    """The entry of an environment in `gspo-env envs`."""

    id: str
    summary: str
    """First line of the class's docstring."""
    tools: tuple[str, ...]
    """Names of the tools."""


def describe_envs() -> list[EnvDescription]:
    """Describes the environments of this package, of its plugins and of resolved files."""
    return [_describe(env_id) for env_id in listed_envs()]


def _describe(env_id: str) -> EnvDescription:
    try:
        creator = load_creator(env_id)
        declared = getattr(creator, "declared_tools", None)
        tools = declared() if callable(declared) else getattr(creator, "tools", ())
    except Exception as error:  # the list must still show the others
        return EnvDescription(id=env_id, summary=f"cannot be loaded: {error}", tools=())
    tools = tools if isinstance(tools, Sequence) else ()  # a property knows them of an instance
    summary = (creator.__doc__ or "").strip().partition("\n")[0]
    return EnvDescription(id=env_id, summary=summary, tools=tuple(tool.name for tool in tools))
