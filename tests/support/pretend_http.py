"""HTTP servers that pretend, on a port or on a Unix socket; standard library only."""

import json
import socketserver
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def body(self):
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def answer(self, value, status=200, headers=()):
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in dict(headers).items():
            self.send_header(name, text)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

    def address_string(self):
        return ""


@contextmanager
def serve(**methods):
    """The address of a server whose requests these methods of a handler answer."""
    handler = type("Answers", (Handler,), methods)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class Server(socketserver.ThreadingUnixStreamServer):
    request_queue_size = 256
    daemon_threads = True
