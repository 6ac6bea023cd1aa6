"""Exact analysis: a tabular softmax policy on small multi-turn problems whose gradient is known.

A problem has S states, whose numbers only increase in an episode, and in each A = V^L actions of L
tokens. The policy has a logit for each state, each prefix of an action, and each token; the true
gradient of the expected return follows by dynamic programming. Sampled groups go through the
estimators and the objective of training, so bias and variance are those of the actual code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import log_softmax

from gspo_env.batch.padded import bare_episode
from gspo_env.credit.estimators import Estimator
from gspo_env.learner.losses import Aggregation, RatioLevel, packed_policy_loss
from gspo_env.types import FloatArray, Group, IntArray, Task

TASK = Task(env_id="tabular", seed=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A finite multi-turn problem; state 0 is the first, -1 the end."""

    after: IntArray
    """(S, A) the state after an action: a larger number, or -1."""
    reward: FloatArray
    """(S, A)"""
    tokens: int = 2
    """Tokens of an action, L."""
    vocabulary: int = 2
    """V; there are V^L actions."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the logits: states, prefixes of an action (including the empty one), tokens."""
        nodes = sum(self.vocabulary**n for n in range(self.tokens))
        return len(self.after), nodes, self.vocabulary

    def path(self, action: int) -> list[tuple[int, int]]:
        """Returns the (prefix, token) pairs that spell an action."""
        pairs, node = [], 0
        for token in map(int, np.unravel_index(action, [self.vocabulary] * self.tokens)):
            pairs.append((node, token))
            node = node * self.vocabulary + 1 + token  # prefixes in order of length
        return pairs


def additive(turns: int) -> Problem:
    """Makes a problem with independent turns: action 0 earns 1 / turns in each."""
    after = np.repeat(np.arange(1, turns + 1)[:, None], 4, axis=1)
    after[-1] = -1
    reward = np.zeros((turns, 4))
    reward[:, 0] = 1 / turns
    return Problem(after=after, reward=reward)


def key_and_door(turns: int) -> Problem:
    """Makes a problem in which the first turn decides whether the last one can earn 1.

    On the first turn action 0 takes the key, and action 1 earns 0.1 without it. On the last turn
    action 0 opens the door with the key.
    """
    # states 0, then (1, without), (1, with), (2, without), ...
    states = 1 + 2 * (turns - 1)
    after = np.full((states, 4), -1)
    reward = np.zeros((states, 4))
    if turns > 1:
        after[0] = [2, 1, 1, 1]
        reward[0, 1] = 0.1
    for state in range(1, states - 2):
        after[state] = state + 2
    reward[-1, 0] = 1.0
    return Problem(after=after, reward=reward)


def may_stop(turns: int) -> Problem:
    """Makes a problem whose length the policy decides: action 3 ends the episode.

    Action 0 earns 1 / turns and the others nothing, as in `additive`.
    """
    problem = additive(turns)
    problem.after[:, 3] = -1
    return problem


def paying_turns(turns: int, pays: float, stopping: float) -> Problem:
    """Makes a problem where each turn goes on (action 0) or stops (1), and both may be paid.

    Going on earns `pays`, stopping earns `stopping` and ends the episode; the last turn ends
    either way.
    """
    after = np.stack([np.arange(1, turns + 1), np.full(turns, -1)], axis=1)
    after[-1] = -1
    reward = np.tile([pays, stopping], (turns, 1))
    return Problem(after=after, reward=reward, tokens=1)


def pay_once(turns: int, pays: float, stopping: float) -> Problem:
    """Makes a problem with one choice: stop, or go on for all turns, of which the first is paid."""
    problem = paying_turns(turns, pays, stopping)
    problem.after[1:, 1] = problem.after[1:, 0]
    problem.reward[1:] = 0.0
    return problem


def all_right(turns: int) -> Problem:
    """Makes a problem with one reward: action 0 in every turn earns 1 on the last."""
    # states (turn, right so far): 0, then (1, no), (1, yes), (2, no), ...
    states = 1 + 2 * (turns - 1)
    after = np.full((states, 4), -1)
    reward = np.zeros((states, 4))
    for turn in range(turns - 1):
        wrong = 2 * turn + 1
        for state in {max(wrong - 2, 0), max(wrong - 1, 0)}:
            after[state] = wrong
        after[max(wrong - 1, 0), 0] = wrong + 1
    reward[-1, 0] = 1.0
    return Problem(after=after, reward=reward)


