"""The rules of `gspo-env diagnose`, with their thresholds and the reasons of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gspo_env.health import diagnose_signal as signal
from gspo_env.health import diagnose_supply as supply
from gspo_env.health import rules as first
from gspo_env.health.rules import Evidence, Said
from gspo_env.health.startup import _NEARLY_ALL
from gspo_env.training.weight_check import HALF_TOLERANCE, TOLERANCE


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One thing that may be wrong with a run."""

    name: str
    check: Callable[[Evidence, float], Said | None]
    limit: float
    """The threshold that `check` gets."""
    reason: str
    """Why it has this value."""
    needs: tuple[str, ...] = ()
    """Metrics without which the rule cannot say anything."""
    episodes: bool = False
    """Whether it needs kept training episodes."""
    explains: tuple[str, ...] = ()
    """Rules whose findings are consequences of this one."""


_SIGNAL = ("no_variance", "entropy", "few_turns", "no_progress")
_OUTCOME = ("hardly_moves", *_SIGNAL)
_SHAPE = ("malformed", "lengths", "cut_actions", "context", "turn_limit", "hacking", "too_hard")

RULES = (
    Rule(
        name="failed",
        check=first.failed,
        limit=0,
        reason="an error is always said",
    ),
    Rule(
        name="environment",
        check=first.environment,
        limit=0.05,
        reason="of 8 episodes of a group, one is lost in every third group; below that, groups "
        "stay whole",
        needs=("rollout/lost_episodes",),
        explains=("no_progress",),
    ),
    Rule(
        name="workers",
        check=supply.workers,
        limit=0.1,
        reason="restarts of a step: one in ten steps is an accident, more is a cause; a process "
        "that is lost for good is always said",
        explains=("dropped", "stragglers", "starved"),
    ),
    Rule(
        name="dropped",
        check=supply.dropped,
        limit=0.1,
        reason="of the groups of a step; an engine that takes its updates drops none, since no "
        "group is admitted that could become too old",
        needs=("rollout/dropped_groups",),
        explains=("stragglers", "starved"),
    ),
    Rule(
        name="no_turns",
        check=first.no_turns,
        limit=0.1,
        reason="nine in ten episodes have nothing to train on",
        needs=("rollout/turns",),
        explains=(*_SHAPE, *_OUTCOME),
    ),
    Rule(
        name="non_finite",
        check=first.non_finite,
        limit=0.01,
        reason="none is skipped in a run whose numbers are sound; float16 skips some while it "
        "finds its loss scale, so there only the last steps count",
        needs=("train/skipped_steps",),
        explains=("no_progress", "hardly_moves"),
    ),
    Rule(
        name="engine",
        check=first.engine,
        limit=1.0,
        reason=f"times the bound of the check after each update: {TOLERANCE['float32']:g} nats in "
        f"float32, {HALF_TOLERANCE:g} in half precision",
        needs=("train/logprob_diff_mean",),
        explains=("stale", "clipped", "collapse", *_SHAPE, *_OUTCOME),
    ),
    Rule(
        name="stale",
        check=supply.stale,
        limit=0.5,
        reason="of the ratios, before the update has moved anything; the default run has none "
        "there, and a small run that learns one update ahead a third",
        needs=("rollout/staleness_mean",),
        explains=("clipped", "collapse", *_OUTCOME),
    ),
    Rule(
        name="collapse",
        check=first.collapse,
        limit=3.5,
        reason="standard errors of a rise of the return that is no chance; with one, the rule "
        "`hacking` applies. What counts as a fall is what the warning of a run says, or a smaller "
        "one that the last three evaluations, or tenths of the training, all have",
        needs=("rollout/success",),
        explains=("clipped", *_SHAPE, *_OUTCOME),
    ),
    Rule(
        name="malformed",
        check=first.malformed,
        limit=0.1,
        reason="malformed calls of a turn: a tenth of the turns does nothing; the default run has "
        "none at its end",
        needs=("rollout/malformed_calls", "rollout/turns"),
        explains=("hacking", "lengths", "cut_actions", "turn_limit", "too_hard", *_OUTCOME),
    ),
    Rule(
        name="lengths",
        check=first.lengths,
        limit=2.0,
        reason="times the tokens of a turn in the first step; in the default run they stay within "
        "a tenth. They also have to come near rollout.max_turn_tokens, and success must not rise",
        needs=("rollout/tokens", "rollout/turns"),
        explains=("hacking", "cut_actions", "context", *_OUTCOME),
    ),
    Rule(
        name="hacking",
        check=first.hacking,
        limit=3.5,
        reason="standard errors of the fall of success and of the rise of the return",
        needs=("rollout/success",),
        explains=("too_hard", *_OUTCOME),
    ),
    Rule(
        name="cut_actions",
        check=signal.cut_actions,
        limit=0.25,
        reason="a quarter of the batch teaches only to be shorter; runs that learn have up to a "
        "quarter for a few steps, and 5 % at the end",
        needs=("rollout/stop/max_turn_tokens",),
        explains=("too_hard", *_OUTCOME),
    ),
    Rule(
        name="context",
        check=signal.context,
        limit=0.1,
        reason="episodes that are cut count as failures whatever the policy did",
        needs=("rollout/stop/max_context",),
        explains=("too_hard", *_OUTCOME),
    ),
    Rule(
        name="turn_limit",
        check=signal.turn_limit,
        limit=0.25,
        reason="a quarter of the outcomes is not known; tasks that always last so long have a "
        "limit of their own, which is not counted",
        needs=("rollout/stop/max_turns",),
        explains=("too_hard", *_OUTCOME),
    ),
    Rule(
        name="timeouts",
        check=signal.timeouts,
        limit=0.05,
        reason="who is cut depends on the machine, so one in twenty is already a bias",
        needs=("rollout/stop/timeout",),
        explains=("no_progress",),
    ),
    Rule(
        name="left_out",
        check=supply.left_out,
        limit=0.5,
        reason="of the groups; a quantile of 0.95 leaves an episode out of a third of the groups "
        "of 8",
        explains=("no_progress",),
    ),
    Rule(
        name="no_gradient",
        check=signal.no_gradient,
        limit=0.0,
        reason="a gradient of exactly 0 comes from no batch with advantages",
        needs=("train/grad_norm", "train/advantage_rms"),
        explains=("too_hard", "hardly_moves", "no_progress"),
    ),
    Rule(
        name="hardly_moves",
        check=signal.hardly_moves,
        limit=0.02,
        reason="of the way to the clip, which the default run reaches in most steps until its "
        "learning rate falls",
        needs=("train/ratio_min", "train/ratio_max"),
        explains=("too_hard", "no_progress"),
    ),
    Rule(
        name="clipped",
        check=signal.clipped,
        limit=0.5,
        reason="of the tokens behind the first minibatch of a step, whose ratios are 1; runs that "
        "learn clip a tenth to a fifth, and half in single steps (the paper of GSPO: 15 %)",
        needs=("train/clipped_fraction",),
        explains=("too_hard", "entropy", "no_progress"),
    ),
    Rule(
        name="too_hard",
        check=signal.too_hard,
        limit=0.01,
        reason="with 8 episodes, 92 % of the groups have no success",
        needs=("eval/success", "rollout/success"),
        explains=_SIGNAL,
    ),
    Rule(
        name="too_easy",
        check=signal.too_easy,
        limit=_NEARLY_ALL,
        reason="the rest is within three standard errors of 256 tasks; the same share as in the "
        "warning before training",
        needs=("eval/success",),
        explains=_SIGNAL,
    ),
    Rule(
        name="entropy",
        check=signal.entropy,
        limit=0.2,
        reason="of the entropy of the first steps. Runs that solve their task fall as far, so the "
        "groups must be without variance and success below 90 % too",
        needs=("train/entropy", "rollout/zero_variance_groups"),
        explains=("no_variance", "few_turns", "no_progress"),
    ),
    Rule(
        name="no_variance",
        check=signal.no_variance,
        limit=0.9,
        reason="one group in ten still teaches, so a run learns, but ten times slower",
        needs=("rollout/zero_variance_groups",),
        explains=("few_turns", "no_progress"),
    ),
    Rule(
        name="few_turns",
        check=signal.few_turns,
        limit=0.4,
        reason="share of the turns with an advantage, in episodes of 3 turns or more; it is 96 % "
        "or more all over the default run, and 25 % where 4 turns share a last reward without "
        "credit",
        episodes=True,
        explains=("no_progress",),
    ),
    Rule(
        name="memorised",
        check=signal.memorised,
        limit=0.3,
        reason="of success, far more than chance between a batch and an evaluation",
        needs=("eval/success", "rollout/success"),
        episodes=True,
    ),
    Rule(
        name="no_progress",
        check=signal.no_progress,
        limit=10,
        reason="steps before which nobody can expect progress",
        needs=("rollout/success",),
    ),
    Rule(
        name="stragglers",
        check=supply.stragglers,
        limit=0.6,
        reason="of the places of episodes are empty while the learner waits, which it does for "
        "0.6 of the time or more; the default run has a third of them empty",
        needs=("time/learner_idle", "time/rollout_idle"),
        explains=("starved",),
    ),
    Rule(
        name="starved",
        check=supply.starved,
        limit=0.75,
        reason="of the time; then an update takes a quarter or less of what the episodes take, "
        "and playing ahead hides at most that",
        needs=("time/learner_idle", "time/rollout_idle"),
    ),
)
"""In the order of causes: what a finding explains is not said again."""
