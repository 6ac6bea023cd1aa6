"""`gspo-env envs`."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from gspo_env.settings import settings


@settings
class Envs:
    """List the environments, or check one."""

    check: str = ""
    """Checks this environment instead, and says from which rewards it is trained."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment to check, such as `hops=4`."""

    def run(self) -> None:
        """Prints one line for each environment, or the result of the check."""
        from gspo_env.check.environment import check_env
        from gspo_env.env.listing import describe_envs
        from gspo_env.health.findings import show

        if self.check:
            findings = list(check_env(self.check, env_kwargs=self.env_kwargs).findings)
            end = "." if all(finding.ok for finding in findings) else ", but:"
            print(f"{self.check} passes all checks{end}")
            for finding in findings:
                print(show(finding))
            return
        for env in describe_envs():
            tools = f"  [tools: {', '.join(env.tools)}]" if env.tools else ""
            print(f"{env.id:24} {env.summary}{tools}")
