"""The target's weights in the forms that peers read: a folder for transformers, a GGUF file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from bench.peers.environments import folder
from valuspec.engine.weights import load_model

GGUF_NAME = "model-bf16.gguf"


def exported(model: str, metadata: Path | None) -> Path:
    """Folder with the model in bf16: config, safetensors, tokenizer and, where there is a GGUF
    file to take the vocabulary from, `GGUF_NAME`."""
    key = hashlib.sha256(f"{model} {metadata}".encode()).hexdigest()[:8]
    where = folder(f"model-{key}")
    if where.is_dir():
        return where
    loaded, tokenizer = load_model(model, torch.bfloat16)
    partial = where.with_name(f"{where.name}.{os.getpid()}.tmp")
    loaded.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    config = json.loads((partial / "config.json").read_text())
    config["architectures"] = [type(loaded).__name__]
    (partial / "config.json").write_text(json.dumps(config, indent=1))
    if metadata is not None:
        write_gguf(metadata, loaded, partial / GGUF_NAME)
    try:
        partial.rename(where)
    except OSError:  # another process was first; its copy is as good
        shutil.rmtree(partial)
    return where


def write_gguf(metadata: Path, model: Any, to: Path) -> None:
    """Write the model's weights, matrices as bf16, with the fields of another file of its kind."""
    reader = gguf.GGUFReader(metadata)
    writer = gguf.GGUFWriter(to, arch=reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type",
                                                "general.quantization_version"):  # fmt: skip
            continue
        kinds = field.types
        sub = kinds[1] if kinds[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kinds[0], sub_type=sub)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    state = model.state_dict()
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in state.items():
        stem, kind = name.rsplit(".", 1)
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = names.get_name(stem)
        if stem.endswith(("q_proj", "k_proj")):
            heads = (
                config.num_attention_heads if stem.endswith("q_proj")
                else config.num_key_value_heads
            )  # fmt: skip
            tensor = interleaved(tensor, heads)
        if tensor.dim() == 1:
            writer.add_tensor(f"{target}.{kind}", tensor.float().numpy())
        else:
            bits = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
            writer.add_tensor(f"{target}.{kind}", bits.view(np.uint8),
                              raw_dtype=gguf.GGMLQuantizationType.BF16)  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key matrix in llama.cpp's order: it rotates neighbours, transformers
    rotates a head's first half with its second."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)
