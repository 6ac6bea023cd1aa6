"""A trained model from a folder that only plays, such as the opponent in a game."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import torch

from gspo_agents.player import Player
from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.config import from_dict
from gspo_env.engines import Completion, Engine, Sampling, Transformers, check_completion
from gspo_env.errors import EngineError
from gspo_env.model.head import match_tokenizer, usable_ids
from gspo_env.model.load import load_model
from gspo_env.model.threads import use_threads
from gspo_env.model.weights import find_weights
from gspo_env.runtime.loops import run
from gspo_env.saved import read_saved
from gspo_env.types import Prompt

logger = logging.getLogger(__name__)

_LOOP = "frozen agents"
_TAKEN = ("rollout", "rewritten_history")
"""The settings of the folder that are used."""
_MAX_SLOTS = 256
"""Maximum number of sequences in the cache of a frozen agent."""


class FrozenAgent:
    """A trained model that only plays, with an engine of its own that all environments share.

    Args:
        folder: Folder of a run or of a model, read as data: of its settings only `_TAKEN` are used.

    Raises:
        ConfigError: The saved settings are damaged.
        ModelError: The folder has no model that can be loaded.
    """

    def __init__(self, folder: str | Path) -> None:
        saved = read_saved(folder)
        tree = saved.tree if saved else {}
        config = from_dict({name: tree[name] for name in _TAKEN if name in tree})
        self.limits = config.rollout
        weights = find_weights(folder)
        logger.info("An opponent plays with %s.", weights)
        self.model, tokenizer = load_model(weights.folder)
        if torch.cuda.is_available():
            self.model.to("cuda")
        use_threads(self.model)
        self.chat = ChatTokenizer(
            tokenizer,
            history=config.rewritten_history,
            end_ids=match_tokenizer(self.model, tokenizer),
        )
        self._size = usable_ids(self.model)
        self._engine: Engine = Transformers().start(
            self.model,
            max_slots=min(self.limits.concurrency, _MAX_SLOTS),
            max_context=self.limits.max_context,
        )

    @classmethod
    def load(cls, folder: str | Path) -> FrozenAgent:
        """Returns the agent of a folder, which is loaded once in a process."""
        path = Path(folder).resolve()
        with _LOCK:
            if path not in _LOADED:
                _LOADED[path] = cls(path)
            return _LOADED[path]

    def player(self, prompt: Prompt | None = None, temperature: float | None = None) -> Player:
        """Returns a player for one episode.

        Args:
            prompt: What it reads before the first observation.
            temperature: The one that it was trained with by default; 0 is greedy.
        """
        heat = self.limits.temperature if temperature is None else temperature
        return Player(self.chat, prompt or Prompt(), self._generate, self.limits, heat)

    def _generate(self, ids: list[int], sampling: Sampling) -> Completion:
        try:
            done = run(self._engine.generate(ids, sampling), _LOOP, self.limits.episode_timeout)
        except TimeoutError as error:
            seconds = self.limits.episode_timeout
            raise EngineError(f"an action was not sampled within {seconds:g} s") from error
        check_completion(done, sampling, self._size)
        return done


_LOADED: dict[Path, FrozenAgent] = {}
_LOCK = threading.Lock()
