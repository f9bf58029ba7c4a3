"""Whether a threshold set really makes decoding faster, judged by the requests that used it."""

from __future__ import annotations

WINDOW_TOKENS = 2000
"""Generated tokens that are judged together."""
BAD_WINDOWS = 2
"""So many slow windows in a row are no accident."""
CLEARLY_SLOWER = 0.9
"""Below this share of plain decoding's speed a window is slow."""


class SpeedWatch:
    """Adds up the requests decoded with one version; starts afresh with another. No clock."""

    def __init__(self) -> None:
        self._version = ""
        self._restart()
        self._bad_windows = 0

    def add(
        self, version: str, *, num_tokens: int, decode_s: float, plain_s: float
    ) -> float | None:
        """Count one finished request; return the speedup if the set is now found slow.

        decode_s: seconds its steps took
        plain_s:  seconds the same tokens take one at a time, in the batches it shared
        """
        if version != self._version:
            self._version = version
            self._bad_windows = 0
            self._restart()
        self._num_tokens += num_tokens
        self._decode_s += decode_s
        self._plain_s += plain_s
        if self._num_tokens < WINDOW_TOKENS or self._decode_s <= 0:
            return None
        speedup = self._plain_s / self._decode_s
        self._restart()
        self._bad_windows = self._bad_windows + 1 if speedup < CLEARLY_SLOWER else 0
        if self._bad_windows < BAD_WINDOWS:
            return None
        self._bad_windows = 0
        return speedup

    def _restart(self) -> None:
        self._num_tokens = 0
        self._decode_s = self._plain_s = 0.0
