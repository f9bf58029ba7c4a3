"""Which threshold set a replica uses, and when another one may replace it. Decisions only, no I/O.

Where a set comes from, first of these that applies:

1. `user_config.threshold_file`: that file, whatever is published
2. `user_config.threshold_version`: that published version, until it is unpinned
3. the store's pointer for the model
4. the set that is shipped with ValuSpec

A set that is refused leaves the last good one in use, and so does a store that cannot be reached.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from retrieval.threshold_store import Pointer
from valuspec.errors import ThresholdError
from valuspec.thresholds import ThresholdSet

logger = logging.getLogger(__name__)

MAX_EVENTS = 64

Origin = Literal["file", "pinned", "store", "shipped", "rolled_back"]
EventKind = Literal["changed", "refused", "rolled_back", "slow"]


@dataclass(frozen=True, slots=True)
class ThresholdEvent:
    """Something that happened to the set in use.

    changed, rolled_back: `old` gave way to `new`
    refused:              `new` ("" if unknown) was not taken, `old` stays
    slow:                 `old` is slower than plain decoding, and there is nothing to go back to
    """

    kind: EventKind
    old: str
    new: str
    reason: str


class ActiveThresholds:
    """The set in use for one model. Use from one thread."""

    def __init__(
        self,
        model_fingerprint: str,
        *,
        has_store: bool = False,
        notify: Callable[[ThresholdEvent], None] = lambda event: None,
    ) -> None:
        """has_store: published sets will be offered; notify: told of every event, once."""
        self.model_fingerprint = model_fingerprint
        self.current = ThresholdSet.starting(model_fingerprint)
        self.origin: Origin = "shipped"
        self.pinned: str | None = None
        self.events: deque[ThresholdEvent] = deque(maxlen=MAX_EVENTS)
        self._shipped = self.current
        self._before = self.current
        """What was in use before, as long as it was not found slow."""
        self._has_store = has_store
        self._notify = notify
        self._file = False
        self._newest: Pointer | None = None
        """The latest pointer followed; an older one is never followed."""
        self._adopted = False
        """Whether `_newest` has decided about the set in use."""
        self._unusable = ""
        """A published version that was refused: its text never changes, so it is not asked for."""
        self._last_refusal = ""

    @property
    def revision(self) -> int:
        """Of the pointer that decided about the set in use; 0 if none did."""
        return self._newest.revision if self._newest and self._adopted else 0

    def apply(self, user_config: Mapping[str, Any]) -> bool:
        """Take what a Serve `user_config` asks for; return False if refused.

        threshold_file:    path of a set; null follows the store, or is the shipped set without one
        threshold_version: a version to keep to, in the file or in the store; null or "latest" is
                           none
        """
        path = user_config.get("threshold_file")
        wanted = user_config.get("threshold_version")
        pinned = None if wanted in (None, "latest") else str(wanted)
        origin: Origin = "shipped"
        candidate = self._shipped
        try:
            if path:
                origin, candidate = "file", ThresholdSet.load(path)
                candidate.validate(model_fingerprint=self.model_fingerprint)
            kept = {candidate.version: candidate, self.current.version: self.current}
            if pinned and not path and pinned in kept:
                origin, candidate = "pinned", kept[pinned]
            elif pinned and pinned != candidate.version and (path or not self._has_store):
                raise ThresholdError(
                    f"threshold set {path or '(shipped)'} has version {candidate.version}, "
                    f"version {pinned} is asked for"
                )
        except ThresholdError as error:
            self._refuse(str(wanted or ""), str(error))
            return False
        self._file, self.pinned = bool(path), pinned
        self._adopted, self._unusable = False, ""
        if path or not self._has_store or (pinned and candidate.version == pinned):
            self._use(candidate, origin, "user_config")
        return True

    def consider(self, pointer: Pointer | None) -> str | None:
        """What to fetch now that the store's pointer is known: a version, or None for nothing."""
        if self._file:
            return None
        if self.pinned:
            done = self.pinned in (self.current.version, self._unusable)
            return None if done else self.pinned
        if pointer is None:
            # Either nothing was ever published, or the store was emptied: then what is good stays.
            if not self._adopted:
                self._use(self._shipped, "shipped", "nothing is published")
            return None
        if not self._may_follow(pointer) or pointer.version == self._unusable:
            return None
        if pointer.version != self.current.version:
            return pointer.version
        self._newest, self._adopted, self.origin = pointer, True, "store"
        return None

    def offer(
        self, version: str, candidate: ThresholdSet | ThresholdError, pointer: Pointer | None
    ) -> None:
        """Take the set fetched after `consider`, unless it is unusable or no longer wanted.

        candidate: the set, or why its text is none
        """
        if self.consider(pointer) != version:
            return
        try:
            if isinstance(candidate, ThresholdError):
                raise candidate
            candidate.validate(model_fingerprint=self.model_fingerprint)
            if candidate.version != version:
                raise ThresholdError(f"the set kept as {version} is {candidate.version}")
        except ThresholdError as error:
            self._unusable = version
            self._refuse(version, str(error))
            return
        if self.pinned:
            self._use(candidate, "pinned", "user_config")
        elif pointer is not None:
            self._newest, self._adopted = pointer, True
            self._use(candidate, "store", f"revision {pointer.revision}: {pointer.reason}")

    def found_slow(self, speedup: float) -> None:
        """Go back to the set used before: the one in use makes decoding slower than plain.

        An operator's own choice stays, and so does the shipped set; both are events.
        The pointer does not move: this machine's trouble need not be that of the others.
        """
        reason = f"{speedup:.2f}x the speed of plain decoding"
        target = self._before if self._before is not self.current else self._shipped
        if self.origin in ("file", "pinned") or target.version == self.current.version:
            slow = ThresholdEvent("slow", self.current.version, self.current.version, reason)
            if not any(e.kind == "slow" and e.old == slow.old for e in self.events):
                self._tell(slow)
            return
        event = ThresholdEvent("rolled_back", self.current.version, target.version, reason)
        self.current = self._before = target
        self.origin = "rolled_back"
        self._tell(event)

    def _may_follow(self, pointer: Pointer) -> bool:
        newest = self._newest
        if newest is None or newest.epoch != pointer.epoch or newest.revision < pointer.revision:
            return True
        if newest.revision > pointer.revision:
            self._refuse(
                pointer.version,
                f"the pointer went back from revision {newest.revision} to {pointer.revision}: "
                "the store has lost writes, or this is a stale copy",
            )
            return False
        if newest.version != pointer.version:
            self._refuse(
                pointer.version,
                f"CONFLICT: revision {pointer.revision} was {newest.version} and is now "
                f"{pointer.version}; activate again what is meant",
            )
            return False
        return not self._adopted

    def _use(self, candidate: ThresholdSet, origin: Origin, reason: str) -> None:
        self.origin = origin
        self._last_refusal = ""
        if candidate.version == self.current.version:
            return
        event = ThresholdEvent("changed", self.current.version, candidate.version, reason)
        self._before, self.current = self.current, candidate
        self._tell(event)

    def _refuse(self, version: str, reason: str) -> None:
        if reason != self._last_refusal:  # polls repeat; the event does not
            self._last_refusal = reason
            self._tell(ThresholdEvent("refused", self.current.version, version, reason))

    def _tell(self, event: ThresholdEvent) -> None:
        level = logging.INFO if event.kind == "changed" else logging.ERROR
        logger.log(
            level, "thresholds %s: %s -> %s: %s", event.kind, event.old, event.new, event.reason
        )
        self.events.append(event)
        self._notify(event)
