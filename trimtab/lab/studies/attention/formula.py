"""Predicts the bytes that are allocated before the backward pass, from shape and dtype. Imports no torch.

They are q, k, v, the output o and the tensors saved for backward. Plain attention saves the probabilities, an N × N
matrix for each head of each sequence: the memory that grows with N². A tiled backend saves one element per query.
"""

# B batch, H heads, N length, D head dimension

from __future__ import annotations

from dataclasses import dataclass, replace

from trimtab.facts.dtypes import BYTES
from trimtab.kernels.attention.spec import TILED as TILED_IMPLS
from trimtab.kernels.attention.spec import saved_bytes
from trimtab.lab.studies.attention.settings import PLAIN, TILED, AttentionSettings, Mode

FP32 = 4


@dataclass(frozen=True)
class Predicted:
    """Bytes before backward in two parts."""

    linear: int
    """q, k, v, o, copies of them and statistics of the rows, which grow with N."""
    quadratic: int
    """Matrices of N × N."""

    @property
    def total(self) -> int:
        """All bytes."""
        return self.linear + self.quadratic


def is_quadratic(backend: str) -> bool:
    """Whether a backend saves N × N matrices.

    Example:
        >>> is_quadratic("reference"), is_quadratic("triton")
        (True, False)
    """
    return backend != TILED and backend not in TILED_IMPLS


def before_backward(settings: AttentionSettings) -> Predicted | None:
    """Bytes that an eager backend has allocated before backward; None if torch.compile decides what to save.

    Example:
        >>> plain = AttentionSettings("reference", batch=8, length=1024, head_dim=64, dtype="fp32")
        >>> before_backward(plain).quadratic // 2**20, before_backward(plain).linear // 2**20
        (33, 12)
    """
    if settings.mode is Mode.COMPILED:
        return None
    s, width = settings, BYTES[settings.dtype]
    tensor_bytes = s.batch * s.length * s.heads * s.head_dim * width
    impl = "triton" if s.backend == TILED else s.backend
    saved = saved_bytes(impl, s.batch, s.length, s.length, s.heads, s.heads, s.head_dim, s.dtype)
    if not is_quadratic(s.backend):
        # heads are interleaved in q, k and v; `tiled` reshapes them into separate sequences, which copies
        copies = 3 * tensor_bytes if s.backend == TILED and s.heads > 1 else 0
        return Predicted(saved + copies, 0)
    matrices = matrix_bytes(s) * bytes_per_score(s.backend, s.dtype)
    # Saved tensors are copies here: the reference saves k and v, sdpa_math q, k and v in fp32. The caller's tensors and
    # o are live as well. Two exceptions, since only some strides need a copy for a product: with one head sdpa_math
    # saves an fp32 v without a copy; with several, the reference saves a copy of q too.
    several = s.heads > 1
    if s.backend == PLAIN:
        alive = (4 if several else 3) * tensor_bytes
    else:
        alive = (4 if several or width != FP32 else 3) * tensor_bytes
    mask = s.length**2 if s.backend == PLAIN and s.causal else 0
    return Predicted(saved - matrices + alive, matrices + mask)


def matrix_bytes(settings: AttentionSettings, width: int = 1) -> int:
    """Bytes of a matrix with `width` bytes for each pair of query and key: B · H · N² · width.

    Example:
        >>> matrix_bytes(AttentionSettings("reference", batch=8, length=1024), width=4) // 2**20
        32
    """
    return settings.batch * settings.heads * settings.length**2 * width


def bytes_per_score(backend: str, dtype: str) -> int:
    """Bytes that a quadratic backend saves for each pair of query and key.

    The softmax is in fp32 and saves its result; the reference also saves the copy in 16 bits that multiplies v.

    Example:
        >>> bytes_per_score("reference", "fp32"), bytes_per_score("reference", "bf16")
        (4, 6)
    """
    rounded = BYTES[dtype] if backend == PLAIN and BYTES[dtype] != FP32 else 0
    return FP32 + rounded


def minimum_bytes(settings: AttentionSettings) -> int:
    """A lower bound of the cell's peak memory, in bytes.

    Eager: the memory before backward. Compiled: q, k, v and, for plain attention, one matrix of scores.

    Example:
        >>> cell = AttentionSettings("reference", mode=Mode.COMPILED, batch=1, length=1024, head_dim=64)
        >>> minimum_bytes(cell) == 4 * (1024 * 1024 + 3 * 1024 * 64)
        True
    """
    known = before_backward(settings)
    if known is not None:
        return known.total
    s, width = settings, BYTES[settings.dtype]
    inputs = 3 * s.batch * s.length * s.heads * s.head_dim * width
    return inputs + (matrix_bytes(s, width) if is_quadratic(s.backend) else 0)


def longest_length(settings: AttentionSettings, memory_bytes: int) -> int:
    """The largest N at which the memory before backward fits into `memory_bytes`.

    Backward needs more, so that a device runs out of memory at shorter lengths.

    Example:
        >>> longest_length(AttentionSettings("reference", batch=8, head_dim=64), 40 * 2**30)
        35890
    """
    low, high = 0, 1
    while minimum_bytes(replace(settings, length=high)) <= memory_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = minimum_bytes(replace(settings, length=middle)) <= memory_bytes
        low, high = (middle, high) if fits else (low, middle)
    return low
