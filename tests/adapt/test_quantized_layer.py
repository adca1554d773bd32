"""One quantized layer: the bytes of bitsandbytes, exact products and gradients, no 16-bit weight saved."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from kernels.triton_tools import interpreted
from torch.utils.checkpoint import checkpoint

from trimtab.adapt import workspace
from trimtab.adapt.quantized import NAMES, QuantizedLinear, packed_state
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.kernels import int8, nf4
from trimtab.trainer.memory import LiveBytes

KINDS: list[dict[str, Any]] = [
    {"kind": "nf4", "double": True},
    {"kind": "nf4", "double": False, "block": 128},
    {"kind": "int8"},
]


def layer_of(weight: torch.Tensor, bias: bool = False, **options: Any) -> QuantizedLinear:
    layer = QuantizedLinear(weight.shape[1], weight.shape[0], bias=bias, dtype=weight.dtype, **options)
    layer.set_weight(weight)
    return layer


def weight_of(rows: int = 40, columns: int = 128, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype)


@pytest.mark.oracle
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_equal_bitsandbytes(double: bool, dtype: torch.dtype) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    weight = weight_of(dtype=dtype)
    theirs = bnb.nn.Linear4bit(128, 40, bias=False, compress_statistics=double, quant_type="nf4")
    theirs.weight = bnb.nn.Params4bit(
        weight.clone(), requires_grad=False, compress_statistics=double, quant_type="nf4"
    )
    state = theirs.to("cpu").state_dict()
    ours = packed_state(layer_of(weight, kind="nf4", double=double))
    assert list(ours) == list(state)
    assert all(torch.equal(ours[name], state[name]) for name in state)


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_gradient_match_the_dequantized_weight(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    layer = layer_of(weight_of(dtype=dtype), bias=True, **options)
    assert layer.bias is not None
    layer.bias.data.copy_(torch.randn(40))
    layer.bias.requires_grad_(True)
    x = torch.randn(2, 3, 128, dtype=dtype, requires_grad=True)
    y = layer(x)
    y.backward(grad := torch.randn(2, 3, 40, dtype=dtype))
    weight_NK = layer.dequantized()
    assert weight_NK.dtype == dtype
    assert torch.equal(y, torch.nn.functional.linear(x, weight_NK) + layer.bias)
    assert x.grad is not None
    assert torch.equal(x.grad, grad @ weight_NK)
    assert torch.allclose(layer.bias.grad, grad.sum((0, 1)), rtol=1e-2)  # type: ignore[arg-type]
    assert torch.equal(layer.product(x), torch.nn.functional.linear(x, weight_NK))


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_autograd_saves_only_packed_tensors(options: dict[str, Any]) -> None:
    layer = layer_of(weight_of(), **options)
    mine = {tensor.untyped_storage().data_ptr() for tensor in layer.packed if tensor is not None}
    kept: list[torch.Tensor] = []
    x = torch.randn(5, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x)
    assert kept
    assert all(tensor.untyped_storage().data_ptr() in mine for tensor in kept)
    workspace_bytes = workspace.allocated_bytes("cpu")
    with LiveBytes() as live:
        y.sum().backward()
    assert workspace.allocated_bytes("cpu") == workspace_bytes >= 40 * 128 * 4, (
        "backward uses the same workspace"
    )
    assert live.now <= 5 * 128 * 4 + 5 * 40 * 4, "and only gradients remain"


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_second_derivative_and_recomputation(options: dict[str, Any]) -> None:
    layer = layer_of(weight_of(6, 64), **options)
    x = torch.randn(4, 64, requires_grad=True)
    (dx,) = torch.autograd.grad((layer(x) ** 2).sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(dx.sum(), x)
    weight = layer.dequantized()
    assert torch.allclose(again, 2 * torch.ones(4, 64) @ weight.T @ weight, rtol=1e-4, atol=1e-6)
    y = checkpoint(layer, x, use_reentrant=False)
    (recomputed,) = torch.autograd.grad((y**2).sum(), x)
    assert torch.equal(recomputed, dx)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_operators_pass_opcheck(options: dict[str, Any]) -> None:
    layer = layer_of(weight_of(8, 64), **options)
    x = torch.randn(3, 64, requires_grad=True)
    torch.library.opcheck(torch.ops.trimtab.packed_linear, (x, *layer.packed, layer.text))
    grad = torch.randn(3, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.trimtab.packed_linear_gradient, (grad, *layer.packed, layer.text))


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_compiled_without_breaks_for_any_number_of_tokens(options: dict[str, Any]) -> None:
    layer = layer_of(weight_of(8, 64), bias=True, **options)
    assert layer.bias is not None
    layer.bias.data.zero_()
    compilations = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal compilations
        compilations += 1
        return graph

    compiled = torch.compile(lambda x: layer(x).relu(), fullgraph=True, dynamic=True, backend=backend)
    torch._dynamo.reset()
    for tokens in (7, 12, 33, 64):
        x = torch.randn(2, tokens, 64, requires_grad=True)
        other = x.detach().clone().requires_grad_(True)
        y, expected = compiled(x), layer(other).relu()
        assert torch.equal(y, expected)
        y.sum().backward()
        expected.sum().backward()
        assert torch.equal(x.grad, other.grad)  # type: ignore[arg-type]
    assert compilations == 1


def test_compiled_backward_dequantizes_again() -> None:
    layer = layer_of(weight_of(8, 64), kind="nf4")
    compiled = torch.compile(lambda x: layer(x) * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(5, 64, requires_grad=True)
    compiled(x).sum().backward()
    assert torch.allclose(x.grad, 2 * torch.ones(5, 8) @ layer.dequantized())  # type: ignore[arg-type]


def test_autocast_computes_in_its_dtype() -> None:
    layer = layer_of(weight_of(), kind="nf4")
    x = torch.randn(5, 128, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, layer(x.bfloat16()))
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_casting_a_model_does_not_change_the_packed_bytes(options: dict[str, Any]) -> None:
    layer = layer_of(weight_of(), bias=True, **options)
    before = [None if tensor is None else tensor.clone() for tensor in layer.packed]
    model = torch.nn.Sequential(layer, torch.nn.Linear(40, 3)).to(torch.bfloat16).half().float()
    model = model.to(torch.bfloat16)
    for name, old, new in zip(NAMES, before, layer.packed, strict=True):
        assert (old is None) == (new is None), name
        if old is not None and new is not None:
            assert old.dtype == new.dtype
            assert torch.equal(old, new), name
    assert layer.bias is not None
    assert layer.bias.dtype == torch.bfloat16
    assert model(torch.randn(2, 128, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_state_dict_restores_the_weight() -> None:
    layer = layer_of(weight_of(), kind="nf4")
    other = QuantizedLinear(128, 40, bias=False, kind="nf4", dtype=torch.float32)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.dequantized(), layer.dequantized())


def test_making_it_trainable_raises() -> None:
    layer = layer_of(weight_of(), bias=True, kind="nf4")
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    with pytest.raises(RecipeError, match=r"cannot be trained directly.*lora"):
        layer.requires_grad_()
    assert layer.requires_grad_(False) is layer


def test_invalid_weights_and_settings_raise() -> None:
    layer = QuantizedLinear(128, 40, bias=False, kind="nf4", dtype=torch.float32)
    with pytest.raises(ModelError, match=r"\[40, 64\] does not fit a layer \[40, 128\]"):
        layer.set_weight(torch.randn(40, 64))
    bad = weight_of()
    bad[3, 5] = float("nan")
    with pytest.raises(ModelError, match="NaN or infinity"):
        layer.set_weight(bad)
    with pytest.raises(ModelError, match="NaN or infinity"):
        QuantizedLinear(128, 40, bias=False, kind="int8", dtype=torch.float32).set_weight(bad)
    with pytest.raises(RecipeError, match="nf4 or int8"):
        QuantizedLinear(128, 40, bias=False, kind="fp4", dtype=torch.float32)
    with pytest.raises(RecipeError, match="blocks of 48"):
        QuantizedLinear(128, 40, bias=False, kind="nf4", block=48, dtype=torch.float32)
    with pytest.raises(ModelError, match=r"scales in 32 bits.* does not fit a layer in .*scales in 8 bits"):
        layer.set_packed_weight(nf4.quantize(weight_of(), double=False))
    with pytest.raises(ModelError, match=r"int8 .* does not fit a layer in nf4"):
        layer.set_packed_weight(int8.quantize(weight_of()))


def test_threads_do_not_write_into_each_others_workspace() -> None:
    layers = [layer_of(weight_of(96, 512) * (i + 1), kind="int8") for i in range(3)]
    x = torch.randn(64, 512)
    expected = [torch.nn.functional.linear(x, layer.dequantized()) for layer in layers]
    wrong: list[int] = []

    def work(index: int) -> None:
        wrong.extend(index for _ in range(30) if not torch.equal(layers[index](x), expected[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_workspace_is_shared_grows_and_is_released() -> None:
    workspace.release()
    with torch.inference_mode():
        layer_of(weight_of(8), kind="nf4")(torch.randn(3, 128))
    with workspace.borrow((4,), torch.float32, torch.device("cpu")) as values:
        assert not values.is_inference(), "training also writes to it"
    for rows in (40, 96, 40):
        layer_of(weight_of(rows), kind="nf4")(torch.randn(3, 128))
    assert workspace.allocated_bytes("cpu") == 96 * 128 * 4
    workspace.release()
    assert workspace.allocated_bytes() == 0


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_triton_reads_the_same_bytes(options: dict[str, Any], rows: int) -> None:
    pytest.importorskip("triton")
    from trimtab.kernels.int8 import impl_triton as int8_triton
    from trimtab.kernels.nf4 import impl_triton, impl_triton_matmul

    with interpreted(impl_triton, impl_triton_matmul, int8_triton):
        layer = layer_of(weight_of(8, 128), impl="triton", **options)
        twin = layer_of(weight_of(8, 128), **options)
        for mine, theirs in zip(layer.packed, twin.packed, strict=True):
            assert mine is theirs is None or torch.equal(mine, theirs)  # type: ignore[arg-type]
        x = torch.randn(rows, 128, requires_grad=True)
        y = layer(x)
        assert torch.allclose(y, twin(x), rtol=1e-5, atol=1e-6)
        y.sum().backward()
        assert torch.equal(x.grad, torch.ones(rows, 8) @ twin.dequantized())  # type: ignore[arg-type]
