"""Families: every key of transformers' configs is read, rejected or harmless; a family is one file."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.facts.errors import ModelError
from trimtab.model import build, init_weights, load_weights, read_shape, save_folder
from trimtab.model.families import FAMILIES, family, shape_from_config, unknown_keys
from trimtab.model.families.config_json import HARMLESS

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": SLIDING,
    "qwen3": SLIDING,
}


def config_of(name: str) -> dict[str, Any]:
    return {"model_type": name, **COMMON, **OWN[name]}


def others(value: Any) -> Iterator[Any]:
    """Values that a key could have instead."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value * 2, 0, value + 1)
    elif isinstance(value, float):
        yield value * 2 or 0.5
    elif isinstance(value, str):
        yield "another"
    elif isinstance(value, list):
        yield ["full_attention", "sliding_attention"] * 2
    elif isinstance(value, dict):
        yield {"rope_type": "default", "rope_theta": 7.0}
    else:
        yield from (3, True, "another")


def kind_of(name: str, key: str, default: Any) -> str:
    """The outcome for a config with another value of a key."""
    config = config_of(name)
    before = shape_from_config(config)
    for value in others(config.get(key, default)):
        try:
            changed = shape_from_config({**config, key: value})
        except ModelError:
            return "refused"
        if changed != before:
            return "read"
    return "ignored"


@pytest.mark.oracle
@pytest.mark.parametrize("name", FAMILIES)
def test_every_key_of_transformers_is_read_rejected_or_harmless(name: str) -> None:
    import transformers

    defaults = getattr(transformers, FAMILIES[name].architecture.replace("ForCausalLM", "Config"))().to_dict()
    kinds = {key: kind_of(name, key, value) for key, value in defaults.items()}
    ignored = {key for key, kind in kinds.items() if kind == "ignored"}
    assert ignored <= HARMLESS | family(name).harmless
    for key in COMMON | OWN[name]:
        assert kinds.get(key, "read") != "ignored", key
    assert kinds["rope_parameters"] == "read"
    assert kinds["hidden_act"] == "refused"
    defaults.pop("layer_types", None)  # has more layers
    assert unknown_keys({**defaults, **config_of(name)}) == []


def test_unknown_keys_are_named() -> None:
    config = {**config_of("qwen3"), "logit_scale": 0.5, "torch_dtype": "bfloat16", "attention_multiplier": 2}
    assert unknown_keys(config) == ["logit_scale", "attention_multiplier"]
    assert unknown_keys({**config_of("llama"), "pretraining_tp": 1, "rope_interleaved": False}) == []
    assert unknown_keys({**config_of("qwen2"), "pretraining_tp": 1}) == ["pretraining_tp"]
    assert unknown_keys({**config_of("qwen2"), "a.b": 1}) == ["a.b"]
    scaling = {"rope_type": "linear", "factor": 2.0, "colour": 1}
    assert unknown_keys({**config_of("llama"), "rope_scaling": scaling}) == ["rope_scaling.colour"]
    theta = {"rope_type": "default", "rope_theta": 5.0, "long_factor": [1.0]}
    assert unknown_keys({**config_of("qwen2"), "rope_parameters": theta}) == ["rope_parameters.long_factor"]


PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": {
        "model_type": "qwen2", "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
        "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 24, "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen/Qwen3-0.6B": {
        "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "use_cache": True,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    "meta-llama/Llama-3.2-1B": {
        "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192, "mlp_bias": False,
        "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "tie_word_embeddings": True, "use_cache": True, "vocab_size": 128256,
    },
    "mistralai/Mistral-7B-v0.3": {
        "model_type": "mistral", "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "sliding_window": None, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 32768,
    },
}  # fmt: skip
"""config.json of models on the hub, without keys of tokens and versions."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_no_unknown_keys(name: str) -> None:
    assert unknown_keys(PUBLISHED[name]) == []


def test_partial_rope_is_refused_in_either_form() -> None:
    partial = {"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 0.5}
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ModelError, match=r"partial_rotary_factor is 0\.5"):
            shape_from_config({**config_of("llama"), key: partial})
    with pytest.raises(ModelError, match="use_mrope is true"):
        shape_from_config({**config_of("qwen2"), "use_mrope": True})


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_windows_may_alternate_between_layers(name: str, tmp_path: Path) -> None:
    """As transformers computes them, before and after saving; `max_window_layers` cannot describe them."""
    import transformers

    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 2
    settings = {**config_of(name), "sliding_window": 3, "layer_types": kinds}
    settings.pop("model_type")
    their = transformers.AutoConfig.for_model(name, **settings)
    model = transformers.AutoModelForCausalLM.from_config(their, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    model.save_pretrained(tmp_path / "theirs")
    shape = read_shape(tmp_path / "theirs")
    assert [shape.window(layer) for layer in range(4)] == [3, None, 3, None]
    ids_BT = torch.randint(0, 64, (2, 12))
    decoder = build(shape, dtype="fp32", device="cpu", attention="reference")
    load_weights(decoder, tmp_path / "theirs")
    with torch.no_grad():
        ours, theirs = decoder.logits(decoder(ids_BT)), model(ids_BT).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    save_folder(decoder, tmp_path / "ours", dtype="fp32")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(again.eval()(ids_BT).logits, theirs)


WINDMILL = '''
"""A family that does not exist: biases on q, k and v, and a window in every second layer."""

from trimtab.model.families import base
from trimtab.model.families.config_json import decoder_shape


def _describe(config):
    size = config.integer("sail_size")
    windows = [size if layer % 2 else None for layer in range(config.num_layers)]
    return decoder_shape(config, qkv_bias=True, windows=windows)


FAMILY = base.Family(
    name="windmill",
    architecture="WindmillForCausalLM",
    describe=_describe,
    own_keys=lambda shape: {"sail_size": shape.window(1)},
    harmless=frozenset({"colour"}),
    gguf_layer={**base.LAYER, **base.QKV_BIAS},
    gguf_pairs_rotary_rows=False,
)
'''


def test_a_new_family_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its line in `families/__init__.py`: everything else follows from the shape."""
    (tmp_path / "windmill.py").write_text(WINDMILL)
    spec = importlib.util.spec_from_file_location("windmill", tmp_path / "windmill.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(FAMILIES, "windmill", module.FAMILY)
    config = {"model_type": "windmill", **COMMON, "sail_size": 5, "colour": "red", "height": 3}
    shape = shape_from_config(config)
    assert [shape.window(layer) for layer in range(4)] == [None, 5, None, 5]
    assert unknown_keys(config) == ["height"]
    decoder = init_weights(build(shape, dtype="fp32", device="cpu", attention="sdpa_flash"), seed=1)
    assert "model.layers.0.self_attn.q_proj.bias" in dict(decoder.named_parameters())
    ids_BT = torch.arange(24).view(2, 12)
    decoder.loss(ids_BT, ids_BT).backward()
    save_folder(decoder, tmp_path / "saved", dtype="fp32")
    assert read_shape(tmp_path / "saved") == shape
    again = build(shape, dtype="fp32", device="cpu", attention="sdpa_flash")
    load_weights(again, tmp_path / "saved")
    assert torch.equal(again(ids_BT), decoder(ids_BT))
    assert family("windmill").gguf_name("model.layers.2.self_attn.k_proj.bias") == "blk.2.attn_k.bias"
