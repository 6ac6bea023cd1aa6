"""Writes the episodes that a run keeps; see `gspo_env.episodes.schema`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_env.config import EpisodesConfig
from gspo_env.episodes.schema import (
    EPISODE_FIELDS,
    FOLDER,
    TOKENS,
    TURN_FIELDS,
    EpisodeFile,
    Phase,
    episode_files,
    read_tokens,
    schema,
)
from gspo_env.files import write_file
from gspo_env.redaction import redact_text
from gspo_env.rollout.metrics import Evaluation
from gspo_env.tools.calls import parse_tool_calls
from gspo_env.tools.json_calls import ToolCallError
from gspo_env.tools.tool import Tool
from gspo_env.types import Episode, Group, Message, Turn

if TYPE_CHECKING:
    import pyarrow as pa

    from gspo_env.learner.stats import TokenValues

logger = logging.getLogger(__name__)

Tokens = Mapping[tuple[int, int, int], "TokenValues"]
"""By index of the group, of the episode in the group and of the turn."""

_VALUES = {
    "trainer_logprobs": "trainer_logprobs",
    "advantages": "advantage",
    "ratios": "ratio",
    "clipped": "clipped",
    "entropies": "entropy",
}
"""The field of `TokenValues` of each column."""


class EpisodeLog:
    """The episodes of one run on the disk: a file for each phase of a step, whole or absent.

    A resumed run writes the same files again, so no episode is there twice.

    Args:
        run: Folder of the run.
        settings: What to keep.
        tokenizer: Gives the text of token ids.
        try_write: Calls a function that may fail to write, such as `Checkpoints.try_write`.
    """

    def __init__(
        self,
        run: Path,
        settings: EpisodesConfig,
        tokenizer: Any,
        try_write: Callable[[str, Callable[[], object]], bool],
    ) -> None:
        self.run, self.settings = run, settings
        self._tokenizer, self._try_write = tokenizer, try_write
        self._tokens = read_tokens(run)

    def groups_to_keep(self, groups: int) -> range:
        """Returns the indices of the training groups to keep; tasks are drawn in random order."""
        most = {"all": groups, "sample": min(groups, self.settings.keep_groups)}
        return range(most.get(self.settings.keep_episodes, 0))

    def trained(self, step: int, groups: Mapping[int, Group], tokens: Tokens) -> None:
        """Writes groups of a training step.

        Args:
            step: The step.
            groups: The groups by index.
            tokens: What the update did to the tokens of trained turns.
        """
        self._write(step, "train", groups, tokens)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Writes the sampled and the greedy episodes of an evaluation."""
        if self.settings.keep_episodes != "none":
            self._write(step, "eval", dict(enumerate(evaluation.groups)), {})
            self._write(step, "greedy", dict(enumerate(evaluation.greedy_groups)), {})

    def resume(self, step: int) -> None:
        """Deletes what a run wrote after the step from which it is resumed."""
        for file in episode_files(self.run):
            if file.step > step:
                self._try_write(f"{FOLDER}/{file.path.name}", file.path.unlink)

    def _write(self, step: int, phase: Phase, groups: Mapping[int, Group], tokens: Tokens) -> None:
        if groups:
            name = f"{FOLDER}/{step:06d}-{phase}.parquet"
            self._try_write(name, lambda: self._save(name, to_table(step, phase, groups, tokens)))

    def _save(self, name: str, table: pa.Table) -> None:
        import pyarrow.parquet as pq

        (self.run / FOLDER).mkdir(exist_ok=True)
        self._note_tokens(table)
        write = partial(pq.write_table, table, compression="zstd", compression_level=1)
        write_file(self.run, name, write)
        for file in surplus(episode_files(self.run), self.settings.keep_mb * 10**6):
            file.path.unlink()

    def _note_tokens(self, table: pa.Table) -> None:
        """Writes the text of token ids that are new."""
        columns = [table[name].combine_chunks().flatten() for name in ("prompt_ids", "action_ids")]
        ids = np.unique(np.concatenate([np.asarray(column) for column in columns]))
        new = [number for number in ids.tolist() if number not in self._tokens]
        if not new:
            return
        self._tokens |= {number: _token_text(self._tokenizer, number) for number in new}
        text = json.dumps(self._tokens)
        write_file(self.run, f"{FOLDER}/{TOKENS}", lambda path: path.write_text(text))


