"""Verify costs of this machine, measured at the first start and kept for the next ones.

What is measured on a busy machine is used, but not kept; what live forwards have taught by the end
is. Costs lie in the user's cache folder, one file per model, machine, dtype and whatever else the
time of a forward depends on; a file that does not say exactly that is measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from valuspec.cost import CostStaircase, LiveCosts
from valuspec.engine.measure import FAR, TURNS_DRAFTED, measure_costs, points
from valuspec.engine.target import Target
from valuspec.engine.weights import cache_dir

logger = logging.getLogger(__name__)

#: A thread that measures alone runs all the time; one that ran less was kept waiting by others.
_UNDISTURBED = 0.5


def live_costs(target: Target, max_batch_size: int) -> LiveCosts:
    """Verify costs of batches up to `max_batch_size`. Takes seconds the first time."""
    subject = describe(target) | {"max_batch_size": max_batch_size, "rows": points(1)}
    subject |= {"far": FAR, "drafted": TURNS_DRAFTED}
    name = hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()[:24]
    path = cache_dir() / "verify-costs" / f"{name}.json"
    costs = _load(path, subject)
    if costs is None:
        logger.info("measuring the verify cost of batches up to %d", max_batch_size)
        costs, running_share = measure_costs(target, max_batch_size)
        if running_share >= _UNDISTURBED:
            _save(path, subject, costs)
        else:
            logger.warning("verify costs are of a busy machine, they are not kept")
    return LiveCosts(costs, keep=partial(_save, path, subject))


def describe(target: Target) -> dict[str, Any]:
    """What the time of a forward depends on; JSON values."""
    return {
        "model_fingerprint": target.model_fingerprint,
        "dtype": str(target.dtype).removeprefix("torch."),
        "processor": _processor(target.device),
        "num_threads": torch.get_num_threads(),
        "num_ranks": target.num_ranks,
        "arithmetic": [target.attention.__name__, target.exact_mode, target.min_width],
        "versions": {name: version(name) for name in ("valuspec", "torch", "transformers")},
    }


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.partition(":")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux, or not x86
        model = platform.processor() or platform.machine()
    return f"{model.strip()}, {os.cpu_count()} cores"


def _load(path: Path, subject: dict[str, Any]) -> dict[int, CostStaircase] | None:
    try:
        kept = json.loads(path.read_bytes())
        if kept["of"] != subject:
            return None
        return {int(size): CostStaircase.from_json(cost) for size, cost in kept["costs"].items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("kept verify costs %s are not usable: %r", path, error)
        return None


def _save(path: Path, subject: dict[str, Any], costs: dict[int, CostStaircase]) -> None:
    kept = {"of": subject, "costs": {str(size): cost.to_json() for size, cost in costs.items()}}
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(kept))
        partial.replace(path)
    except OSError as error:  # the next start measures again
        logger.warning("verify costs cannot be kept: %s", error)
