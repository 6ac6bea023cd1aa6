"""`gspo-env export`."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import tyro

from gspo_env.errors import ConfigError
from gspo_env.settings import settings


@settings
class Export:
    """Write an environment as a package for TRL, verifiers or OpenEnv."""

    env: tyro.conf.Positional[str] = ""
    """Environment: a registered id, or `path/to/file.py:Class`, whose file becomes a part of the
    package."""
    to: str = ""
    """`trl`, `verifiers` or `openenv`, which must be installed in the version that was tried."""
    out: str = ""
    """Folder to write, which must be new or empty."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment, such as `hops=4`."""

    def run(self) -> None:
        """Writes the package, and prints what the library cannot carry."""
        from gspo_env.export.package import write_package

        for name in ("env", "to", "out"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is ''; expected gspo-env export ENV --to NAME --out DIR")
        lines = write_package(self.env, self.to, self.out, **self.env_kwargs)
        print(f"{self.out}: pip install {self.out}")
        print(f"What {self.to} cannot carry:")
        print("\n".join(f"  {line}" for line in lines))
