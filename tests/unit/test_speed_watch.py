"""A set is given up for being slow only when plain decoding has been measured to be faster."""

import numpy as np
import pytest

from deployments.speed_watch import (
    SUSPICIOUS_WINDOWS,
    TRIAL_LASTS,
    WINDOW_TOKENS,
    SpeedWatch,
    plain_set,
)
from valuspec.drafting.drafter import Drafter
from valuspec.engine.types import RequestStats
from valuspec.thresholds import ThresholdSet
from valuspec.valuation import keep

SET = ThresholdSet.starting("model")
PLAIN_STEP_S = {size: SET.plain_step_s(size) for size in (1, 4)}
NUM_STEPS = 100


def request(speed: float, accepted: int = 1, batch_size: int = 1) -> RequestStats:
    """A finished request that ran at `speed` times what the set says of plain decoding."""
    stats = RequestStats(num_output_tokens=1 + NUM_STEPS * (accepted + 1))
    for _ in range(NUM_STEPS):
        stats.add_step(kept=8, accepted=accepted, batch_size=batch_size, forward_s=0.0)
    stats.decode_s = NUM_STEPS * (accepted + 1) * PLAIN_STEP_S[batch_size] / speed
    return stats


def window(watch: SpeedWatch, speed: float, **fields: int):
    """Feed one window's worth of requests; the verdict that ended it, if any."""
    stats = request(speed, **fields)
    num_requests = -(-WINDOW_TOKENS // (stats.num_output_tokens - 1))
    verdicts = [watch.add(stats) for _ in range(num_requests)]
    assert verdicts[:-1] == [None] * (num_requests - 1)
    return verdicts[-1]


def suspected(watch: SpeedWatch, speed: float) -> bool:
    verdicts = [window(watch, speed) for _ in range(SUSPICIOUS_WINDOWS)]
    assert verdicts[:-1] == [None] * (SUSPICIOUS_WINDOWS - 1)
    return verdicts[-1] is not None and verdicts[-1].kind == "suspect"


def test_a_fast_set_is_never_doubted() -> None:
    watch = SpeedWatch(SET.plain_step_s)
    assert [window(watch, speed) for speed in (2.0, 1.0, 0.91, 3.0)] == [None] * 4


def test_long_contexts_are_not_taken_for_a_slow_set() -> None:
    """Plain steps take a millisecond for each token before them; so do those of the requests."""
    watch = SpeedWatch(lambda batch_size, context: 1e-3 * context)
    stats = request(1.0)
    stats.num_prompt_tokens = 300
    steps = 300 + 2 * np.arange(NUM_STEPS)  # each of which brings two tokens
    for share, verdict in ((0.95, None), (0.8, "suspect")):
        stats.decode_s = float((2e-3 * steps).sum()) / share
        verdicts = [watch.add(stats) for _ in range(SUSPICIOUS_WINDOWS * WINDOW_TOKENS // 200)]
        assert {v.kind for v in verdicts if v} == ({verdict} if verdict else set())


def test_one_slow_window_is_an_accident() -> None:
    watch = SpeedWatch(SET.plain_step_s)
    assert [window(watch, speed) for speed in (0.5, 1.5, 0.5, 1.5)] == [None] * 4


def test_a_slow_set_is_tried_against_plain_decoding_and_convicted() -> None:
    watch = SpeedWatch(SET.plain_step_s)
    assert suspected(watch, 0.8)
    verdict = window(watch, 1.0, accepted=0)  # plain decoding is as fast as was thought
    assert (verdict.kind, verdict.speedup) == ("slow", pytest.approx(0.8))


def test_a_machine_that_became_slow_does_not_convict_a_set() -> None:
    """Everything takes 2.5 times as long: plain decoding too."""
    watch = SpeedWatch(SET.plain_step_s)
    assert suspected(watch, 2.0 / 2.5)
    verdict = window(watch, 1.0 / 2.5, accepted=0)
    assert (verdict.kind, verdict.speedup) == ("fine", pytest.approx(2.0))
    for _ in range(TRIAL_LASTS):
        assert window(watch, 2.0 / 2.5) is None
    assert suspected(watch, 2.0 / 2.5), "an old measurement is not believed for ever"


def test_a_set_that_is_slow_on_a_slow_machine_is_convicted_all_the_same() -> None:
    watch = SpeedWatch(SET.plain_step_s)
    assert suspected(watch, 0.7 / 2.5)
    assert window(watch, 1.0 / 2.5, accepted=0).kind == "slow"


def test_batches_are_compared_with_plain_decoding_in_such_batches() -> None:
    assert PLAIN_STEP_S[4] > PLAIN_STEP_S[1], "or this shows nothing"
    watch = SpeedWatch(SET.plain_step_s)
    assert window(watch, 0.95, batch_size=4) is None
    assert window(watch, 0.95, batch_size=4) is None
    assert window(watch, 0.85, batch_size=4) is None
    assert window(watch, 0.85, batch_size=4).kind == "suspect"


def test_tokens_accepted_behind_the_end_of_an_answer_are_no_gain() -> None:
    watch = SpeedWatch(SET.plain_step_s)
    stats = RequestStats(num_output_tokens=2)
    stats.add_step(kept=8, accepted=7, batch_size=1, forward_s=0.0)
    stats.decode_s = 2 * PLAIN_STEP_S[1]  # for one token
    verdicts = [watch.add(stats) for _ in range(SUSPICIOUS_WINDOWS * WINDOW_TOKENS)]
    assert verdicts[-1] is not None
    assert verdicts[-1].speedup == pytest.approx(0.5)


def test_answers_of_one_token_count_nothing() -> None:
    watch = SpeedWatch(SET.plain_step_s)
    for _ in range(3 * WINDOW_TOKENS):
        assert watch.add(RequestStats(num_output_tokens=1)) is None


def test_with_the_plain_set_nothing_is_verified() -> None:
    drafter = Drafter()
    text = list(np.random.default_rng(0).integers(0, 50, 40))
    for _ in range(8):
        drafter.remember("n", text[:8], text[8:])
    session = drafter.start("n", (*text, *text, *text[:12]))
    candidate = session.propose(max_nodes=64, max_depth=8)
    assert len(keep(candidate, SET, batch_size=1, max_nodes=64)) > 0, "or this shows nothing"
    assert len(keep(candidate, plain_set(SET), batch_size=1, max_nodes=64)) == 0
    assert plain_set(SET).version != SET.version
