"""The declared costs of quantized layers, against what they allocate."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from quantized_world import SHAPE, empty
from torch.utils.flop_counter import FlopCounterMode

from trimtab.adapt import quantized_ops, spec_quantized, workspace
from trimtab.adapt.quantized import quantized_layers
from trimtab.adapt.spec import LoraSettings
from trimtab.adapt.spec_quantized import Quantization
from trimtab.facts.dtypes import TORCH_NAMES
from trimtab.facts.errors import RecipeError
from trimtab.facts.shapes import uniform_shape
from trimtab.model import init_weights
from trimtab.model import spec as model_spec
from trimtab.plan.job import Job
from trimtab.plan.memory import Moment, Phase, predict
from trimtab.trainer.memory import LiveBytes, storage_bytes

CASES = [
    ("nf4", "fp32", True, 64),
    ("nf4", "bf16", True, 64),
    ("nf4", "bf16", False, 128),
    ("int8", "fp32", False, 64),
    ("int8", "bf16", False, 64),
]
ROWS = 6


@pytest.mark.parametrize(("kind", "dtype", "double", "block"), CASES)
def test_workspace_and_scratch_match_allocations(kind: str, dtype: str, double: bool, block: int) -> None:
    decoder = init_weights(empty(kind=kind, dtype=dtype, double=double, block=block), 0)
    options = {"double": double, "block": block}
    size = spec_quantized.workspace_bytes(SHAPE, dtype)
    scratch = spec_quantized.scratch_bytes(SHAPE, kind, impl="reference", **options)
    kind_of = getattr(torch, TORCH_NAMES[dtype])
    inputs = {
        name: [torch.randn(ROWS, size, dtype=kind_of) for size in (layer.in_features, layer.out_features)]
        for name, layer in quantized_layers(decoder)
    }
    # A dispatch mode does not see inside an operator; so its steps are called directly.
    for function, given in ((quantized_ops.product, 0), (quantized_ops.product_of_gradient, 1)):
        workspace.release()
        with LiveBytes() as live:
            for name, layer in quantized_layers(decoder):
                function(inputs[name][given], layer.packed, layer.packed_layout)
        assert live.now == workspace.allocated_bytes("cpu") == size, "nothing else persists"
        assert live.peak == pytest.approx(size + scratch, rel=0.03)


@pytest.mark.parametrize(("kind", "dtype", "double", "block"), CASES)
def test_declared_bytes_match_a_model(kind: str, dtype: str, double: bool, block: int) -> None:
    decoder = empty(kind=kind, dtype=dtype, double=double, block=block, skip=("v_proj",))
    options = {"double": double, "block": block, "skip": ("v_proj",)}
    found = storage_bytes([*decoder.parameters(), *decoder.buffers()])
    assert found == spec_quantized.weight_bytes(SHAPE, kind, dtype, **options)
    assert found != spec_quantized.weight_bytes(SHAPE, kind, dtype, **{**options, "skip": ()})


def test_layers_match_the_declaration() -> None:
    names = {f"{name}.weight": layer.packed_layout.shape for name, layer in quantized_layers(empty())}
    assert names == spec_quantized.linear_shapes(SHAPE)


def test_flops_match_a_plain_product() -> None:
    layer = next(layer for _, layer in quantized_layers(init_weights(empty(), 0)))
    dims = layer.packed_layout.shape
    with FlopCounterMode(display=False) as counter:
        out = quantized_ops.product(torch.randn(ROWS, dims[1]), layer.packed, layer.packed_layout)
        quantized_ops.product_of_gradient(out, layer.packed, layer.packed_layout)
    assert counter.get_total_flops() == 2 * spec_quantized.flops(ROWS, dims)


def test_a_quantized_8b_model_has_its_expected_size() -> None:
    llama = uniform_shape("llama", 128_256, 4096, 14_336, 32, num_heads=32, num_kv_heads=8, head_dim=128)
    packed = spec_quantized.weight_bytes(llama, "nf4", "bf16")
    assert packed / 2**30 == pytest.approx(5.31, abs=0.01)
    assert spec_quantized.workspace_bytes(llama, "bf16") == 2 * 4096 * 14_336
    assert spec_quantized.loading_peak_bytes(llama, "nf4", "bf16", impl="triton") < 1.03 * packed
    assert spec_quantized.loading_peak_bytes(llama, "nf4", "bf16", impl="reference") < 1.3 * packed
    assert spec_quantized.scratch_bytes(llama, "nf4", impl="triton") == 0
    with pytest.raises(RecipeError, match="nf4 or int8"):
        spec_quantized.weight_bytes(llama, "fp4", "bf16")


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_plan_counts_the_dequantized_weight(impl: str) -> None:
    job = Job(
        SHAPE,
        batch=1,
        tokens=16,
        accumulation=1,
        dtype="bf16",
        weights_dtype="bf16",
        gradient_dtype="bf16",
        optimizer="adamw_torch",
        attention="reference",
        device="cpu",
        lora=LoraSettings(r=2),
    )
    packing = Quantization("nf4", double=True, impl=impl)
    packed = dataclasses.replace(job, quantization=packing)
    workspace = spec_quantized.workspace_bytes(SHAPE, "bf16")
    scratch = spec_quantized.scratch_bytes(SHAPE, "nf4", impl=impl)
    without, with_it = predict(job), predict(packed)
    # the workspace is persistent; dequantizing a weight is temporary
    for moment, size in without.moments.items():
        assert workspace <= with_it.moments[moment] - size <= workspace + scratch, moment
    last = Moment(Phase.LAYERS_BACKWARD, SHAPE.num_layers - 1, SHAPE.num_layers)
    assert with_it.moments[last] - without.moments[last] == workspace + scratch
    saved = model_spec.parameter_bytes(SHAPE, "bf16") - spec_quantized.weight_bytes(SHAPE, "nf4", "bf16")
    assert without.before.weights - with_it.before.weights == saved
