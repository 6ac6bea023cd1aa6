"""Compares a rollout with default settings with plain loops over the same model.

    python benchmarks/rollout.py [--rounds 9] [--start FOLDER | --run FOLDER]
    python benchmarks/rollout.py --model smollm2 [--rounds 9] [--start FOLDER]

There are two baselines, which run alternately with ours in this process. Both are loops with a KV
cache that sample tokens and keep log-probabilities. They have no environment, and their rows are
equal:

- the same batch: one row for each running episode, with the mean prompt, number of turns, action
  length and observation length of the episodes;
- decoding only, at half of the mean episode length, without environment tokens.

The times are seconds of the processor, so that other programs change the ratios little. FOLDER has
a saved model of the default recipe, such as that of a run (`FOLDER/model`); without one it is
trained for 300 steps. `--run` measures the model of each checkpoint of a run with default settings:

    gspo-env train --output FOLDER --checkpoints.save-every 3 --checkpoints.keep 20

With `--model smollm2`, the model and its task are those of `against_trl.py`, and FOLDER has the
adapter that has imitated; without one it imitates first.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from common import (
    TRAININGS,
    Player,
    alternate,
    cpu_seconds,
    make_player,
    make_start,
    show,
    start_agent,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from gspo_env.chat.tokenizer import ChatTokenizer
from gspo_env.engines.embedded.engine import TransformersEngine
from gspo_env.env.registration import make_env
from gspo_env.files import step_folders
from gspo_env.rollout.collector import Collector
from gspo_env.rollout.pool import EnvPool
from gspo_env.runtime.loops import rare_garbage_collection, run_alone
from gspo_env.types import Group, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A batch of equal rows."""

    rows: int
    prompt: int
    turns: int
    action: int
    observation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What was measured of one model."""

    ours: list[float]
    """Sampled tokens per second of each round."""
    loops: tuple[list[float], list[float]]
    """Those of the plain loops: the same batch, and decoding only."""
    shapes: tuple[Shape, Shape]
    computed: float
    """Part of the episodes' tokens that the engine computed."""
    tokens: int

    @property
    def ratios(self) -> list[float]:
        """Ours to each loop, medians of the pairs."""
        return [
            median(own / floor for own, floor in zip(self.ours, loop, strict=True))
            for loop in self.loops
        ]


