"""Answers like a vLLM server, for tests of the fleet without vLLM; standard library only.

An action has one id, which follows from the weights that were loaded. A file with the name of a
fault beside the socket changes an answer, once for each character in it.
"""

import fcntl
import json
import os
import socketserver
import sys
import zlib
from http.server import BaseHTTPRequestHandler
from pathlib import Path

SOCKET = Path(sys.argv[sys.argv.index("--uds") + 1])
EXTENSION = "gspo_env.engines.vllm.worker.CheckedWorker"
INFO = {
    "parallel_config": {"worker_extension_cls": EXTENSION},
    "weight_transfer_config": None,
    "model_config": {"dtype": "torch.float32"},
}


def takes(fault):
    path = SOCKET.with_name(fault)
    if not path.exists():
        return False
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the servers of a fleet share the file
        left = file.read()
        file.seek(0)
        file.truncate(max(len(left) - 1, 0))
    return bool(left)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    loaded = -1

    def do_GET(self):
        self.answer({"vllm_config": INFO})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/collective_rpc":
            folder = Path(json.loads(body)["kwargs"]["folder"])
            data = b"".join(p.read_bytes() for p in sorted(folder.glob("*.safetensors")))
            Handler.loaded = zlib.crc32(data) % 1000
            self.answer({"results": [{"unread": [], "stale": []}]})
        elif self.path == "/reset_prefix_cache":
            self.answer({"success": not takes("held")})
        elif takes("dies"):
            os._exit(1)
        else:
            choice = {
                "token_ids": [Handler.loaded],
                "logprobs": {"content": [{"logprob": -1.0}]},
                "finish_reason": "abort" if takes("abort") else "length",
            }
            self.answer({"choices": [{}] if takes("empty") else [choice]})

    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(500 if takes("fails") else 200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

    def address_string(self):
        return ""


class Server(socketserver.ThreadingUnixStreamServer):
    request_queue_size = 64
    daemon_threads = True


Server(str(SOCKET), Handler).serve_forever()
