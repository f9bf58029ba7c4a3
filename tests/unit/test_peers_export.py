"""bench.peers: llama.cpp gets the same weights, in the order and type it wants."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch

from bench.peers.export import interleaved, write_gguf
from tests.support.tiny_models import tiny_model


def test_queries_and_keys_are_reordered_so_that_neighbours_rotate_together() -> None:
    heads, size = 2, 8
    weight = torch.arange(heads * size, dtype=torch.float32)[:, None]
    order = interleaved(weight, heads)[:, 0].tolist()
    assert order == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


def test_every_weight_is_written_matrices_as_bf16_bit_for_bit(tmp_path: Path) -> None:
    metadata = tmp_path / "fields.gguf"
    writer = gguf.GGUFWriter(metadata, "llama")
    writer.add_context_length(512)
    writer.add_token_list(["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    model = tiny_model("llama").to(torch.bfloat16)
    write_gguf(metadata, model, tmp_path / "model.gguf")

    written = gguf.GGUFReader(tmp_path / "model.gguf")
    assert written.fields["llama.context_length"].contents() == 512
    assert written.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    tensors = {tensor.name: tensor for tensor in written.tensors}
    state = model.state_dict()
    tied = model.config.tie_word_embeddings
    assert len(tensors) == len(state) - tied
    down = state["model.layers.1.mlp.down_proj.weight"]
    found = tensors["blk.1.ffn_down.weight"]
    assert found.tensor_type == gguf.GGMLQuantizationType.BF16
    np.testing.assert_array_equal(
        found.data.view(np.int16).reshape(tuple(down.shape)), down.view(torch.int16).numpy()
    )
    norm = tensors["blk.0.attn_norm.weight"]
    assert norm.tensor_type == gguf.GGMLQuantizationType.F32