def load_player(folder: Path) -> Player:
    """Loads a saved model of the default recipe."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return Player(model=model, tokenizer=tokenizer, chat=ChatTokenizer(tokenizer))


def load_real(name: str, start: str) -> Player:
    """Loads a real model with the adapter that has imitated."""
    training = TRAININGS[name]
    folder = Path(start or tempfile.mkdtemp(prefix="rollout-"), *([] if start else ["start"]))
    if not start:
        make_start(training, folder)
    agent = start_agent(training, folder, 0)
    torch.set_num_threads(1)
    return Player(
        model=agent.model,
        tokenizer=agent.tokenizer,
        chat=agent.chat,
        env_id=training.env_id,
        limits=agent.config.rollout,
    )


def make_collector(player: Player) -> Collector:
    """Makes the collector of a recipe."""
    limits = player.limits
    engine = TransformersEngine(
        player.model, max_slots=limits.concurrency, max_context=limits.max_context
    )
    return Collector(engine, player.chat, EnvPool(lambda: make_env(player.env_id)), limits)


def collect(collector: Collector, env_id: str, tasks: int, seed: int = 0) -> list[Group]:
    """Collects one rollout batch with an empty cache."""
    batch = [Task(env_id=env_id, seed=n) for n in range(tasks)]
    asyncio.run(collector.engine.update_weights([], seed))
    with rare_garbage_collection():  # as a run does
        return run_alone(collector.collect(batch, seed=seed))


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


def measure(collector: Collector, player: Player, rounds: int, tasks: int = 32) -> Rates:
    """Measures one model, alternately with the loops over a copy of it."""
    before = collector.engine.fed_tokens
    episodes = [e for group in collect(collector, player.env_id, tasks) for e in group.episodes]
    fed = collector.engine.fed_tokens - before
    turns = sum(len(e.turns) for e in episodes)
    model_tokens = sum(e.model_tokens for e in episodes)
    follow = sum(len(t.prompt_ids) for e in episodes for t in e.turns[1:])
    tokens = sum(len(s.token_ids) for e in episodes for s in e.sequences)
    length = tokens / len(episodes)
    rows = min(collector.config.concurrency, len(episodes))
    same = Shape(
        rows=rows,
        prompt=round(sum(len(e.turns[0].prompt_ids) for e in episodes) / len(episodes)),
        turns=round(turns / len(episodes)),
        action=round(model_tokens / turns),
        observation=round(follow / (turns - len(episodes))),
    )
    decode = Shape(rows=rows, prompt=round(length / 2), turns=1, action=32, observation=0)
    plain = copy.deepcopy(player.model).eval()
    if hasattr(plain, "merge_and_unload"):
        plain = plain.merge_and_unload()
    plain.set_attn_implementation("sdpa")

    def ours() -> float:
        sampled = 0

        def work() -> None:
            nonlocal sampled
            groups = collect(collector, player.env_id, tasks, seed=1)
            sampled = sum(e.model_tokens for g in groups for e in g.episodes)

        taken = cpu_seconds(work)
        return sampled / taken

    columns = alternate(
        rounds, ours, lambda: plain_rate(plain, same), lambda: plain_rate(plain, decode)
    )
    return Rates(
        ours=columns[0],
        loops=(columns[1], columns[2]),
        shapes=(same, decode),
        computed=fed / tokens,
        tokens=tokens,
    )


def show_rates(rates: Rates) -> None:
    """Prints the rates of one model, and the ratios to the loops."""
    print(f"the engine computed {rates.computed:.0%} of the episodes' {rates.tokens:,} tokens")
    show("rollout, environments and chat included", rates.ours, "sampled tokens/s")
    named = zip(("same batch", "decode only"), rates.shapes, rates.loops, rates.ratios, strict=True)
    for name, shape, loop, ratio in named:
        show(f"plain loop, {name}", loop, "sampled tokens/s")
        print(f"    {shape}\n    ratio {ratio:.2f} (median of the pairs)")


def follow_run(run: Path, rounds: int) -> None:
    """Prints the ratios for each checkpoint of a run, and how they are in the middle."""
    player = load_player(run / "checkpoints" / "start")
    collector = make_collector(player)
    print("after step  sampled tokens/s  of the same batch  of decode only  tokens computed")
    rows = []
    for folder in step_folders(run / "checkpoints"):
        state = read_weights(folder)
        player.model.load_state_dict(state, strict=False)
        rates = measure(collector, player, rounds)
        rows.append(rates.ratios)
        print(
            f"{folder.name.removeprefix('step-').lstrip('0') or '0':>10}"
            f"{median(rates.ours):>18,.0f}{rates.ratios[0]:>19.2f}{rates.ratios[1]:>16.2f}"
            f"{rates.computed:>17.0%}",
            flush=True,
        )
    same, decode = (median(column) for column in zip(*rows, strict=True))
    print(f"{'median':>10}{'':18}{same:>19.2f}{decode:>16.2f}")


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights that a checkpoint holds, by the model's names."""
    return {
        name.removeprefix("weights."): tensor
        for file in folder.glob("state-*.safetensors")
        for name, tensor in load_file(file).items()
        if name.startswith("weights.")
    }


def main() -> None:
    """Prints the rates and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", choices=sorted(TRAININGS), default="tiny")
    folder = parser.add_mutually_exclusive_group()
    folder.add_argument("--start", default="")
    folder.add_argument("--run", type=Path)
    arguments = parser.parse_args()
    if arguments.run:
        if not step_folders(arguments.run / "checkpoints"):
            parser.error(f"{arguments.run} has no checkpoints; see --checkpoints.keep")
        follow_run(arguments.run, arguments.rounds)
        return
    if arguments.model != "tiny":
        player = load_real(arguments.model, arguments.start)
    elif arguments.start:
        player = load_player(Path(arguments.start))
    else:
        player = make_player(steps=300)
    tasks = TRAININGS[arguments.model].tasks
    show_rates(measure(make_collector(player), player, arguments.rounds, tasks))


if __name__ == "__main__":
    main()
