"""A worker of bench.peers that repeats each prompt: as fast as its store is full, and frail."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "peers" / "workers"))

from serve import Request, serve


class Parrot:
    def load(self, model: str, threads: int, **options: Any) -> dict[str, str]:
        print("libraries chat on standard output")
        return {"parrot": "1.0"}

    def history(self, earlier: list[Request], calibration: list[Request]) -> None:
        self._earlier = earlier

    def stock(self, count: int, **options: Any) -> str:
        self._count = count
        return f"{len(self._earlier[:count])} kept"

    def generate(
        self,
        prompts: list[list[int]],
        streams: int,
        max_tokens: int,
        stop_ids: list[int],
        **options: Any,
    ) -> tuple[list[list[int]], dict[str, int]]:
        if prompts[0] == [666]:
            raise ValueError("a number it does not like")
        if prompts[0] == [999]:
            print("last words", file=sys.stderr, flush=True)
            os._exit(3)
        outputs = [[*prompt[:max_tokens], stop_ids[0]] for prompt in prompts]
        return outputs, {"drafted": 2 * len(prompts), "accepted": len(prompts)}


if __name__ == "__main__":
    serve(Parrot())
