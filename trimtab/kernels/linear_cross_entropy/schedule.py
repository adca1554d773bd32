"""Chunk sizes of the Triton loss: a pure function of shapes and memory budget. Does not import torch.

Nothing here depends on the free memory, so the same arguments give bitwise identical results. The budget is decided
once, when a run is planned (`choice.choose_loss`), and passed as `memory_bytes`.
"""

# N tokens, C hidden size, V vocabulary

from __future__ import annotations

from dataclasses import dataclass

MiB = 2**20
MIN_BYTES = 24 * MiB
LOW_SHARE = 12
MIN_ROWS = 384
"""With fewer rows "rows" is slower than "blocks": its third product mostly reads and writes weight's gradient. On an
H200 with 384 rows 8.0, 48, 61 ms against 8.2, 54, 61 for blocks, with 256 rows 8.9, 55, 66 (first three shapes of the
README)."""
MAX_ENTRIES = 8448
"""Maximum size of a block: larger ones are evicted from the cache before their products read them (8.2 ms against 8.6
without a limit, at 4096 × 1024 × 151,936; half of it 8.5), and 8448 × 1024 elements are two waves of 128 × 256 tiles on
132 multiprocessors."""
MAX_CHUNKS = 48
"""A 16-bit gradient is rounded once per chunk: 48 roundings have an error of 0.4 % rms, within the tolerance. Where
`chunk_tokens` makes more chunks, weight's gradient is summed in fp32 and rounded once."""
ROW_STEP = 128
"""Tile size of a product: with several chunks, rows per chunk are a multiple of it, if memory allows."""


@dataclass(frozen=True)
class Schedule:
    """Strategy and chunk sizes of impl="triton".

    Example:
        >>> schedule(4096, 1024, 151_936, 2, 2, memory_bytes=1250 * MiB)
        Schedule(strategy='rows', rows=4096, scratch_bytes=0)
        >>> schedule(8192, 4096, 128_256, 2, 2, memory_bytes=1900 * MiB)
        Schedule(strategy='rows', rows=4096, scratch_bytes=0)
        >>> schedule(4096, 1024, 151_936, 2, 2).strategy
        'blocks'
    """

    strategy: str
    """"rows": gradients with the loss, three products. "blocks": logits recomputed in the backward, four."""
    rows: int
    """Rows of logits per chunk of the forward."""
    scratch_bytes: int
    """For "blocks": workspace of the backward's logits that do not fit into the unwritten part of weight's gradient."""


def row_stride(V: int) -> int:
    """Entries from one row of logits to the next: rows are aligned to 32 bytes, also for an odd vocabulary.

    Example:
        >>> row_stride(151_936), row_stride(50_257)
        (151936, 50272)
    """
    return -(-V // 16) * 16


def gradient_bytes(N: int, C: int, V: int, width: int, gradient_width: int, weight_grad: bool = True) -> int:
    """Bytes of the gradients of hidden and weight."""
    return N * C * width + (V * C * gradient_width if weight_grad else 0)


def default_memory_bytes(N: int, C: int, V: int, width: int, gradient_width: int) -> int:
    """The low-memory budget: a twelfth of the gradients, at least 24 MiB and the minimum that is needed.

    Example:
        >>> default_memory_bytes(4096, 1024, 151_936, 2, 2) / MiB
        25.395833015441895
    """
    share = gradient_bytes(N, C, V, width, gradient_width) // LOW_SHARE
    return max(share, MIN_BYTES, 4 * N * C)


def schedule(
    N: int,
    C: int,
    V: int,
    width: int,
    gradient_width: int,
    *,
    memory_bytes: int | None = None,
    by_token: bool = False,
    weight_grad: bool = True,
) -> Schedule:
    """Chooses the strategy and the chunk sizes.

    Args:
        width, gradient_width: Bytes per element of the inputs and of weight's gradient.
        memory_bytes: Memory budget in addition to inputs and gradients; by default `default_memory_bytes`.
        by_token: Whether the gradient of each token's loss is only known in the backward (reduction "none").
        weight_grad: Whether weight's gradient is computed.
    """
    if memory_bytes is None:
        memory_bytes = default_memory_bytes(N, C, V, width, gradient_width)
    row = row_stride(V) * width
    if not by_token:
        rows = _even_rows(N, memory_bytes // row)
        few = -(-N // rows) <= MAX_CHUNKS or gradient_width > 2
        # The gradient of a frozen weight is not read and written by every chunk: small chunks cost little.
        if rows >= min(N, MIN_ROWS if weight_grad else ROW_STEP) and (few or not weight_grad):
            return Schedule("rows", rows, 0)
    # In the forward the gradients do not exist yet: their memory holds logits.
    forward = memory_bytes + gradient_bytes(N, C, V, width, gradient_width, weight_grad)
    scratch = max(memory_bytes - 4 * N * C + N * C * width, MIN_BYTES // 8)
    most = max(N, 1) * width * MAX_ENTRIES
    return Schedule("blocks", _even_rows(N, forward // row), min(scratch, most))


def _even_rows(N: int, most: int) -> int:
    """Rows of equal chunks of at most `most`: a last chunk of a few rows wastes a pass.

    Rows are a multiple of a tile where that fits. Where it does not, a number of tokens that is not a multiple either
    gets rows that are not, instead of one more chunk. (Multiples always get the same chunks: otherwise a resumed run
    would sum in another order.)

    Example:
        >>> _even_rows(4096, 4096), _even_rows(4095, 4095), _even_rows(300, 4096), _even_rows(4100, 2100)
        (4096, 4095, 300, 2050)
    """
    N = max(N, 1)
    most = max(min(most, N), 1)
    chunks = -(-N // most)
    rows = -(-N // chunks)
    stepped = -(-rows // ROW_STEP) * ROW_STEP
    if stepped <= most:
        return stepped
    return rows if N % ROW_STEP else max(most // ROW_STEP * ROW_STEP, 1)


def blocks(
    N: int, C: int, V: int, width: int, gradient_width: int, scratch_bytes: int, *, weight_grad: bool = True
) -> list[tuple[int, int, bool]]:
    """Returns (start, stop, borrowed) of the backward's blocks of the vocabulary.

    Weight's gradient is written from the first entry to the last. Its unwritten part is free memory, so it holds a
    block's logits (`borrowed`) as long as they fit: blocks start with V · C / (C + N) entries (for one width) or
    `MAX_ENTRIES`, shrink with the unwritten part, and end at the workspace's size.

    Example:
        >>> sizes = [stop - start for start, stop, _ in blocks(4096, 1024, 151_936, 2, 2, 16 * MiB)]
        >>> sizes[:3], sizes[-1], len(sizes)
        ([8448, 8448, 8448], 1024, 25)
    """
    out: list[tuple[int, int, bool]] = []
    column = max(N, 1) * width
    own = max(scratch_bytes // column, 1)
    start = 0
    while start < V:
        left = V - start
        tail = 0
        if weight_grad:
            # Minus 32 entries of each row's padding.
            tail = max(left * C * gradient_width // (column + C * gradient_width) - 32, 0)
        size = min(_round_down(min(max(tail, own), MAX_ENTRIES)), left)
        out.append((start, start + size, size <= tail))
        start += size
    return out


def _round_down(entries: int) -> int:
    """Rounds down to a multiple of a product's tile, or of 16 where it is smaller than one."""
    for step in (128, 16):
        if entries >= step:
            return entries // step * step
    return entries
