"""Whether a threshold set really makes decoding faster, judged by the requests that used it.

Requests are added up to windows of some thousand tokens, and each window's speed is set against
what plain decoding would reach in the same batches, by the verify cost of one row. But that cost
can be wrong: plain steps may be rare, and a machine can have become slower since there was one. So
when two windows in a row look slower than plain decoding, a window of requests is really decoded
plainly before anything is concluded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from valuspec.engine.types import RequestStats
from valuspec.thresholds import ThresholdSet

WINDOW_TOKENS = 2000
"""Generated tokens that are judged together."""
SUSPICIOUS_WINDOWS = 2
CLEARLY_SLOWER = 0.9
"""Below this share of plain decoding's speed a window is slow."""
TRIAL_LASTS = 20
"""Windows for which the outcome of a trial is believed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """suspect: decode plainly until the next verdict, to make sure
    fine, slow: the trial is over; `speedup` of the set over plain decoding, as measured"""

    kind: Literal["suspect", "fine", "slow"]
    speedup: float


def plain_set(thresholds: ThresholdSet) -> ThresholdSet:
    """A set of the same model and costs with which no node is verified."""
    buckets = tuple(replace(bucket, tau=1.0) for bucket in thresholds.buckets)
    return replace(thresholds, buckets=buckets, provenance={"plain_trial_of": thresholds.version})


class SpeedWatch:
    """Judges one set. No clock: time is what the requests took."""

    def __init__(self, plain_step_s: Callable[[int, int], float]) -> None:
        """plain_step_s: seconds of a step without any draft, by batch size and tokens of context,
        as far as known"""
        self._plain_step_s = plain_step_s
        self._num_tokens = 0
        self._decode_s = 0.0
        self._expected_s = 0.0
        self._slow_windows: list[float] = []  # their speeds relative to the verify cost, in a row
        self._plain_speed = 1.0
        """Plain decoding's speed relative to the verify cost; 1 until a trial has measured it."""
        self._believed_for = 0
        self._on_trial = False

    def add(self, stats: RequestStats) -> Verdict | None:
        """Count a finished request that used the set, or during a trial its plain_set."""
        emitted = sum(stats.accepted) + len(stats.accepted)
        if not emitted:
            return None
        expected_s, context = 0.0, stats.num_prompt_tokens
        for accepted, batch_size in zip(stats.accepted, stats.batch_size, strict=True):
            expected_s += (accepted + 1) * self._plain_step_s(batch_size, context)
            context += accepted + 1
        num_tokens = stats.num_output_tokens - 1  # the first one is prefill's
        self._num_tokens += num_tokens
        self._decode_s += stats.decode_s
        self._expected_s += expected_s * num_tokens / emitted  # the end cuts the last step short
        if self._num_tokens < WINDOW_TOKENS or self._decode_s <= 0:
            return None
        speed = self._expected_s / self._decode_s
        self._num_tokens, self._decode_s, self._expected_s = 0, 0.0, 0.0
        return self._end_trial(speed) if self._on_trial else self._judge(speed)

    def _judge(self, speed: float) -> Verdict | None:
        if self._believed_for:
            self._believed_for -= 1
        else:
            self._plain_speed = 1.0
        speedup = speed / self._plain_speed
        if speedup >= CLEARLY_SLOWER:
            self._slow_windows.clear()
            return None
        self._slow_windows.append(speed)
        if len(self._slow_windows) < SUSPICIOUS_WINDOWS:
            return None
        self._on_trial = True
        return Verdict("suspect", speedup)

    def _end_trial(self, plain_speed: float) -> Verdict:
        speed = sum(self._slow_windows) / len(self._slow_windows)
        self._slow_windows.clear()
        self._on_trial = False
        self._plain_speed, self._believed_for = plain_speed, TRIAL_LASTS
        speedup = speed / plain_speed
        return Verdict("slow" if speedup < CLEARLY_SLOWER else "fine", speedup)
