"""Attacks the reward of an environment before anything is trained on it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from gspo_env.audit.attackers import (
    ATTACKERS,
    CALLS,
    IDLE,
    LIMIT,
    TRIES,
    Attempt,
    Call,
    Knowledge,
    Script,
    first,
    mutated,
    openings,
    pieces,
)
from gspo_env.compare.stats import paired_interval
from gspo_env.credit.scores import auto_score, rewards_differ, turn_rewards
from gspo_env.env.base import attribute, overrides
from gspo_env.env.info import declared_score
from gspo_env.env.registration import make_env, resolve_env
from gspo_env.episodes.text import render_episode
from gspo_env.errors import ConfigError, figure
from gspo_env.health.findings import Finding
from gspo_env.rollout.failures import FaultLog, lose_unscored, refuse_failures
from gspo_env.rollout.play import Policy, demonstrator, look
from gspo_env.rollout.pool import play_alone
from gspo_env.runs.evaluations import wilson_interval
from gspo_env.runtime.loops import settle
from gspo_env.runtime.threads import EnvThread, wrong_actions
from gspo_env.seeding import derive_seed, global_generators_kept
from gspo_env.tools.calls import parse_tool_calls
from gspo_env.tools.tool import Tool
from gspo_env.types import Episode, FloatArray, Group, Score, Task, ToolCall

GOLD, NOISY, HALF = "expert (gold)", "expert, half at random", "expert, an echo at the end"
LEARNED, FOUND = "trained on the reward", "found by a search"
"""The rows of the table that are not attackers."""
Episodes = Mapping[str, Sequence[Episode]]
"""The episodes of each row, one for each task."""
_DRAWS = 8
"""Seeds for each task that is wanted, of which some draw the same task."""
_SAME = 0.99
"""Share of gold's reward from which a task pays as for gold."""
_SHOWN = 3
"""Episodes that are shown of reward and success that disagree."""
_REPEATED = 8
"""Tasks that are played again."""
_PARTIAL = 0.9
"""Share of gold's reward that no failed episode should reach."""
_TURNS, _BATCH, _STEP = 4, 16, 4.0
"""Turns that the trained policy tells apart, the last for all later ones, the episodes of an update
and its step size."""
_KEPT = 6
"""Scripts of a search that have variants."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What one policy earns.

    Example:
        >>> Row(name="echo", share=0.25, low=0.1, high=0.4, success=0.2, turns=1.0).share
        0.25
    """

    name: str
    share: float
    """Its mean reward over gold's."""
    low: float
    """The lower end of the 95 % interval of `share`."""
    high: float
    success: float
    """The share of its episodes with success."""
    turns: float
    """Mean turns of its episodes."""

    def __str__(self) -> str:
        """Names it with its share."""
        return f"{self.name} {self.share:.0%} ({self.low:.0%} to {self.high:.0%})"

    def pays(self, allow: float) -> bool:
        """Returns whether it is an attacker that gets more than is allowed."""
        return self.name not in (GOLD, NOISY, HALF) and self.share > allow


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What the attackers of one environment earn, and what that says about its reward."""

    env_id: str
    allow: float
    """The largest share of gold's reward that an attacker may get."""
    score: Score
    """The rewards that are compared, which are those that training uses."""
    gold: float
    """Mean reward of the expert's successes, or what was given in their place."""
    tasks: int
    """Different tasks that were played."""
    facts: Mapping[str, str]
    """What the environment declares, and how fast it is."""
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    free: tuple[str, ...] = ()
    """The keys of the tasks that pay for no work as for gold."""
    shown: Mapping[str, str] = field(default_factory=dict)
    """Episodes whose reward and success disagree, by their titles."""
    attacks: Mapping[str, str] = field(default_factory=dict)
    """The best episode of each attacker that gets too much."""

    @property
    def is_sound(self) -> bool:
        """Whether no check has found something wrong."""
        return all(finding.ok for finding in self.findings)


