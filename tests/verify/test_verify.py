"""The judge of batches: clean ones have no finding, and each planted fault is found."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from support.runs import tiny, write_env

from gspo_agents.gspo import GSPOAgent
from gspo_env.cli.main import main
from gspo_env.errors import BatchError
from gspo_env.recipes.build import build_model
from gspo_env.recipes.tiny import Tiny
from gspo_env.verify import Batch, Row, read_batch, verify, write_batch
from gspo_env.verify.batch import of_run

WORDS = "abcdefghijklmnopqrstuvwxyz"
PAD = 0


def decode(ids):
    return "".join(WORDS[i % 26] for i in ids)


@pytest.fixture(scope="module")
def model():
    made = build_model(Tiny(hidden_size=16), 64, 1, 0)
    return made.eval()


@pytest.fixture(scope="module")
def clean(model):
    """Two groups of three episodes with two turns, padded on both sides."""
    import torch

    random, rows = np.random.default_rng(0), []
    for group in range(2):
        prompt = random.integers(2, 64, 4).tolist()
        for member in range(3):
            first, glue, second = (random.integers(2, 64, n + member).tolist() for n in (3, 2, 2))
            ids = [*prompt, *first, *glue, *second]
            mask = [0] * 4 + [1] * len(first) + [0] * len(glue) + [1] * len(second)
            with torch.no_grad():
                scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            logprobs = [None, *scores[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()]
            reward = float(member)
            rows.append(
                Row(
                    ids=[PAD, *ids, PAD],
                    mask=[0, *mask, 0],
                    attention=[0, *[1] * len(ids), 0],
                    group=str(group),
                    logprobs=[None, *logprobs, None],
                    advantages=[(reward - 1.0) / (1.0 + 1e-4)] * (len(ids) + 2),
                    reward=reward,
                    sampled=[(4, first), (4 + len(first) + len(glue), second)],
                    text=decode(ids),
                    episode=f"{group}-{member}",
                    seed=10 * group + member,
                )
            )
    return Batch(rows=rows, trainer="test", estimator="grpo")


def names(batch, **kwargs):
    return {finding.name for finding in verify(batch, **kwargs) if not finding.ok}


def change(n, **fields):
    """A fault that changes fields of row n; a function gets the row."""

    def plant(rows):
        values = {k: v(rows[n]) if callable(v) else v for k, v in fields.items()}
        rows[n] = Row(**{name: getattr(rows[n], name) for name in Row.__slots__} | values)

    return plant


def every(**fields):
    def plant(rows):
        for n in range(len(rows)):
            change(n, **fields)(rows)

    return plant


def replaced(values, n, value):
    return [*values[:n], value, *values[n + 1 :]]


def shifted(row):
    return [-1.0 if p is None else p for p in [*row.logprobs[1:], None]]


PLANTS = {
    "lengths": change(1, mask=lambda row: [*row.mask, 1]),
    "padding": change(1, mask=lambda row: replaced(row.mask, -1 % len(row.mask), 1)),
    "mask_covers_context": change(1, mask=lambda row: replaced(row.mask, 2, 1)),
    "mask_misses_sampled": change(
        1, mask=lambda row: replaced(row.mask, 4 + len(row.sampled[0][1]), 0)
    ),
    "text": change(1, text=lambda row: row.text + "?"),
    "retokenised": change(
        1, sampled=lambda row: [(4, [i + 26 for i in row.sampled[0][1]]), row.sampled[1]]
    ),
    "rewritten_history": change(
        1, sampled=lambda row: [(4, [*row.sampled[0][1], 3, 3, 3]), row.sampled[1]]
    ),
    "logprob_values": change(1, logprobs=lambda row: [0.5 if p else p for p in row.logprobs]),
    "logprobs_shifted": change(5, logprobs=shifted),
    "logprobs_other_weights": change(
        5, logprobs=lambda row: [p and 3 * p - 1 for p in row.logprobs]
    ),
    "failed": change(1, failed=True, reward=0.0),
    "seeds": change(1, seed=0),
    "duplicates": lambda rows: rows.append(rows[1]),
    "no_token": change(1, mask=lambda row: [0] * len(row.mask)),
    "mixed_groups": change(1, group="1"),
    "flat": every(reward=1.0, advantages=lambda row: [0.0] * len(row.ids)),
    "values": change(1, reward=float("nan")),
    "advantages": change(1, advantages=lambda row: [0.7] * len(row.ids)),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_clean_batch_has_no_finding_and_a_file_keeps_it(suffix, clean, model, tmp_path):
    assert names(clean, decode=decode, model=model) == set()
    write_batch(clean, tmp_path / f"batch{suffix}")
    again = read_batch(tmp_path / f"batch{suffix}")
    assert again == clean
    assert [f.text for f in verify(again) if f.ok] == [
        "texts: there is no tokenizer (--tokenizer)",
        "the weights of the log-probabilities: there is no --model",
    ]


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found(name, clean, model, tmp_path):
    batch = copy.deepcopy(clean)
    PLANTS[name](batch.rows)
    write_batch(batch, tmp_path / "batch.jsonl")
    found = verify(read_batch(tmp_path / "batch.jsonl"), decode, model)
    (finding,) = [each for each in found if each.name == name]
    assert finding.advice
    where = "0, 1, 2, 3, 4, ..." if name == "flat" else str(5 if name.startswith("logprobs") else 1)
    where = {"duplicates": "6", "mixed_groups": "1", "seeds": "0, 1"}.get(name, where)
    assert f"rows ({where})" in finding.text
    others = names(batch, decode=decode, model=model) - {name}
    # a member more or less in a group is also seen in its statistics
    assert others <= {"advantages", "logprobs_other_weights"}, others


def test_the_command_exits_with_1_and_shows_no_secret(clean, tmp_path, capsys):
    batch = copy.deepcopy(clean)
    write_batch(batch, tmp_path / "clean.jsonl")
    main(["verify", str(tmp_path / "clean.jsonl")])
    assert "6 rows of test: 0 faults" in capsys.readouterr().out
    change(1, group="sk-proj-abcdefghijklmnopqrstuvwxyz0123456789\x1b[31m", seed=0)(batch.rows)
    change(2, group="sk-proj-abcdefghijklmnopqrstuvwxyz0123456789\x1b[31m", seed=0)(batch.rows)
    write_batch(batch, tmp_path / "bad.jsonl")
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tmp_path / "bad.jsonl")])
    assert ended.value.code == 1
    shown = capsys.readouterr().out
    assert "BAD seeds" in shown
    assert "abcdefghij" not in shown
    assert "\x1b" not in shown


def test_the_last_batch_of_a_run_of_ours_is_clean(in_folder, capsys):
    step = "return '', float(len(action) % 7), True, False, {}"
    write_env(Path("own.py"), step, reset="return 'Say something.', {}")
    GSPOAgent(config=tiny(output="run", env="own.py:Own", recipe={"imitation_steps": 1})).train()
    main(["verify", "run", "--model", "run"])
    shown = capsys.readouterr().out
    assert "rows of gspo-env: 0 faults" in shown
    batch = of_run("run")
    assert len({row.group for row in batch.rows}) > 1
    assert all(row.sampled and row.logprobs and any(row.mask) for row in batch.rows)
    change(0, mask=lambda row: [1] * len(row.mask))(batch.rows)
    assert "mask_covers_context" in names(batch)


def test_safetensors_hold_a_padded_batch(clean, tmp_path):
    import torch
    from safetensors.torch import save_file

    size = max(len(row.ids) for row in clean.rows)

    def padded(name):
        rows = [getattr(row, name) for row in clean.rows]
        return torch.tensor([[v or 0 for v in row] + [0] * (size - len(row)) for row in rows])

    tensors = {n: padded(n) for n in ("ids", "mask", "attention", "logprobs", "advantages")}
    tensors["group"] = torch.tensor([int(row.group) for row in clean.rows])
    tensors["reward"] = torch.tensor([row.reward for row in clean.rows])
    header = {"format": "gspo-env batch 1", "estimator": "grpo"}
    save_file(tensors, tmp_path / "batch.safetensors", {"batch": json.dumps(header)})
    assert names(read_batch(tmp_path / "batch.safetensors")) == set()
    tensors["advantages"] = -tensors["advantages"]
    save_file(tensors, tmp_path / "batch.safetensors", {"batch": json.dumps(header)})
    assert names(read_batch(tmp_path / "batch.safetensors")) == {"advantages"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no header"),
        ('{"format": "gspo-env batch 1"}\n{"ids": ["x"]}', "row 0: ids.0"),
        ('{"format": "gspo-env batch 2"}', "has no header"),
        ('{"format": "gspo-env batch 1"}\n' + "[" * 100000, "row 0"),
        ("\x80\x04.", "is not a batch"),
    ],
)
def test_another_file_is_refused_in_one_sentence(text, message, tmp_path):
    (tmp_path / "file.jsonl").write_text(text)
    with pytest.raises(BatchError, match=message) as refusal:
        read_batch(tmp_path / "file.jsonl")
    assert "\n" not in str(refusal.value)


def test_a_huge_file_and_a_parquet_bomb_are_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    with (tmp_path / "huge.jsonl").open("wb") as file:
        file.truncate(2 << 30)
    with pytest.raises(BatchError, match="has more than"):
        read_batch(tmp_path / "huge.jsonl")
    zeros = pa.ListArray.from_arrays(np.arange(0, 10_000_001, 1000), np.zeros(10_000_000, int))
    rows = pa.table({"ids": zeros, "mask": zeros})
    with pq.ParquetWriter(tmp_path / "bomb.parquet", rows.schema) as writer:
        for _ in range(20):
            writer.write_table(rows)
    with pytest.raises(BatchError, match="unpacks to more"):
        read_batch(tmp_path / "bomb.parquet")
