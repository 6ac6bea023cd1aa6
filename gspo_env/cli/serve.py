"""`gspo-env serve`."""

from __future__ import annotations

import ipaddress
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from annotated_types import Ge, Interval

from gspo_env.errors import ConfigError
from gspo_env.redaction import visible
from gspo_env.seeding import SEEDS
from gspo_env.settings import settings

if TYPE_CHECKING:
    from gspo_env.config import Config
    from gspo_env.serving import ChatPolicy

KEY = "GSPO_ENV_SERVE_KEY"
"""The variable with the key."""
_TRY = (
    'curl "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY"'
    """ -d '{"messages": [{"role": "user", "content": "Hello"}]}'"""
)
"""A command that sends a first request, in a shell with the exported variables."""
_TAKEN = ("rollout", "engine", "model_dtype", "rewritten_history")


@settings
class Serve:
    """Answer programs with the model of a run: OpenAI's and Anthropic's chat APIs on a port."""

    model: tyro.conf.Positional[str] = ""
    """A run's folder, a model's folder or a hub id."""
    step: Annotated[int, Ge(0)] | None = None
    """Step of the run whose weights to use; the newest by default."""
    best: bool = False
    """Whether to use the weights of the best evaluation."""
    host: str = "127.0.0.1"
    """The address to listen on; others than this machine's own need a key."""
    port: Annotated[int, Interval(ge=0, le=65535)] = 8000
    """The port; 0 takes a free one."""
    key: str = ""
    """The key of requests; by default the variable GSPO_ENV_SERVE_KEY, else a new one is printed.
    Other users of the machine can read the arguments of a command, but not its variables."""
    model_name: str = ""
    """The model's name in `/v1/models`; the folder's name by default."""
    model_dtype: Literal["", "auto", "float32", "bfloat16", "float16"] = ""
    """The dtype of the weights; a run's own setting by default."""
    engine: str = ""
    """Engine that samples the answers; a run's own by default."""
    temperature: Annotated[float, Ge(0)] | None = None
    """Temperature of requests that name none; that of the training by default, 0 is greedy."""
    max_tokens: Annotated[int, Ge(0)] = 0
    """Most tokens of an answer; those of a turn in the training by default."""
    max_context: Annotated[int, Ge(0)] = 0
    """Most tokens of a prompt and its answer; those of the training by default."""
    seed: Annotated[int, Interval(ge=0, lt=SEEDS)] = 0
    """Seed of requests that have none."""

    def run(self) -> None:
        """Serves until it is interrupted."""
        from gspo_env.env.registration import hide_progress_bars
        from gspo_env.model.weights import find_weights
        from gspo_env.serving import PolicyServer

        hide_progress_bars()
        key = self.key or os.environ.get(KEY, "")
        if not key and not is_loopback(self.host):
            raise ConfigError(
                f"host is {self.host!r}, which others can reach, and there is no key; expected "
                f"--key or the variable {KEY}"
            )
        if not self.model:
            raise ConfigError("the model is ''; expected the folder of a run or a hub id")
        weights = find_weights(self.model, self.step, best=self.best)
        config = policy_config(self)
        open_server = partial(PolicyServer, self.host, self.port, log=True)
        open_server().close()  # a port in use is refused before the model loads
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        # stdout is for a shell
        print(f"loading {visible(str(weights))}", file=sys.stderr, flush=True)
        with policy_of(weights.folder, config, self.seed) as policy:
            address = open_server()
            try:
                name = self.model_name or Path(self.model).resolve().name
                session = address.open(policy, training=False, model=name, key=key or None)
                print(f"export OPENAI_BASE_URL={session.url}", flush=True)
                print(f"export ANTHROPIC_BASE_URL={address.url}", flush=True)
                if not key:
                    for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
                        print(f"export {variable}={session.key}", flush=True)
                print(_TRY, flush=True)
                print(f"Ready on {address.url}, Ctrl-C stops", flush=True)
                threading.Event().wait()
            finally:
                address.close()


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def policy_config(options: Serve) -> Config:
    """Returns the settings of a run, read as data, with those of the options.

    Only those that sampling needs are taken.

    Raises:
        ConfigError: The settings are damaged, or name an engine that has to be given.
    """
    from gspo_env.config import Config, from_dict, override
    from gspo_env.saved import read_saved

    changes = {
        name: value for name in ("engine", "model_dtype") if (value := getattr(options, name))
    }
    config = Config(model=options.model)
    if (saved := read_saved(options.model)) is not None:
        tree = {name: value for name, value in saved.tree.items() if name in _TAKEN}
        untrusted = {k: v for k, v in saved.untrusted.items() if k.partition(".")[0] in _TAKEN}
        saved = replace(saved, tree=tree, untrusted=untrusted)
        config = from_dict({"model": options.model, **saved.settings(changes)})
    config = override(config, changes)
    temperature = options.temperature
    limits = {
        # a training samples, so its settings have no 0
        "temperature": None if temperature is None else max(temperature, sys.float_info.min),
        "max_turn_tokens": options.max_tokens or None,
        "max_context": options.max_context or None,
    }
    changed = {name: value for name, value in limits.items() if value is not None}
    return override(config, {"rollout": changed})


@contextmanager
def policy_of(model: str, config: Config, seed: int = 0) -> Iterator[ChatPolicy]:
    """Loads a model and yields what answers requests with it.

    Args:
        model: A run's folder, a model's folder or a hub id.
        config: Its settings.
        seed: Seed of requests that have none.

    Raises:
        ModelError: The folder has no model that can be loaded.
    """
    import torch

    from gspo_env.chat import ChatTokenizer
    from gspo_env.model.head import match_tokenizer, usable_ids
    from gspo_env.model.load import load_model
    from gspo_env.model.threads import use_threads
    from gspo_env.serving import ChatPolicy

    getattr(config.engine, "require", lambda: None)()
    loaded, tokenizer = load_model(model, config.model_dtype)
    if torch.cuda.is_available():
        loaded.to("cuda")
    use_threads(loaded)
    ends = match_tokenizer(loaded, tokenizer)
    chat = ChatTokenizer(tokenizer, history=config.rewritten_history, end_ids=ends)
    limits = config.rollout
    engine = config.engine.start(
        loaded, max_slots=limits.concurrency, max_context=limits.max_context
    )
    size = usable_ids(loaded)
    policy = ChatPolicy(engine, chat, limits, size, seed)
    try:
        yield policy
    finally:
        policy.close()
        engine.close()
