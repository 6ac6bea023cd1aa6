"""Compares an update of TRL's GRPO trainer with ours on the same multi-turn episodes.

    pip install --no-deps --target DIR "trl==1.16.*" "datasets<5" xxhash multiprocess dill \
        httpx httpcore jinja2
    python benchmarks/against_trl.py DIR [--model smollm2 --groups 1 --shared 300 --rounds 1]
        [--dtype bfloat16]
    python benchmarks/against_trl.py DIR --model smollm2 --groups 8 --shared 300 --rounds 1 \
        --only ours|bare|trl|compact [--lora 16]

Groups of eight episodes with a common prefix of 512 tokens, three turns and ragged lengths. Both
get the same token ids, masks, advantages and old log-probabilities, and use GSPO's sequence ratio.
TRL's loss, log-probability head and padding run as its trainer calls them (left-padded prompts,
right-padded completions, one group per microbatch), with the same gradient clip and optimiser.
Losses and gradients are compared first. TRL is timed as shipped, and with the compact head that it
uses on a GPU. Process CPU time, one thread; with a GPU, both run on it, and the clock is read.

With `--only`, one program runs alone, and the most memory that it took is printed too. `bare` is
the model itself, one episode at a time, so without padding; its loss is the mean of the negative
log-probabilities of the sampled tokens.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import resource
import sys
import types
from collections import defaultdict

import numpy as np
import torch
from common import alternate, device_seconds, make_model, multi_turn_group, show

from gspo_env.batch.sample import Sample
from gspo_env.learner import GSPO, Learner, LearnerConfig
from gspo_env.model.load import add_adapter

CLIP = (0.03, 0.05)
PROGRAMS = {
    "ours": "ours",
    "trl": "TRL as shipped",
    "compact": "TRL with its compact head",
    "bare": "the model itself",
}


class Peer:
    """The loss of TRL with a separate model, optimiser and padded batches."""

    def __init__(self, model, groups: list[list[Sample]], prompt: int) -> None:
        from accelerate import Accelerator
        from trl import GRPOTrainer
        from trl.trainer.utils import add_fused_lm_head

        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation("sdpa")
        add_fused_lm_head(self.model, temperature=1.0, outputs=("log_probs", "entropy"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-9, weight_decay=0.0)
        self.batches = [
            {name: t.to(self.model.device) for name, t in _padded(group, prompt).items()}
            for group in groups
        ]
        self.loss = GRPOTrainer._compute_loss
        self.trainer = types.SimpleNamespace(
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level="sequence",
            beta=0.0,
            loss_type="grpo",
            epsilon_low=CLIP[0],
            epsilon_high=CLIP[1],
            args=types.SimpleNamespace(delta=None),
            use_vllm=False,
            vllm_importance_sampling_correction=False,
            model=self.model,
            current_gradient_accumulation_steps=len(groups),
            accelerator=Accelerator(cpu=not torch.cuda.is_available()),
            _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        )
        scores = GRPOTrainer._get_per_token_logps_and_entropies
        self.trainer._get_per_token_logps_and_entropies = types.MethodType(scores, self.trainer)

    def backward(self) -> float:
        """Computes the loss of all batches and its gradients."""
        self.model.train()
        total = 0.0
        for batch in self.batches:
            loss = self.loss(self.trainer, self.model, batch)
            self.trainer.accelerator.backward(loss)
            total += float(loss.detach())
        return total

    def update(self) -> None:
        """Makes one optimiser step."""
        self.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def bare_update(model, samples: list[Sample]):
    """Returns an optimiser step of the model itself, one episode at a time."""
    model = copy.deepcopy(model).train()
    model.set_attn_implementation("sdpa")
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-9, weight_decay=0.0)

    def update() -> None:
        for sample in samples:
            ids, where = torch.tensor(sample.token_ids), torch.tensor(sample.mask).nonzero()[:, 0]
            logits = model(ids[None], logits_to_keep=where - 1).logits[0]
            loss = torch.nn.functional.cross_entropy(logits.float(), ids[where])
            (loss / len(samples)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


def _padded(group: list[Sample], prompt: int) -> dict[str, torch.Tensor]:
    longest = max(len(s.token_ids) for s in group) - prompt

    def rows(per_sample, dtype):
        filled = [np.pad(v, (0, longest - len(v))) for v in per_sample]
        return torch.tensor(np.stack(filled), dtype=dtype)

    def spread(sample):
        values = np.zeros(len(sample.token_ids))
        values[sample.mask] = sample.engine_logprobs
        return values[prompt:]

    ids = torch.tensor(np.stack([s.token_ids[:prompt] for s in group]))
    return {
        "prompt_ids": ids,
        "prompt_mask": torch.ones_like(ids),
        "completion_ids": rows([s.token_ids[prompt:] for s in group], torch.long),
        "completion_mask": rows([np.ones(len(s.token_ids) - prompt) for s in group], torch.long),
        "tool_mask": rows([s.mask[prompt:] for s in group], torch.float32),
        "advantages": torch.tensor([s.advantages[0] for s in group], dtype=torch.float32),
        "old_per_token_logps": rows([spread(s) for s in group], torch.float32),
    }


def with_real_logprobs(learner: Learner, groups: list[list[Sample]]) -> list[list[Sample]]:
    """Sets pi_old to the policy's log-probabilities plus noise."""
    rng = np.random.default_rng(1)

    def noisy(sample):
        policy = learner.logprobs(learner.pack([sample])).cpu().numpy().astype(np.float64)
        old = policy + rng.normal(0.05 * rng.normal(), 0.1, len(policy))
        return dataclasses.replace(sample, engine_logprobs=old)

    return [[noisy(s) for s in group] for group in groups]