def look_up(hops: int, turns: int) -> Problem:
    """Makes the default environment in small: right hops earn 0.2, then the answer earns 1.

    Action 0 is the right hop and 1 the answer, which ends the episode and is right after all hops;
    2 is a wrong hop and 3 a wrong answer. The episode is over after the last turn.
    """
    width = hops + 1  # states (turn, hops so far)
    after = np.full((turns * width, 4), -1)
    reward = np.zeros((turns * width, 4))
    for state in range(turns * width):
        done = state % width
        if state + width < turns * width:
            after[state, [0, 2]] = state + width
            after[state, 0] += done < hops
        reward[state, 0] = 0.2 * (done < hops)
        reward[state, 1] = float(done == hops)
    return Problem(after=after, reward=reward)


def probabilities(problem: Problem, logits: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns log-probabilities of tokens (S, nodes, V) and probabilities of actions (S, A)."""
    log_token = log_softmax(logits, axis=-1)
    log_action = np.zeros(problem.after.shape)
    for action in range(problem.after.shape[1]):
        for node, token in problem.path(action):
            log_action[:, action] += log_token[:, node, token]
    return log_token, np.exp(log_action)


def true_gradient(problem: Problem, logits: FloatArray) -> tuple[FloatArray, float]:
    """Computes the expected return's gradient with respect to the logits, and the return."""
    log_token, chance = probabilities(problem, logits)
    states, actions = problem.after.shape
    value = np.zeros(states + 1)  # value[-1] is the value of the end
    quality = np.zeros((states, actions))
    for state in reversed(range(states)):
        quality[state] = problem.reward[state] + value[problem.after[state]]
        value[state] = chance[state] @ quality[state]
    visits = np.zeros(states + 1)
    visits[0] = 1.0
    for state in range(states):
        np.add.at(visits, problem.after[state], visits[state] * chance[state])
    gradient = np.zeros_like(logits)
    for action in range(actions):
        weight_S = visits[:states] * chance[:, action] * quality[:, action]
        for node, token in problem.path(action):
            gradient[:, node] -= weight_S[:, None] * np.exp(log_token[:, node])
            gradient[:, node, token] += weight_S
    return gradient, float(value[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """How an estimator's gradient compares with the true one."""

    cosine: float
    """Cosine of the mean estimate and the true gradient: below 1 is a bias in direction."""
    bias: float
    """Norm of (best-scaled mean estimate - true gradient), over the norm of the true gradient."""
    noise: float
    """Standard deviation of one group's estimate, over the norm of the mean estimate."""
    error: float
    """Standard error of `bias`, from the number of groups."""


def analyse(
    problem: Problem,
    estimator: Estimator,
    *,
    ratio_level: RatioLevel = "sequence",
    aggregation: Aggregation = "sequence_mean",
    drift: float = 0.0,
    groups: int = 2000,
    group_size: int = 8,
    seed: int = 0,
) -> Analysis:
    """Computes bias, variance and direction of an estimator's policy gradient.

    Args:
        problem: The problem; the policy has random logits that the seed decides.
        estimator: The advantage estimator.
        ratio_level: Level of the importance ratio; matters only if `drift` is not 0.
        aggregation: How the loss reduces the tokens of an episode.
        drift: Standard deviation of the difference in logits from the policy that sampled.
        groups: Groups to sample.
        group_size: Episodes of a group, G.
        seed: Seed of every draw.
    """
    rng = np.random.default_rng(seed)
    logits = 0.5 * rng.standard_normal(problem.shape)
    sampler = logits + drift * rng.standard_normal(logits.shape)
    true = true_gradient(problem, logits)[0].ravel()
    batch = [_sample_group(problem, sampler, group_size, rng) for _ in range(groups)]
    estimates = _gradients(problem, logits, sampler, batch, estimator, ratio_level, aggregation)
    mean = estimates.mean(0)
    spread = np.sqrt(estimates.var(0, ddof=1).sum())
    length = max(float(np.linalg.norm(mean)), 1e-300)
    scale = float(mean @ true) / length**2
    size = float(np.linalg.norm(true))
    return Analysis(
        cosine=float(mean @ true) / (length * size),
        bias=float(np.linalg.norm(scale * mean - true)) / size,
        noise=spread / length,
        error=abs(scale) * spread / np.sqrt(groups) / size,
    )


def best_return(problem: Problem) -> float:
    """Computes the return of the best policy."""
    value = np.zeros(len(problem.after) + 1)
    for state in reversed(range(len(problem.after))):
        value[state] = (problem.reward[state] + value[problem.after[state]]).max()
    return float(value[0])


def episodes_to_target(
    problem: Problem,
    estimator: Estimator,
    *,
    step_size: float,
    target: float = 0.9,
    group_size: int = 8,
    limit: int = 20_000,
    seed: int = 0,
) -> float:
    """Counts the episodes, one group per step, until policy gradient reaches a target return.

    Args:
        problem: The problem; the policy starts uniform.
        estimator: The advantage estimator.
        step_size: Step size of gradient ascent.
        target: Share of the best return.
        group_size: Episodes of a group, G.
        limit: Maximum episodes; the result is infinity if they do not suffice.
        seed: Seed of every draw.
    """
    rng = np.random.default_rng(seed)
    logits = np.zeros(problem.shape)
    wanted = target * best_return(problem)
    for step in range(limit // group_size):
        if true_gradient(problem, logits)[1] >= wanted:
            return float(step * group_size)
        batch = [_sample_group(problem, logits, group_size, rng)]
        gradient = _gradients(problem, logits, logits, batch, estimator, "sequence")[0]
        logits = logits + step_size * gradient.reshape(logits.shape)
    return float("inf")


def action_name(reward: float, after: int) -> str:
    """Names an action by its effect: actions that a problem cannot tell apart are one action."""
    return f"{reward} {after}"


def _sample_group(
    problem: Problem, logits: FloatArray, size: int, rng: np.random.Generator
) -> tuple[Group, list[list[tuple[int, int]]]]:
    """Samples a group; also returns the (state, action) pairs of each episode."""
    _, chance = probabilities(problem, logits)
    total = chance.cumsum(1)
    walks, episodes = [], []
    for _ in range(size):
        walk, state = [], 0
        while state >= 0:
            draw = rng.random() * total[state, -1]
            action = int(np.searchsorted(total[state], draw, side="right"))
            walk.append((state, action))
            state = int(problem.after[state, action])
        rewards = [float(problem.reward[pair]) for pair in walk]
        states = [str(state) for state, _ in walk]
        acts = [action_name(problem.reward[pair], problem.after[pair]) for pair in walk]
        episodes.append(bare_episode(TASK, [problem.tokens] * len(walk), rewards, states, acts))
        walks.append(walk)
    return Group(task=TASK, episodes=tuple(episodes)), walks


def _gradients(
    problem: Problem,
    logits: FloatArray,
    sampler: FloatArray,
    batch: Sequence[tuple[Group, list[list[tuple[int, int]]]]],
    estimator: Estimator,
    ratio_level: RatioLevel,
    aggregation: Aggregation = "sequence_mean",
) -> FloatArray:
    """Computes each group's gradient of minus the loss for the logits, (M, S * nodes * V)."""
    log_new, _ = probabilities(problem, logits)
    log_old, _ = probabilities(problem, sampler)
    tokens: list[tuple[int, int, int, int, int, int]] = []
    values: list[float] = []
    for m, (group, walks) in enumerate(batch):
        for g, (row, walk) in enumerate(zip(estimator.advantages(group), walks, strict=True)):
            for k, (state, action) in enumerate(walk):
                for node, token in problem.path(action):
                    tokens.append((m, m * len(walks) + g, k, state, node, token))
                    values.append(float(row[k]))
    m_N, b_N, k_N, s_N, n_N, t_N = np.array(tokens).T
    logprobs_N = torch.tensor(log_new[s_N, n_N, t_N], requires_grad=True)
    sequences = int(b_N.max()) + 1
    output = packed_policy_loss(
        logprobs_N,
        torch.tensor(log_old[s_N, n_N, t_N]),
        torch.tensor(values, dtype=torch.float64),
        torch.tensor(b_N),
        num_sequences=sequences,
        ratio_level=ratio_level,
        aggregation=aggregation,
        turn_ids_N=torch.tensor(k_N),
        clip_low=0.999,
        clip_high=1e9,
        normaliser=(len(tokens) if aggregation == "token_mean" else sequences) / len(batch),
    )
    (slope,) = torch.autograd.grad(-output.loss, logprobs_N)
    weight_N = slope.numpy()
    estimates = np.zeros((len(batch), *logits.shape))
    np.add.at(estimates, (m_N, s_N, n_N, t_N), weight_N)
    np.add.at(estimates, (m_N, s_N, n_N), -weight_N[:, None] * np.exp(log_new[s_N, n_N]))
    return estimates.reshape(len(batch), -1)