def audit(
    env: str | type,
    *,
    tasks: int = 32,
    allow: float = 0.25,
    gold: float = 1.0,
    train: int = 960,
    solutions: bool = False,
    seed: int = 0,
    max_turns: int = 16,
    timeout: float = 60.0,
    env_kwargs: Mapping[str, Any] | None = None,
) -> Audit:
    """Plays attackers and the environment's own expert, and compares what they earn.

    Args:
        env: A specification for `make_env`.
        tasks: Different tasks to play.
        allow: The largest share of gold's reward that an attacker may get.
        gold: Reward of a solved task, for an environment without `expert_action`.
        train: Episodes of a policy over the attackers that learns from the reward alone.
        solutions: Only play the expert, which must pass, and nothing, which must fail.
        seed: The first seed.
        max_turns: Turns after which an episode is cut.
        timeout: Seconds that one call of the environment may take.
        env_kwargs: Arguments of the environment.

    Raises:
        ConfigError: A number is out of range.
        EnvironmentHangError: A call did not return in time.
        RolloutError: More than half of the episodes failed in their environment.
    """
    if tasks < 1 or max_turns < 1 or not gold > 0:
        raise ConfigError(
            f"audit: tasks is {tasks}, max_turns {max_turns} and gold {gold:g}; expected at least "
            "1, 1 and a reward above 0"
        )
    env_id, thread = resolve_env(env), EnvThread()
    try:
        instance = thread.guard(env_id, timeout, make_env, env, **(env_kwargs or {}))
        auditor = _Auditor(env_id, instance, seed, max_turns, solutions)
        try:
            return thread.guard(env_id, timeout, auditor.result, tasks, allow, gold, train)
        finally:
            thread.guard(env_id, timeout, instance.close)
    finally:
        thread.stop()


