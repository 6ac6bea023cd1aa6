"""What a terminal and a page show of an audit."""

from __future__ import annotations

from gspo_env.audit.auditor import Audit
from gspo_env.health.findings import show
from gspo_env.report.page import Section, html_page


def title(result: Audit) -> str:
    """Returns the verdict in one line."""
    wrong = [finding.name for finding in result.findings if not finding.ok]
    verdict = f"look at {', '.join(wrong)}" if wrong else "nothing wrong was found"
    return f"Audit of {result.env_id}: {verdict}"


def table(result: Audit) -> list[list[str]]:
    """Returns the table of the policies, its header first."""
    head = ["policy", "share of gold", "95 % interval", "success", "turns"]
    return [head] + [
        [
            row.name,
            f"{row.share:.0%}",
            f"{row.low:.0%} to {row.high:.0%}",
            f"{row.success:.0%}",
            f"{row.turns:.1f}",
        ]
        for row in result.rows
    ]


def summary(result: Audit) -> str:
    """Returns what was played."""
    facts = "; ".join(f"{name}: {value}" for name, value in result.facts.items())
    return (
        f"{result.tasks} tasks were played; {facts}. Gold's mean reward is {result.gold:.4g} "
        f"(score {result.score!r})."
    )


def lines(result: Audit) -> list[str]:
    """Returns what a terminal shows."""
    rows = [f"{a:30}{b:>14}{c:>16}{d:>9}{e:>7}" for a, b, c, d, e in table(result)]
    return [title(result), summary(result), "", *rows, "", *map(show, result.findings)]


def page(result: Audit) -> str:
    """Returns a page in HTML, with the episodes whose reward and success disagree."""
    sections = [
        Section(text=summary(result)),
        Section(title="What each policy gets", table=table(result)),
        Section(title="What that says", items=[show(finding) for finding in result.findings]),
        Section(title="Tasks that pay for no work", items=result.free or ("None.",)),
        Section(title="Reward and success disagree", blocks=result.shown),
        Section(title="Episodes of the attackers that get most", blocks=result.attacks),
    ]
    return html_page(title(result), sections)
