"""Compares a rollout with default settings with plain loops over the same model.

    python benchmarks/rollout.py [--rounds 9] [--start FOLDER]

There are two baselines, which run alternately with ours in this process. Both are loops with a KV
cache that sample tokens and keep log-probabilities. They have no environment, and their rows are
equal:

- the same batch: one row for each running episode, with the mean prompt, number of turns, action
  length and observation length of the episodes;
- decoding only, at half of the mean episode length, without environment tokens.

The times are seconds of the processor, so that other programs change the ratios little. FOLDER has
a saved model of the default recipe, such as that of a run (`FOLDER/model`); without one it is
trained for 300 steps.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass
from statistics import median

import torch
from common import (
    LIMITS,
    alternate,
    collect,
    cpu_seconds,
    load_player,
    make_collector,
    make_player,
    show,
)
from transformers import DynamicCache

from gspo_env.rollout.collector import RolloutConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A batch of equal rows."""

    rows: int
    prompt: int
    turns: int
    action: int
    observation: int


def plain_rate(model, shape: Shape) -> float:
    """Sampled tokens per second of a plain loop over turns and tokens."""
    cache = DynamicCache()

    def prompt(tokens: int) -> torch.Tensor:
        return torch.randint(5, 300, (shape.rows, tokens))

    def loop() -> None:
        ids = prompt(1)
        for turn in range(shape.turns):
            for _ in range(shape.action):
                out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                logprobs = torch.log_softmax(out.logits[:, -1].float(), dim=-1)
                ids = torch.multinomial(logprobs.exp(), 1)
                logprobs.gather(-1, ids)
            if turn + 1 < shape.turns:
                ids = torch.cat([ids, prompt(shape.observation)], 1)

    with torch.inference_mode():
        # The prompt of a group is computed once and is not part of either time.
        model(input_ids=prompt(shape.prompt), past_key_values=cache, use_cache=True)
        return shape.rows * shape.turns * shape.action / cpu_seconds(loop)


def main() -> None:
    """Prints the rates and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--start", default="")
    chosen = parser.parse_args()
    config = RolloutConfig(**LIMITS)
    player = load_player(chosen.start) if chosen.start else make_player(steps=300)
    collector = make_collector(player, config)
    before = collector.engine.fed_tokens
    episodes = [e for group in collect(collector) for e in group.episodes]
    fed = collector.engine.fed_tokens - before
    turns = sum(len(e.turns) for e in episodes)
    model_tokens = sum(e.model_tokens for e in episodes)
    follow = sum(len(t.prompt_ids) for e in episodes for t in e.turns[1:])
    tokens = sum(len(s.token_ids) for e in episodes for s in e.sequences)
    length = tokens / len(episodes)
    rows = min(config.concurrency, len(episodes))
    same = Shape(
        rows=rows,
        prompt=round(sum(len(e.turns[0].prompt_ids) for e in episodes) / len(episodes)),
        turns=round(turns / len(episodes)),
        action=round(model_tokens / turns),
        observation=round(follow / (turns - len(episodes))),
    )
    decode = Shape(rows=rows, prompt=round(length / 2), turns=1, action=32, observation=0)
    plain = copy.deepcopy(player.model).eval()
    plain.set_attn_implementation("sdpa")

    def ours() -> float:
        sampled = 0

        def work() -> None:
            nonlocal sampled
            sampled = sum(e.model_tokens for g in collect(collector, seed=1) for e in g.episodes)

        taken = cpu_seconds(work)
        return sampled / taken

    print(f"the engine computed {fed:,} of the episodes' {tokens:,} tokens: {fed / tokens:.0%}")
    rates = alternate(
        chosen.rounds,
        ours,
        lambda: plain_rate(plain, same),
        lambda: plain_rate(plain, decode),
    )
    show("rollout, environments and chat included", rates[0], "sampled tokens/s")
    for name, shape, values in (("same batch", same, rates[1]), ("decode only", decode, rates[2])):
        show(f"plain loop, {name}", values, "sampled tokens/s")
        ratio = median(own / floor for own, floor in zip(rates[0], values, strict=True))
        print(f"    {shape}\n    ratio {ratio:.2f} (median of the pairs)")


if __name__ == "__main__":
    main()