def compare(learner: Learner, peer: Peer, samples: list[Sample]) -> None:
    """Prints the difference of losses and gradients; stops if it is too large."""
    (minibatch,) = learner.score(learner.prepare(samples))
    passes = learner.backward(minibatch)
    loss = sum(float(p.values["loss"]) for p in passes)
    clipped = torch.cat([p.values["clipped"] for p in passes]).float().mean()
    theirs = peer.backward()
    ours = learner.masters.tensors  # the weights themselves in float32
    expected = {n: p.grad for n, p in peer.model.named_parameters()}
    total = sum(float(g.float().square().sum()) for g in expected.values()) ** 0.5
    difference = (
        sum(float((ours[n].grad - g.float()).square().sum()) for n, g in expected.items()) ** 0.5
    )
    print(
        f"loss {loss:.7f} and {theirs:.7f}; gradients differ by {difference / total:.0e}"
        f" of their norm; {clipped:.0%} of tokens clipped"
    )
    # with SmolLM2, float32 moves gradients from float64's by 3e-4 in MKL and 8e-4 in oneDNN
    bound = 2e-3 if sum(p.numel() for p in peer.model.parameters()) > 5e6 else 1e-4
    exact = learner.policy.dtype is torch.float32  # rounding moves those of half precision by more
    if exact and (difference > bound * total or abs(loss - theirs) > 1e-5):
        raise SystemExit("the updates are not the same")
    learner.optimizer.zero_grad()
    peer.optimizer.zero_grad()


def main() -> None:
    """Prints the seconds of each and how many times as fast ours is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trl", help="the folder that TRL was installed into")
    parser.add_argument("--model", default="small", help="small, large, or a model, as smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--shared", type=int, default=512)
    parser.add_argument("--own", type=int, nargs=2, default=(64, 128))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter, with --only")
    parser.add_argument("--only", choices=PROGRAMS, default="")
    arguments = parser.parse_args()
    sys.path.append(arguments.trl)
    import trl
    from trl.trainer import utils

    torch.set_num_threads(1)
    model = make_model(arguments.model, arguments.dtype)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.lora:
        model = add_adapter(model, arguments.lora)
    rng, vocabulary = np.random.default_rng(0), model.config.vocab_size
    shape = {"shared": arguments.shared, "own": tuple(arguments.own), "vocabulary": vocabulary}
    groups = [multi_turn_group(rng, **shape) for _ in range(arguments.groups)]
    samples = [s for group in groups for s in group]
    if arguments.only == "bare":
        measure_alone(bare_update(model, samples), arguments)
        return
    config = LearnerConfig(minibatches=1, learning_rate=1e-9, warmup_steps=0)
    loss = GSPO(clip_low=CLIP[0], clip_high=CLIP[1], old_logprobs="engine")
    learner = Learner(copy.deepcopy(model), loss, config, total_steps=10**6)
    if arguments.only == "ours":
        measure_alone(lambda: learner.update(samples), arguments)
        return
    groups = with_real_logprobs(learner, groups)
    samples = [s for group in groups for s in group]
    peer = Peer(model, groups, arguments.shared)
    shipped = utils._use_triton

    def compact() -> None:
        utils._use_triton = lambda device: True
        try:
            peer.update()
        finally:
            utils._use_triton = shipped

    if arguments.only:
        del learner
        measure_alone(compact if arguments.only == "compact" else peer.update, arguments)
        return
    total = sum(len(s.token_ids) for s in samples)
    print(f"TRL {trl.__version__}; {len(samples)} episodes, {total} tokens")
    compare(learner, peer, samples)
    programs = {"ours": lambda: learner.update(samples), "trl": peer.update, "compact": compact}
    times = alternate(arguments.rounds, *(lambda p=p: device_seconds(p) for p in programs.values()))
    ours = show("ours", times[0], "s")
    for name, row in zip(("trl", "compact"), times[1:], strict=True):
        theirs = show(PROGRAMS[name], row, "s")
        print(f"  ours is {theirs / ours:.2f} times as fast (at least 4 expected)")


def measure_alone(update, arguments: argparse.Namespace) -> None:
    """Prints the seconds of an update, and the memory that it took beyond the model's."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (times,) = alternate(arguments.rounds, lambda: device_seconds(update))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    show(PROGRAMS[arguments.only], times, "s")
    print(f"  {peak / 2**20:.2f} GiB at most, {before / 2**20:.2f} GiB before")


if __name__ == "__main__":
    main()
