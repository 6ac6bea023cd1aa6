"""Seeds: every draw of a run follows from its seed."""

from __future__ import annotations

import hashlib

HELD_OUT = 10**9
"""Seeds from here on are for evaluation; training seeds stay below."""


def derive_seed(*parts: int | str) -> int:
    """A 64-bit seed that depends on every part."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
