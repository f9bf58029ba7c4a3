"""Read and write draft heads: the authors' layout, SpecForge's, and that of `speculators`.

The three differ in where config.json keeps the layer's sizes and in what the decoder layer is
called. Embeddings are the target's own; a checkpoint's copy must have its shape.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from valuspec.eagle3.config import HeadConfig
from valuspec.eagle3.head import DraftHead
from valuspec.errors import ModelError

#: A head for SmolLM2-135M-Instruct; its README says how it came about.
SHIPPED_HEAD = Path(__file__).parent.parent / "data" / "eagle3-smollm2-135m"
#: Other names of a decoder layer's weights.
RENAMED = {"layers.0.": "midlayer.", "model.layers.0.": "midlayer.", "model.": ""}
#: Stored by some, not needed here: masks that `d2t` implies, and copies of the target's weights.
IGNORED = {"t2d", "verifier_lm_head.weight", "verifier_norm.weight"}
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")

State = dict[str, torch.Tensor]


def load_head(folder: Path, *, embedding: torch.Tensor, num_target_layers: int) -> DraftHead:
    """Load a head for a target. Raises ModelError naming what was found and what was expected.

    embedding: the target's, [vocabulary, hidden]; the head's type follows it
    """
    config = _read_config(folder, num_target_layers)
    vocab_size, hidden_size = embedding.shape
    if config.target_hidden_size != hidden_size:
        raise ModelError(
            f"{folder} is a head for a target of hidden size {config.target_hidden_size}; "
            f"this one has {hidden_size}. Choose a head that was trained for this target"
        )
    if config.vocab_size != vocab_size:
        raise ModelError(
            f"{folder} is a head for a vocabulary of {config.vocab_size}; the target's has "
            f"{vocab_size}. Choose a head that was trained for this target"
        )
    if config.layer_ids[-1] >= num_target_layers:
        raise ModelError(
            f"{folder} reads layers {config.layer_ids}; the target has {num_target_layers}"
        )
    state = _read_weights(folder)
    stored = state.pop("embed_tokens.weight", None)
    if stored is not None and stored.shape != embedding.shape:
        raise ModelError(
            f"{folder}: embed_tokens.weight is {tuple(stored.shape)}; the target's embedding is "
            f"{tuple(embedding.shape)}"
        )
    if config.hidden_size != hidden_size:
        if stored is None:
            raise ModelError(
                f"{folder}: hidden size {config.hidden_size} differs from the target's "
                f"{hidden_size}, so embed_tokens.weight is needed and missing"
            )
        embedding = stored.to(embedding.dtype)
    if config.draft_vocab_size == vocab_size:
        state["d2t"] = torch.zeros(vocab_size, dtype=torch.int64)
    head = DraftHead(config, embedding)
    _check_shapes(folder, head.state_dict(), state)
    _check_vocabulary(folder, state["d2t"], vocab_size)
    head.load_state_dict(state)
    return head.to(embedding.dtype).eval()


def save_head(head: DraftHead, folder: Path) -> None:
    """Write a head in the authors' layout, bf16, complete or not at all."""
    state = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in head.state_dict().items()
    }
    known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    known[state["d2t"] + torch.arange(len(state["d2t"]))] = True
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.safetensors.tmp"
    save_file(state | {"t2d": known}, partial)
    (folder / "config.json").write_text(json.dumps(head.config.to_json(), indent=1) + "\n")
    partial.replace(folder / "model.safetensors")


def _read_config(folder: Path, num_target_layers: int) -> HeadConfig:
    path = folder / "config.json"
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}. Give the folder of a head") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no configuration")
    return HeadConfig.from_json(config, num_target_layers)


def _read_weights(folder: Path) -> State:
    path = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if path is None:
        raise ModelError(f"{folder} has none of {', '.join(WEIGHT_FILES)}")
    try:
        if path.suffix == ".safetensors":
            stored = load_file(path)
        else:  # reads tensors and nothing else, unlike a plain torch.load
            stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or hostile file may raise anything
        raise ModelError(f"cannot read {path}: {error}") from error
    state = {_renamed(name): tensor for name, tensor in stored.items()}
    return {name: tensor for name, tensor in state.items() if name not in IGNORED}


def _renamed(name: str) -> str:
    for old, new in RENAMED.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _check_shapes(folder: Path, expected: State, found: State) -> None:
    missing = sorted(expected.keys() - found.keys())
    unknown = sorted(found.keys() - expected.keys())
    if missing or unknown:
        raise ModelError(
            f"{folder} is no EAGLE-3 head of its configuration: missing "
            f"{', '.join(missing) or 'nothing'}; not expected {', '.join(unknown) or 'nothing'}"
        )
    for name, tensor in expected.items():
        if tensor.shape != found[name].shape:
            raise ModelError(
                f"{folder}: {name} is {tuple(found[name].shape)}; {tuple(tensor.shape)} expected"
            )


def _check_vocabulary(folder: Path, d2t: torch.Tensor, vocab_size: int) -> None:
    ids = d2t + torch.arange(len(d2t))
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ModelError(
            f"{folder}: d2t leads to token ids {int(ids.min())}..{int(ids.max())}; the target's "
            f"vocabulary has {vocab_size}"
        )
