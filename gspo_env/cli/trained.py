"""The config of a run whose model is the folder of another run, or a model without settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gspo_env.config import Config, from_dict, override, resolve
from gspo_env.env.registration import add_kwargs
from gspo_env.saved import read_saved, replace_choices


def config_of_model(
    tree: dict[str, Any],
    choices: Mapping[str, str],
    env_kwargs: Mapping[str, Any],
    flags: Iterable[str],
) -> Config:
    """Returns the config of a file's settings and of those in the folder of its model, if any.

    Args:
        tree: The settings of the file; it names the model.
        choices: The classes that flags name, by kind.
        env_kwargs: Arguments of the environment that flags name.
        flags: The other flags.

    Raises:
        ConfigError: The folder names something that needs a flag.
    """
    saved, recipe = read_saved(tree["model"]), tree.get("recipe")
    if saved is None:
        return from_dict(tree)
    tree.pop("recipe", None)
    # flags may be settings of a class that is named instead of the folder's
    saved_tree = replace_choices(saved.tree, choices)
    played = {name: value for name, value in saved_tree.items() if name != "env_kwargs"}
    config = override(override(from_dict(played), tree), choices)
    env = tree.get("env", "")
    changes = {**tree, **choices} | {resolve(config, flag): True for flag in flags}
    changes["env_kwargs"] = add_kwargs(tree.get("env_kwargs", {}), env_kwargs, env or saved.env)
    config = from_dict(saved.settings(changes, env=env))
    if recipe is not None:
        config = override(config, {"recipe": recipe})
        config = override(config, config.recipe.changes)
    elif getattr(config.recipe, "demonstrates", False):  # the model has imitated already
        config = override(config, {"recipe": {"imitation_steps": 0}})
    return override(config, tree | {"env_kwargs": config.env_kwargs})
