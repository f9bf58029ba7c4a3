"""Redis servers for tests: a real one, and ones that misbehave on purpose."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from redis import Redis

from retrieval.embedded import EmbeddedValkey


@contextmanager
def stopped(valkey: EmbeddedValkey) -> Iterator[None]:
    """The server hangs: its socket accepts, nothing is ever answered."""
    os.kill(valkey.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(valkey.pid, signal.SIGCONT)


def admin(valkey: EmbeddedValkey) -> Redis:
    """A plain client for the test's own look at the server."""
    return Redis.from_url(valkey.url, socket_timeout=10)


@asynccontextmanager
async def answering(reply: bytes) -> AsyncIterator[str]:
    """A server that answers every command with the same bytes; yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(reply * len(re.findall(rb"(?:^|\r\n)\*\d+\r\n", data)))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"redis://{host}:{port}"
    finally:
        server.close()


@asynccontextmanager
async def delayed(valkey: EmbeddedValkey, delay_s: float) -> AsyncIterator[str]:
    """A proxy in front of a real server that holds back every reply; yields its URL."""
    pumps: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = valkey.url.removeprefix("unix://")
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(path)

        async def replies() -> None:
            while data := await upstream_reader.read(1 << 16):
                await asyncio.sleep(delay_s)
                writer.write(data)

        pump = asyncio.create_task(replies())
        pumps.add(pump)
        while data := await reader.read(1 << 16):
            upstream_writer.write(data)
        pump.cancel()
        upstream_writer.close()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"redis://{host}:{port}"
    finally:
        server.close()
        for pump in pumps:
            pump.cancel()
