"""Rules of `gspo-env diagnose` about who plays the episodes, how old they are, and who waits."""

from __future__ import annotations

from gspo_env.health.rules import Evidence, Said, now, share
from gspo_env.report.run_record import RunRecord

_WAITING = 0.6
"""Share of the time in which the learner waits, from which an empty rollout costs much."""


def workers(found: Evidence, limit: float) -> Said | None:
    """Workers or servers die."""
    run, said = found.run, []
    for kind, names in (
        ("workers", ("rollout/worker_restarts", "rollout/workers_lost")),
        ("servers", ("rollout/server_restarts", "rollout/servers_lost")),
    ):
        again, lost = (_last(run, name) for name in names)
        gone = max(0.0, lost - again)
        if gone or again > limit * len(run.steps):
            said.append(f"{again:.0f} {kind} were started again and {gone:.0f} lost for good")
    if not said:
        return None
    reissued = _last(run, "rollout/reissued_groups")
    replayed = f"; {reissued:.0f} groups were played again" if reissued else ""
    return (
        f"Processes of the rollout die: {' and '.join(said)} in {len(run.steps)} steps{replayed}.",
        "Read in the log why they ended (often the memory): fewer --workers or a lower "
        f"--concurrency ({now(run, 'rollout.concurrency')}), --isolation process for environments "
        "that crash; --max-worker-restarts and --max-server-restarts replace more of them.",
    )


def dropped(found: Evidence, limit: float) -> Said | None:
    """Groups are thrown away because they are too old."""
    run = found.run
    groups = run.number("tasks_per_step") or run.episodes_per_step
    count = run.total("rollout/dropped_groups")
    if not count or count < limit * groups * len(run.steps):
        return None
    return (
        f"Groups are too old to train on: {count:.0f} were thrown away and played again in "
        f"{len(run.steps)} steps of {groups:.0f} groups.",
        "The engine samples with older weights than it was sent: see whether every server takes "
        "the updates (`train/sync_logprob_diff`, rollout/servers_lost); "
        f"raise --max-staleness ({now(run, 'supply.max_staleness')}) only if they do.",
    )


def stale(found: Evidence, limit: float) -> Said | None:
    """Episodes are so old that their ratios begin outside the clip."""
    run = found.run
    age, outside = (run.late(name) for name in ("rollout/staleness_mean", _OUTSIDE))
    if not age or outside is None or outside < limit or found.solved:
        return None
    idle = run.late("time/learner_idle")
    waits = "" if idle is None else f"; the learner waits {share(idle)} of the time"
    return (
        f"Episodes are too old: they are {age:.2g} updates behind on average {found.when}, and "
        f"that alone takes {share(outside)} of the ratios outside the clip{waits}.",
        f"Lower --max-staleness ({now(run, 'supply.max_staleness')}) or the learning rate "
        f"({now(run, 'learner.learning_rate')}), and keep --loss.correction truncated.",
    )


def left_out(found: Evidence, limit: float) -> Said | None:
    """Groups go on without their slowest episode."""
    run = found.run
    rate = run.late("rollout/left_out_share")
    if rate is None:
        return None
    groups = min(1.0, rate * (run.number("rollout.group_size") or 1.0))
    if groups < limit:
        return None
    return (
        f"{share(groups)} of the groups go on without their slowest episode {found.when}: the run "
        "learns from the quick episodes, and long ones, often the hard ones, are not seen.",
        f"Raise --straggler-quantile ({now(run, 'supply.straggler_quantile')}), or bound what is "
        "slow instead: --max-turns, --max-turn-tokens or --episode-timeout lower.",
    )


def stragglers(found: Evidence, limit: float) -> Said | None:
    """The learner waits for a few slow episodes."""
    waits, empty = _idle(found)
    if waits < _WAITING or empty < limit:
        return None
    run = found.run
    return (
        f"A few slow episodes hold up each step: the learner waits {share(waits)} of the time, and "
        f"{share(empty)} of the places of episodes are empty then ({found.when}).",
        f"Play ahead: --max-staleness 2 ({now(run, 'supply.max_staleness')}); go on without the "
        f"slowest: --straggler-quantile 0.95 ({now(run, 'supply.straggler_quantile')}); or bound "
        f"an episode: --episode-timeout ({now(run, 'rollout.episode_timeout')}).",
    )


def starved(found: Evidence, limit: float) -> Said | None:
    """The learner waits for episodes although groups are played ahead."""
    run = found.run
    waits, empty = _idle(found)
    if not run.number("supply.max_staleness") or waits < limit:
        return None
    return (
        f"Playing ahead does not keep up: the learner waits {share(waits)} of the time, and "
        f"{share(1 - empty)} of the places of episodes are taken ({found.when}).",
        f"Play more at the same time: --concurrency ({now(run, 'rollout.concurrency')}), more "
        "servers (--replicas) or --workers ray:8; an environment that computes needs --isolation "
        "process. A higher --max-staleness only makes the episodes older.",
    )


_OUTSIDE = "train/ratio_outside_clip"


def _idle(found: Evidence) -> tuple[float, float]:
    """Returns the share of the time in which the learner waits, and of empty places meanwhile.

    Without playing ahead, nothing is played while the learner works.
    """
    run = found.run
    waits, empty = run.late("time/learner_idle") or 0.0, run.late("time/rollout_idle") or 0.0
    if not run.number("supply.max_staleness") and waits:
        empty = max(0.0, 1 - (1 - empty) / waits)
    return waits, empty


def _last(run: RunRecord, name: str) -> float:
    """Returns the highest value of a metric that counts since the start."""
    return float(run.series[name].values.max()) if name in run.series else 0.0
