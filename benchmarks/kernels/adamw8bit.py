"""AdamW with 8-bit moments: one step over all tensors of Qwen3-0.6B, bf16 weights and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.models import MODELS
from trimtab.kernels.adamw8bit import spec
from trimtab.kernels.adamw8bit.truth import adamw_truth
from trimtab.lab.contests import Candidates, Contest, Implementation, floor, missing
from trimtab.model.families import shape_from_config
from trimtab.optim import build

BETAS, EPS, LR = (0.9, 0.999), 1e-8, 1e-4
CHECK_LR = 1e-2  # far above bf16 resolution, so that the check measures the update and not its rounding

Step = Callable[[], object]
Maker = Callable[[list[torch.nn.Parameter], float], Step]
"""Maps parameters and a learning rate to an optimizer step."""


def shapes() -> list[tuple[int, ...]]:
    """The 310 tensors, 596 million parameters; the head is the embedding."""
    return [dims for _, dims in shape_from_config(MODELS["qwen3-0.6b"]).parameters()]


def parameters(dims: list[tuple[int, ...]], seed: int, device: str = "cuda") -> list[torch.nn.Parameter]:
    """bf16 weights with gradients."""
    generator = torch.Generator(device).manual_seed(seed)
    params = []
    for shape in dims:
        p = torch.nn.Parameter(torch.randn(shape, device=device, generator=generator).mul_(0.02).bfloat16())
        p.grad = torch.randn(shape, device=device, generator=generator).mul_(1e-3).bfloat16()
        params.append(p)
    return params


def _ours(impl: str) -> Maker:
    def make(params: list[torch.nn.Parameter], lr: float) -> Step:
        named = [(str(i), p) for i, p in enumerate(params)]
        optimizer = build(
            "adamw_8bit", named, lr=lr, betas=BETAS, eps=EPS, weight_decay=0.1, decay_all=True, impl=impl
        )
        scale = torch.ones((), device=params[0].device)
        return lambda: optimizer.step(lr=lr, grad_scale=scale)

    return make


def _fused(state: torch.dtype) -> Maker:
    """torch's fused AdamW; fp32 states need fp32 weights and gradients."""

    def make(params: list[torch.nn.Parameter], lr: float) -> Step:
        if params[0].dtype != state:
            params = [_as(p, state) for p in params]
        return torch.optim.AdamW(params, lr=lr, betas=BETAS, eps=EPS, weight_decay=0.1, fused=True).step

    return make


def _as(param: torch.nn.Parameter, dtype: torch.dtype) -> torch.nn.Parameter:
    other = torch.nn.Parameter(param.detach().to(dtype))
    assert param.grad is not None
    other.grad = param.grad.to(dtype)
    return other


def _bitsandbytes(name: str) -> Maker:
    def make(params: list[torch.nn.Parameter], lr: float) -> Step:
        import bitsandbytes

        kind = getattr(bitsandbytes.optim, name)
        return kind(params, lr=lr, betas=BETAS, eps=EPS, weight_decay=0.1).step

    return make


def _torchao(params: list[torch.nn.Parameter], lr: float) -> Step:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, lr=lr, betas=BETAS, eps=EPS, weight_decay=0.1).step


def _check(make: Maker, fp32: bool = False, device: str = "cuda") -> Callable[[], str | None]:
    """Returns a check of three steps on a layer's tensors against fp64: errors up to 5 % of the update's rms pass."""

    def check() -> str | None:
        dims = [(1024, 1024), (3072, 1024), (128,)]
        params = parameters(dims, 7, device)
        if fp32:
            params = [_as(p, torch.float32) for p in params]
        before = [p.detach().double() for p in params]
        truth = [b.clone() for b in before]
        moments = [(torch.zeros_like(b), torch.zeros_like(b)) for b in before]
        step = make(params, CHECK_LR)
        for count in (1, 2, 3):
            for i, p in enumerate(params):
                assert p.grad is not None
                p.grad.copy_(parameters(dims, 10 + count, device)[i].grad)
                hyper: dict[str, Any] = {"lr": CHECK_LR, "beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS}
                truth[i], *rest = adamw_truth(
                    truth[i], p.grad, *moments[i], **hyper, weight_decay=0.1, step=count
                )
                moments[i] = (rest[0], rest[1])
            step()
        for shape, p, b, t in zip(dims, params, before, truth, strict=True):
            update, error = (t - b).square().mean().sqrt(), (p.detach().double() - t).square().mean().sqrt()
            resolution = b.square().mean().sqrt() * 2.0**-8  # bf16 resolution of the weights
            if error > 0.05 * update + 1.5 * resolution:
                return f"{shape}: updates differ from fp64 by {float(error / update):.1%} of their rms"
        return None

    return check


def _build() -> Candidates:
    makers: dict[str, Maker] = {
        "trimtab triton": _ours("triton"),
        "trimtab triton_exact": _ours("triton_exact"),
        "trimtab reference": _ours("reference"),
        "torch fused, bf16 states": _fused(torch.bfloat16),
        "torch fused, all fp32": _fused(torch.float32),
    }
    absent = {}
    for package, peers in (
        ("bitsandbytes", {f"bitsandbytes {n}": _bitsandbytes(n) for n in ("AdamW8bit", "PagedAdamW8bit")}),
        ("torchao", {"torchao AdamW8bit": _torchao}),
    ):
        reason = missing(package)
        if reason is None:
            makers |= peers
        else:
            absent |= dict.fromkeys(peers, reason)
    contestants = {}
    for name, make in makers.items():
        step = make(parameters(shapes(), seed=0), LR)
        check = _check(make, fp32="fp32" in name)
        contestants[name] = Implementation(step, check, ours=name == "trimtab triton")
    return Candidates(contestants, absent)


def cases() -> list[Contest]:
    """One case: all tensors of the model."""
    moved = sum(
        spec.bytes_moved(shape, 2, 2) if len(shape) > 1 else 22 * shape[0] for shape in shapes()
    )  # 22 bytes per element of a small tensor: 16 of fp32 moments read and written, 6 of weight and gradient
    return [Contest("adamw8bit", "Qwen3-0.6B, 310 tensors, 596 M", _build, floor(bytes_moved=moved))]
