"""A server on this machine that follows a running run with the page of `gspo-env view`."""

from __future__ import annotations

import hmac
import logging
import secrets
import sys
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gspo_env.episodes.page import Part, Source, render

logger = logging.getLogger(__name__)


class LiveServer(ThreadingHTTPServer):
    """Serves the page of a run on 127.0.0.1, to those who know its address.

    Args:
        run: Folder of the run.
        port: 0 takes a free one.
        most_mb: Megabytes that the episodes may take.

    Raises:
        OutputError: This is not the folder of a run.
    """

    daemon_threads = True

    def __init__(self, run: str | Path, *, port: int = 0, most_mb: int = 64) -> None:
        self._source, self._lock = Source(run, most_mb * 10**6), Lock()
        self._parts: list[Part] = []
        self._state = ""
        self.key = secrets.token_urlsafe(24)
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def host(self) -> str:
        """The only `Host` that requests may name, so that no other site can read the answers."""
        return f"127.0.0.1:{self.server_address[1]}"

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{self.host}/{self.key}/"

    def answer(self, name: str, known: str) -> tuple[int, str, bytes]:
        """Returns the status, the kind and the body of an answer.

        Args:
            name: The last part of the path.
            known: The state of the data that the page has.
        """
        if name == "":
            mark = '<script type="text/plain" id="live"></script>'
            return 200, "text/html; charset=utf-8", render(mark, "'self'").encode()
        with self._lock:
            if name == "index":
                if not self._source.exists:
                    return 503, "text/plain", b"the folder of the run is gone"
                state = self._source.state
                if state == known:
                    return 204, "", b""
                self._parts, self._state = self._source.parts(), state
                body = self._source.index(self._parts)
                return 200, "application/json", b'{"state":"%s",' % state.encode() + body[1:]
            for part in self._parts:
                for n, block in enumerate(part.blocks):
                    if name == f"{part.name}.{n}":
                        return 200, "application/json", zlib.decompress(block)
        return 404, "text/plain", b"not found"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs in one line what a request failed of; that a browser hung up is no failure."""
        error = sys.exception()
        if not isinstance(error, ConnectionError):
            logger.warning("a request of the page failed: %s: %s", type(error).__name__, error)


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = 30

    def do_GET(self) -> None:
        """Answers with the page or with data."""
        address = urlsplit(self.path)
        key, _, name = address.path.removeprefix("/").partition("/")
        allowed = hmac.compare_digest(key.encode(), self.server.key.encode())
        if not allowed or self.headers.get("Host") != self.server.host:
            status, kind, body = 404, "text/plain", b"not found"
        else:
            known = parse_qs(address.query).get("known", [""])[0]
            status, kind, body = self.server.answer(name, known)
        self.send_response(status)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        if status != 204:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Says nothing."""
