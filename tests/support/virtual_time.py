"""Run asyncio code in virtual time: a minute of waiting takes no time and always the same way."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Selector(selectors.DefaultSelector):
    """Where the loop would sleep, the clock jumps to when it would wake."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is not None and timeout > 0:
            self.now += timeout
            timeout = 0
        return super().select(timeout)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """At once: the clock must not jump while a thread works."""
        done = self.create_future()
        done.set_result(func(*args))
        return done


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` in virtual time, beginning at 0 s."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)


def now() -> float:
    """Virtual seconds since `run` began; a monotonic clock."""
    return asyncio.get_running_loop().time()
