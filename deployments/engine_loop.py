"""One thread that steps the engine, and the bridge between it and asyncio.

The engine is not thread-safe and blocks; the event loop must do neither. All that touches the
engine is a command run by the thread between two steps, so a cancelled request is gone before the
next step. Outputs come back through each request's `deliver` callback, those of a step together:
waking another thread for each of them would cost more than handing them over.

The engine is also made by the thread. Each thread that computes with torch has OpenMP workers of
its own; with more of them than cores, all of them sleep between two operations rather than wait,
which made a step of SmolLM2-135M on two cores five milliseconds longer (26 to 31).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from valuspec.engine.types import GenerationRequest, StepOutput
from valuspec.tree import DraftTree

logger = logging.getLogger(__name__)

#: So many failed steps in a row mean the engine is broken, not a request.
MAX_FAILED_STEPS = 3

Deliver = Callable[[StepOutput], None]
Command = Callable[[], None]
Post = Callable[[Command], object]


class SteppableEngine(Protocol):
    """What the loop needs of `valuspec.engine.engine.Engine`."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: GenerationRequest) -> None: ...
    def attach_retrieved(self, request_id: str, trees: list[DraftTree]) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def step(self) -> list[StepOutput]: ...


E = TypeVar("E", bound=SteppableEngine)


class EngineLoop(Generic[E]):
    """Owns the engine's thread. Methods may be called from any thread and do not block; the
    constructor returns, or raises, when make_engine has.

    post: called on the engine's thread, once a step, with what calls the `deliver` callbacks; it
          may have that run elsewhere, an event loop for one. Neither may block.
    """

    def __init__(
        self,
        make_engine: Callable[[], E],
        *,
        post: Post = lambda deliver_all: deliver_all(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._post = post
        self._clock = clock
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._deliver: dict[str, Deliver] = {}  # touched by the engine's thread only
        self._failed_steps = 0
        self._busy_since: float | None = None
        made: Future[E] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(make_engine, made), name="engine", daemon=True
        )
        self._thread.start()
        self.engine: E = made.result()

    def submit(self, requests: Sequence[GenerationRequest], deliver: Deliver) -> None:
        """Queue `requests` together; an output with finish_reason ends each."""
        self._commands.put(lambda: self._add(requests, deliver))

    def attach_retrieved(self, request_ids: Sequence[str], trees: list[DraftTree]) -> None:
        """Give retrieved trees to the requests that are still running."""
        self._commands.put(lambda: self._attach(request_ids, trees))

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Drop requests before the next step; finished or unknown ones are ignored."""
        self._commands.put(lambda: self._cancel(request_ids))

    def run(self, command: Command) -> None:
        """Run `command` on the engine's thread between two steps."""
        self._commands.put(command)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread after the step in progress."""
        self._commands.put(None)
        self._thread.join(timeout_s)

    def check(self, *, stalled_after_s: float) -> None:
        """Raise RuntimeError if the thread has died, fails every step, or is stuck in one."""
        if not self._thread.is_alive():
            raise RuntimeError("the engine thread has died")
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise RuntimeError(f"the last {self._failed_steps} engine steps failed")
        busy_since = self._busy_since
        if busy_since is not None and self._clock() - busy_since > stalled_after_s:
            raise RuntimeError(
                f"one engine step has taken {self._clock() - busy_since:.0f} s, "
                f"limit {stalled_after_s:.0f} s"
            )

    def _run(self, make_engine: Callable[[], E], made: Future[E]) -> None:
        try:
            self._engine = make_engine()
        except BaseException as error:  # noqa: BLE001 - raised by the constructor
            made.set_exception(error)
            return
        made.set_result(self._engine)
        while self._run_commands():
            if self._engine.has_work:
                self._busy_since = self._clock()
                self._step()
                self._busy_since = None

    def _run_commands(self) -> bool:
        """Run what is queued; wait for a command when there is nothing to step. False ends."""
        wait = not self._engine.has_work
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            wait = False
            try:
                command()
            except Exception:
                # One bad command must not take the other requests' thread down.
                logger.exception("engine command failed")

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            # Which request broke the step is unknown, so all of them end; the next may succeed.
            self._failed_steps += 1
            logger.exception("engine step failed, %d in a row", self._failed_steps)
            for request_id in list(self._deliver):
                self._fail(request_id, error)
            return
        self._failed_steps = 0
        self._send(outputs)

    def _send(self, outputs: Sequence[StepOutput]) -> None:
        wanted: list[tuple[Deliver, StepOutput]] = []
        for output in outputs:
            if output.finish_reason is None:
                deliver = self._deliver.get(output.request_id)
            else:
                deliver = self._deliver.pop(output.request_id, None)
            if output.error is not None:
                logger.error("request %s failed: %s", output.request_id, output.error)
            if deliver is not None:
                wanted.append((deliver, output))

        def deliver_all() -> None:
            for deliver, output in wanted:
                deliver(output)

        if wanted:
            self._post(deliver_all)

    def _add(self, requests: Sequence[GenerationRequest], deliver: Deliver) -> None:
        for request in requests:
            self._deliver[request.request_id] = deliver
            try:
                self._engine.add(request)
            except Exception as error:
                logger.exception("request %s could not be added", request.request_id)
                self._fail(request.request_id, error)

    def _attach(self, request_ids: Sequence[str], trees: list[DraftTree]) -> None:
        for request_id in request_ids:
            if request_id in self._deliver:
                self._engine.attach_retrieved(request_id, trees)

    def _cancel(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self._deliver.pop(request_id, None) is not None:
                self._engine.cancel(request_id)

    def _fail(self, request_id: str, error: Exception) -> None:
        try:
            self._engine.cancel(request_id)
        except Exception:
            logger.exception("request %s could not be cancelled", request_id)
        failed = StepOutput(
            request_id=request_id, token_ids=(), text="", finish_reason="error", error=repr(error)
        )
        self._send([failed])
