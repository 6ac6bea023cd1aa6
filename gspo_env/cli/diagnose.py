"""`gspo-env diagnose`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import tyro

from gspo_env.errors import ConfigError
from gspo_env.redaction import visible


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnose:
    """Say why a run does not learn, and which settings to try."""

    folder: tyro.conf.Positional[str] = ""
    """Folder of the run, such as runs/Lookup-v0-seed0-1."""
    json: bool = False
    """Print JSON."""

    def run(self) -> None:
        """Prints what the rules found."""
        if not self.folder:
            raise ConfigError("folder is ''; expected the folder of a run, such as runs/NAME")
        from gspo_env.health.diagnose import diagnose, lines
        from gspo_env.report.run_record import read_run

        found = diagnose(read_run(self.folder))
        if self.json:
            tree = {
                "run": str(found.run.folder),
                "state": found.run.state,
                "findings": [asdict(finding) for finding in found.findings],
                "consequences": list(found.explained),
                "notes": list(found.notes),
                "not_judged": list(found.not_judged),
            }
            print(json.dumps(tree, indent=1))
        else:
            print(visible("\n".join(lines(found))))
