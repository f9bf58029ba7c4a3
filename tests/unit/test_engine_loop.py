import queue
import threading

import pytest

from deployments.engine_loop import MAX_FAILED_STEPS, EngineLoop
from tests.support.fake_engine import FakeEngine, FakeTarget
from valuspec.engine.types import GenerationRequest, SamplingParams, StepOutput
from valuspec.tree import DraftTree

TIMEOUT_S = 10


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(FakeTarget(), max_batch_size=4)


@pytest.fixture
def loop(engine: FakeEngine):
    loop = EngineLoop(lambda: engine)
    yield loop
    engine.gate.set()
    loop.stop()


def request(request_id: str, prompt: str = "abc", max_tokens: int = 4) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=tuple(prompt.encode()),
        params=SamplingParams(max_tokens=max_tokens),
    )


def finish(outputs: "queue.SimpleQueue[StepOutput]", num_requests: int = 1) -> list[StepOutput]:
    """All outputs until so many requests have ended."""
    collected = []
    while num_requests:
        collected.append(outputs.get(timeout=TIMEOUT_S))
        num_requests -= collected[-1].finish_reason is not None
    return collected


def test_outputs_come_in_order_and_end(loop) -> None:
    outputs = queue.SimpleQueue()
    loop.submit([request("a", "xyz", 5)], outputs.put)
    assert "".join(o.text for o in finish(outputs)) == "xyzxy"


def test_a_cancelled_request_gets_no_further_step(loop, engine) -> None:
    engine.gate.clear()
    outputs, other = queue.SimpleQueue(), queue.SimpleQueue()
    loop.submit([request("a", max_tokens=100)], outputs.put)
    loop.submit([request("b", "q", 4)], other.put)
    loop.cancel(["a"])
    engine.gate.set()
    assert "".join(o.text for o in finish(other)) == "qqqq"
    assert engine.cancelled == ["a"]
    assert outputs.qsize() <= 1, "at most the step that was under way"


def test_trees_reach_running_requests_only(loop, engine) -> None:
    engine.gate.clear()
    outputs = queue.SimpleQueue()
    trees = [DraftTree.from_paths([[1, 2]])]
    loop.submit([request("a")], outputs.put)
    loop.attach_retrieved(["a", "gone"], trees)
    engine.gate.set()
    finish(outputs)
    loop.attach_retrieved(["a"], trees)
    loop.submit([request("b")], outputs.put)
    finish(outputs)
    assert list(engine.attached) == ["a"]


@pytest.mark.fault(22)
def test_a_failing_step_ends_its_requests_and_the_next_ones_are_served(loop, engine) -> None:
    outputs = queue.SimpleQueue()
    engine.gate.clear()
    engine.fail_step = RuntimeError("boom")
    loop.submit([request("a"), request("b")], outputs.put)
    engine.gate.set()
    failed = finish(outputs, 2)
    assert {o.request_id: o.finish_reason for o in failed} == {"a": "error", "b": "error"}
    engine.fail_step = None
    loop.submit([request("c")], outputs.put)
    assert finish(outputs)[-1].finish_reason == "length"
    loop.check(stalled_after_s=TIMEOUT_S)


def test_a_request_that_cannot_be_added_fails_alone(loop, engine) -> None:
    add = engine.add

    def refuse_a(r: GenerationRequest) -> None:
        if r.request_id == "a":
            raise ValueError("no")
        add(r)

    engine.add = refuse_a
    outputs = queue.SimpleQueue()
    loop.submit([request("a"), request("b")], outputs.put)
    ends = {o.request_id: o.finish_reason for o in finish(outputs, 2) if o.finish_reason}
    assert ends == {"a": "error", "b": "length"}


@pytest.mark.fault(22)
def test_health_fails_after_failed_steps_in_a_row(loop, engine) -> None:
    engine.fail_step = RuntimeError("boom")
    outputs = queue.SimpleQueue()
    for i in range(MAX_FAILED_STEPS):
        loop.check(stalled_after_s=TIMEOUT_S)
        loop.submit([request(str(i))], outputs.put)
        finish(outputs)
    with pytest.raises(RuntimeError, match="steps failed"):
        loop.check(stalled_after_s=TIMEOUT_S)


@pytest.mark.fault(23)
def test_health_fails_while_one_step_takes_too_long(engine) -> None:
    now = [0.0]
    loop = EngineLoop(lambda: engine, clock=lambda: now[0])
    engine.gate.clear()
    outputs = queue.SimpleQueue()
    in_step = engine.step
    entered = queue.SimpleQueue()

    def step() -> list[StepOutput]:
        entered.put(None)
        return in_step()

    engine.step = step
    loop.submit([request("a")], outputs.put)
    entered.get(timeout=TIMEOUT_S)
    loop.check(stalled_after_s=30)
    now[0] = 31.0
    with pytest.raises(RuntimeError, match="31 s"):
        loop.check(stalled_after_s=30)
    engine.gate.set()
    finish(outputs)
    loop.stop()


def test_an_idle_loop_is_healthy_and_a_stopped_one_is_not(engine) -> None:
    now = [0.0]
    loop = EngineLoop(lambda: engine, clock=lambda: now[0])
    now[0] = 1e6
    loop.check(stalled_after_s=30)
    loop.stop()
    with pytest.raises(RuntimeError, match="died"):
        loop.check(stalled_after_s=30)


def test_the_engine_is_made_by_the_thread_that_steps_it(engine) -> None:
    threads = []
    step = engine.step

    def make() -> FakeEngine:
        threads.append(threading.current_thread())
        return engine

    def note() -> list[StepOutput]:
        threads.append(threading.current_thread())
        return step()

    engine.step = note
    loop = EngineLoop(make)
    outputs = queue.SimpleQueue()
    loop.submit([request("a")], outputs.put)
    finish(outputs)
    loop.stop()
    assert loop.engine is engine
    assert set(threads) == {threads[0]} != {threading.current_thread()}


def test_an_engine_that_cannot_be_made_is_an_error_of_the_constructor() -> None:
    def make() -> FakeEngine:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        EngineLoop(make)


def test_outputs_of_a_step_are_delivered_together(engine) -> None:
    posted = queue.SimpleQueue()
    loop = EngineLoop(lambda: engine, post=posted.put)
    engine.gate.clear()
    outputs = []
    loop.submit([request("a"), request("b"), request("c")], outputs.append)
    engine.gate.set()
    posted.get(timeout=TIMEOUT_S)()
    assert [output.request_id for output in outputs] == ["a", "b", "c"]
    posted.get(timeout=TIMEOUT_S)()
    assert [output.finish_reason for output in outputs[3:]] == ["length"] * 3
    loop.stop()
    assert posted.empty()
