"""Validation of labels against the vocabulary size."""

# N tokens

from __future__ import annotations

import torch

from trimtab.facts.errors import DataError

REMEDY = (
    "the labels come from a tokenizer with more tokens than the model's head; use the model's own tokenizer, "
    "and ignore_index for tokens without a target"
)


def check_labels(labels_N: torch.Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raises `DataError` with the first label outside the vocabulary.

    On a GPU, and inside a compiled region, this would synchronize in every step; there the check is a device-side
    assertion, which stops the run with the same message, but without the position.
    """
    bad_N = ((labels_N < 0) | (labels_N >= vocabulary)) & (labels_N != ignore_index)
    if torch.compiler.is_compiling() or labels_N.device.type != "cpu":
        torch._assert_async(~bad_N.any(), f"a label is outside the vocabulary of {vocabulary}; {REMEDY}")
    elif bool(bad_N.any()):
        n = int(bad_N.nonzero()[0, 0])
        raise DataError(
            f"label {int(labels_N[n])} of token {n} is outside the vocabulary of {vocabulary}", REMEDY
        )
