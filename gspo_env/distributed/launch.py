"""What each of several processes does that train one model together; torchrun starts them.

    torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m gspo_env train ...

Rank 0 plays and leads, the others train. With `--max-restarts N` and `--output`, torchrun starts
all of them again after one has died, and they resume from the last checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gspo_env.config import Config, from_dict, learner_arguments, to_toml
from gspo_env.distributed.controller import Controller, Plan, serve
from gspo_env.distributed.ranks import Ranks, join
from gspo_env.runtime.processes import die_with_parent
from gspo_env.training.checkpoints import step_folders


def run_as_rank(train: Callable[[Ranks], None]) -> None:
    """Joins the other ranks; rank 0 trains, and the others serve it until it ends the run.

    Args:
        train: Trains, given the ranks; called by rank 0.

    Raises:
        TrainingError: Rank 0 has died.
    """
    die_with_parent(os.getppid())
    with join() as ranks:
        if ranks.rank == 0:
            train(ranks)
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # rank 0 decides when the run ends
        logging.getLogger("gspo_env").setLevel(logging.ERROR)  # rank 0 warns of the same
        serve(ranks, lambda text: Plan(**learner_arguments(from_dict(tomllib.loads(text)))))


def make_controller(ranks: Ranks, model: Any, config: Config) -> Controller:
    """Makes the learner of rank 0."""
    return Controller(ranks, model, Plan(**learner_arguments(config)), to_toml(config))


def restarted_run(config: Config) -> str:
    """Returns the folder of the run that torchrun started these ranks again for, or ''."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    resumable = config.output and step_folders(Path(config.output, "checkpoints"))
    return config.output if restarted and resumable else ""
