"""Waits until a real vLLM has sampled tokens, by its own count."""

import asyncio
import re

from gspo_env.engines.vllm import local


async def sampled_more(engine, tokens):
    """Waits until an engine has sampled so many tokens more."""
    before = await _sampled(engine)
    async with asyncio.timeout(300):
        while await _sampled(engine) < before + tokens:
            await asyncio.sleep(0.01)


async def _sampled(engine):
    servers = getattr(engine, "_servers", None)
    if servers is None:
        texts = [await local._read_metrics(engine)]
    else:
        texts = [await engine._read_metrics(server) for server in servers]
    counts = re.findall(
        r"^vllm:generation_tokens_total\{.*\} (\S+)$", "\n".join(texts), re.MULTILINE
    )
    return sum(map(float, counts))
