"""Dropout whose masks are a function of (seed, step, microbatch, layer, element), so that recomputing repeats them.

Each row and each column of x gets a hashed word; the word of an element is a hash of their sum. Integer arithmetic
that wraps gives the same mask on every device.
"""

# N rows, C columns, K layers

from __future__ import annotations

import torch

from trimtab.adapt.spec import DROPOUT_CHUNK
from trimtab.facts.randomness import derive
from trimtab.kernels.stochastic_rounding.spec import MULTIPLIERS

_WORD = 1 << 32
_MOST = 0x7FFFFFFF


def _signed(value: int) -> int:
    """The int32 with the bits of an unsigned word."""
    value %= _WORD
    return value - _WORD if value >= _WORD >> 1 else value


_FIRST, _SECOND = _signed(MULTIPLIERS[0]), _signed(MULTIPLIERS[1])


def _mix_(words: torch.Tensor) -> torch.Tensor:
    """A 32-bit finalizer, in place; shifts are arithmetic in torch, so the copies of the sign are masked away.

    In place, so that what is held does not depend on whether the interpreter lets a caller's argument go.
    """
    words.bitwise_xor_((words >> 17).bitwise_and_(0x7FFF)).mul_(_FIRST)
    words.bitwise_xor_((words >> 11).bitwise_and_(0x1FFFFF)).mul_(_SECOND)
    return words.bitwise_xor_((words >> 15).bitwise_and_(0x1FFFF))


def kept(rows: int, columns: int, key_2: torch.Tensor, p: float, *, first: int = 0) -> torch.Tensor:
    """bool [N, C]: true with probability 1 − p.

    Args:
        rows: N.
        columns: C.
        key_2: two int32 words on the device of the result.
        p: the share that is dropped.
        first: the number of the first row.
    """
    numbers_N = torch.arange(first, first + rows, dtype=torch.int32, device=key_2.device)
    row_N1 = _mix_(numbers_N[:, None] ^ key_2[0])
    column_C = _mix_(torch.arange(columns, dtype=torch.int32, device=key_2.device) ^ key_2[1])
    # 31 bits without the sign, against p of their range; 2³¹ itself, for a p all but 1, would wrap to below all.
    return _mix_(row_N1 + column_C).bitwise_and_(_MOST) >= min(round(p * (1 << 31)), _MOST)


def drop(x_NC: torch.Tensor, key_2: torch.Tensor, p: float) -> torch.Tensor:
    """x with a share `p` of its elements zero and the others divided by 1 − p."""
    N, C = x_NC.shape
    if torch.compiler.is_compiling() or N * C <= DROPOUT_CHUNK:  # one kernel, or little enough
        return kept(N, C, key_2, p).to(x_NC.dtype).mul_(1.0 / (1.0 - p)).mul_(x_NC)
    out_NC = torch.empty_like(x_NC)
    rows = max(1, DROPOUT_CHUNK // C)
    for first in range(0, N, rows):
        part_nC = x_NC[first : first + rows]
        factor_nC = kept(part_nC.shape[0], C, key_2, p, first=first).to(x_NC.dtype).mul_(1.0 / (1.0 - p))
        torch.mul(part_nC, factor_nC, out=out_NC[first : first + rows])
    return out_NC


class Masks:
    """The keys of all layers of a model, written anew before each microbatch.

    A layer holds a view of its two words, so that a compiled block sees a tensor whose content changes, and no
    number that would have to be compiled in.
    """

    def __init__(self, layers: list[str], device: torch.device) -> None:
        offsets = [[_signed(derive(0, "lora dropout", name, i)) for i in range(2)] for name in layers]
        self.offsets_K2 = torch.tensor(offsets, dtype=torch.int32, device=device)
        self.words_K2 = self.offsets_K2.clone()

    def set(self, seed: int, step: int, microbatch: int, rank: int = 0) -> None:
        """The masks of one microbatch, everywhere in the model."""
        key = derive(seed, "lora dropout", step, microbatch, rank)
        torch.bitwise_xor(self.offsets_K2, _signed(key), out=self.words_K2)
        self.words_K2[:, 1].add_(_signed(key >> 31))
