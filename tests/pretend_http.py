"""HTTP over a Unix socket for pretend vLLM servers; standard library only."""

import json
import socketserver
from http.server import BaseHTTPRequestHandler


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


class Server(socketserver.ThreadingUnixStreamServer):
    request_queue_size = 256
    daemon_threads = True
