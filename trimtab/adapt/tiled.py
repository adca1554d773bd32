"""Runs a token-wise function over tiles of tokens, so that its activations are never materialized for all tokens.

The feed-forward half of a block is token-wise, and typically three and a half times as wide as the residual stream.
With n tiles it allocates 1/n of its activations; the backward pass recomputes each tile before it differentiates it.
Outputs are identical, and the gradients of the weights are accumulated over tiles in fp32.
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
    """Returns run(x) for a token-wise function whose output has x's shape and dtype.

    Args:
        run: […, C] → […, C], independent for each token.
        x: […, C], contiguous; saved for the backward pass.
        parameters: the trainable parameters of `run`; others get no gradient.
        tiles: the maximum number of tiles.
        keys: keys of the dropout masks in `run` (`lora_dropout`), to which each tile adds its first row, so that the
            masks do not depend on the tiles.
        recompute: called by the backward pass for each tile instead of `run`: it saves the same tensors, and its output
            values are not read.

    Example:
        >>> layer = torch.nn.Linear(4, 4)
        >>> tiled(layer, torch.ones(2, 3, 4), list(layer.parameters()), tiles=2).shape
        torch.Size([2, 3, 4])
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not torch.is_grad_enabled() or not (x.requires_grad or trainable):
        return _forward(run, x, tiles, keys)
    node = None
    if x.requires_grad:
        # Saved by a separate function before any tile runs: an enclosing checkpoint stops recomputing there.
        x = _SaveInput.apply(x)
        node = x.grad_fn
    out: torch.Tensor = _Tiles.apply(x, node, run, recompute or run, tiles, keys, *trainable)
    return out


def _split(rows: int, tiles: int, keys: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yields (first row, end) of each tile, and sets its masks."""
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
    for start, stop in _split(len(x_NC), tiles, keys):
        out_NC[start:stop] = run(x_NC[start:stop])
    return out_NC.view(x.shape)


class _SaveInput(torch.autograd.Function):
    """The identity; saves its input for the backward pass."""

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
        *trainable: torch.nn.Parameter,
    ) -> torch.Tensor:
        ctx.node, ctx.recompute, ctx.tiles, ctx.keys, ctx.trainable = node, recompute, tiles, keys, trainable
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
        sums: list[torch.Tensor | None] = [None for _ in ctx.trainable]
        for start, stop in _split(len(x_NC), ctx.tiles, ctx.keys):
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                tile = x_NC[start:stop].detach().requires_grad_(dx_NC is not None)
                out = ctx.recompute(tile)
            wanted = [*ctx.trainable] if dx_NC is None else [*ctx.trainable, tile]
            grads = [*torch.autograd.grad(out, wanted, grad_NC[start:stop], allow_unused=True)]
            del out, tile, wanted
            if dx_NC is not None:
                dx_NC[start:stop] = grads.pop()
            for i in reversed(range(len(sums))):  # popped, so that all are freed before the next tile starts
                sums[i] = _accumulate(sums[i], grads.pop())
        dx = None if dx_NC is None else dx_NC.view(x.shape)
        return dx, None, None, None, None, None, *_cast_gradients(sums, ctx.trainable)


def _accumulate(total: torch.Tensor | None, part: torch.Tensor | None) -> torch.Tensor | None:
    """Accumulates in fp32 or wider, so that tiles are not rounded one by one."""
    if part is None:
        return total
    wide = torch.promote_types(part.dtype, torch.float32)
    return part.to(wide) if total is None else total.add_(part)


def _cast_gradients(
    sums: list[torch.Tensor | None], trainable: Sequence[torch.nn.Parameter]
) -> list[torch.Tensor | None]:
    """Casts each to the dtype of its parameter's gradient; empties the list."""
    out: list[torch.Tensor | None] = []
    for parameter in reversed(trainable):
        total = sums.pop()
        kept = getattr(parameter, "grad_dtype", None) or parameter.dtype
        out.append(None if total is None else total.to(kept))
    return out[::-1]
