"""What is checked of a batch; each fault has its rows, an example, its effect and a mend."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gspo_env.health.findings import Finding
from gspo_env.redaction import clean, redact_text, visible
from gspo_env.verify.batch import Batch, Row

Decode = Callable[[Sequence[int]], str]
Places = Iterator[tuple[int, str]]
"""The rows with a fault, and an example of each."""
_FAULTS = {
    "lengths": (
        "lists of different lengths",
        "the loss reads values of other tokens",
        "build mask, log-probabilities and advantages from the same ids",
    ),
    "padding": (
        "padding that the loss counts",
        "the policy learns to write padding, and lengths in the divisor are too large",
        "multiply the mask by the attention mask",
    ),
    "mask_covers_context": (
        "tokens in the mask that no engine sampled",
        "text of the environment is trained as if the policy had written it",
        "set the mask to 0 on prompts, observations and template glue",
    ),
    "mask_misses_sampled": (
        "sampled tokens outside the mask",
        "a part of the action, often its end of turn, has no gradient",
        "set the mask to 1 on all sampled ids",
    ),
    "text": (
        "ids that do not decode to the text",
        "the reward judges another text than is trained",
        "score the decoded ids, or keep the ids that were sampled",
    ),
    "retokenised": (
        "turns with other ids than were sampled, for the same text",
        "ratios are of tokens that the policy did not choose",
        "append sampled ids; never encode a sampled text again",
    ),
    "rewritten_history": (
        "sampled turns that the sequence does not contain",
        "later turns are trained behind a context that the policy did not see",
        "train each turn behind its own prompt, or use a template that keeps earlier turns",
    ),
    "logprob_values": (
        "log-probabilities that are missing, above 0 or not finite",
        "the ratio is wrong or not a number",
        "take the log-softmax of the sampled id",
    ),
    "logprobs_shifted": (
        "log-probabilities shifted by one token",
        "each ratio is that of a neighbour, so the clip acts at random",
        "logits at t predict id t + 1",
    ),
    "logprobs_other_weights": (
        "log-probabilities of other weights than --model",
        "the ratio starts away from 1",
        "sync the engine's weights, and compare dtype and temperature",
    ),
    "failed": (
        "failed episodes with a reward or an advantage",
        "faults of the machine count as bad actions, and lower the baseline of their group",
        "leave them out of the group",
    ),
    "seeds": (
        "rows of one group that were sampled with one seed",
        "they are copies, so the group has fewer samples than its statistics say",
        "derive a seed for each row",
    ),
    "duplicates": (
        "episodes that are in the batch twice",
        "they count twice in the gradient and in their group",
        "remove the copies",
    ),
    "no_token": (
        "rewards that reach no token",
        "the episode moves the baseline of its group, and teaches nothing itself",
        "check why its mask is empty, as after truncation",
    ),
    "mixed_groups": (
        "groups of several prompts",
        "episodes are compared with those of other tasks",
        "build groups from the task, not from the place in the batch",
    ),
    "flat": (
        "groups without variance, and no other",
        "every advantage is 0: the update does nothing",
        "choose tasks of medium difficulty, or other rewards",
    ),
    "values": (
        "rewards or advantages that are not finite",
        "the whole update is not a number",
        "score such an episode as failed",
    ),
    "advantages": (
        "advantages that the named estimator does not give",
        "the gradient has another size or sign than the settings say",
        "compare rewards, groups and scaling",
    ),
}
"""What is counted, what it does to the gradient, and how to mend it."""
_TOLERANCE = 0.1
"""Mean difference of log-probabilities in nats, to which kernels and half precision differ."""


def verify(batch: Batch, decode: Decode | None = None, model: Any = None) -> list[Finding]:
    """Returns what is wrong with a batch; findings that are `ok` say what was not judged.

    Args:
        batch: The batch.
        decode: Decodes ids, special tokens included; without it, texts are not compared.
        model: The causal LM whose log-probabilities the batch should have.
    """
    if not batch.rows:
        return [Finding(name="empty", text="The batch has no rows.", advice="Write all rows.")]
    whole = [n for n, row in enumerate(batch.rows) if not _wrong_lengths(row)]
    examples: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for n, row in enumerate(batch.rows):
        if example := _wrong_lengths(row):
            examples["lengths"].append((n, example))
    for n in whole:
        for name, example in _of_row(batch.rows[n], decode):
            examples[name].append((n, example))
    for name, n, example in _of_groups(batch, whole):
        examples[name].append((n, example))
    if model is not None:
        for n in whole:
            if fault := _of_model(batch.rows[n], model, batch.temperature):
                examples[fault[0]].append((n, fault[1]))
    findings = [
        _finding(name, examples[name], len(batch.rows)) for name in _FAULTS if examples[name]
    ]
    return findings + [
        Finding(name="not judged", text=t, ok=True) for t in _unjudged(batch, decode, model)
    ]


def _finding(name: str, places: Sequence[tuple[int, str]], count: int) -> Finding:
    what, effect, mend = _FAULTS[name]
    rows = sorted({n for n, _ in places})
    more = ", ..." if len(rows) > 5 else ""
    example = visible(redact_text(clean(places[0][1], 300)))
    return Finding(
        name=name,
        text=f"{what}: {len(rows)} of {count} rows ({', '.join(map(str, rows[:5]))}{more}); "
        f"row {places[0][0]}: {example}. So {effect}.",
        advice=f"{mend[0].upper()}{mend[1:]}.",
    )


def _unjudged(batch: Batch, decode: Decode | None, model: Any) -> Iterator[str]:
    if not any(row.sampled for row in batch.rows):
        yield "masks and histories: no row says what was sampled"
    if decode is None:
        yield "texts: there is no tokenizer (--tokenizer)"
    if model is None:
        yield "the weights of the log-probabilities: there is no --model"
    if not batch.estimator:
        yield "advantages: the batch names no estimator"


def _wrong_lengths(row: Row) -> str:
    lists = {name: getattr(row, name) for name in ("mask", "attention", "logprobs", "advantages")}
    wrong = {n: len(v) for n, v in lists.items() if v is not None and len(v) != len(row.ids)}
    return ", ".join(f"{n} has {size} values for {len(row.ids)} ids" for n, size in wrong.items())


def _of_row(row: Row, decode: Decode | None) -> Iterator[tuple[str, str]]:
    real = [True] * len(row.ids) if row.attention is None else [bool(a) for a in row.attention]
    pads = [n for n, (m, r) in enumerate(zip(row.mask, real, strict=True)) if m and not r]
    if pads:
        yield "padding", f"{len(pads)} tokens, the first at {pads[0]}"
    ids = [i for i, r in zip(row.ids, real, strict=True) if r]
    mask = [m for m, r in zip(row.mask, real, strict=True) if r]
    if decode is not None and row.text is not None and decode(ids) != row.text:
        yield "text", _difference(decode(ids), row.text)
    yield from _of_sampled(ids, mask, row.sampled, decode)
    if row.logprobs is not None:
        counts = [bool(m and r) for m, r in zip(row.mask, real, strict=True)]
        values = [(n, row.logprobs[n]) for n, is_counted in enumerate(counts) if is_counted]
        bad = [(n, p) for n, p in values if p is None or not math.isfinite(p) or p > 1e-3]
        if bad:
            yield "logprob_values", f"{len(bad)} tokens, the first at {bad[0][0]}: {bad[0][1]}"
    numbers = [row.reward, *(row.advantages or ())]
    if any(value is not None and not math.isfinite(value) for value in numbers):
        yield "values", f"reward {row.reward}"
    if row.failed and (row.reward is not None or any(_masked(row.advantages, row.mask))):
        yield "failed", f"reward {row.reward}"


def _of_sampled(
    ids: list[int], mask: list[int], sampled: Any, decode: Decode | None
) -> Iterator[tuple[str, str]]:
    if not sampled:
        return
    truth, lost = [0] * len(ids), False
    for turn, (start, action) in enumerate(sampled):
        if ids[start : start + len(action)] == list(action):
            truth[start : start + len(action)] = [1] * len(action)
            continue
        lost = True
        text = "" if decode is None else decode(action)
        if text and text in decode(ids):  # type: ignore[misc]
            yield "retokenised", f"turn {turn}: {text!r}"
        else:
            yield "rewritten_history", f"turn {turn}: {text or action[:20]!r} is not at {start}"
    if lost:
        return
    extra = [n for n, (m, t) in enumerate(zip(mask, truth, strict=True)) if m and not t]
    missing = [n for n, (m, t) in enumerate(zip(mask, truth, strict=True)) if t and not m]
    # a row without any token is left out of the loss as a whole
    for name, places in (("mask_covers_context", extra), ("mask_misses_sampled", missing)):
        if places and any(mask):
            part = [ids[n] for n in places[:20]]
            shown = repr(decode(part)) if decode else f"ids {part}"
            yield name, f"{len(places)} tokens, the first at {places[0]}: {shown}"


def _of_groups(batch: Batch, whole: Sequence[int]) -> Iterator[tuple[str, int, str]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for n in whole:
        groups[batch.rows[n].group].append(n)
    seen: dict[Any, int] = {}
    for n in whole:
        row = batch.rows[n]
        key = (row.group, row.episode, tuple(row.ids)) if row.episode is not None else n
        if key in seen:
            yield "duplicates", n, f"the same episode {row.episode!r} as row {seen[key]}"
        seen[key] = n
    flat = 0
    for numbers in groups.values():
        rows = [batch.rows[n] for n in numbers]
        owner = {n: batch.rows[n].episode or str(n) for n in numbers}
        seeds = Counter((row.seed, o) for row, o in zip(rows, owner.values(), strict=True))
        by_seed = Counter(seed for seed, _ in seeds if seed is not None)
        for n in numbers:
            seed = batch.rows[n].seed
            if seed is not None and by_seed[seed] > 1:
                yield "seeds", n, f"seed {batch.rows[n].seed} in group {batch.rows[n].group!r}"
        prompts = {owner[n]: _first_prompt(batch.rows[n]) for n in reversed(numbers)}
        different = {prompt for prompt in prompts.values() if prompt is not None}
        if len(different) > 1:
            yield (
                "mixed_groups",
                numbers[0],
                f"group {rows[0].group!r} has {len(different)} prompts",
            )
        scored = {owner[n]: batch.rows[n].reward for n in numbers if not batch.rows[n].failed}
        rewards = {o: r for o, r in scored.items() if r is not None and math.isfinite(r)}
        varies = len(set(rewards.values())) > 1
        pays = any(any(_masked(row.advantages, row.mask)) for row in rows)
        flat += bool(rewards) and not varies and not pays
        for n in numbers:
            row = batch.rows[n]
            trained = any(any(batch.rows[k].mask) for k in numbers if owner[k] == owner[n])
            if varies and owner[n] in rewards and not trained:
                yield "no_token", n, f"reward {row.reward}, and no token in the mask"
        yield from _of_estimator(batch, numbers, owner, rewards)
    if flat and flat == len(groups):
        n = whole[0]
        yield from (("flat", n, f"reward {batch.rows[n].reward}") for n in whole)


def _of_estimator(
    batch: Batch, numbers: Sequence[int], owner: dict[int, str], rewards: dict[str, float]
) -> Iterator[tuple[str, int, str]]:
    values = np.array(list(rewards.values()))
    if not batch.estimator or len(values) < 2:
        return
    centred = values - values.mean()
    if batch.estimator == "rloo":
        centred = centred * len(values) / (len(values) - 1)
    elif batch.estimator == "grpo":
        centred = centred / (values.std(ddof=1) + batch.epsilon)
    expected = dict(zip(rewards, centred.tolist(), strict=True))
    for n in numbers:
        row, want = batch.rows[n], expected.get(owner[n], 0.0)
        for value in sorted(set(_masked(row.advantages, row.mask))):
            if math.isfinite(value) and abs(value - want) > 1e-3 * max(1.0, abs(want)):
                yield "advantages", n, f"{value:.4g}, expected {want:.4g} by {batch.estimator}"
                break


def _masked(values: Sequence[float | None] | None, mask: Sequence[int]) -> list[float]:
    pairs = zip(values or (), mask, strict=False)
    return [value for value, counts in pairs if counts and value is not None]


def _first_prompt(row: Row) -> tuple[int, ...] | None:
    """Returns the tokens before what was sampled first; None if that is not known."""
    if not row.sampled:
        return None
    real = row.attention or [1] * len(row.ids)
    ids = [i for i, r in zip(row.ids, real, strict=True) if r]
    return tuple(ids[: row.sampled[0][0]])


def _of_model(row: Row, model: Any, temperature: float) -> tuple[str, str] | None:
    import torch

    if row.logprobs is None:
        return None
    real = row.attention or [1] * len(row.ids)
    at = [n for n, r in enumerate(real) if r]
    ids = torch.tensor([[row.ids[n] for n in at]], device=model.device)
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].float() / temperature
    ours = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
    theirs = np.array([np.nan if row.logprobs[n] is None else row.logprobs[n] for n in at])
    counts = np.array([bool(row.mask[n]) for n in at])

    def gap(shift: int) -> float:
        moved = np.roll(theirs, -shift)[1:]
        used = (counts & np.roll(counts, -shift))[1:] & np.isfinite(moved)
        return float(np.mean(np.abs(ours - moved)[used])) if used.any() else 0.0

    if gap(0) <= _TOLERANCE:
        return None
    shift = min((-1, 1), key=gap)
    if gap(shift) <= _TOLERANCE and counts.sum() > 2:
        return "logprobs_shifted", f"by {shift}: {gap(0):.3g} nats apart, {gap(shift):.3g} shifted"
    return "logprobs_other_weights", f"{gap(0):.3g} nats apart on average"


def _difference(decoded: str, text: str) -> str:
    pairs = enumerate(zip(decoded, text, strict=False))
    place = next((n for n, (a, b) in pairs if a != b), min(len(decoded), len(text)))
    start = max(0, place - 20)
    return f"{decoded[start : place + 20]!r} for {text[start : place + 20]!r}"
