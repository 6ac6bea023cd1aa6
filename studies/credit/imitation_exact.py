"""What imitation while training does to a sparse problem whose groups are listed.

    python studies/credit/imitation_exact.py

A task is solved in three ways: the first of two turns takes a way, or none, with one token of four,
and the second pays with one token of four, 1 on the ways A and B and 0.5 on C. The policies of the
tables take the ways in the ratio 3 : 2 : 5, so they prefer the worse one, and succeed in 2, 50 and
95 % of the episodes. A group's update is that of GSPO, on policy. The gradient of the imitated term
is that of `Interleaved` and the learner, for a model without layers whose head is the table of
logits. What is imitated:

- expert: the best way, A;
- worse expert: C;
- kept: the newest success of earlier groups of the same policies.

Entries are the return, the share of successes on C, and how many ways the successes take (exp of
their entropy: 3 are equal ones). The first table has their expected change by an update of one
group, over all groups (and, with `kept`, over all kept episodes, given one). The second has them
after 40 expected updates of four groups each. An update is a step of plain gradient ascent, without
Adam and without a clip of its norm, and has one demonstration.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import scipy.special
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gspo_env.credit.estimators import Outcome
from gspo_env.learner import GSPO, Learner, LearnerConfig
from gspo_env.training.interleaved import Interleaved
from gspo_env.types import FloatArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a study runs from any folder
from studies.credit.exact import Problem
from studies.credit.losses_exact import AllGroups, Walk

SUCCESSES = {"low": 0.02, "middle": 0.5, "high": 0.95}
WEIGHTS = (0.01, 0.1, 1.0)
STEP, UPDATES, TASKS = 4.0, 40, 4
"""Step size of plain gradient ascent, updates of the second table, groups of each."""
RATIO = np.array([0.3, 0.2, 0.5])
SHOWN: dict[str, Walk] = {"expert": [(0, 0), (1, 0)], "worse expert": [(0, 2), (3, 0)]}


def three_ways() -> Problem:
    """Makes a problem with the ways A, B (1) and C (0.5) to a success, and one to none."""
    after, reward = np.full((5, 4), -1), np.zeros((5, 4))
    after[0], reward[1:4, 0] = [1, 2, 3, 4], [1.0, 1.0, 0.5]
    return Problem(after=after, reward=reward, tokens=1, vocabulary=4)


def policy_with(success: float) -> FloatArray:
    """Returns the logits (5, 1, 4) of a policy of the tables."""
    each = np.sqrt(success)
    first = [*(each * RATIO), 1 - each]
    return np.log([first, *[[each, *[(1 - each) / 3] * 3]] * 4])[:, None]


@cache
def learner_of(rows: int, vocabulary: int, weight: float) -> Learner:
    """Returns a learner in float64 for which the logits after the token V + r are row r of a table.

    The table is the transposed weight of the head.
    """
    shape: dict[str, Any] = {"num_hidden_layers": 0, "num_attention_heads": 1, "head_dim": 2}
    config = LlamaConfig(
        vocab_size=vocabulary + rows,
        usable_vocab_size=vocabulary,
        hidden_size=rows,
        rms_norm_eps=0.0,
        tie_word_embeddings=False,
        **shape,
    )
    model = LlamaForCausalLM(config).double()
    with torch.no_grad():
        row_N = torch.cat([torch.zeros(vocabulary, dtype=torch.int64), torch.arange(rows)])
        model.model.embed_tokens.weight.copy_(torch.eye(rows)[row_N])
        model.model.norm.weight.fill_(rows**-0.5)  # the norm divides a unit vector by this
    settings = LearnerConfig(imitation="kept", imitation_coef=weight)
    return Learner(model, GSPO(), settings, total_steps=1)


def sequence_of(problem: Problem, walk: Walk) -> list[list[int]]:
    """Returns token ids and turns: before each sampled token is the one that names its row."""
    ids, turns, count = [], [], problem.vocabulary
    for turn, (state, action) in enumerate(walk):
        for node, token in problem.path(action):
            ids += [count + state * problem.shape[1] + node, token]
            turns += [-1, turn]
    return [ids, turns]


def imitated(
    problem: Problem, logits: FloatArray, walks: Sequence[Walk], weight: float
) -> FloatArray:
    """Returns the imitated term's gradient (D,) of J' for all logits, by the code of training."""
    count, rows = problem.vocabulary, logits[..., 0].size
    learner = learner_of(rows, count, weight)
    shown = [[sequence_of(problem, walk)] for walk in walks]
    Interleaved(learner.config, learner).restore({"episodes": shown, "kept": []})
    head = learner.policy.lm_head.weight
    with torch.no_grad():
        head[:count] = torch.tensor(logits).view(rows, count).T
    learner.optimizer.zero_grad()
    assert learner.further is not None
    learner.further()
    gradient: FloatArray = -head.grad[:count].T.ravel().cpu().numpy()
    return gradient


class Ways(AllGroups):
    """All groups of the problem, and what a training of it measures."""

    def __init__(self) -> None:
        super().__init__(three_ways(), Outcome())
        reward = self.problem.reward
        self.reward_W = np.array([sum(reward[pair] for pair in walk) for walk in self.walks])
        good_MG = self.reward_W[self.groups_MG] > 0  # as `Episode.success`
        # of a group in random order, each success is as likely the first
        share_MG = good_MG / np.maximum(good_MG.sum(1, keepdims=True), 1)
        self.first_MW = np.zeros((len(good_MG), len(self.walks)))
        np.add.at(self.first_MW, (np.arange(len(good_MG))[:, None], self.groups_MG), share_MG)

    def kept(self, policy: FloatArray) -> FloatArray:
        """Returns the probability (W,) that a group keeps each walk; their sum is that of any."""
        kept_W: FloatArray = self.chances(policy) @ self.first_MW
        return kept_W

    def imitates(
        self, term: str, policy: FloatArray, weight: float, newest_W: FloatArray
    ) -> list[tuple[float, FloatArray]]:
        """Returns the probability of each demonstration of a term, and its gradient (D,).

        Args:
            term: Its name in the tables.
            policy: Logits of the policy.
            weight: `imitation_coef`.
            newest_W: The probability that each walk is the newest success.
        """
        share_W = [float(walk == SHOWN.get(term)) for walk in self.walks]
        pairs = zip(newest_W if term == "kept" else share_W, self.walks, strict=True)
        return [(p, imitated(self.problem, policy, [walk], weight)) for p, walk in pairs if p]

    def figures(self, policies_MD: FloatArray) -> FloatArray:
        """Returns the return, the share of successes on C, and exp of the entropy of their ways.

        Args:
            policies_MD: Logits of M policies; the result is (M, 3).
        """
        tables = torch.tensor(policies_MD).view(-1, *self.problem.shape).log_softmax(-1).numpy()
        places = [[(s, *p) for s, a in w for p in self.problem.path(a)] for w in self.walks]
        chance_MW = np.exp([sum(tables[:, *place] for place in walk) for walk in places]).T
        way_M3 = chance_MW[:, self.reward_W > 0]
        way_M3 = way_M3 / way_M3.sum(1, keepdims=True)
        worse_M = way_M3 @ (self.reward_W[self.reward_W > 0] < 1)
        variety_M = np.exp(scipy.special.entr(way_M3).sum(1))
        return np.stack([chance_MW @ self.reward_W, worse_M, variety_M], axis=1)

    def change(self, term: str, policy: FloatArray, weight: float) -> FloatArray:
        """Returns the expected change (3,) of the figures by an update of one group."""
        chance_M, step_MD = self.updates(GSPO(), policy, policy, policy)
        kept_W, change_3 = self.kept(policy), -self.figures(policy)[0]
        nothing = [(1.0, np.zeros(policy.size))]
        for share, added in self.imitates(term, policy, weight, kept_W / kept_W.sum()) or nothing:
            after_M3 = self.figures(policy.ravel() + STEP * (step_MD + added))
            change_3 = change_3 + share * (chance_M @ after_M3)
        return change_3

    def train(self, term: str, policy: FloatArray, weight: float) -> FloatArray:
        """Returns the logits after the expected updates."""
        newest_W = np.zeros(len(self.walks))
        for _ in range(UPDATES):
            chance_M, step_MD = self.updates(GSPO(), policy, policy, policy)
            shown = self.imitates(term, policy, weight, newest_W)
            step = chance_M @ step_MD + sum(share * added for share, added in shown)
            kept_W = self.kept(policy)
            found = 1 - (1 - kept_W.sum()) ** TASKS
            newest_W = found * kept_W / kept_W.sum() + (1 - found) * newest_W
            policy = policy + STEP * step.reshape(policy.shape)
        return policy

    def flat(self, policy: FloatArray) -> float:
        """Returns the share of groups whose returns are equal."""
        flat_M = np.ptp(self.reward_W[self.groups_MG], axis=1) == 0
        return float(self.chances(policy) @ flat_M)


ARMS = (("none", 0.0), *((term, w) for term in (*SHOWN, "kept") for w in WEIGHTS))


def main() -> None:
    """Prints the tables."""
    ways, policies = Ways(), {name: policy_with(success) for name, success in SUCCESSES.items()}
    heads = " | ".join(f"{name}, {ways.flat(p):.0%} flat" for name, p in policies.items())
    for shape in ("{:+.3f}, {:+.2f}, {:+.3f}", "{:.3f}, {:.2f}, {:.2f}"):
        print(f"| imitated | weight | {heads} |\n|---|---|{'---|' * len(policies)}")
        for term, weight in ARMS:
            cells = []
            for policy in policies.values():
                if "+" in shape:
                    cells.append(shape.format(*ways.change(term, policy, weight)))
                else:
                    cells.append(shape.format(*ways.figures(ways.train(term, policy, weight))[0]))
            print(f"| {term} | {weight:g} | {' | '.join(cells)} |", flush=True)
        print()


if __name__ == "__main__":
    main()
