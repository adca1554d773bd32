"""Dropout whose masks are a function of (seed, step, sequence, position in it, layer, column).

Sequences are indexed within the batch of the optimizer step. So recomputation repeats a mask, and masks do not depend
on how the batch is split into microbatches, processes and tiles.

Each row (a token) and each column of x gets a hashed word; the word of an element is a hash of their sum. Wrapping
integer arithmetic gives the same mask on every device.
"""

# N rows, C columns, K layers

from __future__ import annotations

import torch

from trimtab.adapt.spec import DROPOUT_CHUNK, KEY_WORDS
from trimtab.facts.randomness import derive
from trimtab.kernels.stochastic_rounding.spec import MULTIPLIERS

_WORD = 1 << 32
_MOST = 0x7FFFFFFF


def _signed(value: int) -> int:
    """Returns the int32 with the bit pattern of an unsigned word."""
    value %= _WORD
    return value - _WORD if value >= _WORD >> 1 else value


ROW_KEY, COLUMN_KEY, FIRST_SEQUENCE, TOKENS, FIRST_ROW = range(KEY_WORDS)
"""A layer's words: keys of rows and columns, index of the first sequence, tokens per sequence, and the microbatch row
of the first current row (for tiles)."""

_STRIDE = _signed(0x9E3779B1)
"""Stride between the row numbers of two sequences: 2³² over the golden ratio, whose multiples are far apart modulo 2³².
Up to 0.38 · 2³² tokens per step have distinct numbers, whatever the sequence length."""

_FIRST, _SECOND = _signed(MULTIPLIERS[0]), _signed(MULTIPLIERS[1])


def _mix_(words: torch.Tensor) -> torch.Tensor:
    """32-bit hash finalizer, in place. torch's shifts are arithmetic, so the copies of the sign bit are masked.

    In place, so that memory does not depend on when the interpreter frees a caller's argument.
    """
    words.bitwise_xor_((words >> 17).bitwise_and_(0x7FFF)).mul_(_FIRST)
    words.bitwise_xor_((words >> 11).bitwise_and_(0x1FFFFF)).mul_(_SECOND)
    return words.bitwise_xor_((words >> 15).bitwise_and_(0x1FFFF))


def _row_numbers(rows: int, key_5: torch.Tensor, first: int) -> torch.Tensor:
    """int32 [N]: a number per row that depends only on its sequence and its position in that sequence."""
    row_N = torch.arange(first, first + rows, dtype=torch.int32, device=key_5.device) + key_5[FIRST_ROW]
    sequence_N = torch.div(row_N, key_5[TOKENS], rounding_mode="floor")
    position_N = row_N - sequence_N * key_5[TOKENS]
    return (sequence_N + key_5[FIRST_SEQUENCE]) * _STRIDE + position_N


def keep_mask(rows: int, columns: int, key_5: torch.Tensor, p: float, *, first: int = 0) -> torch.Tensor:
    """bool [N, C]: true with probability 1 − p.

    Args:
        rows: N, tokens of consecutive sequences.
        columns: C.
        key_5: a layer's words of `DropoutMasks`, on the device of the result.
        p: the dropout probability.
        first: index of the first row, relative to the words' first row.
    """
    row_N1 = _mix_(_row_numbers(rows, key_5, first)[:, None] ^ key_5[ROW_KEY])
    column_C = _mix_(torch.arange(columns, dtype=torch.int32, device=key_5.device) ^ key_5[COLUMN_KEY])
    # 31 bits without the sign, compared with p of their range; 2³¹ itself, for p close to 1, would wrap.
    return _mix_(row_N1 + column_C).bitwise_and_(_MOST) >= min(round(p * (1 << 31)), _MOST)


def apply_dropout(x_NC: torch.Tensor, key_5: torch.Tensor, p: float) -> torch.Tensor:
    """Zeroes elements of x with probability `p` and divides the others by 1 − p."""
    N, C = x_NC.shape
    if torch.compiler.is_compiling() or N * C <= DROPOUT_CHUNK:  # one kernel, or few elements
        return keep_mask(N, C, key_5, p).to(x_NC.dtype).mul_(1.0 / (1.0 - p)).mul_(x_NC)
    out_NC = torch.empty_like(x_NC)
    rows = max(1, DROPOUT_CHUNK // C)
    for first in range(0, N, rows):
        part_nC = x_NC[first : first + rows]
        factor_nC = keep_mask(part_nC.shape[0], C, key_5, p, first=first).to(x_NC.dtype).mul_(1.0 / (1.0 - p))
        torch.mul(part_nC, factor_nC, out=out_NC[first : first + rows])
    return out_NC


class DropoutMasks:
    """The mask keys of all layers: five int32 words per layer, rewritten before each microbatch.

    Each layer has a view of its five words, so that a compiled block or a CUDA graph reads a tensor whose content
    changes, instead of constants that would be compiled in.

    Example:
        >>> masks = DropoutMasks(["up_proj"], torch.device("cpu"))
        >>> masks.set(seed=0, step=3, first_sequence=0, tokens=8)
        >>> both = keep_mask(16, 4, masks.words_K5[0], 0.5)          # two sequences of 8 tokens
        >>> masks.set(seed=0, step=3, first_sequence=1, tokens=8)
        >>> torch.equal(keep_mask(8, 4, masks.words_K5[0], 0.5), both[8:])
        True
    """

    def __init__(self, layers: list[str], device: torch.device) -> None:
        offsets = [[_signed(derive(0, "lora dropout", name, i)) for i in range(2)] for name in layers]
        self.offsets_K2 = torch.tensor(offsets, dtype=torch.int32, device=device).view(-1, 2)
        self.words_K5 = torch.zeros(len(layers), 5, dtype=torch.int32, device=device)
        self._write(0, 0, _MOST)

    def set(self, seed: int, step: int, first_sequence: int, tokens: int) -> None:
        """Sets the masks of one microbatch in the whole model.

        Args:
            seed: seed of the run.
            step: the optimizer step.
            first_sequence: index of the microbatch's first sequence in the batch of the whole optimizer step, over all
                microbatches and processes.
            tokens: tokens per sequence of the microbatch, including padding.
        """
        self._write(derive(seed, "lora dropout", step), first_sequence, tokens)

    def set_by_microbatch(self, seed: int, step: int, microbatch: int, rank: int = 0) -> None:
        """Sets masks as earlier versions did: rows are indexed within a microbatch of one process."""
        self._write(derive(seed, "lora dropout", step, microbatch, rank), 0, _MOST)

    def _write(self, key: int, first_sequence: int, tokens: int) -> None:
        words_K5 = self.words_K5
        torch.bitwise_xor(self.offsets_K2, _signed(key), out=words_K5[:, :2])
        words_K5[:, COLUMN_KEY].add_(_signed(key >> 31))
        words_K5[:, FIRST_SEQUENCE].fill_(first_sequence)
        words_K5[:, TOKENS].fill_(tokens)
        words_K5[:, FIRST_ROW].zero_()
