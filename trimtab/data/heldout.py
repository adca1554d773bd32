"""Which documents are kept for evaluation: decided by their content, so that the two sides never share one.

A document's content hash is 64 bits of its first segment (up to 131,072 characters), the same in every run,
on every machine and in whatever file it lies; copies of a document fall on the same side.
"""

from __future__ import annotations

import numpy as np

from trimtab.facts.errors import DataError


def threshold(share: float) -> int:
    """Documents whose hash is below this are held out.

    Example:
        >>> threshold(0.5) == 1 << 63
        True
    """
    if not 0 < share < 1:
        raise DataError(
            f"a held-out share of {share} leaves nothing for one side", "give one between 0 and 1"
        )
    return int(share * 2.0**64)


def is_heldout(content_hash: int, share: float) -> bool:
    """Whether one document is held out, without knowing any other."""
    return content_hash < threshold(share)


def heldout_mask(hashes_N: np.ndarray, share: float | None, count: int | None) -> np.ndarray:
    """Boolean [N], True for documents to hold out: by share of all possible hashes, or the `count` smallest.

    Copies go together, so that `count` may be exceeded by copies of the last one. Of two documents or more,
    each side gets at least one.
    """
    assert (share is None) != (count is None), "either a share or a count"
    distinct = np.unique(hashes_N)
    if share is not None:
        mask_N = hashes_N < np.uint64(threshold(share))
        wanted = 1 if not mask_N.any() else len(distinct) - 1 if mask_N.all() else None
    else:
        assert count is not None
        if count < 1:
            raise DataError(f"{count} held-out documents are none", "give 1 or more")
        wanted, mask_N = min(count, len(distinct) - 1), np.zeros(len(hashes_N), bool)
    if wanted is not None and len(distinct) > 1:
        mask_N = hashes_N <= distinct[wanted - 1]
    return mask_N
