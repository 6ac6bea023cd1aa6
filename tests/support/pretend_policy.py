"""Answers like a vLLM server, for tests of workers: `SOCKET [SECONDS]`; standard library only.

The action follows from the prompt and the seed, as it does with a real server in float32. Each
takes some seconds. A file `dies` beside the socket ends the server with the next request.
"""

import json
import os
import random
import sys
import time
import zlib
from pathlib import Path

from pretend_http import Handler, Server

SOCKET = Path(sys.argv[1])
SECONDS = float(sys.argv[2]) if sys.argv[2:] else 0.0


class Policy(Handler):
    def do_GET(self):
        self.answer({})

    def do_POST(self):
        body = json.loads(self.body())
        if SOCKET.with_name("dies").exists():
            os._exit(1)
        time.sleep(SECONDS)
        asked = body["sampling_params"]
        draw = random.Random(zlib.crc32(json.dumps([body["token_ids"], asked["seed"]]).encode()))
        ids = [draw.randrange(20, 40) for _ in range(draw.randrange(1, asked["max_tokens"] - 1))]
        ids = [i for i in ids if i not in asked["stop_token_ids"]] + asked["stop_token_ids"][:1]
        content = [{"logprob": -draw.random()} for _ in ids]
        choice = {
            "token_ids": ids,
            "logprobs": {"content": content},
            "finish_reason": "stop",
            "weight_versions": [{"version": "4", "start": 0}],
        }
        self.answer({"choices": [choice]})


Server(str(SOCKET), Policy).serve_forever()
