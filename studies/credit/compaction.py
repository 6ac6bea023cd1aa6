"""Is a summary worse if its tokens are not trained? A word has to be remembered past a compaction.

    gspo-env compare --config studies/credit/compaction.toml

A turn shows a cue, and the last turn asks for its word, when the conversation with the cue has been
replaced by a summary of one word. arXiv 2607.05378 reports that summaries whose loss is masked
become worse.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from gspo_env.rollout.collector import Collector
from gspo_env.rollout.compaction import CompactingPolicy, Summary
from gspo_env.rollout.play import PolicyInput, PolicyOutput
from gspo_env.settings import settings
from gspo_env.types import StepInfo
from gspo_envs.diagnostic.diagnostics import CUES, OneWordEnv


class RecallEnv(OneWordEnv):
    """A cue in one of the turns 1 to 3, and in the last turn a question: its word earns 1.

    Demonstrations are asked for a note of it in between, and their answer repeats the note, right
    or wrong. So a model that imitates them answers with what it has noted.
    """

    words = ("red", "green", "blue", "gold", "go")

    def __init__(self, turns: int = 10) -> None:
        super().__init__(turns, fewest=10)

    def _draw(self) -> None:
        self._cue, self._noted = int(self.np_random.integers(4)), ""
        cue, note, question = np.cumsum(self.np_random.integers(1, 4, size=3)).tolist()
        self._places = {cue: CUES[self._cue], self.turns - 1: "question"}
        self._demonstrated = {cue: CUES[self._cue], note: "note", question: "question"}

    @property
    def _task_key(self) -> str:
        return CUES[self._cue]

    @property
    def _last(self) -> bool:
        return self._show() == "question"

    def _show(self) -> str:
        return self._places.get(self.turns_played, "wait")

    def _right(self) -> str:
        return self.words[self._cue if self._show() in ("note", "question") else 4]

    def expert_action(self, noise: float = 0.0) -> str:
        self._places = self._demonstrated
        if self._show() == "note":
            self._noted = super().expert_action(noise)
        return self._noted if self._show() in ("note", "question") else self._right()

    def _play(self, word: str) -> tuple[float, bool, float]:
        right = float(self._last and word == self._right())
        return right, self._last, right


@settings
class MaskedSummary(Summary):
    """`Summary`, but its tokens are not trained."""

    def wrap(self, collector: Collector) -> Collector:
        wrapped = Summary.wrap(self, collector)
        return replace(wrapped, policy=partial(MaskedPolicy, **wrapped.policy.keywords))  # type: ignore[attr-defined]


class MaskedPolicy(CompactingPolicy):
    """Masks the tokens of summaries."""

    async def _summarize(self, inputs: PolicyInput) -> PolicyOutput:
        output = await super()._summarize(inputs)
        info: Any = output.info or StepInfo()
        self.info = replace(info, token_mask=(False,) * len(output.action_ids))
        return replace(output, info=self.info)
