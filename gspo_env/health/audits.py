"""What `gspo-env audit` found, kept in the user's state directory for the warnings of trainings.

A record is of one environment with its arguments and files as they were: those of its class and of
the bases, and those that arguments name. After a change of any, there is no record. What the files
import and what is in folders is not compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from gspo_env.config import Config
from gspo_env.env.registration import Member, load_creator, resolve_env
from gspo_env.user_state import file_digests, read_record, write_record

logger = logging.getLogger(__name__)


def audit_key(member: Member) -> str:
    """Returns what names the record of an environment with its arguments and files as they are."""
    env_id = resolve_env(member.spec)
    digests = {*file_digests([member.spec, dict(member.kwargs)]).values()}
    creator = load_creator(env_id)
    for cls in inspect.getmro(creator) if inspect.isclass(creator) else ():
        with contextlib.suppress(TypeError, OSError):  # built in, or from no file
            digests.add(hashlib.sha256(Path(inspect.getfile(cls)).read_bytes()).hexdigest())
    named = [env_id, dict(member.kwargs), sorted(digests)]
    return json.dumps(named, sort_keys=True, default=str)


def record_audit(key: str, faults: Sequence[str]) -> None:
    """Records the names of the findings of an audit that are not `ok`; see `audit_key`."""
    entry = {"day": time.strftime("%Y-%m-%d"), "faults": list(faults)}
    if problem := write_record("audits", key, entry):
        logger.warning("cannot record this audit (%s): trainings will not know of it", problem)


def audit_advice(config: Config) -> str:
    """Returns what to do about first episodes that show an attacker's pattern."""
    records = " ".join(map(_describe, config.environments))
    return f"{records} Read the best episodes (`gspo-env view RUN`)."


def _describe(member: Member) -> str:
    """Returns a sentence on the record of an environment."""
    try:
        entry = read_record("audits", audit_key(member))
        day, faults = str(entry["day"]), ", ".join(map(str, entry["faults"]))
    except (OSError, RuntimeError, ImportError, ValueError, KeyError, TypeError):
        arguments = " with its --env-kwargs" if member.kwargs else ""
        return (
            f"No audit of {member.spec} with these arguments and files is on record: attack its "
            f"reward (`gspo-env audit {member.spec}`{arguments})."
        )
    return f"The audit of {member.spec} on {day} found {faults or 'nothing wrong'}."
