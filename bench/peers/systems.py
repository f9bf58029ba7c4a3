"""The systems compared, and what each can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ENGINES = ("ours", "vllm", "transformers", "llama.cpp")


@dataclass(frozen=True, slots=True)
class System:
    """One row of the tables.

    worker:   script under workers/
    environment: see `environments.RECIPES`; "" is the running interpreter
    load:     options its process starts with; systems with equal ones share a process
    options:  of each pass
    plain:    the system whose plain decoding it speeds up
    learns:   whether earlier requests can help it
    streams:  numbers of streams it can serve
    tuned:    pass options whose best values are looked for on calibration requests
    part:     an ablation of ours
    """

    name: str
    title: str
    worker: str
    environment: str
    plain: str
    load: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    learns: bool = False
    streams: tuple[int, ...] = (1, 8)
    tuned: tuple[Mapping[str, int], ...] = ()
    part: bool = False

    @property
    def process(self) -> tuple[str, str, str]:
        return self.worker, self.environment, repr(sorted(self.load.items()))


def _ours(name: str, title: str, **options: Any) -> System:
    environment = "sources" if options["mode"] == "suffix" else ""
    return System(
        name, title, "ours_worker", environment, "ours-plain", options=options,
        learns=options["mode"] != "plain", part=name.startswith("ours-without"),
    )  # fmt: skip


def _vllm(name: str, title: str, speculative: dict[str, Any] | None, *, learns: bool) -> System:
    load = {"speculative": speculative}
    return System(name, title, "vllm_worker", "vllm", "vllm-plain", load=load, learns=learns)


_LOOKUPS = tuple({"lookup": n, "ngram": g} for n in (3, 5, 10, 15) for g in (2, 3))

SYSTEMS = {
    system.name: system
    for system in (
        System("transformers-plain", "transformers, plain", "transformers_worker",
               "transformers", "transformers-plain"),
        System("transformers-lookup", "transformers, prompt lookup", "transformers_worker",
               "transformers", "transformers-plain", streams=(1,), tuned=_LOOKUPS),
        _vllm("vllm-plain", "vLLM, plain", None, learns=False),
        _vllm("vllm-ngram", "vLLM, n-gram", {"method": "ngram", "num_speculative_tokens": 5,
              "prompt_lookup_max": 4, "prompt_lookup_min": 2}, learns=False),
        _vllm("vllm-suffix", "vLLM, suffix decoding", {"method": "suffix"}, learns=True),
        System("llama-plain", "llama.cpp, plain", "llama_worker", "llama", "llama-plain",
               streams=(1,)),
        System("llama-lookup", "llama.cpp, prompt lookup", "llama_worker", "llama",
               "llama-plain", load={"lookup": True}, streams=(1,), tuned=_LOOKUPS),
        _ours("suffix-chain", "our engine, SuffixDecoding's path", mode="suffix", tree=False),
        _ours("suffix-tree", "our engine, SuffixDecoding's tree", mode="suffix", tree=True),
        _ours("rest-chain", "our engine, REST's best chain", mode="rest", tree=False),
        _ours("rest-tree", "our engine, REST's tree", mode="rest", tree=True),
        _ours("token-recycling", "our engine, Token Recycling", mode="token-recycling"),
        _ours("ours-plain", "ValuSpec, plain", mode="plain"),
        _ours("ours-unfiltered", "ValuSpec, no valuation", mode="unfiltered"),
        _ours("ours-filtered", "ValuSpec", mode="filtered"),
        _ours("ours-without-retrieval", "ValuSpec, no retrieval", mode="no-retrieval"),
        _ours("ours-without-shared", "ValuSpec, no shared store", mode="no-shared-store"),
        _ours("ours-without-price", "ValuSpec, fixed tau", mode="fixed-tau"),
        _ours("ours-without-budget", "ValuSpec, no common budget", mode="no-budget"),
    )
}  # fmt: skip

OURS = "ours-filtered"
CURVE = ("vllm-suffix", "suffix-tree", OURS)
"""Systems whose learning curve is drawn."""
