"""Causal attention in bf16: five shapes, forward and backward separately, compared with torch's own kernels.

Ground truth is the fp64 reference on two slices, the first and the last (row, key/value head) with its group of query
heads: heads are independent, so slices are exact, and all heads would not fit in memory.
"""

# B batch, T tokens, H query heads, K key/value heads, D head size

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch._functorch.config as settings

from trimtab.facts.errors import ModelError
from trimtab.kernels.accuracy import TOLERANCE, check_accuracy
from trimtab.kernels.attention import Layout, attention, choose_attention, spec
from trimtab.lab.contests import Candidates, Contest, Implementation, floor

PEERS = ("sdpa_cudnn", "sdpa_flash", "flex", "varlen")


@dataclass(frozen=True)
class Shape:
    """The shape of two cases, forward and backward."""

    name: str
    B: int
    T: int
    H: int
    K: int
    D: int
    packed: bool = False


SHAPES = (
    Shape("1x8192, 32/8 heads of 128", 1, 8192, 32, 8, 128),
    Shape("4x4096, 16/8 heads of 128", 4, 4096, 16, 8, 128),
    Shape("8x1024, 12 heads of 64", 8, 1024, 12, 12, 64),
    Shape("packed 4x4096, 32/8 heads of 128", 4, 4096, 32, 8, 128, packed=True),
    Shape("1x8192, 16/8 heads of 256", 1, 8192, 16, 8, 256),
)


def cases() -> list[Contest]:
    """Forward and backward of each shape."""
    return [
        Contest(
            "attention",
            f"{shape.name}, {'backward' if backward else 'forward'}",
            functools.partial(build, shape, backward),
            _floor(shape, backward),
        )
        for shape in SHAPES
        for backward in (False, True)
    ]


def lengths(shape: Shape) -> list[list[int]]:
    """Document lengths of each row: exponential with a mean of 400 tokens, the last one truncated; deterministic."""
    if not shape.packed:
        return [[shape.T]] * shape.B
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(shape.B):
        row: list[int] = []
        while sum(row) < shape.T:
            drawn = int(torch.empty(()).exponential_(1 / 400, generator=generator)) + 1
            row.append(min(drawn, shape.T - sum(row)))
        rows.append(row)
    return rows


def _floor(shape: Shape, backward: bool):  # type: ignore[no-untyped-def]
    pairs = sum(spec.visible_pairs(n, n) for row in lengths(shape) for n in row)
    s = shape
    return floor(
        bytes_moved=spec.bytes_moved(s.B, s.T, s.T, s.H, s.K, s.D, "bf16", backward=backward),
        flops=spec.flops(pairs, s.H, s.D, backward=backward),
    )


class Inputs:
    """The inputs that all implementations of a case get, and the ground truth."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        generator = torch.Generator("cuda").manual_seed(0)

        def draw(heads: int) -> torch.Tensor:
            return torch.randn(
                shape.B, shape.T, heads, shape.D, device="cuda", dtype=torch.bfloat16, generator=generator
            )

        self.leaves = [draw(heads).requires_grad_() for heads in (shape.H, shape.K, shape.K)]
        self.grad_BTHD = draw(shape.H)
        self.documents_BT: torch.Tensor | None = None
        if shape.packed:
            rows = [[i for i, n in enumerate(row) for _ in range(n)] for row in lengths(shape)]
            self.documents_BT = torch.tensor(rows)
        self.layout = Layout.causal() if self.documents_BT is None else Layout.packed(self.documents_BT)

    def slices(self) -> list[tuple[int, int]]:
        """(row, key/value head) pairs for which the ground truth is computed."""
        return [(0, 0), (self.shape.B - 1, self.shape.K - 1)]

    def cut(self, x: torch.Tensor, b: int, g: int) -> torch.Tensor:
        """Returns a slice: one row and one key/value head, or the query heads that share it."""
        group = x.shape[2] // self.shape.K
        return x[b : b + 1, :, g * group : (g + 1) * group].detach()

    @functools.cached_property
    def truth(self) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """(fp64, bf16 reference) results of each slice: o, dq, dk, dv."""
        return [
            (self._reference(b, g, torch.float64), self._reference(b, g, torch.bfloat16))
            for b, g in self.slices()
        ]

    def _reference(self, b: int, g: int, dtype: torch.dtype) -> list[torch.Tensor]:
        layout = Layout.causal()
        if self.documents_BT is not None:
            layout = Layout.packed(self.documents_BT[b : b + 1])
        leaves = [self.cut(x, b, g).to(dtype).requires_grad_() for x in self.leaves]
        out = attention(*leaves, layout=layout, impl="reference")
        grads = torch.autograd.grad(out, leaves, self.cut(self.grad_BTHD, b, g).to(dtype))
        return [out.detach(), *grads]

    def complaint(self, results: list[torch.Tensor], names: tuple[str, ...]) -> str | None:
        """The first result that exceeds the allowed error; None if all agree with the ground truth."""
        known = ("o", "dq", "dk", "dv")
        for name, x in zip(names, results, strict=True):
            if not x.isfinite().all():
                return f"{name} is not finite"
            for (b, g), (true, own) in zip(self.slices(), self.truth, strict=True):
                i = known.index(name)
                checked = check_accuracy(
                    name, self.cut(x, b, g), truth=true[i], reference=own[i], tolerance=TOLERANCE["bf16"]
                )
                if not checked:
                    return f"{name} is off by {checked.rms_error:.2e}, allowed {checked.rms_allowed:.2e}"
        return None


def build(shape: Shape, backward: bool) -> Candidates:
    """Returns all backends that support the shape, with the same inputs."""
    # a compiled backward that overwrites saved tensors could not be timed repeatedly
    settings.donated_buffer = False
    inputs = Inputs(shape)
    contestants, absent = {}, {}
    for impl in ("triton", *PEERS):
        try:
            choose_attention(
                device="cuda",
                capability=torch.cuda.get_device_capability(),
                dtype="bf16",
                head_dim=shape.D,
                packed=shape.packed,
                window=None,
                training=True,
                tokens=shape.T,
                requested=impl,
            )
        except ModelError as error:
            absent[impl] = str(error).split(";")[0]
            continue
        inputs.layout.prepare(impl, "cuda", shape.T, B=shape.B, dtype=torch.bfloat16)
        contestants[impl] = _contestant(inputs, impl, backward)
    return Candidates(contestants, absent)


def _contestant(inputs: Inputs, impl: str, backward: bool) -> Implementation:
    def forward() -> torch.Tensor:
        return attention(*inputs.leaves, layout=inputs.layout, impl=impl)

    kept: list[torch.Tensor] = []

    def gradients() -> tuple[torch.Tensor, ...]:
        if not kept:
            kept.append(forward())
        return torch.autograd.grad(kept[0], inputs.leaves, inputs.grad_BTHD, retain_graph=True)

    def check() -> str | None:
        if backward:
            return inputs.complaint(list(gradients()), ("dq", "dk", "dv"))
        return inputs.complaint([forward().detach()], ("o",))

    run: Callable[[], object] = gradients if backward else forward
    return Implementation(run, check, ours=impl == "triton")
