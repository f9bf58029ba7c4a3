"""The steps of training a draft head, with checkpoints to go on from."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from jobs.eagle3.answers import draft_vocabulary, features, generate, load, read_prompts
from valuspec.eagle3.config import default_layer_ids
from valuspec.eagle3.head import DraftHead
from valuspec.eagle3.loading import save_head
from valuspec.eagle3.training import Batch, Labelled, acceptance, new_head, unroll
from valuspec.engine.target import Target
from valuspec.engine.weights import load_model

HELD_OUT = 0.04
"""Share of the answers the head is judged by and never trained on."""
WARMUP = 40
SAVE_EVERY = 100
CLIP = 0.5
EVALUATED_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to train; the defaults give SmolLM2-135M a head of 20 MB."""

    epochs: float = 4.0
    batch_answers: int = 5
    num_steps: int = 4
    """How far ahead the head runs from every position."""
    learning_rate: float = 1e-3
    draft_vocab_size: int = 8192
    max_tokens: int = 160


def train(target_name: str, prompt_files: Sequence[Path], out: Path, plan: Plan) -> dict[str, Any]:
    """Train a head into `out` and return its figures; goes on where an earlier run stopped.

    Raises ModelError for a target that has no features to learn from.
    """
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)  # a resumed run begins with the same random weights
    model, tokenizer = load_model(target_name, torch.bfloat16)
    layer_ids = default_layer_ids(model.config.num_hidden_layers)
    lent, _ = load_model(target_name, torch.bfloat16)  # the target repacks the weights of its own
    target = Target.from_model(model, tokenizer)
    answers = generate(target, read_prompts(prompt_files, target), plan.max_tokens, out)
    vocabulary = draft_vocabulary(answers, plan.draft_vocab_size, target.vocab_size)
    head = new_head(lent, vocabulary, layer_ids)
    paths = features(target, answers, layer_ids, out / "features")
    labelled = [answer for path in paths for answer in load(path)]
    held_out = max(1, round(HELD_OUT * len(labelled)))
    trainer = Trainer(head, target.vocab_size, labelled[held_out:], out, plan)
    trainer.run()
    return trainer.finish(labelled[:held_out], target.model_fingerprint)


class Trainer:
    """AdamW on fp32 weights; products in bf16 where the processor has them."""

    def __init__(
        self,
        head: DraftHead,
        vocab_size: int,
        answers: Sequence[Labelled],
        out: Path,
        plan: Plan,
    ) -> None:
        self._head = head
        self._answers = answers
        self._out = out
        self._plan = plan
        self._t2d = torch.full((vocab_size,), -1)
        known = head.token_ids(torch.arange(head.config.draft_vocab_size))
        self._t2d[known] = torch.arange(len(known))
        self._trained = {n: p for n, p in head.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            self._trained.values(), lr=plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self._per_epoch = max(1, len(answers) // plan.batch_answers)
        self.total = max(1, round(plan.epochs * self._per_epoch))
        self.step = self._restore()

    def run(self) -> None:
        """Train to the end of the plan."""
        bar = tqdm(total=self.total, initial=self.step, unit="step", desc="training")
        while self.step < self.total:
            loss, ranks = self._train_on(self._batch(self.step))
            self.step += 1
            bar.update()
            bar.set_postfix(loss=f"{loss:.2f}", first=f"{acceptance(ranks, 1)[0]:.2f}")
            if self.step % SAVE_EVERY == 0 or self.step == self.total:
                self._save()
        bar.close()

    def finish(self, held_out: Sequence[Labelled], model_fingerprint: str) -> dict[str, Any]:
        """Write the head and what it reaches on answers it has not seen."""
        ranks = self.evaluate(held_out)
        figures = {
            "model_fingerprint": model_fingerprint,
            "plan": asdict(self._plan),
            "trained_answers": len(self._answers),
            "held_out_answers": len(held_out),
            "steps": self.step,
            "acceptance": {f"top_{width}": acceptance(ranks, width) for width in (1, 2, 4, 10)},
        }
        save_head(self._head, self._out)
        (self._out / "training.json").write_text(json.dumps(figures, indent=1) + "\n")
        return figures

    @torch.no_grad()
    def evaluate(self, answers: Sequence[Labelled]) -> torch.Tensor:
        """Ranks of the target's tokens, as in `Unrolled`."""
        size = self._plan.batch_answers
        ranks = []
        for start in range(0, len(answers), size):
            batch = Batch.of(answers[start : start + size], self._t2d)
            with _fast_products():
                ranks.append(unroll(self._head, batch, EVALUATED_STEPS).ranks)
        return torch.cat(ranks)

    def _batch(self, step: int) -> Batch:
        """Each epoch takes the answers in an order of its own."""
        epoch, index = divmod(step, self._per_epoch)
        order = np.random.default_rng(epoch).permutation(len(self._answers))
        size = self._plan.batch_answers
        chosen = order[index * size : (index + 1) * size]
        return Batch.of([self._answers[i] for i in chosen], self._t2d)

    def _train_on(self, batch: Batch) -> tuple[float, torch.Tensor]:
        factor = learning_rate_factor(self.step, self.total)
        for group in self._optimizer.param_groups:
            group["lr"] = self._plan.learning_rate * factor
        with _fast_products():
            unrolled = unroll(self._head, batch, self._plan.num_steps)
        self._optimizer.zero_grad()
        unrolled.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._trained.values(), CLIP)
        self._optimizer.step()
        return float(unrolled.loss.detach()), unrolled.ranks

    # ---- checkpoints

    def _save(self) -> None:
        state = {f"weight.{n}": p.detach() for n, p in self._trained.items()}
        for name, parameter in self._trained.items():
            for key, tensor in self._optimizer.state[parameter].items():
                state[f"{key}.{name}"] = tensor
        partial = self._out / "checkpoint.tmp"
        save_file(state, partial, {"step": str(self.step)})
        partial.replace(self._out / "checkpoint.safetensors")
        save_head(self._head, self._out)

    def _restore(self) -> int:
        """Load the checkpoint, if there is one; return the steps done."""
        path = self._out / "checkpoint.safetensors"
        if not path.exists():
            return 0
        with safe_open(path, "pt") as file:
            step = int(file.metadata()["step"])
            for name, parameter in self._trained.items():
                parameter.data.copy_(file.get_tensor(f"weight.{name}"))
                self._optimizer.state[parameter] = {
                    key: file.get_tensor(f"{key}.{name}")
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }
        return step


def _fast_products() -> AbstractContextManager[object]:
    """Products in bf16, unless the processor has to widen every number first: that takes longer."""
    has_bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.autocast("cpu", torch.bfloat16, enabled=has_bf16)


def learning_rate_factor(step: int, total: int) -> float:
    """A linear start, then a cosine down to a fiftieth."""
    progress = min(1.0, max(0.0, (step - WARMUP) / max(1, total - WARMUP)))
    return min(1.0, (step + 1) / WARMUP) * (0.02 + 0.49 * (1 + math.cos(math.pi * progress)))
