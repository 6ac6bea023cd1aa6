"""`gspo-env envs`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Envs:
    """List the environments."""

    def run(self) -> None:
        """Prints one line for each environment."""
        from gspo_env.env.registration import describe_envs

        for env in describe_envs():
            tools = f"  [tools: {', '.join(env.tools)}]" if env.tools else ""
            print(f"{env.id:24} {env.summary}{tools}")
