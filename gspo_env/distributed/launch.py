"""Starts a run as several processes, and what each of them does in it.

`gspo-env train --processes N` starts the elastic agent of torchrun in its own process, on this
machine only. `torchrun ... -m gspo_env train` works as well. Rank 0 plays and leads, the others
train. The launcher passes SIGINT and SIGTERM on to rank 0, which ends the run after its step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import tomllib
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_env.config import Config, from_dict, to_toml
from gspo_env.errors import ConfigError, GspoEnvError
from gspo_env.learner.losses import decide_correction
from gspo_env.runtime.processes import die_with_parent
from gspo_env.training.checkpoints import step_folders

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

    from gspo_env.distributed.controller import Controller, Plan
    from gspo_env.distributed.ranks import Ranks

_NOTES = "GSPO_ENV_LAUNCH"
"""Environment variable with the folder in which rank 0 leaves notes for the launcher."""
_PID, _RUN, _EXIT = "pid", "run", "exit"


def launched() -> bool:
    """Returns whether this process is one of several that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def launch(processes: int, max_restarts: int, arguments: Sequence[str]) -> int:
    """Runs `gspo-env` with the same arguments in several processes; returns the exit code.

    Args:
        processes: Number of ranks.
        max_restarts: How often all ranks are started again after one has died.
        arguments: The command and its options.

    Raises:
        ConfigError: A number is out of range.
        KeyboardInterrupt: A second signal, or one before rank 0 has joined.
    """
    if processes < 2 or max_restarts < 0:
        raise ConfigError(
            f"processes is {processes} and max_restarts is {max_restarts}; expected processes 1 "
            "alone, or at least 2 with a number of restarts of at least 0"
        )
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import launch_agent

    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nothing outside can connect
    with tempfile.TemporaryDirectory(prefix="gspo-env-launch-") as notes:
        os.environ[_NOTES] = notes
        try:
            config = _one_node(processes, max_restarts, notes)
            with _signals_to_rank_0():
                launch_agent(config, sys.executable, ["-m", "gspo_env", *arguments])
        except ChildFailedError as error:
            code = error.get_first_failure()[1].exitcode
            return int(_note(_EXIT) or (code if code > 0 else 1))
        finally:
            os.environ.pop(_NOTES)
        return int(_read(Path(notes, _EXIT)) or 0)


def _one_node(processes: int, max_restarts: int, notes: str) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        signals_to_handle="SIGHUP,SIGQUIT",  # the others go to rank 0
        logs_specs=DefaultLogsSpecs(log_dir=notes),  # else its folder would be left
    )


@contextmanager
def _signals_to_rank_0() -> Iterator[None]:
    """Passes the first SIGINT or SIGTERM on to rank 0; the second ends all ranks."""
    asked: list[int] = []

    def pass_on(number: int, _: object) -> None:
        pid = _note(_PID)
        if asked or not pid:
            raise KeyboardInterrupt
        asked.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), number)

    before = {n: signal.signal(n, pass_on) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def as_rank(lead: Callable[[Ranks], None]) -> None:
    """Joins the other ranks; rank 0 leads, and the others serve it until it ends the run.

    Args:
        lead: Trains, given the ranks; called by rank 0.

    Raises:
        TrainingError: Rank 0 has ended without saying so.
    """
    die_with_parent(os.getppid())
    from gspo_env.distributed.controller import serve
    from gspo_env.distributed.ranks import join

    with join() as ranks:
        if ranks.rank:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # rank 0 decides when the run ends
            logging.getLogger("gspo_env").setLevel(logging.ERROR)  # rank 0 warns of the same
            serve(ranks, lambda text: plan_of(from_dict(tomllib.loads(text))))
            return
        _leave(_PID, str(os.getpid()))
        with _not_started_again():
            lead(ranks)


def make_controller(ranks: Ranks, model: Any, config: Config) -> Controller:
    """Makes the learner of rank 0, which leads the others."""
    from gspo_env.distributed.controller import Controller

    return Controller(ranks, model, plan_of(config), to_toml(config))


def plan_of(config: Config) -> Plan:
    """Returns the settings that all ranks share."""
    from gspo_env.distributed.controller import Plan

    return Plan(
        loss=decide_correction(config.loss, config.supply.max_staleness),
        config=config.learner,
        total_steps=config.steps * config.learner.minibatches,
        temperature=config.rollout.temperature,
    )


@contextmanager
def _not_started_again() -> Iterator[None]:
    """Ends well after an error that would come again, and leaves its exit code to the launcher."""
    from gspo_env.distributed.ranks import OneRankFailed

    try:
        yield
    except OneRankFailed:
        raise
    except (GspoEnvError, KeyboardInterrupt) as error:
        if _NOTES not in os.environ:
            raise
        from gspo_env.redaction import redact_text, visible

        stopped = isinstance(error, KeyboardInterrupt)
        if not stopped:
            print(f"gspo-env: {visible(redact_text(str(error)))}", file=sys.stderr)
        _leave(_EXIT, "130" if stopped else "2")


def leave_run(folder: Path) -> None:
    """Tells the launcher which run this is, so that all ranks can go on with it."""
    _leave(_RUN, str(folder))


def interrupted_run(config: Config) -> str:
    """Returns the folder of the run that these ranks were started again to go on with, or ''."""
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    folder = (_note(_RUN) or config.output) if again else ""
    return folder if folder and step_folders(Path(folder, "checkpoints")) else ""


def _leave(name: str, text: str) -> None:
    if folder := os.environ.get(_NOTES):
        part = Path(folder, f".{name}")
        part.write_text(text)
        part.replace(Path(folder, name))


def _note(name: str) -> str:
    folder = os.environ.get(_NOTES)
    return _read(Path(folder, name)) if folder else ""


def _read(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    return ""
