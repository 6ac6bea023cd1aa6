"""Checks tiny random models of many architectures, and writes the table of docs/models.md.

`python tests/support/architectures.py` checks all, or those named; `--write` replaces the table.
Windows and chunks are shorter than the sequences, and the weights are large enough that what a
layer remembers changes every prediction.
"""

import argparse
import asyncio
import copy
import json
import logging
import math
import random
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from gspo_env.batch.sample import Sample
from gspo_env.engines import Sampling, Transformers
from gspo_env.errors import ModelError
from gspo_env.learner import GSPO, Learner, LearnerConfig
from gspo_env.model.adapters import add_adapter
from gspo_env.model.check import BOUND, RunMode, check_model
from gspo_env.model.export import named_weights

TABLE = Path(__file__).parents[2] / "docs" / "models.md"
MARK = "<!-- made by tests/support/architectures.py -->\n"
DATA = json.loads((Path(__file__).parents[1] / "data" / "architectures.json").read_text())
COMMON, PARTS = DATA["common"], DATA["parts"]
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (kind, {k: v for part in parts for k, v in PARTS[part].items()} | own)
    for name, (kind, parts, own) in DATA["architectures"].items()
}
VOCABULARY, CONTEXT = COMMON["vocab_size"], 256
CALM = {"mamba", "mamba2", "falcon_mamba", "minicpm3"}
"""Weights that are five times larger make these models chaotic."""


class Wrong(Exception):
    """What is wrong beside the log-probabilities."""

    def __init__(self, what: str, text: str) -> None:
        super().__init__(f"{what}: {text}")
        self.what = what


