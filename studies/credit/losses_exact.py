"""Bias of every estimator and every loss on three tabular problems, without an error of sampling.

    python studies/credit/losses_exact.py

Problems of two turns have at most 16 episodes, so all groups of 4 episodes are listed, with their
actions. Each group goes through the estimator and through the loss of training. For policies at
half of the best return, the table has the bias (0 is the true gradient, 1 no signal) and, after it,
the progress of an update of 16 groups (1 is the true gradient without noise) in three cases:

- on policy: the ratios are 1, so that the estimator and the aggregation decide;
- moved: the policy has moved away from pi_old, which sampled, by 0.3 in its logits, as in the later
  minibatches of an update;
- engine: the trainer is at pi_old, but the logits of the engine that sampled differ by 0.3, by its
  arithmetic or because its weights are older.

Differences of logits are normal with this standard deviation; the last two cases are means over 5
of them. Where nothing else is said, the losses have the estimator `outcome`, leave-one-out.

Score centring (arXiv 2609.20807) needs the probabilities of the whole vocabulary by the engine, so
it is not one of the losses, which have those of the sampled tokens.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gspo_env.batch.padded import bare_episode
from gspo_env.credit.estimators import Estimator, Outcome
from gspo_env.learner.losses import GSPO, DrGRPO, Loss, LossInput
from gspo_env.registry import BUILTIN, find
from gspo_env.types import FloatArray, Group

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a study runs from any folder
from studies.credit.dppo import DPPO
from studies.credit.enumeration import Direction, direction_of, policy_at
from studies.credit.exact import (
    TASK,
    Problem,
    action_name,
    additive,
    key_and_door,
    may_stop,
    probabilities,
    true_gradient,
)

PROBLEMS = {"additive": additive(2), "key and door": key_and_door(2), "may stop": may_stop(2)}
CASES = ("on policy", "moved", "engine")
SIZE, GROUPS, DRIFT, SEEDS = 4, 16, 0.3, 5
WIDE: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.27}

Walk = list[tuple[int, int]]
"""The states and the actions of an episode."""


@dataclass(frozen=True)
class Centred:
    """Score centring: the gradient A (w s - mean of w s under the engine) of a token's score s.

    With the probabilities p of the trainer and q of the engine, w is 1, or min(p / q, cap). The
    mean over the vocabulary is sum over v of q_v w_v s_v: 0 for w = p / q, and for w = 1 the mean
    score by which the engine's samples move the policy whatever the advantages.
    """

    cap: float | None = None
    """None is w = 1."""

    def weight(self, p: FloatArray, q: FloatArray) -> FloatArray:
        """Returns w of each token of the vocabulary."""
        return np.ones_like(p) if self.cap is None else np.minimum(p / q, self.cap)


class AllGroups:
    """All groups of a problem, by the actions of their episodes.

    Args:
        problem: The problem.
        estimator: The estimator of advantages, without the divisor `batch`.
        size: Episodes of a group, G.
    """

    def __init__(self, problem: Problem, estimator: Estimator, size: int = SIZE) -> None:
        self.problem, self.size = problem, size
        self.walks = list(_walks(problem, 0))
        pairs = itertools.combinations_with_replacement(range(len(self.walks)), size)
        self.groups_MG = np.array(list(pairs))
        self.orders_M = np.array(
            [
                math.factorial(size) / math.prod(map(math.factorial, np.bincount(members)))
                for members in self.groups_MG
            ]
        )
        episodes = [_episode(problem, walk) for walk in self.walks]
        tokens: list[tuple[int, ...]] = []
        advantages: list[float] = []
        for m, members in enumerate(self.groups_MG):
            group = Group(task=TASK, episodes=tuple(episodes[i] for i in members))
            for g, (i, row) in enumerate(zip(members, estimator.advantages(group), strict=True)):
                for k, (state, action) in enumerate(self.walks[i]):
                    path = problem.path(action)
                    tokens += [(m, m * size + g, k, state, node, t) for node, t in path]
                    advantages += [float(row[k])] * len(path)
        self.tokens_6N, self.advantages_N = np.array(tokens).T, np.array(advantages)

    def direction(
        self,
        loss: Loss | Centred,
        policy: FloatArray,
        old: FloatArray,
        engine: FloatArray,
        age: int = 0,
    ) -> Direction:
        """Compares the expected update with the true gradient of a policy; see `updates`."""
        chance_M, updates_MD = self.updates(loss, policy, old, engine, age)
        mean_D = chance_M @ updates_MD
        noise = float(chance_M @ ((updates_MD - mean_D) ** 2).sum(1))
        square = float(mean_D @ mean_D) + noise / GROUPS
        return direction_of(mean_D, square, true_gradient(self.problem, policy)[0].ravel())

    def _walk_chances(self, policy: FloatArray) -> FloatArray:
        chances = probabilities(self.problem, policy)[1]
        return np.array([math.prod(chances[pair] for pair in walk) for walk in self.walks])

    def chances(self, policy: FloatArray) -> FloatArray:
        """Returns the probability of each group (M,) if a policy samples it."""
        chance_M: FloatArray = self._walk_chances(policy)[self.groups_MG].prod(1) * self.orders_M
        return chance_M

    def updates(
        self,
        loss: Loss | Centred,
        policy: FloatArray,
        old: FloatArray,
        engine: FloatArray,
        age: int = 0,
    ) -> tuple[FloatArray, FloatArray]:
        """Returns the probability of each group (M,), and its update of all logits (M, D).

        Args:
            loss: The loss, or score centring.
            policy: Logits of the policy that trains.
            old: Logits of pi_old.
            engine: Logits of the policy that sampled.
            age: How many updates ago it sampled.
        """
        m_N, episode_N, turn_N, *place = self.tokens_6N
        walk_W = self._walk_chances(engine)
        length_W = np.array([len(walk) * self.problem.tokens for walk in self.walks])
        chance_M = self.chances(engine)
        logs = [
            torch.tensor(probabilities(self.problem, x)[0][*place]) for x in (policy, old, engine)
        ]
        new_N, old_N, engine_N = logs
        whose = getattr(loss, "old_logprobs", "none")
        inputs = LossInput(
            logprobs_N=new_N.requires_grad_(),
            old_logprobs_N={"engine": engine_N, "trainer": old_N}.get(whose, new_N.detach()),
            advantages_N=torch.tensor(self.advantages_N),
            episode_N=torch.tensor(episode_N),
            turn_N=torch.tensor(turn_N),
            reference_logprobs_N=None,
            engine_logprobs_N=engine_N,
            ages_N=torch.full_like(torch.tensor(turn_N), age),
            num_episodes=self.groups_MG.size,
            num_turns=int(turn_N.max()) + 1,
            episodes=self.size,
            # the denominator of a large minibatch is its mean
            tokens=self.size * float(walk_W @ length_W),  # type: ignore[arg-type]
        )
        plain = GSPO(**WIDE, aggregation="token_mean") if isinstance(loss, Centred) else loss
        (slope_N,) = torch.autograd.grad(-plain.compute(inputs).loss, inputs.logprobs_N)
        weight_N = slope_N.numpy()
        row_NV = np.exp(probabilities(self.problem, policy)[0])[*place[:2]]
        subtracted_NV = weight_N[:, None] * row_NV
        if isinstance(loss, Centred):
            q_NV = np.exp(probabilities(self.problem, engine)[0])[*place[:2]]
            w_NV = loss.weight(row_NV, q_NV)
            mean_NV = q_NV * w_NV - row_NV * (q_NV * w_NV).sum(1, keepdims=True)
            w_N = w_NV[np.arange(len(w_NV)), place[2]]
            subtracted_NV = weight_N[:, None] * (w_N[:, None] * row_NV + mean_NV)
            weight_N = weight_N * w_N
        updates = np.zeros((len(chance_M), *policy.shape))
        np.add.at(updates, (m_N, *place), weight_N)
        np.add.at(updates, (m_N, *place[:2]), -subtracted_NV)
        return chance_M, updates.reshape(len(chance_M), -1)


def logits_of(problem: Problem, case: str, seed: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Returns the logits of the policy, of pi_old and of the engine in a case."""
    policy = policy_at(problem, 0.5)
    moved = policy + DRIFT * np.random.default_rng(seed).standard_normal(policy.shape)
    engine = policy if case == "on policy" else moved
    return policy, moved if case == "moved" else policy, engine


