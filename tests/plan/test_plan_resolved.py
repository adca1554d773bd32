"""The resolved configuration: immutable, typed throughout, and the same after a round trip through choices.json."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_jobs import H200, QWEN

from trimtab.adapt.spec import LoraSettings
from trimtab.adapt.spec_quantized import Quantization
from trimtab.facts.devices import DeviceFacts
from trimtab.plan.resolved import (
    AttentionConfig,
    CompileConfig,
    CudaGraphsConfig,
    LayerAttention,
    LossConfig,
    MemoryPlan,
    OptimizerConfig,
    ParallelConfig,
    PointwiseConfig,
    PrecisionConfig,
    Resolved,
)
from trimtab.plan.resolved_json import (
    REQUIRED,
    adapters_from_dict,
    resolved_from_dict,
    resolved_to_dict,
)
from trimtab.recipe import loads
from trimtab.run.resolve import resolve_recipe

RECIPE = "model: q\ndata: {train: x}\noptim: adamw_8bit\ndtype: bf16\n"
CPU = DeviceFacts("a CPU", "cpu", memory_bytes=2**36, bf16=True)
EARLY: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bf16",
    "weights_dtype": "fp32",
    "gradient_dtype": "fp32",
    "attention": {"impl": "varlen", "reason": "packed documents", "rejected": [["flex", "compiles"]]},
    "precision": "matrix products in bf16",
    "threads": 16,
    "deterministic": False,
    "version": 1,
    "model_commit": None,
    "recipe": {"optim": "adamw_torch_fused"},
}
"""choices.json in its first version."""

words = st.sampled_from(["", "fp32", "bf16", "varlen", "triton", "set in the recipe"])
sizes = st.integers(0, 2**45)
reasons = st.lists(st.tuples(words, words), max_size=2).map(tuple)
backends = st.builds(LayerAttention, words.filter(bool), words.filter(bool), words, reasons)
layers = st.lists(backends, min_size=3, max_size=3).map(tuple)
configurations = st.builds(
    Resolved,
    device=st.sampled_from(["cpu", "cuda"]),
    threads=st.integers(1, 64),
    deterministic=st.booleans(),
    precision=st.builds(PrecisionConfig, words, words, words, words),
    attention=st.builds(AttentionConfig, layers | backends.map(lambda backend: (backend,) * 3)),
    optimizer=st.builds(OptimizerConfig, words.filter(bool), words, words),
    loss=st.builds(LossConfig, words, st.none() | sizes, words, st.floats(0, 0.9), st.floats(0, 0.9)),
    pointwise=st.builds(PointwiseConfig, words, words),
    compile=st.builds(CompileConfig, st.booleans(), st.booleans(), words),
    graphs=st.builds(CudaGraphsConfig, st.booleans(), words),
    memory=st.none()
    | st.builds(
        MemoryPlan,
        st.lists(st.sampled_from(["none", "block", "offload"]), min_size=3, max_size=3).map(tuple),
        st.integers(1, 8),
        st.none() | sizes,
        st.integers(0, 3),
        sizes,
        words,
        st.none() | sizes,
        sizes,
        words,
    ),
    lora=st.none()
    | st.builds(LoraSettings, r=st.integers(1, 64), rank_pattern=st.sampled_from([{}, {"q_proj": 4}])),
    quantization=st.none()
    | st.builds(
        Quantization, st.sampled_from(["nf4", "int8"]), st.sampled_from([0, 64]), st.booleans(), words, words
    ),
    parallel=st.builds(ParallelConfig, st.integers(1, 8)),
)


@given(configurations)
def test_json_round_trip(resolved: Resolved) -> None:
    written = json.loads(json.dumps(resolved_to_dict(resolved)))
    assert resolved_from_dict(written, 3) == resolved
    assert set(REQUIRED) <= set(written)


@pytest.mark.parametrize("device", [CPU, H200], ids=lambda device: device.kind)
@pytest.mark.parametrize("more", ["", "lora: {r: 8}\nload_in_4bit: true", "packing: false\nz_loss: 1e-4"])
def test_json_round_trip_of_resolved_recipes(device: DeviceFacts, more: str) -> None:
    resolved = resolve_recipe(loads(f"{RECIPE}{more}"), QWEN, device, threads=3)
    written = json.loads(json.dumps(resolved_to_dict(resolved)))
    assert resolved_from_dict(written, QWEN.num_layers) == resolved
    assert resolved.memory is not None
    assert len(resolved.attention.layers) == len(resolved.memory.recompute) == QWEN.num_layers


def test_layers_with_different_backends() -> None:
    full = LayerAttention("varlen", "sdpa_cudnn", "no mask", (("flex", "slower"),))
    windowed = LayerAttention("triton", "triton", "a window", (("sdpa_cudnn", "it supports no mask"),))
    resolved = dataclasses.replace(
        resolved_from_dict(EARLY, 3), attention=AttentionConfig((full, windowed, full))
    )
    written = json.loads(json.dumps(resolved_to_dict(resolved)))
    assert [layer["packed"] for layer in written["attention"]["layers"]] == ["varlen", "triton", "varlen"]
    assert [(kind["layers"], kind["reason"]) for kind in written["attention"]["kinds"]] == [
        ([0, 2], "no mask"),
        ([1], "a window"),
    ]
    assert resolved_from_dict(written, 3).attention == resolved.attention
    assert resolved.attention.packed_backends == "varlen, triton"


def test_layers_of_an_earlier_version_share_one_reason() -> None:
    names = [{"packed": "varlen", "unpacked": "sdpa_cudnn"}, {"packed": "triton", "unpacked": "triton"}]
    attention = {"layers": names, "reason": "two kinds", "rejected": [["flex", "slower"]]}
    rejected = (("flex", "slower"),)
    assert resolved_from_dict({**EARLY, "attention": attention}, 2).attention.layers == (
        LayerAttention("varlen", "sdpa_cudnn", "two kinds", rejected),
        LayerAttention("triton", "triton", "two kinds", rejected),
    )


def test_an_early_file_has_the_defaults_of_its_time() -> None:
    resolved = resolved_from_dict(EARLY, 4)
    assert resolved == Resolved(
        device="cuda",
        threads=16,
        deterministic=False,
        precision=PrecisionConfig("bf16", "fp32", "fp32", "matrix products in bf16"),
        attention=AttentionConfig(
            (LayerAttention("varlen", "varlen", "packed documents", (("flex", "compiles"),)),) * 4
        ),
        optimizer=OptimizerConfig("adamw_torch_fused", "torch", "set in the recipe"),
    )
    assert resolved.loss == LossConfig("chunked", None, "", 0.0, 0.0)
    assert resolved.pointwise.impl == "reference"
    assert (resolved.compile.enabled, resolved.graphs.enabled) == (False, False)
    assert (resolved.memory, resolved.lora, resolved.quantization) == (None, None, None)
    assert resolved.parallel == ParallelConfig(data=1)
    eight = resolved_from_dict({**EARLY, "recipe": {"optim": "adamw_8bit"}}, 4).optimizer
    assert (eight.name, eight.impl) == ("adamw_8bit", "reference")


def test_the_first_memory_plans_use_the_loss_sections_memory() -> None:
    memory = {"recompute": ["block"] * 4, "mlp_tiles": 2, "allocator_bytes": None, "sentence": "block"}
    loss = {"impl": "triton", "memory_bytes": 12345, "reason": "the fastest"}
    resolved = resolved_from_dict({**EARLY, "memory": memory, "loss": loss}, 4)
    assert resolved.memory == MemoryPlan(("block",) * 4, mlp_tiles=2, loss_memory=12345)
    later = resolved_from_dict({**EARLY, "memory": {**memory, "loss_memory": 7}, "loss": loss}, 4)
    assert later.memory_plan.loss_memory == 7


def test_other_keys_are_ignored_and_empty_sections_are_defaults() -> None:
    expected = resolved_from_dict(EARLY, 4)
    empty = {"optimizer": {}, "compile": {}, "loss": {}, "pointwise": {}, "graphs": {}, "memory": {}}
    assert resolved_from_dict({**EARLY, **empty, "lora": None, "quantization": None}, 4) == expected
    unknown = {"loss": {"colour": "red"}, "compile": {"on": False, "mode": "max"}, "lengths": []}
    assert resolved_from_dict({**EARLY, **unknown}, 4) == expected


def test_adapters_are_read_from_a_file_without_other_keys() -> None:
    assert adapters_from_dict({}) == (None, None)
    packed = {"kind": "nf4", "block": 64, "double": True, "dtype": "fp32", "impl": "triton", "reason": ""}
    assert adapters_from_dict({"lora": LoraSettings(r=4).to_dict(), "quantization": packed}) == (
        LoraSettings(r=4),
        Quantization("nf4", 64, True, "fp32", "triton"),
    )


def leaves(hint: Any) -> Iterator[Any]:
    """Every type in a type hint, including fields of dataclasses."""
    if get_origin(hint) in (Union, types.UnionType, tuple):
        for part in get_args(hint):
            yield from leaves(part)
        return
    yield get_origin(hint) or hint
    if dataclasses.is_dataclass(hint) and hint is not LoraSettings:  # peft's patterns are mappings
        for part in get_type_hints(hint).values():
            yield from leaves(part)


def test_every_field_has_a_concrete_type() -> None:
    types_used = set(leaves(Resolved))
    classes = {kind for kind in types_used if dataclasses.is_dataclass(kind)}
    assert {LayerAttention, MemoryPlan, Quantization, LoraSettings, ParallelConfig} <= classes
    assert types_used - classes == {str, int, float, bool, type(None), Ellipsis}


def test_configurations_are_immutable() -> None:
    classes = [kind for kind in set(leaves(Resolved)) if dataclasses.is_dataclass(kind)]
    assert all(kind.__dataclass_params__.frozen for kind in classes)  # type: ignore[attr-defined]
    resolved = resolve_recipe(loads(RECIPE), QWEN, H200, threads=3)
    assert hash(resolved) == hash(dataclasses.replace(resolved))
    assert hash(Quantization("nf4")) == hash(Quantization("nf4"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved.precision.dtype = "fp16"  # type: ignore[misc]
