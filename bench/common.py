"""What the measuring programs share: requests, greedy trajectories, tables, JSON."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tqdm import tqdm

from jobs.history import retrieve as retrieve
from valuspec.drafting.drafter import Drafter
from valuspec.engine import (
    compiled_forward,
    decoder,
    linear,
    path_attention,
    path_kernels,
    row_kernels,
    row_ops,
    tile_kernels,
    two_zone,
)
from valuspec.engine.engine import Engine
from valuspec.engine.target import Target
from valuspec.engine.types import GenerationRequest, RequestStats, SamplingParams
from valuspec.engine.weights import cache_dir
from valuspec.replay import Trajectory
from valuspec.thresholds import ThresholdSet

NAMESPACE = "bench"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a workload file."""

    request_id: str
    token_ids: tuple[int, ...]


class FrozenDrafter(Drafter):
    """Learns nothing while it is measured: a request must not meet its own earlier answer."""

    def stock(self, trajectories: Iterable[Trajectory]) -> None:
        """Put finished answers into the shared store."""
        for t in trajectories:
            super().remember(t.namespace, t.prompt_ids, t.output_ids)

    def remember(self, *_: object) -> None:
        return


def load_prompts(path: Path, target: Target, limit: int | None = None) -> list[Prompt]:
    """First user turns of a JSON-lines file, through the model's chat template."""
    prompts = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            message = {"role": "user", "content": record["turns"][0]}
            prompts.append(Prompt(record["id"], tuple(target.render_chat([message]))))
    return prompts[:limit]


def generate(
    engine: Engine, prompts: Sequence[Prompt], max_tokens: int, *, speculative: bool
) -> dict[str, tuple[list[int], RequestStats]]:
    """Greedy output ids and counters by request id, as many at once as the engine takes."""
    params = SamplingParams(max_tokens=max_tokens, speculative=speculative)
    for prompt in prompts:
        engine.add(
            GenerationRequest(
                request_id=prompt.request_id,
                prompt_ids=prompt.token_ids,
                params=params,
                namespace=NAMESPACE,
            )
        )
    outputs: dict[str, list[int]] = {prompt.request_id: [] for prompt in prompts}
    finished = {}
    with tqdm(total=len(prompts), unit="answer", file=sys.stderr, disable=len(prompts) < 8) as bar:
        while engine.has_work:
            for step in engine.step():
                outputs[step.request_id] += step.token_ids
                if step.stats is not None:
                    finished[step.request_id] = (outputs[step.request_id], step.stats)
                    bar.update()
    return finished


def trajectories(target: Target, prompts: Sequence[Prompt], max_tokens: int) -> list[Trajectory]:
    """Greedy answers of the target, kept in the user's cache folder under what they depend on.

    Decoded with drafts: the output is the same, and the answers come sooner.
    """
    arithmetic = [str(target.dtype), target.exact_mode, _processor(), _arithmetic_version()]
    where = [target.model_fingerprint, *arithmetic]
    key = json.dumps([where, max_tokens, [p.token_ids for p in prompts]])
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    path = cache_dir() / "trajectories" / f"{name}.json"
    if path.is_file():
        outputs = json.loads(path.read_text())
    else:
        engine = Engine(
            target,
            drafter=Drafter(),
            thresholds=ThresholdSet.starting(target.model_fingerprint),
        )
        done = generate(engine, prompts, max_tokens, speculative=True)
        outputs = [done[p.request_id][0] for p in prompts]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps(outputs))
        partial.replace(path)
    return [
        Trajectory(
            np.array(prompt.token_ids, np.int32),
            np.array(output, np.int32),
            max_tokens,
            namespace=NAMESPACE,
        )
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _arithmetic_version() -> str:
    """Changes with the code that computes logits: its last bits now and then decide a token."""
    digest = hashlib.sha256()
    for module in (
        compiled_forward, decoder, linear, path_attention, path_kernels, row_kernels, row_ops,
        tile_kernels, two_zone,
    ):  # fmt: skip
        digest.update(inspect.getsource(module).encode())
    return digest.hexdigest()[:16]


def print_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """First column left, the others right; floats with as many digits as they deserve."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        first, *rest = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *rest]), flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def environment() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    return {
        "processor": _processor(),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor()


def print_json(result: Mapping[str, Any]) -> None:
    """The last line of a bench, for machines."""
    print(json.dumps(result), flush=True)
