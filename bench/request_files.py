"""Reads requests of every form the benches know.

A line is {"turns": [TEXT, ...]}, {"messages": [...]} or {"prompt": TEXT}.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import common
from valuspec.engine.target import Target
from valuspec.errors import ValuSpecError


def read_prompts(path: Path, target: Target, limit: int | None) -> list[common.Prompt]:
    """Requests of a JSON-lines file; raises ValuSpecError naming the line that cannot be read."""
    prompts: list[common.Prompt] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValuSpecError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            token_ids = _token_ids(json.loads(line), target)
        except (ValueError, TypeError, KeyError, ValuSpecError) as error:
            raise ValuSpecError(f"{path}, line {number}: {error}") from error
        prompts.append(common.Prompt(f"line {number}", tuple(token_ids)))
        if len(prompts) == limit:
            break
    if not prompts:
        raise ValuSpecError(f"{path} has no requests")
    return prompts


def _token_ids(record: Any, target: Target) -> list[int]:
    if isinstance(record, dict):
        if isinstance(record.get("prompt"), str) and record["prompt"]:
            return target.encode(record["prompt"])
        if isinstance(record.get("messages"), list) and record["messages"]:
            return target.render_chat(record["messages"])
        turns = record.get("turns")
        if isinstance(turns, list) and turns and isinstance(turns[0], str):
            return target.render_chat([{"role": "user", "content": turns[0]}])
    raise ValuSpecError(
        'expected {"turns": [TEXT, ...]}, {"messages": [{"role": .., "content": ..}]} '
        'or {"prompt": TEXT}'
    )