def surplus(files: Sequence[EpisodeFile], most: int) -> list[EpisodeFile]:
    """Returns the files to delete, so that the others have at most this many bytes.

    Those of training go first. Within a phase, the one goes whose neighbours are the closest, so
    that the others stay spread over the run; the first and the last of each phase are left.
    """
    total, removed = sum(file.size for file in files), []
    for phase in ("train", "greedy", "eval"):
        rest = [file for file in files if file.phase == phase]
        while total > most and len(rest) > 2:
            gaps = [after.step - before.step for before, after in zip(rest, rest[2:], strict=False)]
            removed.append(rest.pop(1 + min(range(len(gaps)), key=gaps.__getitem__)))
            total -= removed[-1].size
    return removed


def _token_text(tokenizer: Any, number: int) -> str:
    """Returns the text of a token; the tokenizer's own name of one that is a part of a letter."""
    text = str(tokenizer.decode([number]))
    name = str(tokenizer.convert_ids_to_tokens(number) or text)
    if not text or "\ufffd" in text:
        return name
    # SentencePiece drops the space before the first word of a text
    return f" {text}" if name.startswith("\u2581") and not text.startswith(" ") else text


def to_table(step: int, phase: Phase, groups: Mapping[int, Group], tokens: Tokens) -> Any:
    """Returns the rows of episodes.

    Args:
        step: The training step.
        phase: How they were played.
        groups: The groups by index.
        tokens: What the update did to the tokens of trained turns.
    """
    import pyarrow as pa

    columns: dict[str, list[Any]] = {name: [] for name in (*EPISODE_FIELDS, *TURN_FIELDS)}
    for p, group in groups.items():
        for g, episode in enumerate(group.episodes):
            values = {k: tokens.get((p, g, k)) for k in range(len(episode.turns))}
            rows, hidden = _turns(episode, values)
            head = {
                "episode": f"{phase}-{step}-{p}-{g}",
                "group": f"{phase}-{step}-{p}",
                "phase": phase,
                "step": step,
                **_episode(episode, hidden),
                "trained": any(value is not None for value in values.values()),
            }
            for row in rows:
                for name, value in (head | row).items():
                    columns[name].append(value)
    arrays = [_array(columns[field.name], field.type) for field in schema()]
    return pa.Table.from_arrays(arrays, schema=schema())


def _array(values: list[Any], kind: Any) -> Any:
    import pyarrow as pa

    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:  # lone surrogates, which no file takes
        texts = (v if v is None else v.encode(errors="backslashreplace").decode() for v in values)
        return pa.array(list(texts), kind)


class _Clean:
    """Replaces what looks like a secret and notes whether there was any."""

    def __init__(self) -> None:
        self.hidden = False

    def __call__(self, text: str) -> str:
        clean = redact_text(text)
        self.hidden |= clean != text
        return clean

    def json(self, value: Any) -> str | None:
        """Writes JSON, of None nothing."""
        return None if value is None else self(json.dumps(value, ensure_ascii=False, default=repr))


def _episode(episode: Episode, hidden: bool) -> dict[str, Any]:
    clean, task = _Clean(), episode.task
    return {
        "env": task.env_id,
        "seed": task.seed,
        "options": clean.json(dict(task.options) or None),
        "task_key": None if (key := episode.reset.task_key) is None else clean(key),
        "num_turns": len(episode.turns),
        "num_sequences": len(set(range(len(episode.turns))) - set(episode.parents)),
        "total_reward": episode.total_reward,
        "outcome": float(episode.outcome),
        "own_outcome": episode.ending.outcome is not None,
        "success": bool(episode.success),
        "stop_reason": episode.stop_reason.value,
        "terminated": bool(episode.terminated),
        "truncated": bool(episode.truncated),
        "error": None if episode.error is None else clean(episode.error),
        "final_observation": clean(episode.final_observation),
        "redacted": hidden or clean.hidden,
    }


