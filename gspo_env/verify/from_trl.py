"""Writes the batches of TRL's `GRPOTrainer`.

    trainer = recorded(GRPOTrainer, "batches")(model=..., ...)

Each generation is written to `batches/0.jsonl`, `1.jsonl`, ..., for `gspo-env verify`.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from gspo_env.verify.batch import Batch, Row, write_batch

_ESTIMATORS = {"group": "grpo", "none": "dr_grpo"}


def recorded(trainer: type[Any], folder: str | Path) -> type[Any]:
    """Returns a subclass of a `GRPOTrainer` that writes every batch of one process."""
    numbers = itertools.count()
    Path(folder).mkdir(parents=True, exist_ok=True)

    class Recorded(trainer):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            answer = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            sampled = zip(prompt_ids, answer[0], strict=True)
            self._calls = [*getattr(self, "_calls", ()), *((list(p), list(c)) for p, c in sampled)]
            return answer

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            rewards = super()._calculate_rewards(*args, **kwargs)
            self._rewards = (rewards * self.reward_weights.to(rewards.device)).nansum(1).tolist()
            lost = rewards.isnan().all(1).tolist()
            self._rewards = [None if x else r for r, x in zip(self._rewards, lost, strict=True)]
            return rewards

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            self._calls = []
            output = super()._generate_and_score_completions(inputs)
            write_batch(self._batch(output), Path(folder) / f"{next(numbers)}.jsonl")
            return output

        def _batch(self, output: Any) -> Batch:
            at = self.accelerator.process_index * len(output["prompt_ids"])
            size = self.num_generations if self.model.training else self.num_generations_eval
            rows, calls = [], _by_row(self._calls, len(output["prompt_ids"]))
            for n in range(len(output["prompt_ids"])):
                values = {name: output[name][n].tolist() for name in _NAMES if name in output}
                prompt, mask = values["prompt_ids"], values["completion_mask"]
                counted = values.get("tool_mask", mask)
                ids = prompt + values["completion_ids"]
                attention = values["prompt_mask"] + mask
                whole = [i for i, a in zip(ids, attention, strict=True) if a]
                logprobs = values.get("old_per_token_logps", values.get("sampling_per_token_logps"))
                before: list[None] = [None] * len(prompt)
                starts = [(len(p), c[: len(whole) - len(p)]) for p, c in calls[n]]
                rows.append(
                    Row(
                        ids=ids,
                        attention=attention,
                        mask=[0] * len(prompt)
                        + [int(m and t) for m, t in zip(mask, counted, strict=True)],
                        group=str((at + n) // size),
                        logprobs=None if logprobs is None else [*before, *logprobs],
                        advantages=[*before, *[values["advantages"]] * len(mask)],
                        reward=self._rewards[at + n],
                        failed=self._rewards[at + n] is None,
                        sampled=[call for call in starts if call[1]],
                    )
                )
            kind = _ESTIMATORS.get(str(self.scale_rewards), "")
            return Batch(
                rows=rows, trainer="trl", estimator=kind, temperature=float(self.temperature)
            )

    return Recorded


_NAMES = (
    *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask"),
    *("advantages", "old_per_token_logps", "sampling_per_token_logps"),
)


def _by_row(calls: list[Any], count: int) -> list[list[Any]]:
    """Returns the calls of each row: the first calls are one a row, later ones continue one."""
    rows = [[call] for call in calls[:count]]
    for prompt, ids in calls[count:]:
        for row in rows:
            before = [*row[-1][0], *row[-1][1]]
            if prompt[: len(before)] == before:
                row.append((prompt, ids))
                break
    return rows
