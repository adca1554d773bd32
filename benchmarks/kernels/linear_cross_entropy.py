"""The loss over a vocabulary with both gradients, compared with torch, torch.compile, Liger and cut-cross-entropy.

Flat logits (an untrained model) and peaked logits (hidden states aligned with their label): some peers skip small
values, and are fast or accurate only for one kind.
"""

# N tokens, C hidden size, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F

from trimtab.kernels.linear_cross_entropy import linear_cross_entropy, schedule, spec
from trimtab.lab.contests import Candidates, Contest, Implementation, disagreement, floor, missing

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
NAMES = ("loss", "hidden's gradient", "weight's gradient")


@dataclass(frozen=True)
class Shape:
    """Sizes, and the workspace limits of trimtab's two modes in MiB (beyond inputs and gradients)."""

    N: int
    C: int
    V: int
    fast: int
    low: int


SHAPES = (
    Shape(4096, 1024, 151_936, fast=1190, low=25),  # Qwen3-0.6B
    Shape(8192, 4096, 128_256, fast=1900, low=134),  # Llama 3 8B
    Shape(8192, 2304, 256_000, fast=1800, low=139),  # Gemma 2 2B
    Shape(16384, 576, 49_152, fast=1500, low=38),  # SmolLM2-135M
)
POINTING = 16.0
"""For peaked logits: the label's logit is this much above the others', which have a standard deviation of 1."""


@dataclass(frozen=True)
class Inputs:
    """bf16 leaves and labels; one in sixteen is ignored."""

    hidden_NC: torch.Tensor
    weight_VC: torch.Tensor
    labels_N: torch.Tensor


def draw(shape: Shape, peaked: bool) -> Inputs:
    """Random inputs, drawn on the GPU: on a CPU the larger shapes take seconds."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(rows: int, std: float) -> torch.Tensor:
        return (torch.randn(rows, shape.C, generator=generator, device="cuda") * std).bfloat16()

    weight_VC = normal(shape.V, shape.C**-0.5)
    hidden_NC = normal(shape.N, 1.0)
    labels_N = torch.randint(0, shape.V, (shape.N,), generator=generator, device="cuda")
    if peaked:
        hidden_NC = hidden_NC + POINTING * weight_VC[labels_N]
    labels_N[::16] = -100
    return Inputs(hidden_NC.requires_grad_(), weight_VC.requires_grad_(), labels_N)


def step(loss: Loss, inputs: Inputs) -> Results:
    """Loss and both gradients, as in training."""
    value = loss(inputs.hidden_NC, inputs.weight_VC, inputs.labels_N)
    return value.detach(), *torch.autograd.grad(value, (inputs.hidden_NC, inputs.weight_VC))


def accumulated(inputs: Inputs, chunks: int, dtype: torch.dtype) -> Results:
    """The plain computation in chunks of rows, gradients accumulated in `dtype`."""
    hidden_NC = inputs.hidden_NC.detach().to(dtype)
    weight_VC = inputs.weight_VC.detach().to(dtype).requires_grad_()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    count, total, found = (inputs.labels_N != -100).sum(), torch.zeros((), device="cuda", dtype=wide), []
    for h_nC, labels_n in zip(hidden_NC.chunk(chunks), inputs.labels_N.chunk(chunks), strict=True):
        h_nC = h_nC.clone().requires_grad_()
        loss = F.cross_entropy(F.linear(h_nC, weight_VC).to(wide), labels_n, reduction="sum") / count
        loss.backward()
        total += loss.detach()
        found.append(h_nC.grad)
    assert weight_VC.grad is not None
    return total, torch.cat(found), weight_VC.grad


def check(
    loss: Loss, inputs: Inputs, truth: Callable[[], Results], own: Callable[[int], Results], chunks: int
) -> str | None:
    """Returns the first error larger than that of the plain computation with as many chunks plus a tolerance, or
    None."""
    return disagreement(NAMES, step(loss, inputs), truth(), own(chunks), "bf16")


def plain(wide: bool, h: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits_NV = F.linear(h, w)
    return F.cross_entropy(logits_NV.float() if wide else logits_NV, y)


def ours(memory: int | None, h: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if memory is None:
        return linear_cross_entropy(h, w, y, impl="chunked")
    return linear_cross_entropy(h, w, y, impl="triton", memory_bytes=memory)


def peers(shape: Shape) -> tuple[dict[str, tuple[Loss, bool, int]], dict[str, str]]:
    """(loss, exact, chunks) by name, and the absent peers with the reason."""
    compiled = torch.compile(partial(plain, True), fullgraph=True, dynamic=False)
    found: dict[str, tuple[Loss, bool, int]] = {
        "torch, fp32 logits": (partial(plain, True), True, 1),
        "torch, bf16 logits": (partial(plain, False), True, 1),
        "torch.compile": (compiled, True, 1),
    }
    absent = {}
    if reason := missing("liger_kernel"):
        absent["Liger"] = reason
    else:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        # Liger's chunk size: logits of a chunk take about as much memory as its hidden states.
        rows = 1 << (-(-shape.N // -(-shape.V // shape.C)) - 1).bit_length()
        found["Liger"] = (
            lambda h, w, y: liger_fused_linear_cross_entropy(h, w, y),
            True,
            -(-shape.N // rows),
        )
    if reason := missing("cut_cross_entropy"):
        absent["cut-cross-entropy"] = reason
    else:
        from cut_cross_entropy import linear_cross_entropy as cce

        found["cut-cross-entropy, filtered"] = (lambda h, w, y: cce(h, w, y), False, 1)
        # Even without the filter its error is larger than that of plain bf16: it is timed as approximate.
        found["cut-cross-entropy, unfiltered"] = (lambda h, w, y: cce(h, w, y, filter_eps=None), False, 1)
    return found, absent


def build(shape: Shape, peaked: bool) -> Candidates:
    inputs = draw(shape, peaked)
    pieces = max(shape.N // 1024, 1)
    truth = cache(lambda: accumulated(inputs, pieces, torch.float64))
    own = cache(lambda chunks: accumulated(inputs, chunks, torch.bfloat16))
    contestants = {}

    def enter(name: str, loss: Loss, exact: bool, mine: bool, chunks: int) -> None:
        contestants[name] = Implementation(
            run=partial(step, loss, inputs),
            check=partial(check, loss, inputs, truth, own, chunks),
            exact=exact,
            ours=mine,
        )

    for mode, budget in (("fast", shape.fast), ("low memory", shape.low)):
        plan = schedule.schedule(shape.N, shape.C, shape.V, 2, 2, memory_bytes=budget * schedule.MiB)
        chunks = -(-shape.N // plan.rows) if plan.strategy == "rows" else 1
        enter(f"triton, {mode}", partial(ours, budget * schedule.MiB), True, True, chunks)
    enter("chunked", partial(ours, None), True, True, 1)
    found, absent = peers(shape)
    for name, (loss, exact, chunks) in found.items():
        enter(name, loss, exact, False, chunks)
    return Candidates(contestants, absent)


def cases() -> list[Contest]:
    """Heads of four models, flat and peaked."""
    return [
        Contest(
            "linear_cross_entropy",
            f"{s.N}×{s.C}×{s.V}, {'peaked' if peaked else 'flat'}",
            build=partial(build, s, peaked),
            floor=floor(flops=3 * 2 * s.N * s.C * s.V, bytes_moved=spec.bytes_moved(s.N, s.C, s.V, "bf16")),
        )
        for s in SHAPES
        for peaked in (False, True)
    ]
