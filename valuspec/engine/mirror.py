"""How the further ranks of a target do what rank 0 does, step by step.

Rank 0 alone schedules, drafts, values and accepts. What that comes to for keys and values is one of
four commands, sent to every other rank in the order of rank 0's own calls: make a cache, give it
up, compute these rows, move these cells. Each rank then runs the same code on its own shard.

A message is int64 numbers: command, number of arrays, their lengths, their elements.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from valuspec.engine.kv_cache import BLOCK, Int64Array, KvCache
from valuspec.engine.rows import SequenceRows
from valuspec.errors import ModelError, RankLostError

if TYPE_CHECKING:
    from valuspec.engine.target import Target


class Channel(Protocol):
    """A way to another rank. Messages arrive whole and in order; OSError or EOFError when it is
    gone. `multiprocessing.connection.Connection` is one."""

    def send_bytes(self, message: bytes, /) -> None: ...
    def recv_bytes(self) -> bytes: ...
    def close(self) -> None: ...


class _Command(IntEnum):
    MAKE = 0
    """[cache, num_blocks, sequences, blocks of a sequence]"""
    GIVE_UP = 1
    """[cache]"""
    FORWARD = 2
    """[cache, min_width], sequences, starts, numbers of rows, then flat: token ids, parents, and
    the sequences' block tables as far as they are read"""
    MOVE = 3
    """[cache], sources, targets"""


class Leader:
    """Rank 0's side: tells the other ranks what to do.

    on_loss: called once, when a rank is lost. Nothing can be computed from then on.
    """

    def __init__(self, channels: Sequence[Channel]) -> None:
        self.on_loss: Callable[[RankLostError], None] | None = None
        self._channels = channels
        self._loss: RankLostError | None = None
        self._num_caches = 0
        # Filled by whoever drops a cache, maybe in the middle of a message.
        self._given_up: deque[int] = deque()

    def await_others(self, model_fingerprint: str) -> None:
        """Return once all ranks have loaded their shards. Raises RankLostError, or ModelError if
        one has another model."""
        for channel in self._channels:
            try:
                fingerprint = channel.recv_bytes().decode()
            except (OSError, EOFError) as error:
                self._lose(error)
            if fingerprint != model_fingerprint:
                raise ModelError(
                    f"the ranks have loaded different weights: {model_fingerprint} on rank 0, "
                    f"{fingerprint} on another. Give all nodes the same model"
                )

    def new_cache(self, **sizes: Any) -> KvCache:
        """A cache, with one like it on every rank. sizes: arguments of KvCache"""
        key, self._num_caches = self._num_caches, self._num_caches + 1
        self._tell(_Command.MAKE, [key, sizes["num_blocks"], *sizes["tables"].shape])
        cache = _LedCache(self, key, **sizes)
        weakref.finalize(cache, self._given_up.append, key).atexit = False
        return cache

    @contextmanager
    def forward(
        self, members: Sequence[SequenceRows], cache: KvCache, min_width: int
    ) -> Iterator[None]:
        """Have all ranks compute these rows; rank 0 must compute the same in the body.

        Any exception in it, not only a lost rank's, leaves the ranks out of step: RankLostError.
        """
        assert isinstance(cache, _LedCache)
        sequences = np.array([member.sequence for member in members])
        num_blocks = -(-max(member.start + len(member) for member in members) // BLOCK)
        self._tell(
            _Command.FORWARD,
            [cache.key, min_width],
            sequences,
            [member.start for member in members],
            [len(member) for member in members],
            np.concatenate([member.token_ids for member in members]),
            np.concatenate([member.parents for member in members]),
            cache.tables[sequences, :num_blocks].reshape(-1),
        )
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - raised again as what it means
            self._lose(error)

    def move(self, key: int, sources: Int64Array, targets: Int64Array) -> None:
        self._tell(_Command.MOVE, [key], sources, targets)

    def close(self) -> None:
        """Let the other ranks go."""
        for channel in self._channels:
            channel.close()

    def _tell(self, command: _Command, *arrays: Sequence[int] | Int64Array) -> None:
        if self._loss is not None:
            raise self._loss
        try:
            while self._given_up:
                self._send(_Command.GIVE_UP, [self._given_up.popleft()])
            self._send(command, *arrays)
        except OSError as error:
            self._lose(error)

    def _send(self, command: _Command, *arrays: Sequence[int] | Int64Array) -> None:
        head = [command, len(arrays), *map(len, arrays)]
        message = np.concatenate([head, *arrays]).astype(np.int64).tobytes()
        for channel in self._channels:
            channel.send_bytes(message)

    def _lose(self, error: BaseException) -> NoReturn:
        self._loss = RankLostError(f"the ranks of this target no longer work together: {error!r}")
        self.close()
        if self.on_loss is not None:
            self.on_loss(self._loss)
        raise self._loss from error


class _LedCache(KvCache):
    """Rank 0's part of a cache."""

    def __init__(self, leader: Leader, key: int, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.key = key
        self._leader = leader

    def move(self, sources: Int64Array, targets: Int64Array) -> None:
        self._leader.move(self.key, sources, targets)
        super().move(sources, targets)


def follow(target: Target, leader: Channel) -> None:
    """Do what rank 0 says with this rank's shard, until rank 0 closes the channel.

    Raises RuntimeError when a rank is lost in the middle of a forward.
    """
    caches: dict[int, KvCache] = {}
    leader.send_bytes(target.model_fingerprint.encode())
    while True:
        try:
            message = leader.recv_bytes()
        except (OSError, EOFError):
            return
        numbers = np.frombuffer(message, np.int64)
        lengths = numbers[2 : 2 + numbers[1]]
        (key, *options), *arrays = np.split(
            numbers[2 + numbers[1] :], np.cumsum(lengths[:-1], dtype=np.int64)
        )
        match _Command(numbers[0]):
            case _Command.MAKE:
                num_blocks, *shape = options
                caches[key] = target.new_cache(np.zeros(shape, np.int64), int(num_blocks))
            case _Command.GIVE_UP:
                del caches[key]
            case _Command.FORWARD:
                (target.min_width,) = map(int, options)
                _forward(target, caches[key], *arrays)
            case _Command.MOVE:
                caches[key].move(*arrays)


def _forward(
    target: Target,
    cache: KvCache,
    sequences: Int64Array,
    starts: Int64Array,
    counts: Int64Array,
    token_ids: Int64Array,
    parents: Int64Array,
    tables: Int64Array,
) -> None:
    blocks = tables.reshape(len(sequences), -1)
    cache.tables[sequences, : blocks.shape[1]] = blocks
    ends = np.cumsum(counts)[:-1]
    members = map(
        SequenceRows,
        sequences.tolist(),
        starts.tolist(),
        np.split(token_ids, ends),
        np.split(parents, ends),
    )
    target.forward(list(members), cache, np.zeros(1, np.int64))
