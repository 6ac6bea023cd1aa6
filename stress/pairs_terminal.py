"""Terminal tasks in containers for `pairs.py`; the image is that of docs/tools.md."""

from __future__ import annotations

import os
from pathlib import Path

from gspo_envs.harbor.env import HarborEnv


def tasks(folder: Path) -> None:
    """Writes terminal tasks, which pay for the length of the answer."""
    image = os.environ.get("GSPO_ENV_IMAGE", "localhost/debian:bookworm")
    pays = "echo 0.$(($(cat /app/size) % 8)) >/logs/verifier/reward.txt"
    for word in ("amber", "basil", "cedar", "delta"):
        files = {
            "task.toml": f'[environment]\nmemory_mb = 256\ndocker_image = "{image}"\n',
            "instruction.md": f"Say {word}.",
            "tests/test.sh": pays,
            "solution/solve.sh": "true\n",
        }
        for name, text in files.items():
            (folder / word / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / word / name).write_text(text)


class Terminal(HarborEnv):
    """A terminal task in a container; its answer is a command, so that a tiny model runs some."""

    def on_final(self, text: str) -> tuple[str, float, bool]:
        """Writes the length of the answer where the tests read it."""
        self.run(f"echo {len(text)} >/app/size")
        return super().on_final(text)
