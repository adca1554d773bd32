"""Attention with its optional results and arguments against a truth computed by loops in fp64."""

# B batch, T queries, S keys, H query heads, K key/value heads, D head size

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from triton_tools import interpreted

from trimtab.kernels.accuracy import TOLERANCE, AccuracyCheck, check_accuracy
from trimtab.kernels.attention import Layout, attention
from trimtab.kernels.attention.spec import Case, make_inputs, make_lse_gradient, make_sinks

RESULTS = ("o", "lse", "dq", "dk", "dv", "dsinks")
PLACES = ["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)]


@contextlib.contextmanager
def at(place: str) -> Iterator[str]:
    """Yields the device; on the CPU every kernel is interpreted."""
    pytest.importorskip("triton")
    from trimtab.kernels.attention import kernels_backward, kernels_forward, launch_triton

    if place == "gpu":
        yield "cuda"
    else:
        with interpreted(kernels_forward, kernels_backward, launch_triton):
            yield "cpu"


def dtypes_at(place: str) -> tuple[str, ...]:
    """Without bf16 in the interpreter, which is inaccurate there."""
    return ("fp32", "fp16") if place == "interpreter" else ("fp32", "fp16", "bf16")


def truth(
    case: Case,
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    sinks_H: torch.Tensor | None = None,
) -> tuple[Any, Any]:
    """(o_BTHD, lse_BTH) one query at a time, sharing no code with any implementation."""
    (B, T, H, D), (S, K) = q_BTHD.shape, k_BSKD.shape[1:3]
    scale = D**-0.5 if case.scale is None else case.scale
    nothing = 0.0 * sum(x.sum() for x in (q_BTHD, k_BSKD, v_BSKD))  # zero gradients for fully masked queries
    o, lse = torch.zeros_like(q_BTHD) + nothing, torch.full_like(q_BTHD[..., 0], -torch.inf) + nothing
    for b in range(B):
        document = (
            [n for n, length in enumerate(case.documents[b]) for _ in range(length)]
            if case.documents
            else None
        )
        for t in range(T):
            i = t + (S - T if case.offset is None else case.offset)
            seen = [j for j in range(S) if _sees(case, document, i, j)]
            for h in range(H if seen or sinks_H is not None else 0):
                s = scale * k_BSKD[b, seen, h * K // H] @ q_BTHD[b, t, h]
                s = s if case.softcap is None else case.softcap * (s / case.softcap).tanh()
                s = s if sinks_H is None else torch.cat([s, sinks_H[h : h + 1]])
                place = torch.zeros(B, T, H, dtype=torch.bool)
                place[b, t, h] = True
                o = torch.where(place[..., None], s.softmax(0)[: len(seen)] @ v_BSKD[b, seen, h * K // H], o)
                lse = torch.where(place, s.exp().sum().log(), lse)
    return o, lse


def _sees(case: Case, document: list[int] | None, i: int, j: int) -> bool:
    near = case.window is None or abs(i - j) < case.window
    return (j <= i or not case.causal) and near and (document is None or document[i] == document[j])


def run(function: Callable[..., Any], inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> Any:
    """(o, lse, dq, dk, dv[, dsinks]) with both upstream gradients, or with one of them without lse."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves) if len(grads) > 1 else [function(*leaves)]
    found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    return [*(x.detach() for x in outputs), *found]


def make_all_inputs(case: Case, dtype: str, device: str = "cpu") -> tuple[list[Any], Any, Any]:
    """([q, k, v] followed by the sinks if there are any, do, documents)."""
    *inputs, do, documents_BS = make_inputs(case, dtype, device)
    sinks_H = make_sinks(case, dtype, device)
    return [*inputs, *([] if sinks_H is None else [sinks_H])], do, documents_BS


@functools.cache
def true_results(case: Case) -> Any:
    """In fp64."""
    inputs, do, _ = make_all_inputs(case, "fp64")
    return run(functools.partial(truth, case), inputs, (do, make_lse_gradient(case, "fp64")))


def by_impl(
    case: Case, documents_BT: torch.Tensor | None, impl: str, *, return_lse: bool = True
) -> Callable[..., Any]:
    """The case as a function of its tensors."""
    layout = Layout.causal() if documents_BT is None else Layout.packed(documents_BT)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None) -> Any:
        return attention(
            q, k, v, layout=layout, window=case.window, scale=case.scale, softcap=case.softcap, causal=case.causal,
            offset=case.offset, sinks_H=sinks, return_lse=return_lse, impl=impl,
        )  # fmt: skip

    return call


def compare(
    case: Case, impl: str, dtype: str, device: str = "cpu", *, factor: float = 1.0, dlse_factor: float = 1.0
) -> list[AccuracyCheck]:
    """Verdicts for o, lse and every gradient; `factor` and `dlse_factor` inject errors that must be found."""
    inputs, do, documents_BT = make_all_inputs(case, dtype, device)
    dlse = make_lse_gradient(case, dtype, device)
    own = run(by_impl(case, documents_BT, "reference"), inputs, (do, dlse))
    got = run(by_impl(case, documents_BT, impl), inputs, (do, dlse * dlse_factor))
    assert got[1].dtype == (torch.float64 if dtype == "fp64" else torch.float32)
    assert got[1].shape == got[0].shape[:3]
    true = true_results(case)
    dv = true[4] if true[4].numel() else torch.zeros(1)
    # Without cancellation dq and dk are as large as dv.
    floors = {"floor": 0.1 * float(dv.square().mean().sqrt()), "peak_floor": 0.1 * float(dv.abs().max())}
    accuracy_checks = []
    for name, x, t, r in zip(RESULTS[: len(true)], got, true, own, strict=True):
        x, r = (y.cpu().double() for y in (x, r))
        assert torch.equal(x.isinf(), t.isinf()), f"{name}: fully masked queries"
        x, t, r = (y.masked_fill(y.isinf(), 0.0) for y in (x * factor, t, r))
        accuracy_checks.append(
            check_accuracy(name, x, truth=t, reference=r, tolerance=TOLERANCE[dtype], **floors)
        )
    return accuracy_checks
