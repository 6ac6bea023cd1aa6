"""Kills and resumes a run of SmolLM2 whose judge is another SmolLM2 with a bad connection.

    python stress/judge.py --episodes 200 --per-minute 60

The policy learns sums. Its judge answers behind a proxy that takes 0.2 to 3 seconds, fails 10 % of
the requests and garbles 10 % of the answers. As shipped, SmolLM2 doesn't keep to the form of an
answer, so the proxy answers with the first number from 1 to 10 that the model writes, or with 5.
Each episode must have a score of the judge or count as lost, the requests must keep to the limit
and use it, and no question that had an answer may be asked again. Exit code 1 if one of these is
not so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2 as httpx

from gspo_env.episodes import read_episodes

STEPS, TASKS = 5, 5
KEY = "a-key-of-this-program"
ON_THE_WAY = 2.0
"""Seconds before the kill in which an answer may not have been kept."""
WINDOW = 30.0
"""Seconds in which requests are counted."""
JUDGE = """
from gspo_env.rewards import Judge
JUDGE = Judge(url={url!r}, model="m", repeat=0, retries=1, per_minute={per_minute})
"""


@dataclass
class Proxy:
    """Delays, fails and garbles, and records what it does."""

    upstream: str
    draw: random.Random
    arrivals: list[float] = field(default_factory=list)
    answers: list[tuple[float, str, float]] = field(default_factory=list)
    """When each answer was sent, to which request, and its score."""
    failed: int = 0
    garbled: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, handler: BaseHTTPRequestHandler) -> None:
        """Answers a request."""
        with self._lock:
            self.arrivals.append(time.monotonic())
            end, fate = time.monotonic() + self.draw.uniform(0.2, 3.0), self.draw.random()
        body = handler.rfile.read(int(handler.headers["content-length"])).decode()
        text = "I would rather not say." if fate < 0.2 else self._ask(json.loads(body))
        time.sleep(max(0.0, end - time.monotonic()))
        if select.select([handler.connection], [], [], 0)[0]:
            return  # who asked is gone
        with self._lock:
            self.failed += fate < 0.1
            self.garbled += 0.1 <= fate < 0.2
            if fate >= 0.2:
                self.answers.append((time.monotonic(), body, int(text) / 10))
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        data = json.dumps({"choices": [choice]}).encode()
        handler.send_response(500 if fate < 0.1 else 200)
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _ask(self, body: dict[str, Any]) -> str:
        body = {**body, "max_tokens": 8}
        headers, place = {"authorization": f"Bearer {KEY}"}, f"{self.upstream}/chat/completions"
        response = httpx.post(place, json=body, headers=headers, timeout=600).raise_for_status()
        answer = response.json()["choices"][0]["message"]["content"]
        return next((n for n in re.findall(r"\d+", answer) if 1 <= int(n) <= 10), "5")


def main() -> None:
    """Plays the run and prints what was counted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=200, help=f"a multiple of {STEPS * TASKS}")
    parser.add_argument("--per-minute", type=float, default=60.0)
    parser.add_argument("--model", default="smollm2", help="the policy and the judge")
    options = parser.parse_args()
    examples = Path(__file__).resolve().parents[1] / "examples"
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        subprocess.run([sys.executable, str(examples / "sums.py")], check=True)
        command = [sys.executable, "-m", "gspo_env", "serve", options.model, "--port", "0"]
        variables = {**os.environ, "GSPO_ENV_SERVE_KEY": KEY}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=variables, text=True) as serve:
            try:
                lines = iter(serve.stdout or ())
                exports = (re.match(r"export OPENAI_BASE_URL=(\S+)", line) for line in lines)
                proxy = Proxy(next(each[1] for each in exports if each), random.Random(0))
                problems = _play(proxy, options, examples / "sums.toml")
            finally:
                serve.kill()
    print("\n".join(problems) or "all as it should be")
    sys.exit(bool(problems))


def _play(proxy: Proxy, options: argparse.Namespace, config: Path) -> list[str]:
    """Kills the run at half of the answers, resumes it, and returns what is wrong."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            proxy.reply(self)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, rate = f"http://127.0.0.1:{server.server_port}/v1", options.per_minute
    Path("judge.py").write_text(JUDGE.format(url=url, per_minute=rate))
    train = [sys.executable, "-m", "gspo_env", "train"]
    kwargs = ["data=sums.jsonl", "held_out=0.2", 'rewards=["judge.py:JUDGE"]']
    size = str(options.episodes // (STEPS * TASKS))
    limits = ["--steps", str(STEPS), "--tasks-per-step", str(TASKS), "--rollout.group-size", size]
    saves = ["--keep-episodes", "all", "--checkpoints.save-every", "1", "--output", "run"]
    evals = [
        "--eval-every",
        "0",
        "--eval-tasks",
        "1",
        "--tracker",
        "none",
        "--model",
        options.model,
    ]
    memory = ["--learner.microbatch-tokens", "2048"]
    flags = ["--config", str(config), "--env-kwargs", *kwargs, *limits, *saves, *evals, *memory]
    process = subprocess.Popen([*train, *flags])
    while len(proxy.answers) < options.episodes // 2 and process.poll() is None:
        time.sleep(0.02)
    time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    killed, before = time.monotonic(), len(proxy.answers)
    if process.wait() != -signal.SIGKILL:
        return [f"the run ended with {process.returncode} before it was killed"]
    if code := subprocess.run([*train, "--resume", "run"], check=False).returncode:
        return [f"the resumed run ended with {code}"]
    return [*_check_requests(proxy, killed, before, rate), *_check_run(proxy, options.episodes)]


def _check_requests(proxy: Proxy, killed: float, before: int, per_minute: float) -> list[str]:
    times: dict[str, list[float]] = {}
    for sent, question, _ in proxy.answers:
        times.setdefault(question, []).append(sent)
    twice = [each for each in times.values() if len(each) > 1]
    lost = [each for each in twice if killed - ON_THE_WAY < each[0] < killed and len(each) == 2]
    windows = [sum(a <= b < a + WINDOW for b in proxy.arrivals) for a in proxy.arrivals]
    limit = per_minute * WINDOW / 60
    print(
        f"{len(proxy.arrivals)} requests, {before} answered before the kill and "
        f"{len(proxy.answers)} in all, {proxy.failed} failed, {proxy.garbled} garbled; "
        f"{len(twice)} answered twice, {len(lost)} of them first just before the kill\n"
        f"at most {max(windows)} requests in {WINDOW:g} s, where {limit:g} may begin"
    )
    problems = ["a question was answered twice"] if len(twice) > len(lost) else []
    if not 0.9 * limit <= max(windows) <= limit + 2:  # one for each end of the window
        problems.append("the requests did not keep to the limit, or did not use it")
    return problems


def _check_run(proxy: Proxy, episodes: int) -> list[str]:
    records = list(read_episodes("run", phases=("train",)))
    scores = [
        json.loads(r.turns[-1].reward_parts or "{}").get("judge") for r in records if not r.error
    ]
    failed = [r.error for r in records if r.error and "reward judge" in r.error]
    possible = {score for *_, score in proxy.answers}
    print(f"{len(records)} episodes: {len(scores)} with a score, {len(failed)} lost")
    problems = [] if len(records) == episodes else [f"{len(records)} episodes are counted"]
    if len(scores) + len(failed) != episodes or not possible.issuperset(scores):
        problems.append(f"scores {sorted(map(str, set(scores)))}, and {len(failed)} without one")
    return problems


if __name__ == "__main__":
    main()
