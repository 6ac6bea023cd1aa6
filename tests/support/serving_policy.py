"""A scripted policy for tests of the address, and a client that hangs up."""

import http.client
import json
from urllib.parse import urlsplit

from gspo_env.serving import Reply, Request
from gspo_env.types import Message
from support.jails import eventually


class Policy:
    """Answers with given messages, the last one again and again, and notes the requests."""

    def __init__(self, *messages, **reply):
        texts = messages or ("hello",)
        self.replies = [
            Reply(
                message=Message(role="assistant", content=m) if isinstance(m, str) else m, **reply
            )
            for m in texts
        ]
        self.seen = []

    async def __call__(self, request: Request) -> Reply:
        self.seen.append(request)
        return self.replies[min(len(self.seen), len(self.replies)) - 1]


def hang_up(url, key, text, arrived):
    """Sends a request, and closes its connection once `arrived` is true."""
    parts = urlsplit(url)
    body = json.dumps({"messages": [{"role": "user", "content": text}]})
    line = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    headers = {"authorization": f"Bearer {key}"}
    line.request("POST", parts.path + "/chat/completions", body, headers)
    assert eventually(arrived)
    line.close()
