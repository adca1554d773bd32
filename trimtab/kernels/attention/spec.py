"""Backends, test cases and costs of attention. Does not import torch."""

# B batch, T queries, S keys, H query heads, K key/value heads, D head size

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.facts.dtypes import BYTES, TORCH_NAMES

if TYPE_CHECKING:
    import torch

IMPLS = ("reference", "sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "varlen", "flex", "triton")
SKIPS_DOCUMENTS = ("varlen", "flex", "triton")
"""Backends that skip pairs of tokens from different documents of a packed sequence."""
TILED = ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "varlen", "flex", "triton")
"""Backends that never materialize a [T, S] matrix of attention weights."""
MASKED = ("reference", "sdpa_math", "sdpa_flash", "sdpa_efficient")
"""Backends that read packed documents and windows from a [T, S] mask, shared by the layers with the same window."""
CAPPED = ("reference", "flex", "triton")
"""Backends that support a soft cap of scores."""
BIDIRECTIONAL = ("reference", "sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "triton")
"""Backends that support non-causal attention."""
WITH_OFFSET = ("reference", "sdpa_math", "sdpa_flash", "sdpa_efficient", "triton")
"""Backends that support queries at other than the last positions; sdpa_flash only on a CPU, where it reads a mask."""
WITH_SINKS = ("reference", "triton")
"""Backends that support attention sinks: learned logits in the denominator of the softmax."""
WITH_LSE = ("reference", "triton")
"""Backends that return a differentiable log-sum-exp."""
MIN_FLEX_QUERIES = 128
"""Minimum number of queries of FlexAttention on a GPU: below one block its generated kernels failed on an H200."""


@dataclass(frozen=True)
class Case:
    """Sizes and arguments of a test; `documents` are the lengths in each row (their sum is T), or None."""

    name: str
    B: int
    T: int
    S: int
    H: int
    K: int
    D: int
    window: int | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    scale: float | None = None
    softcap: float | None = None
    causal: bool = True
    offset: int | None = None
    sinks: bool = False


CASES = (
    Case("plain", B=2, T=64, S=64, H=4, K=4, D=32),
    Case("one token", B=1, T=1, S=1, H=1, K=1, D=8),
    Case("odd", B=3, T=37, S=37, H=3, K=1, D=24),
    Case("longer than a tile", B=1, T=193, S=193, H=2, K=2, D=64, scale=0.3),
    Case("grouped", B=2, T=65, S=65, H=8, K=2, D=16),
    Case("window", B=2, T=70, S=70, H=4, K=2, D=16, window=9),
    Case("window of one", B=1, T=19, S=19, H=2, K=2, D=16, window=1),
    Case("window longer than the sequence", B=1, T=19, S=19, H=2, K=2, D=16, window=50),
    Case("packed", B=2, T=60, S=60, H=4, K=2, D=16, documents=((60,), (1, 17, 2, 40))),
    Case("packed documents of one token", B=1, T=9, S=9, H=2, K=1, D=16, documents=((1,) * 9,)),
    Case("packed, window", B=2, T=150, S=150, H=2, K=1, D=32, window=13, documents=((100, 50), (3, 130, 17))),
    Case("decode", B=3, T=1, S=41, H=4, K=2, D=16),
    Case("decode, window", B=2, T=1, S=41, H=4, K=2, D=16, window=7),
    Case("decode several", B=2, T=5, S=41, H=4, K=2, D=16),
    Case("decode several, window", B=2, T=5, S=41, H=4, K=2, D=16, window=6),
    Case("soft cap", B=2, T=45, S=45, H=4, K=2, D=16, scale=0.5, softcap=2.0),
    Case("soft cap, packed", B=1, T=45, S=45, H=2, K=1, D=16, documents=((20, 25),), softcap=50.0),
    Case("negative scale", B=1, T=20, S=20, H=2, K=1, D=16, scale=-0.4),
    Case("queries before any key", B=2, T=12, S=7, H=2, K=2, D=16),
    Case("no keys", B=1, T=3, S=0, H=2, K=1, D=16),
    Case("no queries", B=2, T=0, S=5, H=2, K=1, D=16),
    Case("empty batch", B=0, T=4, S=4, H=2, K=2, D=16),
)


OPTION_CASES = (
    Case("not causal", B=1, T=21, S=21, H=3, K=1, D=16, causal=False),
    Case("not causal, more keys", B=1, T=5, S=23, H=2, K=2, D=8, causal=False),
    Case("not causal, window", B=1, T=40, S=40, H=2, K=1, D=16, window=6, causal=False),
    Case("not causal, packed", B=2, T=20, S=20, H=2, K=1, D=16, documents=((20,), (7, 1, 12)), causal=False),
    Case(
        "not causal, packed, window, offset, grouped", B=2, T=11, S=40, H=4, K=2, D=16, window=5, offset=9,
        documents=((40,), (7, 10, 23)), causal=False,
    ),
    Case("offset", B=1, T=9, S=40, H=2, K=1, D=16, offset=13),
    Case("offset, window", B=1, T=20, S=40, H=2, K=2, D=16, offset=3, window=9),
    Case("offset, packed, grouped", B=2, T=12, S=40, H=4, K=2, D=16, offset=17, documents=((40,), (20, 3, 17))),
    Case("packed, queries last", B=1, T=12, S=40, H=2, K=1, D=16, documents=((31, 9),), window=8),
    Case("first queries before the keys", B=1, T=12, S=20, H=2, K=2, D=16, offset=-5),
    Case("last queries after the keys", B=1, T=12, S=20, H=2, K=2, D=16, offset=15),
    Case("last queries after the keys, window", B=1, T=40, S=20, H=2, K=1, D=16, offset=5, window=6),
    Case("all queries after the keys", B=1, T=4, S=20, H=2, K=1, D=16, offset=50, window=6),
    Case(
        "not causal, first and last rows fully masked", B=1, T=40, S=9, H=2, K=1, D=16, offset=-15, window=5,
        causal=False,
    ),
    Case("sinks", B=2, T=21, S=21, H=3, K=1, D=16, sinks=True),
    Case("sinks, more keys", B=1, T=4, S=37, H=2, K=2, D=8, window=20, sinks=True),
    Case(
        "sinks, packed, window, grouped", B=2, T=36, S=36, H=4, K=2, D=16, window=9, documents=((36,), (7, 10, 19)),
        sinks=True,
    ),
    Case("sinks, soft cap", B=1, T=12, S=12, H=2, K=1, D=16, scale=0.5, softcap=2.0, sinks=True),
    Case("sinks, queries before any key", B=1, T=12, S=7, H=2, K=1, D=16, sinks=True),
    Case(
        "sinks, not causal, rows fully masked", B=1, T=30, S=9, H=2, K=1, D=16, offset=-9, window=5,
        causal=False, sinks=True,
    ),
)  # fmt: skip
"""Arguments that a decoder in training does not use: small shapes, since the interpreter is slow."""


def make_inputs(
    case: Case, dtype: str, device: str = "cpu", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns (q_BTHD, k_BSKD, v_BSKD, grad_BTHD, documents_BT or None), the same values for every dtype and device.

    Values are rounded to bf16 first, so that the fp64 truth gets the same inputs as 16-bit runs.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=generator).bfloat16()
        return x.to(device=device, dtype=getattr(torch, TORCH_NAMES[dtype]))

    q_BTHD = draw(case.B, case.T, case.H, case.D)
    k_BSKD, v_BSKD = (draw(case.B, case.S, case.K, case.D) for _ in range(2))
    grad_BTHD = draw(case.B, case.T, case.H, case.D)
    if case.documents is None:
        return q_BTHD, k_BSKD, v_BSKD, grad_BTHD, None
    rows = [[i for i, length in enumerate(row) for _ in range(length)] for row in case.documents]
    return q_BTHD, k_BSKD, v_BSKD, grad_BTHD, torch.tensor(rows, dtype=torch.int32)


def make_sinks(case: Case, dtype: str, device: str = "cpu", seed: int = 2) -> torch.Tensor | None:
    """Returns sinks_H in a dtype, of the magnitude of the scores; None for a case without sinks."""
    import torch

    sinks_H = torch.randn(case.H, generator=torch.Generator().manual_seed(seed)).bfloat16() + 1.0
    return sinks_H.to(device=device, dtype=getattr(torch, TORCH_NAMES[dtype])) if case.sinks else None


def make_lse_gradient(case: Case, dtype: str, device: str = "cpu", seed: int = 1) -> torch.Tensor:
    """Returns dlse_BTH, an upstream gradient of the log-sum-exp: fp32, or fp64 for fp64 inputs."""
    import torch

    dlse_BTH = torch.randn(case.B, case.T, case.H, generator=torch.Generator().manual_seed(seed))
    return dlse_BTH.to(device=device, dtype=torch.float64 if dtype == "fp64" else torch.float32)


def visible_pairs(
    T: int, S: int, window: int | None = None, *, causal: bool = True, offset: int | None = None
) -> int:
    """Number of (query, key) pairs that attention computes for one document of T queries and S keys.

    Example:
        >>> visible_pairs(4, 4), visible_pairs(4, 4, window=2), visible_pairs(1, 9)
        (10, 7, 9)
        >>> visible_pairs(4, 4, window=2, causal=False), visible_pairs(2, 9, offset=3)
        (10, 9)
    """
    i = S - T if offset is None else offset
    if window is None:
        return _clamped_sum(i + 1, T, S) if causal else T * S
    # Query i attends to keys from i − window + 1 to before i + 1, or i + window, as far as they exist.
    return _clamped_sum(i + 1 if causal else i + window, T, S) - _clamped_sum(i - window + 1, T, S)


def _clamped_sum(first: int, count: int, highest: int) -> int:
    """Σ min(max(first + n, 0), highest) over n = 0 … count − 1."""
    low, high = (
        min(max(x, first), first + count) for x in (0, highest)
    )  # x where 0 < x < highest, and beyond
    return (high - low) * (low + high - 1) // 2 + (first + count - high) * highest


def flops(pairs: int, H: int, D: int, *, backward: bool = False) -> int:
    """FLOPs over visible pairs: two products in the forward, five in the backward (which recomputes the scores)."""
    return (10 if backward else 4) * pairs * H * D


def bytes_moved(
    B: int, T: int, S: int, H: int, K: int, D: int, dtype: str, *, backward: bool = False, lse: bool = False
) -> int:
    """Lower bound of a tiled kernel: inputs and output once; in the backward also their gradients.

    With `lse` the log-sum-exp, which is written in any case, has a gradient to be read.
    """
    q, kv, row = B * T * H * D * BYTES[dtype], B * S * K * D * BYTES[dtype], B * H * T * 4
    return (4 * q + 4 * kv + row * (2 if lse else 1)) if backward else (2 * q + 2 * kv + row)


def saved_bytes(
    impl: str,
    B: int,
    T: int,
    S: int,
    H: int,
    K: int,
    D: int,
    dtype: str,
    *,
    lse: bool = False,
    sinks: bool = False,
) -> int:
    """Bytes that one layer saves for the backward, inputs and output included where they are saved.

    Tiled backends save q, k, v, o and a log-sum-exp per row; the others a [T, S] matrix per head, and keys and values
    repeated for every query head. With `lse` (the log-sum-exp is returned and differentiated) the reference also saves
    the matrix of scores, and Triton nothing more; `sinks` are an input and a column of the reference's matrices.

    Example:
        >>> saved_bytes("sdpa_flash", 1, 1024, 1024, 16, 8, 128, "bf16") / 2**20
        12.0625
    """
    width = BYTES[dtype]
    q, kv = B * T * H * D * width, B * S * K * D * width
    if impl in TILED:
        repeated = 2 * B * S * H * D * width if impl == "sdpa_efficient" and H != K else 2 * kv
        return 2 * q + repeated + B * H * T * 4 + (H * width if sinks else 0)
    weights = B * H * T * (S + 1 if sinks else S)
    repeated = 2 * B * S * H * D * width
    if impl == "reference":
        scores = (weights + B * H * T) * 4 if lse else 0
        return q + repeated + weights * (4 + (width if width != 4 else 0)) + scores
    # sdpa_math always computes in fp32, and saves its scaled q and k.
    return B * T * H * D * 4 + 2 * B * S * H * D * 4 + weights * 4


def saved_activations(
    impl: str, B: int, T: int, H: int, K: int, D: int, dtype: str, *, sinks: bool = False
) -> list[tuple[str, int]]:
    """(name, bytes) of the tensors that make up `saved_bytes`; "q", "k", "v" and "o" are the inputs and the output.

    Example:
        >>> [name for name, _ in saved_activations("triton", 1, 8, 2, 2, 4, "bf16")]
        ['q', 'k', 'v', 'o', 'lse']
    """
    width = BYTES[dtype]
    q, kv, heads = B * T * H * D * width, B * T * K * D * width, B * T * H * D * width
    if impl in TILED:
        found = [("q", q), ("k", kv), ("v", kv), ("o", q), ("lse", B * H * T * 4)]
        if impl == "sdpa_efficient" and H != K:
            found[1:3] = [("repeated keys", heads), ("repeated values", heads)]
        return found
    whole = saved_bytes(impl, B, T, T, H, K, D, dtype, sinks=sinks)
    return [("matrices", whole)]


def scratch_bytes(
    impl: str,
    B: int,
    T: int,
    S: int,
    H: int,
    K: int,
    D: int,
    dtype: str,
    *,
    sinks: bool = False,
    backward: bool = True,
) -> int:
    """Peak temporary bytes of a pass in addition to saved tensors and gradients."""
    if impl in TILED and not backward and not sinks:
        return 0
    if impl == "triton":
        # the row sums of o∘do; with sinks their weights, and which rows are fully masked
        return B * T * H * (4 + (5 if sinks else 0))
    if impl in TILED:
        return B * T * H * (D * 4 + 4)  # dq in fp32 and the row sums of o∘do
    return 2 * B * H * T * S * 4  # scores, or the gradients of weights and scores


def layout_form(impl: str, T: int, window: int | None, dtype: str) -> tuple[str, int | None, str]:
    """Identifies the prepared layout that a layer reads: layers with the same form share it (`Layout.prepare`).

    Example:
        >>> layout_form("triton", 64, 8, "bf16") == layout_form("triton", 64, None, "bf16")
        True
    """
    if impl in ("varlen", "triton"):  # they compute the window from positions
        return impl, None, ""
    window = None if window is None or window >= T else window
    if impl == "flex":
        return impl, window, ""
    return (
        "mask",
        window,
        "fp32" if impl == "reference" else dtype,
    )  # the reference adds its mask to fp32 scores


def layout_bytes(impl: str, B: int, T: int, *, packed: bool, window: int | None, dtype: str) -> int:
    """Bytes of the prepared layout, once for all layers with the same `layout_form`."""
    if impl == "varlen":
        return 4 * (B * T + 1) if packed else 8 * (B + 1)
    if impl == "triton":
        return 8 * B * T if packed else 0
    if impl == "flex":
        blocks = -(-T // 128)
        return (B if packed else 1) * 4 * 4 * blocks * (blocks + 1)
    if impl not in MASKED or not (packed or (window is not None and window < T)):
        return 0
    return (B if packed else 1) * T * (-(-T // 8) * 8) * BYTES[dtype]
