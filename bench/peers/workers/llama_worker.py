"""llama.cpp through llama-cpp-python: plain, and with its prompt-lookup draft; one stream.

Its Python API decodes one sequence at a time.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from serve import Stateless, serve


class CountingLookup(LlamaPromptLookupDecoding):
    """The library's own draft, counted."""

    drafted = 0

    def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
        draft = np.asarray(super().__call__(input_ids, **kwargs))
        self.drafted += len(draft)
        return draft


class LlamaCpp(Stateless):
    def load(
        self, model: str, threads: int, max_model_len: int = 4096, lookup: bool = False
    ) -> dict[str, str]:
        self._draft = CountingLookup() if lookup else None
        self._llm = Llama(
            f"{model}/model-bf16.gguf",
            n_ctx=max_model_len,
            n_threads=threads,
            n_threads_batch=threads,
            draft_model=self._draft,
            # With a draft the library keeps all logits, but makes room for them only if told so:
            # a prompt longer than a batch would fail.
            logits_all=lookup,
            verbose=False,
        )
        self._evaluations = 0
        evaluate = self._llm.eval

        def counted(tokens: Any) -> None:
            self._evaluations += 1
            evaluate(tokens)

        self._llm.eval = counted
        return {"llama-cpp-python": importlib.metadata.version("llama-cpp-python")}

    def generate(
        self,
        prompts: list[list[int]],
        streams: int,
        max_tokens: int,
        stop_ids: list[int],
        lookup: int = 10,
        ngram: int = 2,
    ) -> tuple[list[list[int]], dict[str, int]]:
        """lookup: tokens copied a step; ngram: longest match looked for"""
        drafted_before, accepted = 0, 0
        if self._draft is not None:
            self._draft.num_pred_tokens, self._draft.max_ngram_size = lookup, ngram
            drafted_before = self._draft.drafted
        outputs = []
        for prompt in prompts:
            self._llm.reset()  # nothing of an earlier prompt is reused
            self._evaluations = 0
            output: list[int] = []
            for token in self._llm.generate(prompt, temp=0.0, repeat_penalty=1.0, reset=True):
                output.append(int(token))
                if token in stop_ids or len(output) == max_tokens:
                    break
            if self._draft is not None:
                accepted += len(output) - self._evaluations
            outputs.append(output)
        drafted = self._draft.drafted - drafted_before if self._draft is not None else 0
        return outputs, {"drafted": drafted, "accepted": accepted}


if __name__ == "__main__":
    serve(LlamaCpp())
