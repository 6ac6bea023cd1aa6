"""An event loop whose time jumps to the next timer, so that tests of waiting take no time."""

import asyncio


class Deadlock(Exception):
    """Nothing will ever happen again."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps instead of sleeping; raises `Deadlock` where a real loop would wait for ever."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        select = self._selector.select

        def jump(timeout):
            if timeout is None:
                raise Deadlock
            self.now += max(timeout, 0.0)
            return select(0)

        self._selector.select = jump

    def time(self):
        return self.now


def run(coroutine):
    """Runs a coroutine in virtual time; returns its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
