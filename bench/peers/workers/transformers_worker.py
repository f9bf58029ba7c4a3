"""transformers `generate`: plain, and with prompt lookup (one stream only, as the library has it).

Several streams are padded batches of fixed members: what `generate` offers.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from serve import Stateless, serve


class Transformers(Stateless):
    def load(self, model: str, threads: int) -> dict[str, str]:
        torch.set_num_threads(threads)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16
        ).eval()
        self._rows: list[int] = []
        self._model.register_forward_pre_hook(self._count, with_kwargs=True)
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def _count(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        self._rows.append(int(ids.shape[1]))

    def generate(
        self,
        prompts: list[list[int]],
        streams: int,
        max_tokens: int,
        stop_ids: list[int],
        lookup: int = 0,
        ngram: int = 2,
    ) -> tuple[list[list[int]], dict[str, int]]:
        """lookup: tokens copied a step; ngram: longest match looked for"""
        extra: dict[str, Any] = {}
        if lookup:
            extra = {"prompt_lookup_num_tokens": lookup, "max_matching_ngram_size": ngram}
        outputs: list[list[int]] = []
        drafted = accepted = 0
        for start in range(0, len(prompts), streams):
            batch = prompts[start : start + streams]
            width = max(map(len, batch))
            ids = torch.tensor([[stop_ids[0]] * (width - len(p)) + p for p in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
            self._rows.clear()
            with torch.inference_mode():
                out = self._model.generate(
                    ids,
                    attention_mask=mask,
                    do_sample=False,
                    max_new_tokens=max_tokens,
                    eos_token_id=stop_ids,
                    pad_token_id=stop_ids[0],
                    **extra,
                )
            outputs += [_until_stop(row, stop_ids) for row in out[:, width:].tolist()]
            if lookup:
                # The first forward reads the prompt, with a draft behind it.
                drafted += self._rows[0] - width + sum(rows - 1 for rows in self._rows[1:])
                accepted += len(out[0]) - width - len(self._rows)
        return outputs, {"drafted": drafted, "accepted": accepted}


def _until_stop(row: list[int], stop_ids: list[int]) -> list[int]:
    ends = [i for i, token in enumerate(row) if token in stop_ids]
    return row[: ends[0] + 1] if ends else row


if __name__ == "__main__":
    serve(Transformers())
