"""Answers like a vLLM server, for tests of the fleet without vLLM; standard library only.

The ids of an action follow from the weights that were loaded. A request, and the cache for its
prompt, keep those of their start until the cache is reset. A file with the name of a fault beside
the socket changes an answer, once for each character in it. With `slow`, long actions last until
the weights have changed.
"""

import fcntl
import itertools
import json
import os
import sys
import threading
import time
import zlib
from http.server import ThreadingHTTPServer
from pathlib import Path

from pretend_http import Handler, Server

SOCKET = Path(sys.argv[sys.argv.index("--uds") + 1])
STARTED_WITH = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
EXTENSION = "gspo_env.engines.vllm.worker.CheckedWorker"
INFO = {
    "parallel_config": {"worker_extension_cls": EXTENSION},
    "weight_transfer_config": STARTED_WITH.get("weight-transfer-config"),
    "model_config": {
        "dtype": "torch.float32",
        "max_model_len": STARTED_WITH.get("max-model-len", 100),
    },
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


def read(folder):
    return b"".join(path.read_bytes() for path in sorted(Path(folder).glob("*.safetensors")))


class VLLM(Handler):
    base, adapters = b"", {}
    roots, numbers, loaded = {}, itertools.count(1), {}
    cached, resets, aborts = {}, 0, 0
    version = "default"
    going = threading.Event()
    counting, running, most, held = threading.Lock(), 0, 0, 0

    def do_GET(self):
        if self.path == "/held":  # long actions that wait
            super().answer(VLLM.held)
            return
        if self.path == "/is_paused":
            super().answer({"is_paused": not VLLM.going.is_set()})
            return
        if takes("busy"):
            time.sleep(6)
        if self.path == "/metrics":
            self.answer_metrics()
            return
        if self.path.startswith("/server_info") and takes("no pip"):
            super().answer({}, 500)
            return
        models = [{"id": name, "root": root} for name, root in VLLM.roots.items()]
        self.answer({"vllm_config": INFO, "world_size": 1, "data": models})

    def do_POST(self):
        body = self.body()
        key = os.environ.get("VLLM_API_KEY")
        guarded = self.path.startswith(("/v1", "/inference"))
        if guarded and key and self.headers["Authorization"] != f"Bearer {key}":
            super().answer({"error": "Unauthorized"}, 401)
            return
        path, _, query = self.path.partition("?")
        fields = json.loads(body) if body else {}
        if path == "/collective_rpc":
            method, folder = fields["method"], fields["kwargs"].get("folder")
            while SOCKET.with_name("loading").exists():
                time.sleep(0.01)
            if method == "load_checked":
                VLLM.base = read(folder)
            elif method == "load_adapter":
                VLLM.adapters[VLLM.loaded[int(fields["kwargs"]["number"])]] = read(folder)
            elif method == "adapter_ids":
                self.answer({"results": [sorted(VLLM.loaded)]})
                return
            elif method == "free_adapter":
                VLLM.loaded.pop(int(fields["kwargs"]["number"]))
            refused = method != "start_checking" and takes("refuses")
            if refused and method == "load_adapter":
                super().answer({}, 500)
            else:
                self.answer({"results": [{"unread": ["w"] * refused, "stale": []}]})
        elif path == "/reset_prefix_cache":
            adapters = {"": b"", **VLLM.adapters}
            VLLM.cached = {n: zlib.crc32(VLLM.base + a) % 1000 for n, a in adapters.items()}
            VLLM.resets += query == "reset_running_requests=true"
            self.answer({"success": not takes("held")})
        elif path == "/v1/unload_lora_adapter":
            VLLM.adapters.pop(fields["lora_name"], None)
            VLLM.roots.pop(fields["lora_name"], None)
            self.answer({})  # the worker keeps it, as vLLM's does
        elif path == "/v1/load_lora_adapter":
            name = fields["lora_name"]
            VLLM.adapters[name] = read(fields["lora_path"])
            VLLM.roots[name] = fields["lora_path"]
            VLLM.loaded[next(VLLM.numbers)] = name
            super().answer({}, 200 if STARTED_WITH.get("enable-lora") else 404)
        elif path == "/pause":
            VLLM.going.clear()
            VLLM.aborts += "mode=keep" not in query
            time.sleep(0.01)  # until the current step is done
            self.answer({})
        elif path == "/resume":
            VLLM.going.set()
            self.answer({})
        elif path == "/update_weight_version":
            VLLM.version = fields["new_version"]
            self.answer({})
        elif takes("dies"):
            os._exit(1)
        elif takes("drops"):
            self.close_connection = True
        elif fields.get("model", "") not in ("", *VLLM.adapters):
            super().answer({"error": "the model does not exist"}, 404)
        else:
            with VLLM.counting:
                VLLM.running += 1
                VLLM.most = max(VLLM.most, VLLM.running)
            try:
                choice = self.sample(
                    fields.get("model", ""), fields["sampling_params"]["max_tokens"]
                )
            finally:
                with VLLM.counting:
                    VLLM.running -= 1
            if takes("abort"):
                choice["finish_reason"] = "abort"
            self.answer({"choices": [{}] if takes("empty") else [choice]})

    def sample(self, name, tokens):
        weights, resets, ids, spans = VLLM.cached.get(name, -1), VLLM.resets, [], []
        aborts = VLLM.aborts
        for n in range(tokens):
            VLLM.going.wait()
            if aborts != VLLM.aborts:
                break
            if resets != VLLM.resets:
                weights, resets = VLLM.cached.get(name, -1), VLLM.resets
            if not spans or spans[-1]["version"] != VLLM.version:
                spans.append({"version": VLLM.version, "start": n})
            ids.append(weights)
            if n == 40:
                self.hold()
        return {
            "token_ids": ids,
            "finish_reason": "length" if len(ids) == tokens else "abort",
            "logprobs": {"content": [{"logprob": -1.0}] * len(ids)},
            "weight_versions": spans,
        }

    def hold(self):
        with VLLM.counting:
            VLLM.held += 1
        while VLLM.version.endswith(".0") and SOCKET.with_name("slow").exists():
            time.sleep(0.01)
        with VLLM.counting:
            VLLM.held -= 1

    def answer_metrics(self):
        blocks = STARTED_WITH.get("num-gpu-blocks-override", 1000)
        text = f"""vllm:cache_config_info{{block_size="32",num_gpu_blocks="{blocks}"}} 1.0
vllm:kv_cache_usage_perc{{}} 0.0
vllm:num_requests_running{{}} {VLLM.running}
vllm:num_requests_waiting{{}} 0.0
vllm:num_preemptions_total{{}} 0.0
most {VLLM.most}
"""
        self.send_response(503 if takes("mute") else 200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def answer(self, value):
        super().answer(value, 500 if takes("fails") else 200)


VLLM.going.set()
if "--port" in sys.argv:  # it was started by somebody else
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), VLLM).serve_forever()
Server(str(SOCKET), VLLM).serve_forever()
