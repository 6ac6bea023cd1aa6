"""A conversation with a tool, as a line of a file of conversations has it."""

import json
from pathlib import Path
from typing import Any

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "lookup", "arguments": '{"key": "amber"}'},
}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Use the tool."},
    {"role": "user", "content": "What is amber?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": "river"},
    {"role": "assistant", "content": "It is river."},
]


def write(path: Path, *rows: dict[str, Any]) -> str:
    """Writes lines of JSON; returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
