"""Published threshold sets: immutable texts by version, and one pointer per model.

    vs:thresholds:<version>          a set, never changed
    vs:thresholds:active:<model>     the pointer: which set is in use, and what was before
    vs:thresholds:sets:<model>       versions kept for the model
    vs:thresholds:models             models that have sets

Sets are texts here. Who uses one parses and judges it, so processes of two builds, which may not
accept each other's sets, can share a store.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from retrieval.documents import MAX_DOCUMENT_BYTES, Documents, InMemoryDocuments, Lease
from retrieval.store import StoreError
from valuspec.errors import ValuSpecError

MAX_HISTORY = 32
"""Activations a pointer remembers."""
MAX_REASON_CHARS = 200

RefusalReason = Literal[
    "conflict", "unknown_version", "stale_revision", "stale_fence", "no_previous"
]


class PublishRefusedError(ValuSpecError):
    """The store works, and what was asked must not be done. Nothing was changed.

    conflict:        the version exists with other content: a defect, or somebody is tampering
    unknown_version: no such set is kept for the model
    stale_revision:  the pointer has moved meanwhile: look again
    stale_fence:     the lease has passed to somebody else: stop
    no_previous:     there is nothing to roll back to
    """

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: RefusalReason = reason


@dataclass(frozen=True, slots=True)
class Activation:
    """One move of a pointer. `previous` is the version a rollback returns to."""

    revision: int
    version: str
    previous: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Pointer:
    """Which set a model's replicas use.

    epoch:   drawn when the pointer was made; revisions of two epochs cannot be compared (the store
             was emptied in between)
    history: activations, oldest first, revisions ascending; the last one is in force
    """

    epoch: str
    history: tuple[Activation, ...]

    @property
    def version(self) -> str:
        return self.history[-1].version

    @property
    def revision(self) -> int:
        """1 for the first activation; grows with every one, rollbacks too."""
        return self.history[-1].revision

    @property
    def previous(self) -> str | None:
        return self.history[-1].previous

    @property
    def reason(self) -> str:
        return self.history[-1].reason

    def to_json(self) -> str:
        return json.dumps({"epoch": self.epoch, "history": [asdict(a) for a in self.history]})

    @classmethod
    def from_json(cls, text: str | bytes) -> Pointer:
        """Raises ValueError saying what is wrong."""
        try:
            data = json.loads(text)
            history = tuple(_activation(entry) for entry in data["history"])
            epoch = data["epoch"]
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not a pointer: {type(error).__name__}: {error}") from error
        revisions = [a.revision for a in history]
        if not isinstance(epoch, str) or not history or revisions != sorted(set(revisions)):
            raise ValueError(f"not a pointer: epoch {epoch!r:.40}, revisions {revisions}")
        return cls(epoch, history)


class ThresholdStore:
    """Reads and publishes threshold sets. Methods raise StoreError when the store fails.

    Publishing is two steps, each safe to repeat: `put` the set, then `activate` it. Whoever dies in
    between leaves the old set in force, and a set nobody points to.
    """

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    @classmethod
    def at(cls, url: str) -> ThresholdStore:
        """On the Redis or Valkey at `url`."""
        from retrieval.redis_documents import RedisDocuments

        return cls(RedisDocuments(url))

    @classmethod
    def in_memory(cls) -> ThresholdStore:
        return cls(InMemoryDocuments())

    # -- reading ---------------------------------------------------------------------------------

    async def models(self) -> list[str]:
        """Fingerprints of the models that sets are kept for."""
        return sorted(await self._documents.members("vs:thresholds:models"))

    async def versions(self, model: str) -> list[str]:
        """Versions kept for a model, in no meaningful order."""
        return sorted(await self._documents.members(_sets_key(model)))

    async def get(self, version: str) -> str | None:
        """The text of a set, unjudged; None if it is not kept. A giant one comes cut."""
        text = await self._documents.read(_set_key(version))
        # What is no UTF-8 is no set either, as whoever parses it will find.
        return None if text is None else text.decode(errors="replace")

    async def pointer(self, model: str) -> Pointer | None:
        """Which set is in use; None before the first activation.

        Raises StoreError (protocol) for a damaged one, which `activate` replaces when the caller
        expects revision 0.
        """
        raw = await self._documents.read(_pointer_key(model))
        try:
            return None if raw is None else Pointer.from_json(raw)
        except ValueError as error:
            raise StoreError("protocol", f"{_pointer_key(model)}: {error}") from error

    # -- publishing ------------------------------------------------------------------------------

    async def put(self, model: str, version: str, text: str) -> bool:
        """Keep a set for ever; False if it was kept already. Raises PublishRefusedError (conflict).

        version: the content hash in the text; letters and digits
        """
        if not version.isalnum():
            raise ValueError(f"version {version!r}; letters and digits expected")
        content = text.encode()
        if len(content) > MAX_DOCUMENT_BYTES:
            raise ValueError(f"the set has {len(content)} bytes; at most {MAX_DOCUMENT_BYTES}")
        created = await self._documents.create(_set_key(version), content)
        if not created and await self._documents.read(_set_key(version)) != content:
            raise PublishRefusedError("conflict", f"{version} is kept with other content")
        await self._documents.add_members(_sets_key(model), version)
        await self._documents.add_members("vs:thresholds:models", model)
        return created

    async def activate(
        self,
        model: str,
        version: str,
        *,
        expected_revision: int,
        reason: str,
        fence: Lease | None = None,
    ) -> Pointer:
        """Point the model's replicas to a set that is kept; return the pointer now in force.

        expected_revision: the pointer's revision as the caller saw it, 0 for none
        fence:             the caller's lease, if it works under one

        Raises PublishRefusedError: unknown_version, stale_revision, stale_fence.
        """
        if version not in await self._documents.members(_sets_key(model)):
            raise PublishRefusedError("unknown_version", f"{version} is not kept for model {model}")
        raw, pointer = await self._expect(model, expected_revision)
        previous = pointer.version if pointer else None
        if pointer and previous == version:  # confirmed: still goes back to where it did
            previous = pointer.previous
        return await self._move(model, raw, pointer, version, previous, reason, fence)

    async def rollback(self, model: str, *, expected_revision: int, reason: str) -> Pointer:
        """Point back to the set in force before; again, to the one before that.

        Raises PublishRefusedError: no_previous, stale_revision.
        """
        raw, pointer = await self._expect(model, expected_revision)
        if pointer is None or pointer.previous is None:
            raise PublishRefusedError("no_previous", f"model {model} has no set to roll back to")
        target = pointer.previous
        # Where that set went back to, this one does: otherwise two rollbacks would go in a circle.
        before = next((a.previous for a in reversed(pointer.history) if a.version == target), None)
        return await self._move(model, raw, pointer, target, before, reason, None)

    # -- leases ----------------------------------------------------------------------------------

    async def acquire_lease(self, name: str, ttl_s: float) -> Lease | None:
        """Take the lease of this name for ttl_s seconds; None while somebody holds it."""
        return await self._documents.acquire(name, ttl_s)

    async def renew_lease(self, lease: Lease, ttl_s: float) -> bool:
        """Hold it for ttl_s seconds from now on; False if it has lapsed."""
        return await self._documents.renew(lease, ttl_s)

    async def release_lease(self, lease: Lease) -> None:
        """Give it back; a lapsed one is ignored."""
        await self._documents.release(lease)

    async def aclose(self) -> None:
        await self._documents.aclose()

    async def _expect(self, model: str, revision: int) -> tuple[bytes | None, Pointer | None]:
        """The pointer as stored and as read. Raises PublishRefusedError (stale_revision)."""
        raw = await self._documents.read(_pointer_key(model))
        try:
            pointer = None if raw is None else Pointer.from_json(raw)
        except ValueError:  # damaged: as good as none
            pointer = None
        found = pointer.revision if pointer else 0
        if found != revision:
            raise PublishRefusedError(
                "stale_revision", f"the pointer is at revision {found}, the caller saw {revision}"
            )
        return raw, pointer

    async def _move(
        self,
        model: str,
        raw: bytes | None,
        pointer: Pointer | None,
        version: str,
        previous: str | None,
        reason: str,
        fence: Lease | None,
    ) -> Pointer:
        revision = pointer.revision + 1 if pointer else 1
        moved = Pointer(
            epoch=pointer.epoch if pointer else secrets.token_hex(8),
            history=(
                *(pointer.history[1 - MAX_HISTORY :] if pointer else ()),
                Activation(revision, version, previous, reason[:MAX_REASON_CHARS]),
            ),
        )
        swapped = await self._documents.swap(
            _pointer_key(model), raw, moved.to_json().encode(), fence
        )
        if swapped == "changed":
            raise PublishRefusedError("stale_revision", f"the pointer has left {revision - 1}")
        if swapped == "fenced":
            raise PublishRefusedError("stale_fence", f"{fence} has passed to somebody else")
        return moved


def _activation(entry: Mapping[str, Any]) -> Activation:
    activation = Activation(**entry)
    types = (int, str, str | None, str)
    fields = (activation.revision, activation.version, activation.previous, activation.reason)
    if not all(isinstance(f, t) for f, t in zip(fields, types, strict=True)):
        raise TypeError(f"activation {entry!r:.80}")
    return activation


def _set_key(version: str) -> str:
    return f"vs:thresholds:{version}"


def _sets_key(model: str) -> str:
    return f"vs:thresholds:sets:{model}"


def _pointer_key(model: str) -> str:
    return f"vs:thresholds:active:{model}"
