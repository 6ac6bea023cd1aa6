"""A scripted policy for tests of the address."""

from gspo_env.serving import Reply, Request
from gspo_env.types import Message


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
