"""Which weights a folder has: of a run the newest, the best, or those of a step.

    RUN/model                             after the last step before the run ended or was stopped
    RUN/checkpoints/step-000020/model     the best so far; `RUN/checkpoints/best` names it
    RUN/checkpoints/step-000023           what resumes the run, but no model

Nothing falls back to older weights silently: where a checkpoint is newer than every model, as in a
run that was killed, the error says how to save its model.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from gspo_env.errors import ModelError
from gspo_env.files import CHECKPOINT, MODEL, read_small, saved_step, step_folders

_STEPS = re.compile(r"^steps = (\d{1,15})$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """The model that a name means."""

    name: str
    """What the user named."""
    folder: str
    """The folder or the hub id to load."""
    step: int | None = None
    """The training step after which it was saved; None if unknown."""
    newest: bool = False
    """Whether its run has none of a later step."""

    def __str__(self) -> str:
        """Names the folder, and the step of the weights if that is known."""
        which = "" if self.step is None else f", weights of step {self.step}"
        return f"{self.name}{which}{', the newest' * self.newest}"


def find_weights(name: str | Path, step: int | None = None, *, best: bool = False) -> Weights:
    """Returns which model a name means: a run's newest, unless another one is chosen.

    Args:
        name: The folder of a run, of a checkpoint or of a model, or a hub id.
        step: The step of the run whose weights to take.
        best: Takes those of the best evaluation instead.

    Raises:
        ModelError: The run has no such weights, or has no model of its newest checkpoint.
    """
    path, name = Path(name), str(name)
    is_run = (path / "checkpoints").is_dir() and not (path / "config.json").exists()
    if not is_run:
        return _outside_of_run(path, name, step, best)
    saved = {at: folder for folder in _models(path) if (at := saved_step(folder)) is not None}
    steps = [int(each.name[5:]) for each in step_folders(path / "checkpoints")]
    newest = max([0, *steps, *saved])
    resume = f"gspo-env train --resume {shlex.quote(name)}"
    if best:
        folder = path / "checkpoints" / "best" / MODEL
        step = saved_step(folder)
        if step is None:
            raise ModelError(f"the run {name!r} has no best checkpoint{_saved(saved)}")
        return Weights(name=name, folder=str(folder), step=step, newest=step == newest)
    if not newest and not saved:
        why = f" yet; resume with: {resume}" if steps else " yet"
        if (path / MODEL).is_dir():
            why = ", as each run of a comparison"
        raise ModelError(f"the run {name!r} has no model{why}")
    step = newest if step is None else step
    if step in saved:
        return Weights(name=name, folder=str(saved[step]), step=step, newest=step == newest)
    checkpoint = path / "checkpoints" / f"step-{step:06d}"
    if step != newest or not checkpoint.is_dir():
        raise ModelError(f"the run {name!r} has no weights of step {step}{_saved(saved)}")
    planned = _STEPS.search(read_small(path, "config.toml"))
    raise ModelError(
        f"the run {name!r} is at step {step}{f' of {planned[1]}' if planned else ''}, of which it "
        f"has no model yet{_saved(saved)}; resume with: {resume}, or save the model of step {step} "
        f"with: {resume} --steps {step}"
    )


def _outside_of_run(path: Path, name: str, step: int | None, best: bool) -> Weights:
    """Returns the model of a checkpoint, or the one that the name itself means."""
    if step is not None or best:
        flag = "--best" if best else f"--step {step}"
        raise ModelError(f"{name!r} is not the folder of a run, whose weights {flag} can choose")
    if (path / MODEL / "config.json").exists() and not (path / "config.json").exists():
        folder = path / MODEL
        return Weights(name=name, folder=str(folder), step=saved_step(folder))
    if (path / "state.json").exists() and (number := CHECKPOINT.fullmatch(path.name)):
        run = shlex.quote(str(path.parent.parent))
        raise ModelError(
            f"the checkpoint {name!r} has no model, which only the best one has; save it with: "
            f"gspo-env train --resume {run} --steps {int(number[1])}"
        )
    return Weights(name=name, folder=name)


def _models(run: Path) -> list[Path]:
    """Lists where a run keeps models; `best` is a folder if the run was copied without links."""
    return [*sorted((run / "checkpoints").glob(f"*/{MODEL}"), reverse=True), run / MODEL]


def _saved(steps: dict[int, Path]) -> str:
    names = ", ".join(map(str, sorted(steps)))
    return f"; it has those of step {names} (choose with --step)" if steps else ""
