"""config.json to a shape and back: real models' configs, both forms of RoPE settings, errors for unsupported keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape, RopeScaling, uniform_shape
from trimtab.model.families import config_from_shape, shape_from_config
from trimtab.model.families.config_json import read_config

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA32_1B = {
    "model_type": "llama",
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def test_published_models_have_their_published_sizes() -> None:
    qwen = shape_from_config(QWEN3_06B)
    assert (qwen.num_parameters, qwen.attention.qk_norm, qwen.attention.head_dim, qwen.window(0)) == (
        596_049_920,
        "head",
        128,
        None,
    )
    llama = shape_from_config(LLAMA32_1B)
    assert llama.num_parameters == 1_235_814_400
    assert llama.attention.rope.scaling == RopeScaling(
        "llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0
    )


def test_rope_scaling_and_rope_parameters_give_the_same_shape() -> None:
    old = {**TINY, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
    new = {**TINY, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}
    assert shape_from_config(old) == shape_from_config(new)
    assert (
        shape_from_config(
            {**TINY, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
        ).attention.rope.theta
        == 7
    )


def test_yarn_scales_without_a_factor_and_with_mscale() -> None:
    rope = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512, "mscale": 1.0}
    shape = shape_from_config(
        {**TINY, "max_position_embeddings": 2048, "rope_scaling": {**rope, "mscale_all_dim": 0.5}}
    )
    assert shape.attention.rope.scaling is not None
    assert shape.attention.rope.scaling.factor == 4.0
    assert shape.attention.rope.scaling.attention_factor == pytest.approx(1.138629 / 1.069315, rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "window", "full_layers"),
    [
        ({"model_type": "mistral", "sliding_window": 9, "num_key_value_heads": 2}, 9, 0),
        ({"model_type": "mistral", "sliding_window": None, "num_key_value_heads": 2}, None, 0),
        ({"model_type": "mistral", "num_key_value_heads": 2}, 4096, 0),  # transformers' own default
        ({"model_type": "qwen2", "sliding_window": 9, "num_key_value_heads": 2}, None, 0),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}, 9, 3),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 28}, None, 0),
        ({"use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention"] * 4}, None, 0),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
            },
            9,
            1,
        ),
    ],
)
def test_windows(keys: dict[str, Any], window: int | None, full_layers: int) -> None:
    shape = shape_from_config({**TINY, "model_type": "qwen2", "num_key_value_heads": 2, **keys})
    windows = [shape.window(layer) for layer in range(4)]
    assert windows == [None] * full_layers + [window] * (4 - full_layers)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "gemma3"}, "'gemma3'.*supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "None"),
        ({"hidden_size": "16"}, "hidden_size is '16'"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_hidden_layers": -1}, "expected an integer"),
        ({"num_hidden_layers": 2**50}, "expected an integer"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"head_dim": 5}, "even"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"rms_norm_eps": float("nan")}, "expected a number"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "already quantized"),
        ({"partial_rotary_factor": 0.5}, "all dimensions of a head"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "unknown scaling 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1.0}}, "are positive"),
        ({"rope_scaling": [1]}, "expected an object"),
        ({"rope_theta": 0.0}, "rope_theta is 0"),
        ({"model_type": "mistral", "sliding_window": 0, "num_key_value_heads": 2}, "sliding_window is 0"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ between kinds of layers"),
        (
            {
                "model_type": "qwen2",
                "num_key_value_heads": 2,
                "use_sliding_window": True,
                "layer_types": ["linear_attention", "full_attention"] * 2,
            },
            "layer_types names 'linear_attention'",
        ),
    ],
)
def test_unsupported_configs_raise(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        shape_from_config({**TINY, **keys}, "x/config.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe{}", b"[" * 100_000])
def test_files_that_are_not_a_config_raise(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError):
        read_config(tmp_path)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    family = draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]))
    layers, kv = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    factor = draw(st.floats(1.0, 64.0))
    scaling = draw(
        st.sampled_from(
            [
                None,
                RopeScaling("linear", factor),
                RopeScaling("dynamic", factor),
                RopeScaling("llama3", factor, 8192),
                RopeScaling("yarn", factor, 4096, beta_fast=24.0, attention_factor=1.5, truncate=False),
            ]
        )
    )
    bias = draw(st.booleans()) if family in ("llama", "qwen3") else False
    window = draw(st.none() | st.integers(1, 99)) if family != "llama" else None
    full = draw(st.integers(0, layers - 1)) if window and family.startswith("qwen") else 0
    return uniform_shape(
        family=family,
        vocab_size=draw(st.integers(1, 10**6)),
        hidden_size=draw(st.integers(1, 10**5)),
        intermediate_size=draw(st.integers(1, 10**5)),
        num_layers=layers,
        num_heads=kv * draw(st.integers(1, 4)),
        num_kv_heads=kv,
        head_dim=2 * draw(st.integers(1, 128)),
        max_positions=draw(st.integers(1, 10**6)),
        rope_theta=draw(st.floats(2.0, 1e8)),
        rope_scaling=scaling,
        norm_eps=draw(st.floats(1e-8, 1e-2)),
        tie_embeddings=draw(st.booleans()),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias,
        mlp_bias=draw(st.booleans()) if family == "llama" else False,
        qk_norm=family == "qwen3",
        sliding_window=window,
        num_full_layers=full,
    )


@settings(max_examples=150, deadline=None)
@given(shapes())
def test_a_shape_round_trips_through_its_config(shape: ModelShape) -> None:
    config = config_from_shape(shape, dtype="bfloat16", extra={"eos_token_id": 3})
    assert shape_from_config(config) == shape
    assert (config["eos_token_id"], config["bos_token_id"], config["dtype"]) == (3, None, "bfloat16")


def test_a_shape_that_no_config_describes_raises() -> None:
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot describe"):
        config_from_shape(uniform_shape("llama", 64, 16, 32, 4, 4, 4, 4, qkv_bias=True), dtype="float32")
