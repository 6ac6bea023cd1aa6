"""Answers like a vLLM server, for tests of workers: `SOCKET [SECONDS]`; standard library only.

The action follows from the prompt and the seed, as it does with a real server in float32. Each
takes some seconds. A file `dies` beside the socket ends the server with the next request.
"""

import json
import os
import random
import socketserver
import sys
import time
import zlib
from http.server import BaseHTTPRequestHandler
from pathlib import Path

SOCKET = Path(sys.argv[1])
SECONDS = float(sys.argv[2]) if sys.argv[2:] else 0.0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
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

    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

    def address_string(self):
        return ""


class Server(socketserver.ThreadingUnixStreamServer):
    request_queue_size = 256
    daemon_threads = True


Server(str(SOCKET), Handler).serve_forever()
