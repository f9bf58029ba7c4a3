"""Draft heads on disk: three layouts in, clear errors, one layout out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.eagle_heads import head_config, random_head
from valuspec.eagle3.config import HeadConfig, default_layer_ids
from valuspec.eagle3.head import DraftHead
from valuspec.eagle3.loading import load_head, save_head
from valuspec.errors import ModelError

LAYERS = 8


def load(folder: Path, head: DraftHead) -> DraftHead:
    return load_head(folder, embedding=head.embedding, num_target_layers=LAYERS)


def written(folder: Path, config: dict, state: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in state.items()},
              folder / "model.safetensors")  # fmt: skip
    return folder


def flat(head: DraftHead) -> dict:
    config = head.config.to_json()
    return {name: value for name, value in config.items() if value is not None}


def assert_same(loaded: DraftHead, head: DraftHead) -> None:
    state = loaded.state_dict()
    assert state.keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_what_is_saved_is_loaded_in_bf16(tmp_path) -> None:
    head = random_head(0, qk_norm=True, norm_output=True)
    save_head(head, tmp_path)
    loaded = load(tmp_path, head)
    assert loaded.config == head.config
    assert torch.equal(loaded.fc.weight, head.fc.weight.bfloat16().float())
    assert torch.equal(loaded.d2t, head.d2t)


def test_the_authors_layout(tmp_path) -> None:
    """Flat configuration without layer ids, `midlayer`, masks, and a pickled state of tensors."""
    head = random_head(1, layer_ids=default_layer_ids(LAYERS))
    config = flat(head)
    del config["eagle_config"], config["target_hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = dict(head.state_dict()) | {"t2d": torch.zeros(60, dtype=torch.bool)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert_same(load(tmp_path, head), head)


def test_specforges_layout(tmp_path) -> None:
    """The same, in safetensors, with its own copy of the target's embedding."""
    head = random_head(2)
    state = dict(head.state_dict()) | {"embed_tokens.weight": head.embedding.clone()}
    loaded = load(written(tmp_path, flat(head), state), head)
    assert_same(loaded, head)
    assert loaded.config.layer_ids == (1, 2, 3)


def test_the_layout_of_speculators(tmp_path) -> None:
    """Sizes in a nested configuration, and the layer called `layers.0`."""
    head = random_head(3, norm_before_residual=True, rope={"rope_theta": 5e5})
    layer = {name: value for name, value in flat(head).items()
             if name not in ("draft_vocab_size", "target_hidden_size", "eagle_config")}  # fmt: skip
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": 24,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    state = {n.replace("midlayer.", "layers.0."): t for n, t in head.state_dict().items()}
    loaded = load(written(tmp_path, config, state), head)
    assert_same(loaded, head)
    assert loaded.config.norm_before_residual
    assert loaded.config.rope["rope_theta"] == 5e5


def test_a_full_vocabulary_needs_no_map(tmp_path) -> None:
    head = random_head(4, draft_vocab_size=60)
    state = {n: t for n, t in head.state_dict().items() if n != "d2t"}
    loaded = load(written(tmp_path, flat(head), state), head)
    assert loaded.token_ids(torch.arange(60)).tolist() == list(range(60))


@pytest.mark.parametrize(
    ("config", "drop", "message"),
    [
        ({"target_hidden_size": 40}, (), "hidden size 40; this one has 32"),
        ({"vocab_size": 61}, (), "vocabulary of 61; the target's has 60"),
        ({}, ("fc.weight", "d2t"), "missing d2t, fc.weight"),
        ({"intermediate_size": 40}, (), r"gate_proj.weight is \(48, 32\); \(40, 32\)"),
        ({"num_hidden_layers": 2}, (), "2 decoder layers"),
        ({"fc_norm": True}, (), "fc_norm are not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, (), "yarn rotary positions"),
        ({"hidden_size": None}, (), "sizes"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, (), "reads layers"),
    ],
)  # fmt: skip
def test_a_head_that_does_not_fit_is_refused(tmp_path, config, drop, message) -> None:
    head = random_head(5)
    state = {n: t for n, t in head.state_dict().items() if n not in drop}
    folder = written(tmp_path, flat(head) | config, state)
    with pytest.raises(ModelError, match=message):
        load(folder, head)


def test_a_map_that_leads_out_of_the_vocabulary_is_refused(tmp_path) -> None:
    head = random_head(6)
    state = dict(head.state_dict()) | {"d2t": head.d2t + 50}
    with pytest.raises(ModelError, match="d2t leads to token ids"):
        load(written(tmp_path, flat(head), state), head)


def test_damaged_files_are_refused(tmp_path) -> None:
    head = random_head(7)
    with pytest.raises(ModelError, match=r"config\.json"):
        load(tmp_path, head)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds no configuration"):
        load(tmp_path, head)
    (tmp_path / "config.json").write_text(json.dumps(flat(head)))
    with pytest.raises(ModelError, match=r"none of model\.safetensors, pytorch_model\.bin"):
        load(tmp_path, head)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04no tensors here")
    with pytest.raises(ModelError, match="cannot read"):
        load(tmp_path, head)


def test_a_checkpoint_cannot_run_code(tmp_path) -> None:
    head = random_head(8)
    (tmp_path / "config.json").write_text(json.dumps(flat(head)))
    torch.save({"fc.weight": HeadConfig}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot read"):
        load(tmp_path, head)


def test_rotary_scaling_of_long_context_heads() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    scaled = DraftHead(head_config(rope=rope), torch.zeros(60, 32))._angles
    plain = DraftHead(head_config(), torch.zeros(60, 32))._angles
    assert torch.equal(scaled[:, :, 0], plain[:, :, 0])  # a short wave stays
    assert torch.allclose(scaled[800, :, -1], plain[100, :, -1], atol=1e-5)  # a long one does not
