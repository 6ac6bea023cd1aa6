"""Exports environments of every kind and lets the validator of each library judge the packages.

    python stress/exports.py [--only NAME ...]

Each environment is exported for each of verifiers and OpenEnv that is installed (they need
environments of their own), and for TRL, which has no validator: there the class is made, reset and
played. The wheel is built and unpacked as an installer does. Exit code 1 if one is not accepted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.exports import ENVS, install

from gspo_env.export import write_package

SERVE = """
import importlib, sys, threading, time, uvicorn
from openenv.cli._validation import validate_running_environment
app = importlib.import_module(sys.argv[1] + ".server.app").app
server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
threading.Thread(target=server.run, daemon=True).start()
while not server.started:
    time.sleep(0.05)
port = server.servers[0].sockets[0].getsockname()[1]
report = validate_running_environment(f"http://127.0.0.1:{port}")
checks = report["summary"]
print("running:", f"{checks['passed_count']} of {checks['total_count']}")
sys.exit(not report["passed"])
"""
PLAY = """
import importlib, inspect, sys
package = importlib.import_module(sys.argv[1])
kind = next(v for v in vars(package).values() if inspect.isclass(v) and hasattr(v, "reset"))
rows = package.rows(kind, package.seeds(4))
for row in rows:
    env = kind()
    env.reset(**{k: v for k, v in row.items() if k != "prompt"})
print("reset:", len(rows), "of 4 rows")
"""


def run(command: list[object], site: Path, work: Path) -> tuple[bool, str]:
    env = {"PYTHONPATH": ":".join([str(site), *sys.path]), "HOME": str(work), "PATH": "/usr/bin"}
    env["TRL_EXPERIMENTAL_SILENCE"] = "1"
    done = subprocess.run(
        list(map(str, command)), env=env, cwd=work, capture_output=True, text=True, timeout=600
    )
    return not done.returncode, (done.stdout if not done.returncode else done.stderr or done.stdout)


def judge(peer: str, folder: Path, package: str, site: Path, work: Path) -> tuple[bool, str]:
    """Returns whether the library's own validator accepts a package, and what it says."""
    python = Path(sys.executable)
    if peer == "verifiers":
        validate = [python.with_name("vf-validate"), package, "--taskset.num-tasks", 4, "--no-rich"]
        right, said = run([*validate, "--runtime.type", "subprocess", "-o", "out"], site, work)
        if not right:
            return right, said
        summary = json.loads(next(work.rglob("summary.json")).read_text())
        outcomes = {k: v for k, v in summary["outcomes"].items() if v}
        return not {"invalid", "error"} & outcomes.keys(), f"{outcomes}"
    if peer == "openenv":
        static = [python, "-m", "openenv.cli", "validate", folder, "--skip-build"]
        right, said = run([*static, "--level", "static"], site, work)
        if not right or "Verdict: PASS" not in said:
            return False, said
        right, said = run([python, "-c", SERVE, package], site, work)
        return right, f"static: PASS, {said.strip()}"
    return run([python, "-c", PLAY, package], site, work)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(ENVS), default=list(ENVS))
    peers = [p for p in ("trl", "verifiers", "openenv") if importlib.util.find_spec(p)]
    counts: Counter[bool] = Counter()
    for name in parser.parse_args().only:
        spec, kwargs = ENVS[name]
        for peer in peers:
            with tempfile.TemporaryDirectory() as folder:
                work = Path(folder)
                lost = write_package(spec, peer, work / "package", **kwargs)
                site = install(work / "package", work / "site")
                package = next(site.glob("gspo_*/__init__.py")).parent.name
                right, said = judge(peer, work / "package", package, site, work)
            counts[right] += 1
            said = " ".join(said.split())[-300:]
            print(
                f"| {name} | {peer} | {'accepted' if right else 'WRONG'} | {said} | {len(lost)} |",
                flush=True,
            )
    print(f"{counts[True]} packages accepted, {counts[False]} wrong")
    return int(not counts[True] or counts[False] > 0)


if __name__ == "__main__":
    sys.exit(main())
