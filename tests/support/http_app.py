"""Gateway and a real replica behind a real HTTP server of this process, on the loopback address."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from deployments.auth import ApiKeys
from deployments.gateway import create_app
from deployments.settings import AppArgs
from tests.support.fake_port import InProcessPort


@contextlib.contextmanager
def serving(port: InProcessPort, args: AppArgs) -> Iterator[tuple[str, int]]:
    """Serve `port` from a thread of its own; yields host and port number."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    app = create_app(port, args, ApiKeys([]))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join()


def assert_idle(port: InProcessPort) -> None:
    """Nothing is left of what a replica with a real engine has done."""
    replica, engine = port.replica, port.engine
    assert replica._num_unfinished == 0
    assert not replica._open_calls
    assert not replica._loop._deliver
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    assert engine.pool.num_available == engine.pool.num_blocks
    assert sorted(engine._places.free) == list(range(engine.max_batch_size))


@dataclass
class Response:
    """An HTTP answer as it comes in."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader
    token_ids: list[int] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    """Of the chunks."""
    done: bool = False

    async def event(self) -> bool:
        """Take in the next event; False at the end of the stream."""
        while line := await self.reader.readline():
            if line == b"data: [DONE]\n":
                self.done = True
                return False
            if line.startswith(b"data: "):
                chunk = json.loads(line.removeprefix(b"data: "))
                self.ids.add(chunk["id"])
                for choice in chunk["choices"]:
                    self.token_ids += choice.get("token_ids") or []
                return True
        return False


class Connection:
    """One connection that a test closes when it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, address: tuple[str, int]) -> AsyncIterator[Connection]:
        reader, writer = await asyncio.open_connection(*address)
        try:
            yield cls(reader, writer)
        finally:
            writer.transport.abort()

    def send(self, body: dict[str, Any], request_id: str, *, share: float = 1.0) -> None:
        """Send a request for a completion, or the leading `share` of its bytes."""
        content = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: {request_id}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        whole = head.encode() + content
        self.writer.write(whole[: int(share * len(whole))])

    async def response(self) -> Response:
        status = int((await self.reader.readline()).split()[1])
        headers = {}
        while line := (await self.reader.readline()).strip().decode():
            name, value = line.split(":", 1)
            headers[name.lower()] = value.strip()
        return Response(status, headers, self.reader)

    async def body(self, response: Response) -> dict[str, Any]:
        """Of an answer that is no stream."""
        content = await self.reader.readexactly(int(response.headers["content-length"]))
        decoded: dict[str, Any] = json.loads(content)
        return decoded
