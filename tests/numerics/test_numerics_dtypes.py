"""The listed dtypes of operations match the resolved ones."""

from __future__ import annotations

import pytest
from tiny_model import tiny_shape

from trimtab.facts.devices import DeviceFacts
from trimtab.plan.resolved import Resolved
from trimtab.recipe import build
from trimtab.run.dtypes import Dtypes, list_dtypes
from trimtab.run.resolve import resolve_backends

CPU = DeviceFacts(name="CPU", kind="cpu", memory_bytes=2**33, free_bytes=2**33, bf16=True, cores=1)


def chosen(**changes: str) -> Resolved:
    recipe = build({"model": "m", "data": {"train": "t"}, "max_seq_length": 64, "device": "cpu", **changes})
    return resolve_backends(recipe, tiny_shape(), CPU, threads=1)


def listed(**changes: str) -> Dtypes:
    return list_dtypes(tiny_shape(num_layers=9, qk_norm=True), chosen(**changes))


def test_fp32_is_fp32_everywhere() -> None:
    found = listed(dtype="fp32")
    assert {(row.weight, row.output, row.gradient) for row in found.modules} == {("fp32", "fp32", "fp32")}
    assert {pair for pairs in found.operations.values() for pair in pairs} == {"fp32 → fp32"}


@pytest.mark.parametrize("gradients", ["fp32", "bf16"])
def test_bf16_weights(gradients: str) -> None:
    found = listed(dtype="bf16", gradient_dtype=gradients)
    assert {(row.weight, row.output, row.gradient) for row in found.modules} == {("bf16", "bf16", gradients)}
    assert found.operations["mm"] == ["bf16 → bf16"]
    assert all(pair.endswith("fp32") for pair in found.operations["log_softmax"])
    assert found.operations["rsqrt"] == ["fp32 → fp32"], "norms sum in fp32"
    assert found.loss == "fp32"


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_fp32_weights_under_autocast(dtype: str) -> None:
    found = listed(dtype=dtype, weights_dtype="fp32")
    rows = {row.name.removeprefix("model.layers.0."): row for row in found.modules}
    assert rows["mlp.up_proj"].output == rows["self_attn.q_proj"].output == dtype
    assert rows["input_layernorm"].output == "fp32"
    assert {row.gradient for row in found.modules} == {"fp32"}
    assert found.operations["mm"] == [f"{dtype} → {dtype}"], "the head's product too"
    assert all(pair.endswith("→ fp32") for pair in found.operations["log_softmax"])
    assert found.operations["rsqrt"] == ["fp32 → fp32"]
    assert found.loss == "fp32"