def _turns(
    episode: Episode, values: Mapping[int, TokenValues | None]
) -> tuple[list[dict[str, Any]], bool]:
    """Returns the fields of `TurnRecord` of each turn, and whether something was redacted."""
    clean, turns = _Clean(), episode.turns
    system = episode.prompt.system
    first = [] if system is None else [Message(role="system", content=system)]
    messages: Iterable[Message] | None = [*first, *episode.prompt.messages] or None
    tools: Iterable[Any] | None = episode.prompt.tools or None
    sequences, roles = _sequences(episode.parents), episode.roles
    callable_now: Sequence[Any] = tuple(episode.prompt.tools)

    def context() -> dict[str, Any]:
        return {
            "messages": clean.json(None if messages is None else [*map(_message, messages)]),
            "tools": clean.json(
                None if tools is None else [getattr(t, "schema", t) for t in tools]
            ),
        }

    rows = []
    for k, (turn, parent) in enumerate(zip(turns, episode.parents, strict=True)):
        info = turns[k - 1].info if k else None
        if info is not None:
            messages, tools = info.messages, info.tools
            callable_now = callable_now if tools is None else tuple(tools)
        rows.append(
            {
                "turn": k,
                "parent": parent,
                "fork": turn.fork,
                "sequence": sequences[k],
                "kind": turn.kind,
                "role": roles[k],
                "observation": clean(turn.observation),
                "action": clean(turn.text),
                "tool_calls": clean.json(tool_calls(turn, callable_now) or None),
                "reward": float(turn.reward),
                "reward_parts": clean.json(dict(turn.info.reward_parts) or None),
                "agent": (episode.reset if info is None else info).agent,
                "state_key": turn.state_key,
                "weights_version": turn.weights_version,
                "generate_seconds": turn.timing.generate,
                "step_seconds": turn.timing.step,
                **context(),
                **_ids(turn, values[k]),
            }
        )
    if not rows:
        rows = [_EMPTY | context()]
    if clean.hidden:
        rows = [row | _NO_TOKENS for row in rows]
    return rows, clean.hidden


_NO_TOKENS: dict[str, Any] = {
    "prompt_ids": (),
    "action_ids": (),
    "engine_logprobs": (),
    "token_versions": None,
    **dict.fromkeys(_VALUES),
}
_EMPTY: dict[str, Any] = {
    **dict.fromkeys(TURN_FIELDS),
    **_NO_TOKENS,
    "kind": "action",
    "role": "user",
    "observation": "",
    "action": "",
    "reward": 0.0,
    "weights_version": 0,
    "generate_seconds": 0.0,
    "step_seconds": 0.0,
}
"""The row of an episode without turns."""


def _ids(turn: Turn, values: TokenValues | None) -> dict[str, Any]:
    """Returns the token columns of a turn; None for tokens that its mask leaves out."""
    columns: dict[str, Any] = {
        "prompt_ids": turn.prompt_ids,
        "action_ids": turn.action_ids,
        "engine_logprobs": turn.logprobs,
        "token_versions": [v for v, n in turn.weights_versions for _ in range(n)] or None,
        **dict.fromkeys(_VALUES),
    }
    for column, name in _VALUES.items():
        array = None if values is None else getattr(values, name)
        if array is None:
            continue
        trained: list[Any] = (array > 0.5).tolist() if column == "clipped" else array.tolist()
        if turn.info.token_mask is not None:
            remaining = iter(trained)
            trained = [next(remaining) if used else None for used in turn.info.token_mask]
        columns[column] = trained
    return columns


def _sequences(parents: Sequence[int | None]) -> list[int]:
    """Returns the index of the sequence in which each turn is trained.

    As in `Episode.sequences`: there is a sequence for each turn that no other continues, and a
    turn is trained in the first that contains it.
    """
    sequences = [-1] * len(parents)
    leaves = sorted(set(range(len(parents))) - set(parents))
    for number, leaf in enumerate(leaves):
        at: int | None = leaf
        while at is not None and sequences[at] < 0:
            sequences[at] = number
            at = parents[at]
    return sequences


def tool_calls(turn: Turn, tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the tool calls of a turn, and what is wrong with the malformed ones."""
    calls = parse_tool_calls(
        turn.text,
        [tool for tool in tools if isinstance(tool, Tool)],
        turn.message,
        in_reasoning=turn.in_reasoning,
    )
    return [
        {"error": call.message}
        if isinstance(call, ToolCallError)
        else {"name": call.name, "arguments": call.arguments}
        for call in calls
    ]


def _message(message: Message) -> dict[str, Any]:
    tree = asdict(message)
    return {name: tree[name] for name in tree if name in ("role", "content") or tree[name]}
