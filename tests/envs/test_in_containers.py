"""Trainings whose environments run in containers: every episode is scored and nothing is left."""

import json
import math
import shlex

import pytest
from support.containers import IMAGE, PROGRAM, require_image
from support.jails import eventually, run_python

from gspo_env.sandbox.containers import call

pytestmark = pytest.mark.containers

ASK = """
import http.client, json, os, sys
from urllib.parse import urlparse
place = urlparse(os.environ["OPENAI_BASE_URL"])
line = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
body = json.dumps({"messages": [{"role": "user", "content": json.load(sys.stdin)["question"]}]})
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
line.request("POST", place.path + "/chat/completions", body, key)
print(json.dumps(len(json.loads(line.getresponse().read())["choices"]) / 4))
"""
SERVE = """
import json, sys
schema = {"type": "object", "properties": {"a": {"type": "string"}}}
for line in sys.stdin:
    asked = json.loads(line)
    params = asked.get("params") or {}
    version = params.get("protocolVersion", "2025-06-18")
    answers = {
        "initialize": {
            "protocolVersion": version,
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "inside", "version": "1"},
        },
        "tools/list": {"tools": [{"name": "echo", "description": "Echo.", "inputSchema": schema}]},
        "tools/call": {"content": [{"type": "text", "text": str(params.get("arguments"))}]},
        "ping": {},
    }
    if "id" in asked:
        reply = {"jsonrpc": "2.0", "id": asked["id"]}
        if asked["method"] in answers:
            reply["result"] = answers[asked["method"]]
        else:
            reply["error"] = {"code": -32601, "message": "unknown"}
        print(json.dumps(reply), flush=True)
"""
TEST = "#!/bin/bash\n[ -e /app/a ] && echo 1 >/logs/verifier/reward.txt || exit 1\n"
HARBOR = {
    "task.toml": "[environment]\nmemory_mb = 256\n",
    "instruction.md": "Make the file a.",
    "environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /app\n",
    "tests/test.sh": TEST,
    "solution/solve.sh": "#!/bin/bash\ntouch a\n",
}


def arguments(kind, folder):
    """The arguments of an environment, as values of TOML."""
    rows = [{"prompt": f"Say {n}.", "question": f"Say {n}.", "answer": str(n)} for n in range(4)]
    data = folder / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    box = f"{PROGRAM}:{IMAGE}"
    if kind == "SQL":
        return {"sandbox": box}
    if kind == "Program":
        return {"sandbox": box, "command": ["python3", "-c", ASK], "data": str(data)}
    if kind == "MCP":
        pytest.importorskip("mcp")
        servers = {"inside": {"command": "python3", "args": ["-c", SERVE]}}
        (folder / "paid.py").write_text("def paid(a):\n    return float(len(a.text) % 2)\n")
        paid = f"{folder}/paid.py:paid"
        return {"sandbox": box, "servers": servers, "data": str(data), "rewards": paid}
    for name in ("one", "two"):
        for path, text in HARBOR.items():
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / path).write_text(text)
    return {"sandbox": PROGRAM, "folder": str(folder), "held_out": 0.5}


def containers():
    listed = call(PROGRAM, "ps", "--all", "--quiet", "--filter", "label=gspo-env")
    return {*listed.stdout.split()}


@pytest.mark.parametrize("kind", ["SQL", "Program", "MCP", "Harbor"])
def test_a_training_in_containers_scores_each_episode_and_leaves_none(kind, tmp_path):
    require_image()
    before, values = containers(), arguments(kind, tmp_path)
    words = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    flags = "--steps 2 --tasks-per-step 2 --group-size 2 --eval-tasks 1 --tracker none"
    flags += " --rollout.max-turn-tokens 16 --rollout.max-turns 2"
    flags += " --recipe.demonstrations 2 --recipe.imitation-steps 1"
    line = ["train", "--env", f"gspo/{kind}-v0", *shlex.split(flags), "--env-kwargs", *words]
    output = tmp_path / "run"
    done = run_python("-m", "gspo_env", *line, "--output", str(output), timeout=480)
    assert done.returncode == 0, done.stderr[-2000:]
    points = [json.loads(row)["metrics"] for row in (output / "metrics.jsonl").open()]
    steps = [point for point in points if "train/loss" in point]
    assert [math.isfinite(point["train/loss"]) for point in steps] == [True, True]
    lost = ("env_errors", "env_timeouts", "lost_episodes", "retried")
    assert {point[f"rollout/{name}"] for point in steps for name in lost} == {0.0}
    assert eventually(lambda: containers() <= before)
