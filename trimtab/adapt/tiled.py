"""A function of single tokens, run over a few of them at a time, so that what is inside it never exists whole.

The feed-forward half of a block is three and a half times as wide as the stream and looks at each token alone. Over
n tiles of the tokens it holds an n-th of that; the backward pass computes each tile again before it differentiates
it. The values are those of the whole, the gradients of its weights are added up tile by tile in fp32.
"""

# N tokens, C hidden size

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from trimtab.adapt.lora_dropout import FIRST_ROW
from trimtab.adapt.spec_recompute import tile_rows

Tokenwise = Callable[[torch.Tensor], torch.Tensor]


def tiled(
    run: Tokenwise,
    x: torch.Tensor,
    parameters: Sequence[torch.nn.Parameter],
    tiles: int,
    keys: Sequence[torch.Tensor] = (),
    recompute: Tokenwise | None = None,
) -> torch.Tensor:
    """run(x) for a function of single tokens that returns x's shape and dtype.

    Args:
        run: […, C] → […, C], no token looking at another.
        x: […, C], contiguous; kept for the backward pass.
        parameters: whatever `run` learns; others that it reads get no gradient.
        tiles: how many parts the tokens are cut into at most.
        keys: words of dropout masks in `run` (`lora_dropout`): each tile's carry its first row, so that the masks are
            those of the whole.
        recompute: what the backward pass calls with each tile instead of `run`: a function that saves the same for its
            own backward pass, and whose output values are not read.

    Example:
        >>> layer = torch.nn.Linear(4, 4)
        >>> tiled(layer, torch.ones(2, 3, 4), list(layer.parameters()), tiles=2).shape
        torch.Size([2, 3, 4])
    """
    learned = [parameter for parameter in parameters if parameter.requires_grad]
    if not torch.is_grad_enabled() or not (x.requires_grad or learned):
        return _forward(run, x, tiles, keys)
    node = None
    if x.requires_grad:
        # Kept by a step of its own, before any tile runs: a checkpoint around this stops recomputing right there.
        x = _Keep.apply(x)
        node = x.grad_fn
    out: torch.Tensor = _Tiles.apply(x, node, run, recompute or run, tiles, keys, *learned)
    return out


def _cut(rows: int, tiles: int, keys: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """(first row, the one after the last) of each tile, its masks set."""
    size = tile_rows(rows, tiles)
    for start in range(0, rows, size):
        for key in keys:
            key[FIRST_ROW].add_(start)
        try:
            yield start, min(start + size, rows)
        finally:
            for key in keys:
                key[FIRST_ROW].sub_(start)


def _forward(run: Tokenwise, x: torch.Tensor, tiles: int, keys: Sequence[torch.Tensor]) -> torch.Tensor:
    x_NC, out_NC = x.detach().reshape(-1, x.shape[-1]), torch.empty_like(x).view(-1, x.shape[-1])
    for start, stop in _cut(len(x_NC), tiles, keys):
        out_NC[start:stop] = run(x_NC[start:stop])
    return out_NC.view(x.shape)


class _Keep(torch.autograd.Function):
    """The identity; keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        node: Any,
        run: Tokenwise,
        recompute: Tokenwise,
        tiles: int,
        keys: Sequence[torch.Tensor],
        *learned: torch.nn.Parameter,
    ) -> torch.Tensor:
        ctx.node, ctx.recompute, ctx.tiles, ctx.keys, ctx.learned = node, recompute, tiles, keys, learned
        if node is None:
            ctx.save_for_backward(x)
        kind = x.device.type
        ctx.autocast = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        return _forward(run, x, tiles, keys)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (x,) = (ctx if ctx.node is None else ctx.node).saved_tensors
        x_NC, grad_NC = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
        dx_NC = None if ctx.node is None else torch.empty_like(x_NC)
        sums: list[torch.Tensor | None] = [None for _ in ctx.learned]
        for start, stop in _cut(len(x_NC), ctx.tiles, ctx.keys):
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                tile = x_NC[start:stop].detach().requires_grad_(dx_NC is not None)
                out = ctx.recompute(tile)
            wanted = [*ctx.learned] if dx_NC is None else [*ctx.learned, tile]
            grads = [*torch.autograd.grad(out, wanted, grad_NC[start:stop], allow_unused=True)]
            del out, tile, wanted
            if dx_NC is not None:
                dx_NC[start:stop] = grads.pop()
            for i in reversed(range(len(sums))):  # popped, so that all are free before the next tile begins
                sums[i] = _added(sums[i], grads.pop())
        dx = None if dx_NC is None else dx_NC.view(x.shape)
        return dx, None, None, None, None, None, *_kept_as(sums, ctx.learned)


def _added(total: torch.Tensor | None, part: torch.Tensor | None) -> torch.Tensor | None:
    """The sum so far in fp32 or wider: tiles would otherwise be rounded one by one."""
    if part is None:
        return total
    wide = torch.promote_types(part.dtype, torch.float32)
    return part.to(wide) if total is None else total.add_(part)


def _kept_as(
    sums: list[torch.Tensor | None], learned: Sequence[torch.nn.Parameter]
) -> list[torch.Tensor | None]:
    """Each in the format that its parameter's gradient is kept in; the list is emptied on the way."""
    out: list[torch.Tensor | None] = []
    for parameter in reversed(learned):
        total = sums.pop()
        kept = getattr(parameter, "grad_dtype", None) or parameter.dtype
        out.append(None if total is None else total.to(kept))
    return out[::-1]
