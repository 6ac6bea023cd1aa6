"""A real MCP server for the tests: `python mcp_server.py [PORT]`; without a port over stdio."""

import json
import os
import sys
import time

from mcp.server.mcpserver import Context, MCPServer
from mcp.types import (
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
)

server = MCPServer("workshop")
memory: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def remember(word: str) -> str:
    """Remember a word and give all words so far."""
    memory.append(word)
    return " ".join(memory)


@server.tool()
def divide(a: float, b: float) -> float:
    """Divide two numbers."""
    return a / b


@server.tool()
def hang(seconds: float = 3600.0) -> str:
    """Do not answer."""
    time.sleep(seconds)
    return "late"


@server.tool()
async def slow(seconds: float) -> str:
    """Answer late; other calls may finish first."""
    import anyio

    await anyio.sleep(seconds)
    return "late"


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def pid() -> int:
    """Give the number of the server's process."""
    return os.getpid()


@server.tool()
def variable(name: str) -> str:
    """Give an environment variable of the server."""
    return os.environ.get(name, "none")


@server.tool()
def header(name: str, context: Context) -> str:
    """Give a header of the request."""
    return str(context.request_context.request.headers.get(name))


@server.tool()
def result(texts: list[str], structure: str, image: bool = False, uri: str = "") -> CallToolResult:
    """Give texts, an image, a link, a file, and a structure in JSON."""
    content = [TextContent(text=text) for text in texts]
    content += [ImageContent(data="eA==", mime_type="image/png")] * image
    if uri:
        file = BlobResourceContents(uri=uri, blob="eA==")
        content += [ResourceLink(name="notes", uri=uri), EmbeddedResource(resource=file)]
    return CallToolResult(content=content, structured_content=json.loads(structure))


@server.tool()
def stock(items: list[str]) -> list[dict[str, str | int]]:
    """Give the stock of items."""
    return [{"item": item, "count": n} for n, item in enumerate(items)]


if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run("stdio")
