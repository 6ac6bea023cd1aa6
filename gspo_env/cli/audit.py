"""`gspo-env audit`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from annotated_types import Ge, Gt

from gspo_env.cli.capture import check_new_file
from gspo_env.errors import ConfigError, OutputError
from gspo_env.settings import settings

if TYPE_CHECKING:
    from gspo_env.audit import Audit as Result


@settings
class Audit:
    """Attack the reward of an environment before training on it."""

    env: tyro.conf.Positional[str] = ""
    """The environment, such as gspo/Lookup-v0 or tasks.py:Tasks."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment, such as `hops=4`."""
    tasks: Annotated[int, Ge(1)] = 32
    """Different tasks to play, as far as there are so many."""
    allow: Annotated[float, Ge(0)] = 0.25
    """The largest share of gold's reward that an attacker may get."""
    gold: Annotated[float, Gt(0)] = 1.0
    """Reward of a solved task, for an environment without `expert_action`."""
    train: Annotated[int, Ge(0)] = 960
    """Episodes of a tiny policy that combines attackers and learns from the reward alone; not with
    a `group_reward`, such as a judge."""
    solutions: bool = False
    """Only play the expert, which must pass each task, and nothing, which must fail."""
    seed: Annotated[int, Ge(0)] = 0
    """The first seed of the tasks."""
    max_turns: Annotated[int, Ge(1)] = 16
    """Turns after which an episode is cut."""
    json: bool = False
    """Print JSON."""
    output: str = ""
    """Folder for audit.json and the page audit.html."""
    tracking_uri: str = ""
    """A store of MLflow, such as sqlite:///mlflow.db, which gets the shares and these files; needs
    `--output`."""

    def run(self) -> None:
        """Prints what each attacker gets; exits with 1 if a check finds something wrong."""
        if not self.env:
            raise ConfigError("env is ''; expected one, such as `gspo-env audit gspo/Lookup-v0`")
        if self.tracking_uri and not self.output:
            raise ConfigError("tracking_uri needs --output, the folder with the files to store")
        if self.output:
            try:  # before it plays
                Path(self.output).mkdir(parents=True, exist_ok=True)
                check_new_file(os.path.join(self.output, f".{os.getpid()}.part"))
            except OSError as error:
                raise OutputError(f"cannot write to {self.output!r}: {error.strerror}") from error
        from gspo_env.audit import audit
        from gspo_env.audit.page import lines, page
        from gspo_env.env.registration import Member
        from gspo_env.health.audits import audit_key, record_audit
        from gspo_env.redaction import visible

        names = ("tasks", "allow", "gold", "train", "solutions", "seed", "max_turns", "env_kwargs")
        key = audit_key(
            Member(spec=self.env, kwargs=self.env_kwargs)
        )  # a file may change meanwhile
        result = audit(self.env, **{name: getattr(self, name) for name in names})
        if not self.solutions:
            record_audit(key, [finding.name for finding in result.findings if not finding.ok])
        text = json.dumps({"sound": result.is_sound, **dataclasses.asdict(result)}, indent=1)
        if self.output:
            folder = Path(self.output)
            (folder / "audit.json").write_text(text + "\n", encoding="utf-8")
            (folder / "audit.html").write_text(page(result), encoding="utf-8")
            if self.tracking_uri:
                self._track(result, folder)
        print(text if self.json else visible("\n".join(lines(result))))
        if not result.is_sound:
            sys.exit(1)

    def _track(self, result: Result, folder: Path) -> None:
        """Sends the shares and the files to MLflow."""
        from gspo_env.tracking.base import Point, RunInfo
        from gspo_env.tracking.mlflow import MLflow

        params = {"env": result.env_id, "tasks": self.tasks, "allow": self.allow}
        info = RunInfo(name=f"audit {result.env_id}", folder=folder, params=params)
        tracker = MLflow(tracking_uri=self.tracking_uri).start(info)
        shares = {f"audit/{row.name.replace(' ', '_')}": row.share for row in result.rows}
        tracker.log_points([Point(step=0, time=int(time.time() * 1000), metrics=shares)])
        tracker.artifact(folder, "audit")
        tracker.finish("FINISHED", "")
