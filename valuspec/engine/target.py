"""The target model: weights, tokenizer, chat template, forward pass, and how exact it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from valuspec.eagle3.head import DraftHead
from valuspec.eagle3.loading import load_head
from valuspec.engine.attention import Attention, attention_for
from valuspec.engine.decoder import Decoder, LeanDecoder, build_decoder
from valuspec.engine.graphs import StepGraphs, graphs_for, step_width
from valuspec.engine.kv_cache import ONES, KvCache
from valuspec.engine.mirror import Leader
from valuspec.engine.ranks import RankGroup
from valuspec.engine.rows import NEAR, Int64Array, SequenceRows, build_rows
from valuspec.engine.shards import take_shard
from valuspec.engine.weights import load_model, model_fingerprint, tokenizer_fingerprint
from valuspec.errors import ModelError, RequestError

ExactMode = Literal["rows", "envelope", "fast"]

#: Share of a device's free memory (of the machine's, on a CPU) that keys and values may take.
KV_SHARE = 0.4
#: Longest context the rotary tables and the cache are laid out for, whatever the model allows.
MAX_MODEL_LEN = 32768


@dataclass(slots=True)
class Target:
    """A loaded target model, or one rank's shard of it.

    exact_mode: "rows" (rows do not influence each other), "envelope" (every forward padded to one
        width) or "fast" (neither could be shown exact; `exact` is False)
    min_width:  every forward is padded to a multiple of so many rows
    graphs:     recorded forwards of few rows, on devices that replay them faster
    num_heads, num_kv_heads: of this rank
    num_ranks:  how many share the work of a forward
    leader:     on rank 0 of several, what makes the others do the same
    """

    decoder: Decoder
    tokenizer: Any
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    model_fingerprint: str
    tokenizer_fingerprint: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device
    attention: type[Attention]
    graphs: StepGraphs | None = None
    exact_mode: ExactMode = "fast"
    min_width: int = 4
    num_ranks: int = 1
    leader: Leader | None = None

    @classmethod
    def load(
        cls,
        model: str,
        *,
        dtype: str = "bfloat16",
        device: str = "cpu",
        exact: bool = True,
        group: RankGroup | None = None,
        leader: Leader | None = None,
    ) -> Target:
        """Load a folder, hub id, .gguf file or the bundled `smollm2`, and probe exactness.

        exact:  False skips the probe and serves in fast mode
        group:  load only what its rank holds of the weights
        leader: on rank 0 of a group; returns once all ranks have loaded
        Raises ModelError when the model cannot be loaded, its architecture is not supported or it
        cannot be split; RankLostError.
        """
        from valuspec.engine.probe import choose_exact_mode

        loaded, tokenizer = load_model(model, _dtype(dtype))
        # A shard is taken in main memory: the whole need not fit the device.
        target = cls.from_model(loaded if group else loaded.to(device), tokenizer, group)
        if leader is not None:
            leader.await_others(target.model_fingerprint)
            target.leader = leader
        if exact:
            target.exact_mode, target.min_width = choose_exact_mode(target)
        return target

    @classmethod
    def from_model(cls, model: Any, tokenizer: Any, group: RankGroup | None = None) -> Target:
        """Wrap a loaded transformers model; `tokenizer` may be None where no text is needed.

        The model's modules are repacked and must not be used afterwards.
        """
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        limit = int(getattr(config, "max_position_embeddings", MAX_MODEL_LEN))
        max_model_len = min(limit, MAX_MODEL_LEN)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        fingerprint = model_fingerprint(model)
        num_ranks = 1
        if group is not None:
            num_ranks = group.size
            take_shard(model, group.rank, num_ranks)
            model.to(group.device)
        weight = model.get_input_embeddings().weight
        decoder = build_decoder(model, max_model_len, group)
        attention = attention_for(weight.device, weight.dtype)
        return cls(
            decoder=decoder,
            tokenizer=tokenizer,
            vocab_size=config.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=_eos_token_ids(model, tokenizer),
            model_fingerprint=fingerprint,
            tokenizer_fingerprint="" if tokenizer is None else tokenizer_fingerprint(tokenizer),
            num_layers=config.num_hidden_layers,
            num_heads=heads // num_ranks,
            num_kv_heads=kv_heads // num_ranks,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=weight.dtype,
            device=weight.device,
            attention=attention,
            min_width=decoder.fewest_rows,
            # Sums over ranks are no part of a recording.
            graphs=graphs_for(decoder, attention, weight.device) if group is None else None,
            num_ranks=num_ranks,
        )

    @property
    def exact(self) -> bool:
        """Whether the probe showed trees and one-token decoding to agree bit for bit."""
        return self.exact_mode != "fast"

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, as the model's tokenizer begins a prompt."""
        token_ids: list[int] = self.tokenizer.encode(text)
        return token_ids

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation through the model's chat template, ready for an answer."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise RequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        try:
            encoded = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as error:  # a template may raise anything
            raise RequestError(
                f"the chat template refused the messages: {error}", param="messages"
            ) from error
        return list(encoded["input_ids"])

    def new_cache(self, tables: Int64Array, num_blocks: int | None = None) -> KvCache:
        """An empty cache of `num_blocks` blocks, of those that `tables` names when absent."""
        make: Callable[..., KvCache] = KvCache if self.leader is None else self.leader.new_cache
        return make(
            num_layers=self.num_layers,
            num_blocks=int(tables.max()) + 1 if num_blocks is None else num_blocks,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.dtype,
            device=self.device,
            tables=tables,
        )

    def affordable_tokens(self, wanted: int) -> int:
        """Tokens a cache may hold: `wanted`, or as many as fit a share of the device's memory."""
        heads = self.num_layers * self.num_kv_heads
        per_token = heads * (2 * self.head_size + ONES) * self.dtype.itemsize
        if self.device.type == "cuda":
            memory = torch.cuda.mem_get_info(self.device)[0]
        else:
            # Which all ranks share. A GPU is one rank's; rank 0 has most on it, the head too.
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.num_ranks
        return min(wanted, int(memory * KV_SHARE) // per_token)

    def forward(
        self,
        members: list[SequenceRows],
        cache: KvCache,
        logit_rows: NDArray[np.int64] | None = None,
    ) -> torch.Tensor:
        """Logits of all rows, or of `logit_rows`, [num_rows, vocabulary]; see `build_rows`."""
        count = sum(len(member) for member in members)
        wanted = np.arange(count) if logit_rows is None else logit_rows
        if self.graphs is not None and (width := step_width(count, self.min_width)) is not None:
            return self.graphs.forward(members, wanted, cache, width)
        rows = build_rows(members, wanted, cache.device, min_width=self.min_width)
        attention = self.attention(rows, cache)
        if self.leader is None:
            return self.decoder.forward(rows, attention)[: len(wanted)]
        with self.leader.forward(members, cache, self.min_width):
            return self.decoder.forward(rows, attention)[: len(wanted)]

    def show_features(self, layer_ids: tuple[int, ...]) -> None:
        """From now on keep what these layers read in `features`; ids as in `HeadConfig`."""
        self._lean().feature_layers = layer_ids

    @property
    def features(self) -> torch.Tensor | None:
        """Of the last forward's rows, [at least num_rows, layers * hidden]; None unless shown."""
        return self._lean().features

    def load_head(self, folder: Path) -> DraftHead:
        """Load an EAGLE-3 head for this target. Raises ModelError naming what does not fit."""
        if self.device.type != "cpu":
            raise ModelError(f"EAGLE-3 heads run beside a target on the CPU, not on {self.device}")
        return load_head(
            folder, embedding=self._lean().embedding, num_target_layers=self.num_layers
        )

    def _lean(self) -> LeanDecoder:
        if not isinstance(self.decoder, LeanDecoder):
            raise ModelError(
                "EAGLE-3 heads need a target of the Llama, Mistral, Qwen2 or Qwen3 architecture"
            )
        return self.decoder

    def wait(self) -> None:
        """Return once the device has done everything it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def max_tree_depth(self) -> int:
        return NEAR - 1


def _dtype(name: str) -> torch.dtype:
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if name not in dtypes:
        raise ModelError(f"dtype {name!r}; choose one of {', '.join(dtypes)}")
    return dtypes[name]


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    ids: set[int] = set()
    for source in (model.generation_config, model.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if isinstance(found, int):
            ids.add(found)
        elif found is not None:
            ids.update(found)
    return frozenset(ids)
