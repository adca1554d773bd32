"""Tests of FlashAttention-2 under the names of the original study, and additional cases.

Triton tests run in the interpreter without a GPU.
"""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from adapters import (
    get_flashattention_autograd_function_pytorch,
    get_flashattention_autograd_function_triton,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_tools import interpreted

CUDA = torch.cuda.is_available()


def on_triton():
    """A context in which the Triton function runs, and the device it runs on."""
    pytest.importorskip("triton")
    from trimtab.kernels.attention import kernels_backward, kernels_forward, launch_triton

    if CUDA:
        return contextlib.nullcontext(), "cuda"
    return interpreted(kernels_forward, kernels_backward, launch_triton), "cpu"


def draw(batch, n_q, n_k, d, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(n_q)
    tensors = [torch.randn(batch, n, d, generator=generator) for n in (n_q, n_k, n_k, n_q)]
    return [x.to(device=device, dtype=dtype) for x in tensors]


def plain(Q, K, V, is_causal):
    """(O, L) by the definition; queries are the last positions."""
    s = Q @ K.mT / math.sqrt(Q.shape[-1])
    if is_causal:
        n_q, n_k = s.shape[-2:]
        s = s.masked_fill(
            torch.ones(n_q, n_k, dtype=torch.bool, device=s.device).triu(1 + n_k - n_q), -math.inf
        )
    return s.softmax(-1).nan_to_num(0) @ V, s.logsumexp(-1)


def forward_pass(function, is_causal, device):
    Q, K, V, _ = draw(4, 128, 128, 64, device=device)
    O = function.apply(Q.requires_grad_(), K, V, is_causal)  # noqa: E741
    saved = [x for x in O.grad_fn.saved_tensors if x.shape == (4, 128)]
    assert len(saved) == 1, "exactly one saved tensor of shape (batch, n_q): L"
    O_true, L_true = plain(Q, K, V, is_causal)
    torch.testing.assert_close(O, O_true, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(saved[0], L_true, rtol=1e-5, atol=1e-5)


def backward_pass(function, is_causal, device, sizes=(4, 128, 128, 64)):
    tensors = draw(*sizes, device=device)
    got, true = ([x.detach().clone().requires_grad_() for x in tensors[:3]] for _ in range(2))
    function.apply(*got, is_causal).backward(tensors[3])
    exact = [x.detach().double().requires_grad_() for x in true]
    plain(*exact, is_causal)[0].backward(tensors[3].double())
    for x, y in zip(got, exact, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_flash_forward_pass_pytorch(is_causal):
    forward_pass(get_flashattention_autograd_function_pytorch(), is_causal, "cpu")


@pytest.mark.parametrize("is_causal", [False, True])
def test_flash_backward_pytorch(is_causal):
    backward_pass(get_flashattention_autograd_function_pytorch(), is_causal, "cpu")


@pytest.mark.parametrize("is_causal", [False, True])
def test_flash_forward_pass_triton(is_causal):
    context, device = on_triton()
    with context:
        forward_pass(get_flashattention_autograd_function_triton(), is_causal, device)


@pytest.mark.parametrize("is_causal", [False, True])
def test_flash_backward_triton(is_causal):
    context, device = on_triton()
    with context:
        backward_pass(get_flashattention_autograd_function_triton(), is_causal, device)


@settings(max_examples=12, deadline=None)
@given(
    n_q=st.integers(1, 90),
    n_k=st.integers(1, 90),
    d=st.sampled_from([3, 16, 24]),
    is_causal=st.booleans(),
    name=st.sampled_from(["pytorch", "triton"]),
)
def test_any_lengths(n_q, n_k, d, is_causal, name):
    """Causal queries are the last positions; the first n_q − n_k are then fully masked: zeros, zero gradients."""
    functions = {
        "pytorch": get_flashattention_autograd_function_pytorch,
        "triton": get_flashattention_autograd_function_triton,
    }
    context, device = on_triton() if name == "triton" else (contextlib.nullcontext(), "cpu")
    with context:
        function = functions[name]()
        tensors = draw(2, n_q, n_k, d, device=device)
        leaves = [x.clone().requires_grad_() for x in tensors[:3]]
        O = function.apply(*leaves, is_causal)  # noqa: E741
        O.backward(tensors[3])
        num_masked = max(n_q - n_k, 0) if is_causal else 0
        assert not O[:, :num_masked].any()
        assert not leaves[0].grad[:, :num_masked].any()
        exact = [x.double().requires_grad_() for x in tensors[:3]]
        expected, _ = plain(exact[0][:, num_masked:], *exact[1:], is_causal)
        expected.backward(tensors[3][:, num_masked:].double())
        torch.testing.assert_close(O[:, num_masked:].double(), expected, rtol=1e-5, atol=1e-5)
        for x, y in zip(leaves, exact, strict=True):
            torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-5, atol=1e-5)


def test_the_readable_implementation_in_other_dtypes():
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 2e-2)):
        Q, K, V, _ = draw(2, 70, 70, 16, dtype)
        O = get_flashattention_autograd_function_pytorch().apply(Q, K, V, True)  # noqa: E741
        assert O.dtype == dtype
        true = plain(Q.double(), K.double(), V.double(), True)[0]
        torch.testing.assert_close(O.double(), true, rtol=tolerance, atol=tolerance)
