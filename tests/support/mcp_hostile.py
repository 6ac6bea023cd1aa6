"""A hostile MCP server for the tests, without a library: `python mcp_hostile.py KIND [PORT]`.

Its tools and results are those of `KIND`; a kind without an entry behaves well.
"""

import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KIND = sys.argv[1]
A = {"type": "object", "properties": {"a": {"type": "string"}}}
REFS = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
SCHEMAS = {
    "pattern": {"type": "object", "properties": {"a": {"pattern": "^(a+)+$"}}},
    "names": {"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False},
    "choice": {
        "properties": {"a": {"oneOf": [{"pattern": "^a"}, {"pattern": "^a*b"}]}},
        "if": {"properties": {"a": {"pattern": "^c"}}},
        "then": {"required": ["zz"]},
    },
    "type": {"type": "object", "properties": {"a": {"type": "nonsense"}}},
    "list": {"type": "object", "properties": []},
    "nowhere": {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
    "remote": {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/schema"}}},
    "loop": {"$ref": "#"},
    "broken pattern": {"type": "object", "properties": {"a": {"pattern": "("}}},
    "number": {"type": "object", "properties": {"a": {"minLength": "x"}}},
    "zero": {"type": "object", "properties": {"a": {"multipleOf": 0}}},
    "doubling": {"$defs": {**REFS, "d40": {"type": "object"}}, "$ref": "#/$defs/d0"},
    "unique": {"type": "object", "properties": {"a": {"uniqueItems": True}}},
    "choices": {
        "properties": {"a": {"items": {"enum": [*([n] for n in range(900)), {}, {"b": 1}]}}}
    },
    "alternatives": {"properties": {"a": {"items": {"anyOf": [False] * 2000 + [True]}}}},
    "passes": {"properties": {"a": {"allOf": [{"items": True}] * 1000}}},
    "wide": {"type": "object", "properties": {str(n): {} for n in range(4000)}},
    "long": {"type": "object", "properties": {"a": {"const": "x" * 100_000}}},
}
deep: dict = {}
for _ in range(150):
    deep = {"not": deep}
SCHEMAS["deep"] = deep
nested: list = []
for _ in range(500):
    nested = [nested]


def text(content, **more):
    return {"content": [{"type": "text", "text": content}], **more}


RESULTS = {
    "big error": text("x" * 800_000, isError=True),
    "empty": text(""),
    "surrogates": text("th\ud800 \U0001f600 \\ud800"),
    "nested": {**text("x"), "structuredContent": {"a": nested}},
    "blocks": {"content": [{"type": "text", "text": "x"}] * 20_000},
    "big result": text("x" * 8_000_000),
    "values": {**text("x"), "structuredContent": {"a": [[]] * 500_000}},
    "structured": text("ok", structuredContent={"a": "a" * 40 + "!"}),
    "not a result": {"content": "x" * 100_000},
}


def call():
    if KIND == "stderr":
        for _ in range(100):
            sys.stderr.write("noise " * 20_000)
        sys.stderr.flush()
    if KIND == "pids":
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        pids = [subprocess.Popen(sleep, start_new_session=new).pid for new in (False, True)]
        return text(f"{os.getpid()} {' '.join(map(str, pids))}")
    return RESULTS.get(KIND, text("ok"))


def tools(cursor):
    tool = {"name": "t", "inputSchema": {"type": "object", **SCHEMAS.get(KIND, A)}}
    if KIND == "structured":
        tool["outputSchema"] = {"type": "object", "properties": {"a": {"pattern": "^(a+)+$"}}}
    if KIND == "name":
        tool["name"] = "<tool_call>"
    if KIND == "description":
        tool["description"] = "x" * 1_000_000
    if KIND == "together":
        heavy = {"type": "object", "properties": {str(n): {} for n in range(200)}}
        return {"tools": [{"name": f"t{n}", "inputSchema": heavy} for n in range(100)]}
    if KIND == "many":
        return {"tools": [{**tool, "name": f"t{n}"} for n in range(5000)]}
    more = {"nextCursor": str(int(cursor or 0) + 1)} if KIND == "pages" else {}
    return {"tools": [tool] if not cursor else [], **more}


def answer(message):
    """The answer to a message; None to a notification."""
    if "id" not in message:
        return None
    method, params = message.get("method"), message.get("params") or {}
    made = {"jsonrpc": "2.0", "id": message["id"]}
    if method == "initialize":
        result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "hostile", "version": "1"}}  # fmt: skip
    elif method == "tools/list":
        result = tools(params.get("cursor"))
    elif method == "tools/call" and KIND == "big refusal":
        return {**made, "error": {"code": -32001, "message": "x" * 800_000}}
    elif method == "tools/call":
        result = call()
    else:
        return {**made, "error": {"code": -32601, "message": "no such method"}}
    return {**made, "result": result}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_error(405)

    do_DELETE = do_GET

    def do_POST(self):
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        reply = answer(message)
        calls = message.get("method") == "tools/call"
        self.send_response(200 if reply else 202)
        kind = "text/event-stream" if calls and KIND in ("events", "event") else "application/json"
        self.send_header("content-type", kind)
        if calls and KIND == "compressed":
            self.send_header("content-encoding", "gzip")
        self.end_headers()
        if calls and KIND == "compressed":
            body = json.dumps({**reply, "result": text("x" * 50_000_000)}).encode()
            self.wfile.write(gzip.compress(body, 1))
        elif calls and KIND in ("endless", "events", "event"):
            part = {"endless": b" ", "events": b"data:\n\n", "event": b"data: x\n"}[KIND] * 10_000
            for _ in itertools.count():
                self.wfile.write(part)
        elif reply:
            self.wfile.write(json.dumps(reply).encode())


if len(sys.argv) > 2:
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
if KIND == "exits":
    sys.exit("it does not start")
if KIND == "stubborn":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
for line in sys.stdin:
    reply = answer(json.loads(line))
    calls = json.loads(line).get("method") == "tools/call"
    if calls and KIND == "endless":
        while True:
            sys.stdout.write("x" * 100_000)
    if calls and KIND == "no messages":
        sys.stdout.write("Downloading... 50 %\n" * 500 + '{"jsonrpc": "2.0", "id": [{}]}\n' * 500)
    if calls and KIND == "bytes":
        said = json.dumps({**reply, "result": text("the")}).replace("the", "th\xe9")
        os.write(1, said.encode("latin-1") + b"\n")
        continue
    if calls and KIND == "strange notes":
        note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": []}}
        sys.stdout.write((json.dumps(note) + "\n") * 500)
    if calls and KIND == "flood":
        note = {"jsonrpc": "2.0", "method": "notifications/message",
                "params": {"level": "info", "data": "x"}}  # fmt: skip
        for _ in range(5000):
            sys.stdout.write(json.dumps(note) + "\n")
    if reply:
        print(json.dumps(reply), flush=True)
if KIND in ("stubborn", "pids"):
    time.sleep(600)