@cache
def all_groups(problem: str, estimator: Estimator) -> AllGroups:
    """Returns the groups of a problem by its name; each is listed once."""
    return AllGroups(PROBLEMS[problem], estimator)


def measure(problem: str, estimator: Estimator, loss: Loss | Centred, case: str) -> str:
    """Returns the mean bias and progress over the seeds of the drift."""
    groups = all_groups(problem, estimator)
    seeds = range(1) if case == "on policy" else range(1, 1 + SEEDS)
    rows = [groups.direction(loss, *logits_of(groups.problem, case, seed)) for seed in seeds]
    bias, progress = np.mean([(row.bias, row.progress) for row in rows], axis=0)
    return f"{bias:.3f}, {progress:.2f}"


def losses() -> dict[str, Loss | Centred]:
    """Returns the losses of the table by what it calls them."""
    named: dict[str, Loss | Centred] = {n: find("loss", n)() for n in BUILTIN["loss"]}
    return named | {
        "gspo, clip of grpo": GSPO(**WIDE),
        "gspo, clip of grpo, token_sum": GSPO(**WIDE, aggregation="token_sum"),
        "the same, one ratio a turn": GSPO(**WIDE, aggregation="token_sum", ratio_level="turn"),
        "dr_grpo, truncated": DrGRPO(correction="truncated"),
        "dr_grpo, mask": DrGRPO(correction="mask"),
        "cispo, trainer's pi_old": find("loss", "cispo")(old_logprobs="trainer"),
        "dppo": DPPO(),
        "exact importance weights": find("loss", "vespo")(
            k_pos=1.0, k_neg=1.0, lambda_pos=0.0, lambda_neg=0.0
        ),
        "score centring": Centred(),
        "score centring, truncated": Centred(cap=2.0),
    }


