"""Checks the ids in MLflow's environment variables; loaded if one is set."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from mlflow.exceptions import MlflowException

from gspo_env.errors import ConfigError
from gspo_env.tracking.mlflow import GONE, MLflow, open_client


def check_ids(settings: MLflow) -> None:
    """Looks for the experiment and the run that the environment names by id.

    Raises:
        ConfigError: The store lacks one, or has deleted it.
    """
    client = open_client(settings)
    if not settings.experiment.strip() and not os.environ.get("MLFLOW_EXPERIMENT_NAME"):
        _check_id("MLFLOW_EXPERIMENT_ID", client.get_experiment)
    _check_id("MLFLOW_RUN_ID", lambda run_id: client.get_run(run_id).info)


def _check_id(variable: str, find: Callable[[str], Any]) -> None:
    value = os.environ.get(variable, "")
    try:
        stage = find(value).lifecycle_stage if value else "active"
    except MlflowException as error:
        stage = str(error) if error.error_code in GONE else "active"
    if stage != "active":
        raise ConfigError(f"{variable} is {value!r}; expected one of the store ({stage})")
