"""`gspo-env train`."""

from __future__ import annotations

from dataclasses import dataclass

from gspo_env.cli.options import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Train(Run):
    """Train a policy with GSPO on a text environment."""

    def run(self) -> None:
        """Trains."""
        from gspo_env.env.registration import load_agent

        load_agent("gspo")(config=self.resolved).train()