class _Auditor:
    """Plays in one environment."""

    def __init__(self, env_id: str, env: Any, seed: int, max_turns: int, solutions: bool) -> None:
        self.solutions, self.attackers = solutions, IDLE[:1] if solutions else tuple(ATTACKERS)
        self.env_id, self.env, self.seed, self.max_turns = env_id, env, seed, max_turns
        self.faults = FaultLog()
        self.score: Score = "turns"
        self.knowledge: dict[int, Knowledge] = {}
        """What attackers know in the task of a seed: the expert's episodes of the other tasks."""
        self.gold = 1.0

    def result(self, count: int, allow: float, gold: float, train: int) -> Audit:
        """Plays everything."""
        with global_generators_kept(), wrong_actions():
            began = time.perf_counter()
            looks = self.draw(count)
            speed = self.resets / (time.perf_counter() - began)
            tasks = [episode.task for episode in looks.values()]
            experts = self.demonstrations(tasks)
            groups = [self.members(task, experts.get(task.seed)) for task in tasks]
            by_name = {name: [group[name] for group in groups] for name in groups[0]}
            episodes = [e for row in by_name.values() for e in row]
            refuse_failures(episodes)
            failures = sum(episode.failed for episode in episodes)
            every = [
                Group(task=t, episodes=tuple(g.values()))
                for t, g in zip(tasks, groups, strict=True)
            ]
            self.score = declared_score(self.env_id, self.env) or auto_score(every)
            solved = [episode for episode in by_name.get(GOLD, ()) if episode.success]
            self.gold = mean(map(self.reward, solved)) if solved else gold
            winners: list[Script] = []
            if train and not self.solutions and not overrides(self.env, "group_reward"):
                winners, by_name[LEARNED] = self.learned(list(looks.values()), train)
                by_name[FOUND] = [self.play(t, self.attack(t, winners[0])) for t in tasks]
            rows = {name: self.row(name, episodes) for name, episodes in by_name.items()}
            rows |= {
                name: self.row(
                    name,
                    [
                        e
                        for e, g in zip(by_name[name], groups, strict=True)
                        if not self.replays(e, g)
                    ],
                )
                for name in (LEARNED, FOUND)
                if name in by_name
            }
            free = [
                key
                for key, group in zip(looks, groups, strict=True)
                if any(
                    self.reward(group[n]) >= self.goal(group) and not group[n].failed
                    for n in set(IDLE) & set(self.attackers)
                )
            ]
            odd = self.disagreements([e for episodes in by_name.values() for e in episodes])
            checks = [
                self.replayed(by_name.get(GOLD, ())),
                None if self.solutions else self.paid(rows, allow),
                self.free(free, len(tasks)),
            ]
            if not self.solutions:
                checks += [
                    self.escape(by_name, rows, allow),
                    self.agreement(by_name, odd),
                    *self.directions(by_name),
                    self.lengths(by_name),
                    self.variance(every, bool(experts)),
                    self.repeats(tasks, experts),
                ]
        return Audit(
            env_id=self.env_id,
            allow=allow,
            score=self.score,
            gold=self.gold,
            tasks=len(tasks),
            facts=self.facts(bool(experts), speed)
            | ({"the search found": str(winners[0])} if winners and rows[FOUND].pays(allow) else {})
            | ({"failed episodes": f"{failures} of {len(episodes)}"} if failures else {}),
            rows=tuple(rows.values()),
            findings=tuple(finding for finding in checks if finding is not None),
            free=tuple(free),
            shown={title: render_episode(episode) for title, episode in odd[:_SHOWN]},
            attacks={
                str(row): render_episode(max(by_name[name], key=self.reward))
                for name, row in rows.items()
                if row.pays(allow)
            },
        )

    def draw(self, count: int) -> dict[str, Episode]:
        """Returns the resets of different tasks, by their keys."""
        drawn: dict[str, Episode] = {}
        self.resets = 0
        for seed in range(self.seed, self.seed + _DRAWS * count):
            episode = self.play(Task(env_id=self.env_id, seed=seed), look)
            self.resets += 1
            key = episode.reset.task_key
            drawn.setdefault(f"seed {seed}" if key is None else key, episode)
            if len(drawn) == count:
                break
        refuse_failures(list(drawn.values()))
        return drawn

    def play(self, task: Task, policy: Policy) -> Episode:
        """Plays one episode."""
        limits = {"max_turns": self.max_turns, "retries": 0}
        return play_alone(self.env, task, policy, self.faults, **limits)

    def demonstrations(self, tasks: Sequence[Task]) -> dict[int, Episode]:
        """Returns the episodes of the expert, by seed; none without one."""
        try:
            shown = {task.seed: self.play(task, demonstrator()) for task in tasks}
        except NotImplementedError:
            shown = {}
        usable = {seed: e for seed, e in shown.items() if e.turns and not e.failed}
        self.knowledge = {
            task.seed: Knowledge([e for seed, e in usable.items() if seed != task.seed])
            for task in tasks
        }
        return shown

    def members(self, task: Task, expert: Episode | None) -> dict[str, Episode]:
        """Returns the episodes of one task, scored as one group."""
        played = {} if expert is None else {GOLD: expert}
        if expert is not None and not self.solutions:
            played[NOISY] = self.play(task, demonstrator(0.5))
            shows, last = demonstrator(), len(expert.turns) - 1
            played[HALF] = self.play(
                task, lambda now: shows(now) if now.turn < last else now.observation
            )
        for name in self.attackers:
            played[name] = self.play(task, self.attack(task, ATTACKERS[name]))
        return dict(zip(played, self.scored(task, list(played.values())), strict=True))

    def attack(self, task: Task, choice: Script | Callable[[int], Script]) -> Policy:
        """Returns a policy that plays a script, or the one that is chosen at each turn."""
        attempt = Attempt(random.Random(derive_seed("audit", task.seed)), self.knowledge[task.seed])
        if isinstance(choice, Script):
            return lambda now: attempt.play(choice, now)
        return lambda now: attempt.play(choice(min(now.turn, _TURNS - 1)), now)

    def scored(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Episode]:
        """Adds the rewards of the group, as a rollout does."""
        group = Group(task=task, episodes=tuple(episodes))
        if reward := attribute(self.env, "group_reward", None):
            group = settle(reward(group), "group_reward()")
        return lose_unscored(group, self.faults).episodes

    def reward(self, episode: Episode) -> float:
        """Returns what training would pay for an episode."""
        return float(turn_rewards(episode, self.score).sum())

    def goal(self, group: Mapping[str, Episode]) -> float:
        """Returns the reward from which a task pays as for gold."""
        expert = group.get(GOLD)
        gold = self.reward(expert) if expert and expert.success else self.gold
        return gold - (1 - _SAME) * abs(gold)

    def replays(self, episode: Episode, group: Mapping[str, Episode]) -> bool:
        """Returns whether an episode of several turns does the expert's work, so is a solution.

        Calls may have further arguments. Where an echo at the end is paid too, what is said in
        turns without a call doesn't matter.
        """
        expert = group.get(GOLD)
        if expert is None or not 1 < len(episode.turns) == len(expert.turns):
            return False
        half, tools = group.get(HALF), expert.prompt.tools
        said = not tools or half is None or self.reward(half) < self.goal(group)
        pairs = zip(episode.turns, expert.turns, strict=True)
        return all(_same_work(turn.text, right.text, tools, said) for turn, right in pairs)

    def share(self, episodes: Sequence[Episode]) -> FloatArray:
        """Returns rewards over gold's; where gold has no reward, 1 from it on and else 0."""
        rewards = np.array([self.reward(episode) for episode in episodes])
        return rewards / self.gold if self.gold > 0 else (rewards >= self.gold).astype(np.float64)

    def row(self, name: str, episodes: Sequence[Episode]) -> Row:
        """Returns the row of a policy."""
        played = [episode for episode in episodes if not episode.failed]
        shares = self.share(played)
        low, high = interval(shares) if played else (0.0, 1.0)  # the environment failed in all
        return Row(
            name=name,
            share=mean(shares),
            low=low,
            high=high,
            success=mean(bool(e.success) for e in played),
            turns=mean(len(e.turns) for e in played),
        )

    def searched(self, looks: Sequence[Episode], budget: int) -> list[Script]:
        """Searches scripts by the reward alone, and returns the best, best first.

        Each opening plays two tasks; the rest of the budget goes to variants of what paid most.
        """
        rng, tasks = random.Random(self.seed), [episode.task for episode in looks]
        contents = pieces(looks[0].prompt, first(looks[0]))
        if not any(knowledge.gold for knowledge in self.knowledge.values()):
            # one call may be the work, and no expert shows that it is
            contents = [content for content in contents if not isinstance(content, Call)]
        paid: dict[Script, list[float]] = {}

        def best() -> list[Script]:
            return sorted(paid, key=lambda script: -mean(paid[script]))[:_KEPT]

        def attempt(script: Script, count: int) -> int:
            rewards = paid.setdefault(script, [])
            for _ in range(count):
                task = tasks[len(rewards) % len(tasks)]
                rewards.append(self.reward(self.play(task, self.attack(task, script))))
            return count

        first_ones = openings(contents)
        if 4 * len(first_ones) > 3 * budget:
            first_ones = rng.sample(first_ones, max(1, budget * 3 // 8))
        budget -= sum(attempt(script, 2) for script in first_ones)
        while budget > 0 and paid:
            parents = best()
            child = mutated(rng.choice(parents), contents, rng)
            budget -= attempt(child, 2) + (attempt(child, 2) if child in best() else 0)
            parent = rng.choice(parents)
            budget -= attempt(parent, 2) if len(paid[parent]) < len(tasks) else 0
        return best()

    def learned(self, looks: Sequence[Episode], train: int) -> tuple[list[Script], list[Episode]]:
        """Trains a policy on the reward alone, and returns the episodes that it then plays.

        It chooses a script at each turn, by a softmax for each of the first turns; REINFORCE with
        the mean of a batch as the baseline (Williams 1992).
        """
        winners = self.searched(looks, train // 2)
        tasks = [episode.task for episode in looks]
        rng, scripts = np.random.default_rng(self.seed), [*ATTACKERS.values(), *winners]
        logits = np.zeros((_TURNS, len(scripts)))
        for start in range(0, train // 2, _BATCH):
            rewards, gradients = np.zeros(_BATCH), np.zeros((_BATCH, *logits.shape))
            for n in range(_BATCH):
                task = tasks[(start + n) % len(tasks)]
                probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
                choose = partial(_sample, rng, scripts, probabilities, gradients[n])
                rewards[n] = self.reward(self.play(task, self.attack(task, choose)))
            centred = rewards - rewards.mean()
            logits += _STEP / _BATCH * np.tensordot(centred / (centred.std() or 1.0), gradients, 1)
        best = logits.argmax(-1)
        return winners, [self.play(t, self.attack(t, lambda k: scripts[best[k]])) for t in tasks]

    def replayed(self, gold: Sequence[Episode]) -> Finding | None:
        """Whether the expert succeeds."""
        lost = [episode.reset.task_key or "" for episode in gold if not episode.success]
        won = len(gold) - len(lost)
        if not gold:
            return None
        text = f"The expert succeeds in {won} of {len(gold)} tasks."
        advice = "" if won else "Shares are of --gold; see that a right solution is a success."
        solves = attribute(self.env, "expert_solves", False)
        if lost and (solves or self.solutions):
            text += f" Not in {', '.join(sorted(lost)[:8])}{', ...' * (len(lost) > 8)}."
            advice = advice or "Mend them or leave them out: their solution fails."
        return Finding(name="gold", text=text, advice=advice, ok=won > 0 and not (lost and solves))

    def paid(self, rows: Mapping[str, Row], allow: float) -> Finding:
        """Which attackers are paid."""
        paid = most_first(row for row in rows.values() if row.pays(allow))
        if not paid:
            most = most_first(row for row in rows.values() if row.name in ATTACKERS)[0]
            text = f"No attacker gets more than {allow:.0%} of gold's reward; most: {most}."
            if most.high > allow:
                text += f" More than {allow:.0%} is possible: play more --tasks."
            return Finding(name="attackers", text=text, ok=True)
        return Finding(
            name="attackers",
            text=f"More than {allow:.0%} of gold's reward: {'; '.join(map(str, paid))}.",
            advice="Read their episodes (`--output FOLDER` writes a page), and pay only for what a "
            "solution has done; --allow accepts more, where guessing is worth as much.",
        )

    def free(self, keys: Sequence[str], tasks: int) -> Finding:
        """Which tasks pay for no work."""
        if not keys:
            return Finding(name="free tasks", text="No task pays for no work.", ok=True)
        return Finding(
            name="free tasks",
            text=f"{len(keys)} of {tasks} tasks pay for no work as for gold: {', '.join(keys[:8])}"
            + (", ..." if len(keys) > 8 else "."),
            advice="Leave them out of training, or reward also what has to be done on the way.",
        )

    def escape(self, by_name: Episodes, rows: Mapping[str, Row], allow: float) -> Finding | None:
        """Whether doing nothing pays more than an honest attempt that fails."""
        tries = [by_name[name] for name in (NOISY, *TRIES) if name in by_name]
        names = [n for n in (*IDLE, LIMIT, LEARNED, FOUND) if n in rows and not rows[n].pays(allow)]
        gaps: dict[str, list[float]] = {name: [] for name in names}
        for name, values in gaps.items():
            for idle, *attempts in zip(by_name[name], *tries, strict=True):
                lost = [self.reward(e) for e in attempts if not e.success and not e.failed]
                if lost and not (idle.failed or idle.success):
                    values.append(self.reward(idle) - mean(lost))
        name, values = max(gaps.items(), key=lambda item: mean(item[1]), default=("", []))
        if mean(values) <= allow * abs(self.gold) or interval(values)[0] <= 0:
            return None
        return Finding(
            name="escape",
            text=f"'{name}' gets {figure(mean(values))} more than attempts that fail, so a policy "
            "that mostly fails learns not to try.",
            advice="Let nothing end an episode with more than the worst attempt gets "
            "(`outcome_if_cut`, the reward of an empty answer).",
        )

    def disagreements(self, episodes: Sequence[Episode]) -> list[tuple[str, Episode]]:
        """Returns the episodes whose reward and success disagree, the worst first, with titles."""
        odd = []
        for episode, share in zip(episodes, self.share(episodes), strict=True):
            ended = episode.turns and episode.turns[-1].info.success is not None
            wrong = share < 0.5 if episode.success else share >= _PARTIAL
            if ended and not episode.failed and wrong:
                verdict = "success" if episode.success else "no success"
                title = f"{verdict}, with {share:.0%} of gold's reward, seed {episode.task.seed}"
                odd.append((abs(float(share) - bool(episode.success)), title, episode))
        odd.sort(key=lambda item: -item[0])
        return [(f"{n}. {title}", episode) for n, (_, title, episode) in enumerate(odd, start=1)]

    def agreement(self, by_name: Episodes, odd: Sequence[object]) -> Finding:
        """Whether reward and success agree."""
        last = [e.turns[-1].info for es in by_name.values() for e in es if e.turns]
        if all(info.success is None for info in last):
            text = "The environment has no `success` of its own to compare the reward with."
            return Finding(name="success", text=text, ok=True)
        text = f"Reward and success disagree in {len(odd)} of {len(last)} episodes."
        return Finding(name="success", text=text, ok=not odd)

    def directions(self, by_name: Episodes) -> Iterator[Finding]:
        """Whether outcome, rewards of turns and named parts, such as a judge, rise together."""
        signals: dict[str, list[float]] = {}
        episodes = [e for es in by_name.values() for e in es if e.turns and not e.failed]
        for n, episode in enumerate(episodes):
            parts: dict[str, float] = {"turns": episode.total_reward, "outcome": episode.outcome}
            for turn in episode.turns:
                for name, value in turn.info.reward_parts.items():
                    parts[name] = parts.get(name, 0.0) + value
            for name, value in parts.items():
                signals.setdefault(name, [0.0] * n).append(value)
        signals = {k: v for k, v in signals.items() if len(v) == len(episodes) and np.ptp(v) > 0}
        pairs = [
            (a, b, *rank_correlation(signals[a], signals[b]))
            for a, b in itertools.combinations(signals, 2)
        ]
        pairs = [pair for pair in pairs if signals[pair[0]] != signals[pair[1]]]
        if pairs:
            text = "; ".join(f"{a} and {b} {rho:+.2f}" for a, b, rho, _ in pairs)
            against = any(rho < 0 and p < 0.01 for *_, rho, p in pairs)
            yield Finding(
                name="direction",
                text=f"Rank correlation over all episodes: {text}.",
                advice="A policy that raises one lowers the other." if against else "",
                ok=not against,
            )

    def lengths(self, by_name: Episodes) -> Finding | None:
        """Whether longer episodes that fail earn more."""
        lost = [
            e for es in by_name.values() for e in es if e.turns and not e.success and not e.failed
        ]
        rewards, turns = [self.reward(e) for e in lost], [float(len(e.turns)) for e in lost]
        sizes = [float(sum(len(turn.text) for turn in e.turns)) for e in lost]
        correlations = [
            f"{name} {rank_correlation(rewards, values)[0]:+.2f}"
            for name, values in (("turns", turns), ("characters", sizes))
            if len(lost) > 2 and np.ptp(rewards) > 0 and np.ptp(values) > 0
        ]
        if not correlations:
            return None
        text = (
            f"Rank correlation of the reward of failed episodes with {' and '.join(correlations)}."
        )
        return Finding(name="length", text=text, ok=True)

    def variance(self, groups: Sequence[Group], expert: bool) -> Finding:
        """Whether the episodes of a task differ in reward, or nothing can be learned."""
        differ = sum(rewards_differ(group, self.score) for group in groups)
        return Finding(
            name="variance",
            text=f"In {differ} of {len(groups)} tasks, episodes differ in reward.",
            advice=""
            if differ
            else "Nothing can be learned where all rewards are equal."
            if expert
            else "An `expert_action` would show whether a solution is paid.",
            ok=differ > 0 or not expert,
        )

    def repeats(self, tasks: Sequence[Task], experts: Mapping[int, Episode]) -> Finding:
        """Whether the same seed and actions, random calls and the expert's, give the same."""

        def record(episode: Episode) -> list[tuple[Any, ...]]:
            return [(t.text, t.observation, t.reward) for t in episode.turns]

        def same(task: Task) -> bool:
            first, again = (self.play(task, self.attack(task, ATTACKERS[CALLS])) for _ in range(2))
            if record(first) != record(again):
                return False
            expert = experts.get(task.seed)
            if expert is None or expert.failed or not expert.turns:
                return True
            texts = [turn.text for turn in expert.turns]
            again = self.play(task, lambda now: texts[min(now.turn, len(texts) - 1)])
            return record(expert) == record(again)

        other = [task for task in tasks[:_REPEATED] if not same(task)]
        text = (
            f"The same seed and actions gave another episode for seed {other[0].seed}."
            if other
            else "The same seed and actions give the same episode."
        )
        return Finding(name="repeats", text=text, ok=not other)

    def facts(self, expert: bool, speed: float) -> dict[str, str]:
        """Returns what is known of the environment."""
        number, held = (attribute(self.env, name, None) for name in ("num_tasks", "num_eval_tasks"))
        keeps = overrides(self.env, "snapshot") and overrides(self.env, "restore")
        return {
            "different tasks": "not declared" if number is None else str(number),
            "held-out tasks": "by seed" if held is None else str(held),
            "expert": "yes" if expert else "no: shares are of --gold",
            "snapshot and restore": "yes" if keeps else "no",
            "resets a second": f"{speed:.0f}",
        }


def _same_work(text: str, solution: str, tools: Sequence[Tool], said: bool) -> bool:
    """Returns whether two actions are equal, or make the same calls, or only say something."""
    calls, right = (parse_tool_calls(each, tools) for each in (text, solution))
    if text == solution or not (calls or right):
        return text == solution or not said
    return len(calls) == len(right) and all(
        isinstance(call, ToolCall)
        and isinstance(expected, ToolCall)
        and call.name == expected.name
        and call.arguments.items() >= expected.arguments.items()
        for call, expected in zip(calls, right, strict=True)
    )


def most_first(rows: Iterable[Row]) -> list[Row]:
    """Sorts rows by their share."""
    return sorted(rows, key=lambda row: -row.share)


def mean(values: Any) -> float:
    """Returns a mean; 0 of nothing."""
    numbers = [float(value) for value in values]
    return sum(numbers) / len(numbers) if numbers else 0.0


def interval(values: Any) -> tuple[float, float]:
    """Returns a 95 % interval of a mean: Wilson's if all values are 0 or 1, else Student's."""
    numbers = np.asarray(values, dtype=np.float64)
    if np.isin(numbers, (0.0, 1.0)).all():
        return wilson_interval(float(numbers.mean()), len(numbers))
    return paired_interval(numbers)


def _sample(
    rng: np.random.Generator,
    scripts: Sequence[Script],
    probabilities: FloatArray,
    gradient: FloatArray,
    turn: int,
) -> Script:
    """Draws the script of a turn, and adds the gradient of its log-probability."""
    choice = int(rng.choice(len(scripts), p=probabilities[turn]))
    gradient[turn] -= probabilities[turn]
    gradient[turn, choice] += 1
    return scripts[choice]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Returns Spearman's rank correlation and its p-value."""
    from scipy.stats import spearmanr

    result = spearmanr(first, second)
    return float(result.statistic), float(result.pvalue)
