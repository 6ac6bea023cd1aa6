"""`gspo-env diagnose`."""

from __future__ import annotations

import json

import tyro

from gspo_env.errors import ConfigError
from gspo_env.redaction import visible
from gspo_env.settings import settings


@settings
class Diagnose:
    """Explain why a run does not learn, and which settings to try."""

    folder: tyro.conf.Positional[str] = ""
    """Folder of the run, such as runs/Lookup-v0-seed0-1."""
    json: bool = False
    """Print JSON."""

    def run(self) -> None:
        """Prints what the rules found."""
        if not self.folder:
            raise ConfigError("folder is ''; expected the folder of a run, such as runs/NAME")
        from gspo_env.health.diagnose import diagnose, lines
        from gspo_env.runs import Run

        diagnosis = diagnose(Run.open(self.folder))
        if self.json:
            tree = {
                "run": str(diagnosis.run.folder),
                "state": diagnosis.run.state,
                "findings": [
                    {"name": f.name, "text": f.text, "advice": f.advice} for f in diagnosis.findings
                ],
                "consequences": list(diagnosis.consequences),
                "notes": list(diagnosis.notes),
                "not_judged": list(diagnosis.not_judged),
            }
            print(json.dumps(tree, indent=1))
        else:
            print(visible("\n".join(lines(diagnosis))))
