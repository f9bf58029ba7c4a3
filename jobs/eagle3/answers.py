"""What a head learns from: the target's own answers, its features there, and what it held likely.

All is kept in the output folder, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from valuspec.drafting.drafter import Drafter
from valuspec.eagle3.training import Labelled
from valuspec.engine.engine import Engine
from valuspec.engine.kv_cache import own_blocks
from valuspec.engine.rows import SequenceRows
from valuspec.engine.target import Target
from valuspec.engine.types import GenerationRequest, SamplingParams
from valuspec.thresholds import ThresholdSet

BATCH_SIZE = 8
"""Answers generated at a time."""
GROUP = 64
"""Answers between two saves."""
MAX_PROMPT = 512
"""Longer prompts are left out: their features cost more than their answers teach."""
MIN_ANSWER = 4
TOP_K = 32
"""Likeliest tokens of the target that are kept as the label of a row."""
CHUNK = 256


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids of a prompt and of the target's greedy answer."""

    prompt_ids: list[int]
    output_ids: list[int]


def read_prompts(paths: Sequence[Path], target: Target) -> list[list[int]]:
    """Token ids of the prompts of JSON-lines files, in a fixed random order.

    A line has `turns` (the first one counts), `messages`, `prompt` or `prompt_ids`.
    """
    prompts = []
    for path in paths:
        with path.open(encoding="utf-8") as lines:
            prompts += [_prompt_ids(json.loads(line), target) for line in lines if line.strip()]
    order = np.random.default_rng(0).permutation(len(prompts))
    return [prompts[i] for i in order if len(prompts[i]) <= MAX_PROMPT]


def _prompt_ids(record: dict[str, Any], target: Target) -> list[int]:
    if "prompt_ids" in record:
        return [int(t) for t in record["prompt_ids"]]
    messages = record.get("messages")
    if messages is None:
        text = record["turns"][0] if "turns" in record else record["prompt"]
        messages = [{"role": "user", "content": text}]
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return target.render_chat(messages)


def generate(
    target: Target, prompts: Sequence[list[int]], max_tokens: int, folder: Path
) -> list[Answer]:
    """Greedy answers to the prompts, as many at once as fit; kept in `answers.jsonl`."""
    path = folder / "answers.jsonl"
    answers = list(_read(path)) if path.exists() else []
    bar = tqdm(total=len(prompts), initial=len(answers), unit="answer", desc="answers")
    engine = Engine(
        target,
        drafter=Drafter(),
        thresholds=ThresholdSet.starting(target.model_fingerprint),
        max_batch_size=BATCH_SIZE,
    )
    with path.open("a", encoding="utf-8") as file:
        while len(answers) < len(prompts):
            group = prompts[len(answers) : len(answers) + GROUP]
            for answer in _decode(engine, group, max_tokens, bar):
                answers.append(answer)
                file.write(json.dumps([answer.prompt_ids, answer.output_ids]) + "\n")
            file.flush()
    return [a for a in answers[: len(prompts)] if len(a.output_ids) >= MIN_ANSWER]


def _read(path: Path) -> Iterator[Answer]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            prompt, output = json.loads(line)
        except ValueError:  # the last line of a run that was killed
            return
        yield Answer(prompt, output)


def _decode(
    engine: Engine, prompts: Sequence[list[int]], max_tokens: int, bar: Any
) -> list[Answer]:
    outputs: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=max_tokens)
        engine.add(
            GenerationRequest(request_id=str(index), prompt_ids=tuple(prompt), params=params)
        )
    while engine.has_work:
        for step in engine.step():
            outputs[int(step.request_id)] += step.token_ids
            bar.update(step.stats is not None)
    return [Answer(p, o) for p, o in zip(prompts, outputs, strict=True)]


def draft_vocabulary(answers: Iterable[Answer], size: int, vocab_size: int) -> torch.Tensor:
    """The `size` tokens most frequent in the answers, ascending, int64; then the lowest ids."""
    counts = Counter(token for answer in answers for token in answer.output_ids)
    frequent = [token for token, _ in counts.most_common(size)]
    rest = (token for token in range(vocab_size) if token not in counts)
    chosen = [*frequent, *(t for t, _ in zip(rest, range(size - len(frequent)), strict=False))]
    return torch.tensor(sorted(chosen))


def features(
    target: Target, answers: Sequence[Answer], layer_ids: tuple[int, ...], folder: Path
) -> list[Path]:
    """Files of GROUP answers each, with what `load` reads; those that exist stay as they are."""
    folder.mkdir(exist_ok=True)
    target.show_features(layer_ids)
    paths = []
    starts = range(0, len(answers), GROUP)
    for start in tqdm(starts, unit="group", desc="features"):
        path = folder / f"{start // GROUP:05d}.safetensors"
        if not path.exists():
            parts = [_labelled(target, answer) for answer in answers[start : start + GROUP]]
            tensors = {
                f"{index}.{name}": tensor
                for index, part in enumerate(parts)
                for name, tensor in part.items()
            }
            partial = path.with_suffix(".tmp")
            save_file(tensors, partial)
            partial.replace(path)
        paths.append(path)
    target.show_features(())
    return paths


@torch.inference_mode()
def _labelled(target: Target, answer: Answer) -> dict[str, torch.Tensor]:
    tokens = np.array([*answer.prompt_ids, *answer.output_ids])
    cache = target.new_cache(own_blocks(1, len(tokens)))
    first = len(answer.prompt_ids) - 1  # its row yields the first output token
    seen, ids, p = [], [], []
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        rows = np.arange(min(max(first - start, 0), len(chunk) - 1), len(chunk))
        logits = target.forward([SequenceRows.chain(0, start, chunk)], cache, rows)
        if target.features is not None:
            seen.append(target.features[: len(chunk)])
        if start + len(chunk) > first:
            top = logits.float().softmax(-1).topk(TOP_K)
            ids.append(top.indices.int())
            p.append(top.values.bfloat16())
    return {"tokens": torch.from_numpy(tokens).int(), "features": torch.cat(seen),
            "top_ids": torch.cat(ids), "top_p": torch.cat(p)}  # fmt: skip


def load(path: Path) -> list[Labelled]:
    """The answers of one file of features."""
    tensors = load_file(path)
    count = 1 + max(int(name.partition(".")[0]) for name in tensors)
    return [
        Labelled(
            tensors[f"{i}.features"],
            tensors[f"{i}.tokens"].long(),
            tensors[f"{i}.top_ids"].long(),
            tensors[f"{i}.top_p"].float(),
        )
        for i in range(count)
    ]
