"""Tool calls as models write them, and what is read of them: cases of the tests and the docs."""

import json
from pathlib import Path

CASES = json.loads((Path(__file__).parents[1] / "data/tool_calls.json").read_text())
FORMATS = {family: case["text"] for family, case in CASES["formats"].items()}
"""How each family writes the call look(word='a', times=2)."""
