"""`gspo-env episodes`."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from gspo_env.cli.capture import check_new_file, figures_of, read_conditions, to_lines
from gspo_env.errors import ConfigError
from gspo_env.settings import settings

if TYPE_CHECKING:
    from gspo_env.episodes.schema import EpisodeRecord
    from gspo_env.types import Episode

logger = logging.getLogger(__name__)


@settings
class Episodes:
    """Write the kept training episodes of a run as conversations to imitate, each once."""

    folder: tyro.conf.Positional[str] = ""
    """Folder of the run."""
    format: Literal["messages"] = "messages"
    """JSON lines with `messages`, `tools`, `success` and `reward`, for `--recipe imitate` and
    TRL's `SFTTrainer`."""
    keep: str = ""
    """Take only episodes with this condition, such as "success == 1 and turns < 4"; it compares
    `reward`, `success`, `turns` or a named part of the reward with a number."""
    out: str = ""
    """The file to write, which must not exist; by default the lines are printed."""

    def run(self) -> None:
        """Writes the conversations; the tasks of the evaluation are left out."""
        from gspo_env.episodes import read_episodes
        from gspo_env.files import check_folder

        if not self.folder:
            raise ConfigError("expected the folder of a run")
        conditions = read_conditions(self.keep)
        if self.out:
            check_new_file(self.out)
        check_folder(Path(self.folder))
        records = [*read_episodes(self.folder)]
        trained = _not_held_out(records)
        played = [whole(r) for r in trained if r.turns and r.error is None]
        picks = [e for e in played if all(met(figures_of(e)) for met in conditions)]
        lines = {_said(line): line for episode in reversed(picks) for line in to_lines(episode)}
        if not lines:
            raise ConfigError(
                f"none of {len(played)} training episodes that {self.folder!r} has kept meets "
                f"{self.keep!r}; expected some"
                if played
                else f"{self.folder!r} has kept no training episode of a task that is not held out"
            )
        text = "".join(f"{line}\n" for line in reversed(lines.values()))
        if not self.out:
            print(text, end="")
            return
        with Path(self.out).open("x", encoding="utf-8") as file:
            file.write(text)
        print(
            f"episodes       {len(picks)} of {len(played)}, {len(records) - len(trained)} held out"
        )
        print(f"conversations  {len(lines)} in {self.out}")


def _not_held_out(records: Sequence[EpisodeRecord]) -> list[EpisodeRecord]:
    """Returns the episodes of training, without tasks that an evaluation has played."""
    held_out = {(r.env, r.task_key) for r in records if r.phase != "train" and r.task_key}
    return [r for r in records if r.phase == "train" and (r.env, r.task_key) not in held_out]


def whole(record: EpisodeRecord) -> Episode:
    """Returns an episode with what `reset` gave: the tools and a whole first conversation."""
    from gspo_env.episodes.restore import to_episode

    episode = to_episode(record)
    prompt = episode.prompt
    messages = prompt.first_messages("") if prompt.is_whole else episode.reset.messages
    return replace(episode, reset=replace(episode.reset, tools=prompt.tools, messages=messages))


def _said(line: str) -> str:
    """Returns what makes a line another conversation: its messages and tools."""
    row = json.loads(line)
    return json.dumps([row["messages"], row.get("tools")])
