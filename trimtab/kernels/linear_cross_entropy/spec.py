"""Implementations, test cases and costs of the loss. Does not import torch."""

# N tokens, C hidden size, V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trimtab.facts.dtypes import BYTES, TORCH_NAMES
from trimtab.kernels.linear_cross_entropy import schedule as memory_schedule

if TYPE_CHECKING:
    import torch

IMPLS = ("reference", "chunked", "triton")
REDUCTIONS = ("sum", "mean", "none")

CHUNK_BYTES = 8 * 2**20
CHUNK_SHARE = 16
CHUNK_ROWS = 512
SMALL_VOCABULARY = 32_768


def chunk_tokens(N: int, V: int) -> int:
    """Rows of logits per chunk of "chunked".

    8 MiB of logits in fp32 (less makes the product slow, more exceeds the cache: measured at 2048 × 256 × 4096 on one
    CPU core), or, with large vocabularies, a sixteenth of the rows but at most 512: every chunk reads the weight and
    adds to its gradient once, and from about 500 rows on the arithmetic dominates.

    Example:
        >>> chunk_tokens(2048, 4096), chunk_tokens(4096, 151_936), chunk_tokens(32_768, 151_936)
        (512, 256, 512)
    """
    rows = max(CHUNK_BYTES // (4 * V), min(-(-N // CHUNK_SHARE), CHUNK_ROWS), 1)
    return max(min(rows, N), 1)


def block_entries(rows: int, N: int, V: int) -> int:
    """Vocabulary entries per block of the backward pass, with as many logits as a chunk of `rows`.

    Example:
        >>> block_entries(256, 4096, 151_936)
        9496
    """
    return max(-(-rows * V // max(N, 1)), 1)


def recomputes(V: int, reduction: str) -> bool:
    """Whether "chunked" recomputes the logits in the backward pass instead of computing gradients in the forward pass.

    Losses per token require it. For large vocabularies it is cheaper: an fp32 accumulator for weight's gradient, read
    and written by every chunk, costs more memory and, on a GPU, more time than one more product.
    """
    return reduction == "none" or V > SMALL_VOCABULARY


@dataclass(frozen=True)
class Case:
    """A test case; `ignored` is the fraction of labels without a target."""

    name: str
    N: int
    C: int
    V: int
    ignored: float = 0.0
    bias: bool = False
    chunk_tokens: int | None = None
    spread: float = 1.0
    """Standard deviation of the logits: 1 gives flat probabilities, 20 puts nearly all probability on one entry."""
    aligned: float = 0.0
    """Alignment of hidden states with their label: 1 raises the label's logit by `spread`²."""
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    weighted: bool = False

    def options(self) -> dict[str, Any]:
        """The keyword arguments other than tensors."""
        return {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss, "softcap": self.softcap}


CASES = (
    Case("plain", N=64, C=32, V=96),
    Case("one token, one feature, one entry", N=1, C=1, V=1),
    Case("one token", N=1, C=16, V=33),
    Case("odd, a ragged last chunk", N=37, C=19, V=53, ignored=0.3, chunk_tokens=8),
    Case("chunks of one", N=5, C=8, V=17, chunk_tokens=1),
    Case("a chunk longer than the input", N=5, C=8, V=17, chunk_tokens=100),
    Case("bias", N=33, C=16, V=40, ignored=0.2, bias=True, chunk_tokens=10),
    Case("all ignored", N=12, C=8, V=20, ignored=1.0, bias=True, chunk_tokens=5),
    Case("peaked", N=48, C=32, V=64, spread=20.0, chunk_tokens=16),
    Case("logits aligned with the label", N=40, C=32, V=70, spread=2.5, aligned=1.0, chunk_tokens=16),
    Case("large vocabulary", N=24, C=16, V=5000, ignored=0.5, chunk_tokens=7),
    Case("smoothed", N=30, C=16, V=45, ignored=0.2, bias=True, chunk_tokens=11, label_smoothing=0.1),
    Case("z-loss", N=30, C=16, V=45, ignored=0.2, chunk_tokens=11, z_loss=0.01),
    Case("capped", N=30, C=16, V=45, spread=8.0, ignored=0.2, chunk_tokens=11, softcap=10.0),
    Case("weighted", N=30, C=16, V=45, ignored=0.2, chunk_tokens=11, weighted=True),
    Case(
        "all options",
        N=21,
        C=9,
        V=75,
        ignored=0.2,
        bias=True,
        chunk_tokens=8,
        spread=3.0,
        aligned=0.5,
        label_smoothing=0.2,
        z_loss=0.02,
        softcap=5.0,
        weighted=True,
    ),
    Case("empty", N=0, C=8, V=20),
)


def make_inputs(
    case: Case, dtype: str, device: str = "cpu", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Returns (hidden_NC, weight_VC, bias_V or None, labels_N), the same values for every dtype and device."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std).bfloat16().float()

    hidden_NC = draw(case.N, case.C, std=1.0)
    weight_VC = draw(case.V, case.C, std=case.spread / case.C**0.5)
    bias_V = draw(case.V, std=1.0) if case.bias else None
    labels_N = torch.randint(0, case.V, (case.N,), generator=generator)
    if case.aligned:
        hidden_NC = (hidden_NC + case.aligned * case.spread * weight_VC[labels_N]).bfloat16()
    labels_N[torch.rand(case.N, generator=generator) < case.ignored] = -100
    place: dict[str, Any] = {"device": device, "dtype": getattr(torch, TORCH_NAMES[dtype])}
    bias_V = None if bias_V is None else bias_V.to(**place)
    return hidden_NC.to(**place), weight_VC.to(**place), bias_V, labels_N.to(device)


def make_token_weights(case: Case, device: str = "cpu") -> torch.Tensor | None:
    """fp32 token weights, one of them 0 and one negative, for a `weighted` case."""
    import torch

    if not case.weighted:
        return None
    weights_N = torch.linspace(-0.25, 2.0, case.N)
    weights_N[: case.N // 8] = 0.0
    return weights_N.to(device)


def _schedule(
    N: int,
    C: int,
    V: int,
    dtype: str,
    reduction: str,
    weight_grad: bool,
    memory_bytes: int | None,
    gradient_dtype: str | None = None,
) -> memory_schedule.Schedule:
    return memory_schedule.schedule(
        N,
        C,
        V,
        BYTES[dtype],
        BYTES[gradient_dtype or dtype],
        memory_bytes=memory_bytes,
        by_token=reduction == "none",
        weight_grad=weight_grad,
    )


def flops(
    N: int,
    C: int,
    V: int,
    *,
    reduction: str = "sum",
    weight_grad: bool = True,
    impl: str = "chunked",
    dtype: str = "bf16",
    memory_bytes: int | None = None,
) -> int:
    """FLOPs of the products: logits, both gradients, and the logits again where they are recomputed.

    Example:
        >>> flops(8, 2, 4, impl="reference") == 3 * 2 * 8 * 2 * 4
        True
    """
    again = impl != "reference" and not computes_gradients_in_forward(
        impl, N, C, V, dtype, reduction=reduction, weight_grad=weight_grad, memory_bytes=memory_bytes
    )
    return (2 + int(weight_grad) + int(again)) * 2 * N * C * V


def computes_gradients_in_forward(
    impl: str,
    N: int,
    C: int,
    V: int,
    dtype: str,
    *,
    reduction: str = "sum",
    weight_grad: bool = True,
    memory_bytes: int | None = None,
    gradient_dtype: str | None = None,
) -> bool:
    """Whether the gradients are computed in the forward pass and saved; else in the backward.

    Example:
        >>> computes_gradients_in_forward("triton", 4096, 1024, 151_936, "bf16", memory_bytes=1250 * 2**20)
        True
    """
    if impl == "triton":
        plan = _schedule(N, C, V, dtype, reduction, weight_grad, memory_bytes, gradient_dtype)
        return plan.strategy == "rows"
    return impl == "chunked" and not recomputes(V, reduction)


def bytes_moved(N: int, C: int, V: int, dtype: str) -> int:
    """Lower bound: hidden and weight read once, their gradients written once."""
    return 2 * (N * C + V * C) * BYTES[dtype] + 8 * N


def saved_bytes(
    impl: str,
    N: int,
    C: int,
    V: int,
    dtype: str,
    *,
    reduction: str = "sum",
    weight_grad: bool = True,
    memory_bytes: int | None = None,
    gradient_dtype: str | None = None,
) -> int:
    """Bytes saved for the backward in addition to hidden and weight.

    `gradient_dtype` is the dtype that weight's gradient is accumulated in, where it is not `dtype`.

    Example:
        >>> saved_bytes("chunked", 4096, 1024, 151_936, "bf16") / 2**20
        0.06640625
        >>> saved_bytes("reference", 4096, 1024, 151_936, "bf16") / 2**20
        2374.0
        >>> saved_bytes("triton", 4096, 1024, 151_936, "bf16", memory_bytes=1200 * 2**20) / 2**20
        304.75
    """
    if impl == "reference":
        return 4 * N * V
    if impl == "triton":
        plan = _schedule(N, C, V, dtype, reduction, weight_grad, memory_bytes, gradient_dtype)
        if plan.strategy == "rows":  # the gradients themselves, in their own dtypes
            of_weight = V * C * BYTES[gradient_dtype or dtype] if weight_grad else 0
            return N * C * BYTES[dtype] + of_weight
        return N * (4 + 4 + 4)  # token weights, log-sum-exps, negative log-likelihoods
    if recomputes(V, reduction):
        return N * (4 + 4 + 8 + 1)  # log-probabilities, log-sum-exps, labels and which are not ignored
    return N * C * BYTES[dtype] + (4 * V * C if weight_grad else 0)


def scratch_bytes(
    impl: str,
    N: int,
    C: int,
    V: int,
    dtype: str,
    *,
    reduction: str = "sum",
    weight_grad: bool = True,
    memory_bytes: int | None = None,
    gradient_dtype: str | None = None,
) -> int:
    """Peak temporary bytes in addition to saved tensors and gradients, the larger of both passes."""
    width = BYTES[dtype]
    if impl == "reference":
        return N * V * (8 if dtype == "fp32" else 8 + width)
    if impl == "triton":
        plan = _schedule(N, C, V, dtype, reduction, weight_grad, memory_bytes, gradient_dtype)
        forward = plan.rows * memory_schedule.row_stride(V) * width
        if plan.strategy == "rows":
            return forward
        # The forward's logits use the gradients' memory; hidden's gradient is accumulated in fp32.
        wide = BYTES[gradient_dtype or dtype]
        gradients = memory_schedule.gradient_bytes(N, C, V, width, wide, weight_grad)
        least = max(4 * N * C, (4 - width) * N * C + plan.scratch_bytes)
        return max(forward - gradients, least)
    rows = chunk_tokens(N, V)
    buffers = rows * V * (width + 4)  # logits and log-probabilities; each becomes its own gradient
    if recomputes(V, reduction):
        return buffers + 4 * N * C  # hidden's gradient, summed over the blocks
    if width == 2 and weight_grad:
        buffers += V * C * width  # a chunk's summand of the gradient, before it is added in fp32
    return buffers + rows * (C * width + 24)  # hidden's gradient of a chunk; its labels and losses