def _walks(problem: Problem, state: int) -> list[Walk]:
    """Lists the episodes from a state on."""
    walks: list[Walk] = []
    for action, after in enumerate(problem.after[state].tolist()):
        rests = _walks(problem, after) if after >= 0 else [[]]
        walks += [[(state, action), *rest] for rest in rests]
    return walks


def _episode(problem: Problem, walk: Walk) -> Any:
    rewards = [float(problem.reward[pair]) for pair in walk]
    acts = [action_name(problem.reward[pair], problem.after[pair]) for pair in walk]
    states = [str(state) for state, _ in walk]
    return bare_episode(TASK, [problem.tokens] * len(walk), rewards, states, acts)


def main() -> None:
    """Prints the table."""
    heads = [f"{problem}, {case}" for problem in PROBLEMS for case in CASES]
    print(f"| arm | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    leave_one_out = Outcome(baseline="leave_one_out")
    arms: dict[str, tuple[Estimator, Loss | Centred]] = {
        f"{n} with gspo": (find("advantage", n)(), GSPO())
        for n in sorted(
            {*BUILTIN["advantage"]} - {"by_agent", "distillation", "parts"}
        )  # those have other rewards
    }
    arms["outcome, scale mean, with gspo"] = Outcome(scale="mean"), GSPO()
    arms |= {name: (leave_one_out, loss) for name, loss in losses().items()}
    for name, arm in arms.items():
        cells = [measure(problem, *arm, case) for problem in PROBLEMS for case in CASES]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
