"""The circuit breaker, driven by a clock of the test's own."""

import pytest

from retrieval.breaker import CircuitBreaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(failure_threshold=3, cooldown_s=2.0, clock=clock)


def fail(breaker: CircuitBreaker, times: int) -> None:
    for _ in range(times):
        breaker.record_failure()


def test_opens_after_failures_in_a_row(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    assert breaker.state == "closed"
    assert breaker.allow()
    fail(breaker, 1)
    assert breaker.state == "open"
    assert not breaker.allow()


def test_a_success_starts_the_count_again(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    breaker.record_success()
    fail(breaker, 2)
    assert breaker.state == "closed"


def test_one_probe_per_cooldown(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 1.99
    assert not breaker.allow()
    clock.now += 0.01
    assert breaker.state == "half_open"
    assert [breaker.allow() for _ in range(3)] == [True, False, False]


def test_a_good_probe_closes(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 2
    assert breaker.allow()
    breaker.record_success()
    assert breaker.state == "closed"
    fail(breaker, 2)
    assert breaker.state == "closed"


def test_a_bad_probe_opens_for_a_full_cooldown(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 2
    assert breaker.allow()
    clock.now += 1.5
    breaker.record_failure()
    clock.now += 1.9
    assert not breaker.allow()
    clock.now += 0.1
    assert breaker.allow()


def test_a_probe_that_never_reports_does_not_block_the_next(
    breaker: CircuitBreaker, clock: Clock
) -> None:
    fail(breaker, 3)
    clock.now += 2
    assert breaker.allow()
    clock.now += 2
    assert breaker.allow()


@pytest.mark.parametrize("options", [{"failure_threshold": 0}, {"cooldown_s": 0}])
def test_senseless_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        CircuitBreaker(**options)  # type: ignore[arg-type]