def build(name: str, scale: float | None = None, **changes: Any) -> Any:
    """Builds a tiny model of an architecture.

    Args:
        name: Its name in the table.
        scale: Factor of its random matrices.
        changes: Settings of its config in place of the tiny ones.
    """
    kind, settings = ARCHITECTURES[name]
    config = CONFIG_MAPPING[kind](**copy.deepcopy(COMMON | settings | changes))
    factor = (2.5 if kind in CALM else 5.0) if scale is None else scale
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.mul_(factor)
            else:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def plain_logprobs(model: Any, ids: np.ndarray[Any, Any] | list[int]) -> torch.Tensor:
    """Scores a sequence alone, with the model as `transformers` runs it; (T - 1,)."""
    row = torch.tensor(np.asarray(ids))[None]
    logits = model(input_ids=row, use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(-1, row[0, 1:, None])[:, 0]


def make_samples(shared: int) -> list[Sample]:
    """Four random sequences that begin with `shared` common tokens."""
    rng = np.random.default_rng(1)
    prefix = rng.integers(3, VOCABULARY, shared)
    samples = []
    for length in (90, 61, 33, 12):
        ids = np.concatenate([prefix, rng.integers(3, VOCABULARY, length)])
        turns = np.where(np.arange(len(ids)) % 7 < 3, -1, np.arange(len(ids)) // 7)
        count = int((turns >= 0).sum())
        samples.append(Sample(token_ids=ids, turn_ids=turns, advantages=rng.normal(size=count)))
    return samples


def make_learner(model: Any, **settings: Any) -> Learner:
    config = LearnerConfig(microbatch_tokens=400, **settings)
    return Learner(model, GSPO(), config, total_steps=4)


def logprobs_and_gradients(learner: Learner, samples: list[Sample]) -> tuple[torch.Tensor, Any]:
    learner.policy.zero_grad()
    logprobs = learner.scorer(learner.pack(samples))[0].logprobs_N
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    grads = {n: p.grad.clone() for n, p in learner.policy.named_parameters() if p.grad is not None}
    learner.policy.zero_grad()
    return logprobs.detach(), grads


def learner_difference(learner: Learner, plain: Any, samples: list[Sample]) -> float:
    """Compares log-probabilities and gradients of the learner with those of the plain model."""
    ours, ours_grads = logprobs_and_gradients(learner, samples)
    plain.zero_grad()
    rows = [plain_logprobs(plain, s.token_ids)[torch.from_numpy(s.mask[1:])] for s in samples]
    truth = torch.cat(rows)
    (truth * torch.linspace(-1, 1, len(truth))).sum().backward()
    grads = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    if set(grads) != set(ours_grads):
        raise Wrong("gradients", f"those of {set(grads) ^ set(ours_grads)} are missing")
    total = math.sqrt(sum(float(g.norm()) ** 2 for g in grads.values()))
    moved = math.sqrt(sum(float((ours_grads[n] - g).norm()) ** 2 for n, g in grads.items()))
    if not moved <= 1e-3 * total:
        raise Wrong("gradients", f"differ by {moved / total:.1g} of their norm")
    return float((ours - truth.detach()).abs().max())


async def converse(engine: Any, seed: int) -> list[tuple[list[int], Any]]:
    """Plays three turns of random observations."""
    rng = random.Random(seed)
    ids = [rng.randrange(3, VOCABULARY) for _ in range(2 + 9 * seed)]
    log = []
    for turn in range(3):
        sampling = Sampling(max_tokens=rng.randrange(2, 8), seed=seed + turn)
        done = await engine.generate(list(ids), sampling, f"s{seed}")
        log.append((list(ids), done))
        ids += [*done.token_ids, *(rng.randrange(3, VOCABULARY) for _ in range(1 + 5 * turn))]
    engine.release(f"s{seed}")
    return log


def engine_difference(model: Any, plain: Any, context: int = CONTEXT) -> float:
    """Compares what the embedded engine reports with passes over the whole sequences."""
    engine = Transformers().start(model, max_slots=3, max_context=context)

    async def play() -> Any:
        return await asyncio.gather(*(converse(engine, seed) for seed in range(5)))

    worst = 0.0
    with torch.no_grad():
        for prompt, done in (pair for log in asyncio.run(play()) for pair in log):
            whole = plain_logprobs(plain, prompt + list(done.token_ids))
            reported = torch.tensor(done.logprobs)
            worst = max(worst, float((whole[len(prompt) - 1 :] - reported).abs().max()))
    return worst


def export_difference(model: Any) -> float:
    """Compares the exported weights with those that `save_pretrained` writes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = [load_file(path) for path in Path(folder).glob("*.safetensors")]
    saved = {name: tensor for part in files for name, tensor in part.items()}
    return greatest_difference(dict(named_weights(model)), saved)


def adapter_difference(name: str) -> float:
    """Trains an adapter for one step; compares it with the merged model."""
    model = add_adapter(build(name), 4)
    samples = make_samples(40)
    learner = make_learner(model, learning_rate=0.05)
    before = learner.logprobs(learner.pack(samples))
    learner.update(samples)
    after = learner.logprobs(learner.pack(samples))
    up = [p for n, p in model.named_parameters() if "lora_B" in n]
    moved = [bool(p.abs().max() > 0) for p in up]  # some models do not use a layer, or its weight
    if sum(moved) <= len(up) / 2 or not (after - before).abs().max() > 1e-3:
        raise Wrong("gradients", f"the step changed {sum(moved)} of {len(up)} parts")
    merged = copy.deepcopy(model).merge_and_unload()
    own = check_model(model).attention
    merged.set_attn_implementation("sdpa" if own == "gspo_ragged" else own)
    with torch.no_grad():
        rows = [plain_logprobs(merged, s.token_ids)[torch.from_numpy(s.mask[1:])] for s in samples]
        exported = greatest_difference(*(dict(named_weights(m)) for m in (model, merged)))
    return max(exported, float((torch.cat(rows) - after).abs().max()))


def greatest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Compares tensors, whose names have to be the same."""
    if odd := sorted(set(ours) ^ set(theirs)):
        raise Wrong("names", f"{odd[0]} and {len(odd) - 1} more")
    return max(float((ours[name] - tensor).abs().max()) for name, tensor in theirs.items())


def cell(measure: Callable[[], float], fast: bool) -> str:
    """Runs one measurement; says whether it is right, and in which way."""
    try:
        value = measure()
    except Exception as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else ""
        logging.info("%s: %s", type(error).__name__, text)
        if isinstance(error, ModelError):
            return "refused"
        return f"**wrong** {error.what if isinstance(error, Wrong) else type(error).__name__}"
    if not value <= BOUND:
        return f"**wrong** {value:.0e}"
    return f"{'right' if fast else 'slower way'} {value:.0e}"


def check(name: str) -> list[str]:
    """Returns the row of the table."""
    model = build(name)
    plain = copy.deepcopy(model)
    try:
        way = check_model(model).mode
    except ModelError:
        return [name, *["refused"] * 5]
    learner = make_learner(model)
    return [
        name,
        cell(
            lambda: learner_difference(learner, plain, make_samples(0)), way is not RunMode.UNPACKED
        ),
        cell(lambda: learner_difference(learner, plain, make_samples(40)), way is RunMode.SHARED),
        cell(lambda: engine_difference(build(name), plain), way is not RunMode.UNPACKED),
        cell(lambda: export_difference(model), True),
        cell(lambda: adapter_difference(name), way is not RunMode.UNPACKED),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[], help="architectures; all by default")
    parser.add_argument("--write", action="store_true", help=f"replace the table of {TABLE.name}")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.basicConfig(level=logging.INFO, format="    %(message)s")
    lines = [
        "| architecture | packed | shared prefix | engine | vLLM export | LoRA |",
        "|---" * 6 + "|",
    ]
    for name in arguments.names or ARCHITECTURES:
        lines.append("| " + " | ".join(check(name)) + " |")
        print(lines[-1], flush=True)
    if arguments.write:
        head, _, _ = TABLE.read_text().partition(MARK)
        TABLE.write_text(head + MARK + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
