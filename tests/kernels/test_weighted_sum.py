"""The weighted sum: exact with every gradient, on the CPU in Triton's interpreter, and compiled on a GPU."""

# N rows, D elements per row

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import parity
from tests.kernels.parity import UPSTREAM, accuracy_checks, run
from tests.kernels.triton_tools import CHIPS, SHARED_LIMIT, compile_for, interpreted
from trimtab.facts.errors import ModelError, ResourceError
from trimtab.kernels.weighted_sum import spec, weighted_sum
from trimtab.kernels.weighted_sum.spec import CASES, LARGE_CASES, Case

pytest.importorskip("triton")
from trimtab.kernels.weighted_sum import impl_triton


def call(impl: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return weighted_sum(x, w, impl=impl)


def inputs(case: Case, device: str = "cpu") -> dict[str, torch.Tensor]:
    x, w = spec.make_inputs(case, "fp32", device)
    return {"x": x.requires_grad_(), "w": w.requires_grad_()}


interpreter = partial(parity.interpreter, impl_triton)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("kind", UPSTREAM)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_exact(case: Case, kind: str, dtype: str) -> None:
    for checked in accuracy_checks(call, inputs(case), dtype, kind=kind, around=interpreter):
        assert checked, checked


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, LARGE_CASES[0]], ids=lambda case: case.name)
@pytest.mark.parametrize("kind", UPSTREAM)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_exact_on_a_gpu(case: Case, kind: str, dtype: str) -> None:
    for checked in accuracy_checks(call, inputs(case, "cuda"), dtype, kind=kind, device="cuda"):
        assert checked, checked


@settings(max_examples=15, deadline=None)
@given(N=st.integers(1, 80), D=st.integers(1, 300), dtype=st.sampled_from(["fp32", "fp16"]))
def test_any_shape(N: int, D: int, dtype: str) -> None:
    for checked in accuracy_checks(call, inputs(Case("drawn", N, D)), dtype, around=interpreter):
        assert checked, checked


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_one_percent_error_fails(dtype: str) -> None:
    case = inputs(CASES[0])
    assert not any(accuracy_checks(call, case, dtype, impl="reference", factor=1.01, around=nullcontext))


def test_strides_and_leading_axes() -> None:
    wide = torch.randn(4, 5, 40)
    w = torch.randn(20)
    for x in (wide[..., :20], wide.transpose(0, 1)[..., 20:], wide[..., ::2], w.expand(3, 20)):
        with interpreter():
            got = weighted_sum(x, w, impl="triton")
        torch.testing.assert_close(got, weighted_sum(x, w))


def test_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than one program of the backward processes, the last chunk ragged."""
    monkeypatch.setattr(spec, "MAX_CHUNKS", 2)
    assert spec.chunk_rows(150) == 76
    for checked in accuracy_checks(call, inputs(Case("chunks", 150, 9)), "fp32", around=interpreter):
        assert checked, checked


def test_deterministic() -> None:
    with interpreter():
        first, second = (run(call, "triton", inputs(Case("again", 100, 70))) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_operators_pass_opcheck() -> None:
    """Schema, fake, autograd and tracing agree; and there is no graph break."""
    x, w = (tensor for tensor in inputs(Case("", 5, 7)).values())
    with interpreted(impl_triton):
        torch.library.opcheck(torch.ops.trimtab.weighted_sum, (x, w))
        torch.library.opcheck(
            torch.ops.trimtab.weighted_sum_backward, (torch.ones(5), x.detach(), w.detach())
        )
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled("triton", x, w), weighted_sum(x, w))


def test_second_derivatives_raise() -> None:
    x, w = inputs(Case("", 2, 3)).values()
    with interpreted(impl_triton):
        (g,) = torch.autograd.grad(weighted_sum(x, w, impl="triton").sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        g.sum().backward()


def test_invalid_arguments_raise() -> None:
    x, w = torch.ones(2, 3), torch.ones(3)
    with pytest.raises(ModelError, match="unknown weighted sum implementation 'fast'; use one of"):
        weighted_sum(x, w, impl="fast")
    with pytest.raises(ResourceError, match="require a CUDA device"):
        weighted_sum(x, w, impl="triton")


@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_for_every_chip(chip: int) -> None:
    tile = {"R": spec.ROWS, "C": spec.COLUMNS}
    numbers = {"N": "i32", "D": "i32:16", "stride": "i32:16"}
    for dtype in ("fp32", "fp16"):
        forward = dict.fromkeys(("x_ptr", "w_ptr", "y_ptr"), f"*{dtype}")
        backward = dict.fromkeys(("g_ptr", "x_ptr", "w_ptr", "gx_ptr"), f"*{dtype}")
        for kernel, types, more in (
            (impl_triton._forward_kernel, forward, {}),
            (impl_triton._backward_kernel, {**backward, "parts_ptr": "*fp32"}, {"CHUNK": 256}),
        ):
            compiled = compile_for(chip, kernel, {**types, **numbers}, {**tile, **more})
            assert compiled.shared <= SHARED_LIMIT[chip]
            assert not compiled.spills


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    case = LARGE_CASES[1]
    x = torch.zeros(case.N, case.D, dtype=torch.bfloat16, device="cuda")
    w = torch.ones(case.D, dtype=torch.bfloat16, device="cuda")
    x[-1] = 1.0
    x.requires_grad_()
    w.requires_grad_()
    y = weighted_sum(x, w, impl="triton")
    assert y[-1] == case.D
    assert y[:-1].abs().max() == 0
    gx, gw = torch.autograd.grad(y[-1], (x, w))
    assert torch.equal(gw, torch.ones_like(w))
    assert gx[-1].min() == gx[-1].max() == 1
    assert gx[:-1].abs().max() == 0


def test_the_docs_page_quotes_the_code() -> None:
    """docs/writing-a-kernel.md quotes the files: each block marked as a quote must be found in them, word for word."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "writing-a-kernel.md").read_text(encoding="utf-8")
    quoted = re.findall(r"<!-- skip: part of (\S+), .*? -->\n```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(quoted) == 5
    for name, text in quoted:
        assert text in (root / name).read_text(encoding="utf-8"), f"{name} has changed: {text[:80]}"
