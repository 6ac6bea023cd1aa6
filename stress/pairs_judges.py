"""Judges for `pairs.py`, and the local server with chat completions that answers them.

The server rates an answer by its letters. It garbles an eighth of its answers and fails an eighth
of the requests once, so that judges ask again.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pairs_envs import worth

from gspo_env.rewards import Judge

_failed: set[int] = set()
"""The digests of the requests that have failed."""
_SERVER: dict[str, Any] = {
    "url": os.environ.get("PAIRS_JUDGE", "http://localhost:9/v1"),
    **{"model": "letters", "retries": 4, "backoff": 0.01},
}
TURNS = Judge(**_SERVER, per="turn", repeat=0.5)
RANK = Judge(**_SERVER, kind="rank", name="rank")
CRITERIA = Judge(**_SERVER, kind="pairs", name="pairs", criteria={"Long.": 1.0, "Good.": 3.0})


def serve() -> None:
    """Starts the server in this process; judges that are loaded later ask it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["PAIRS_JUDGE"] = f"http://127.0.0.1:{server.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        """Rates the last message of each answer, or ranks the answers."""
        body = self.rfile.read(int(self.headers["content-length"]))
        question = json.loads(body)["messages"][-1]["content"]
        fate = zlib.crc32(question.encode())
        fails = fate % 8 == 1 and fate not in _failed
        _failed.add(fate)
        text = "It depends." if fate % 8 == 0 else answer(question)
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        data = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 1}}).encode()
        self.send_response(500 if fails else 200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Is silent."""


def answer(question: str) -> str:
    """Returns the number of one answer, or the order of several."""
    blocks = re.findall(
        r"^\((?:The a|A)nswer.* begins .*\)\n((?:.*\n)*?)\(\w+.* ends", question, re.M
    )
    numbers = [worth(block.rpartition("(assistant")[2].partition(":)")[2]) for block in blocks]
    if len(numbers) == 1:
        return str(numbers[0])
    order = sorted(range(len(numbers)), key=lambda n: -numbers[n])
    marks = ["=" if numbers[a] == numbers[b] else ">" for a, b in itertools.pairwise(order)]
    return "".join(f"{n + 1}{mark}" for n, mark in zip(order, [*marks, ""], strict=True))
