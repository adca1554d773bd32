"""Keys and values of the tokens so far, so that each new token costs one position and not all of them.

Legend: B rows, T new tokens, S tokens so far, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class KVCache:
    """Grows in blocks; every row holds the same number of tokens.

    Example:
        >>> cache = KVCache(num_layers=1, block=4)
        >>> k_BTKD = torch.zeros(2, 3, 1, 8)
        >>> k_BSKD, v_BSKD = cache.update(0, k_BTKD, k_BTKD)
        >>> k_BSKD.shape, cache.length
        (torch.Size([2, 3, 1, 8]), 3)
    """

    def __init__(self, num_layers: int, *, block: int = 256) -> None:
        assert num_layers >= 1
        assert block >= 1
        self.block = block
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers
        self._lengths = [0] * num_layers

    @property
    def length(self) -> int:
        """Tokens that every layer holds; during a forward pass still the number before it."""
        return min(self._lengths)

    @property
    def nbytes(self) -> int:
        """Memory held, the room for tokens to come included."""
        return sum(t.nbytes for t in (*self._keys, *self._values) if t is not None)

    def update(
        self, layer: int, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a layer's new keys and values; returns all of its so far, k_BSKD and v_BSKD (views)."""
        start = self._lengths[layer]
        end = start + k_BTKD.shape[1]
        keys = self._keys[layer] = self._with_room(self._keys[layer], k_BTKD, start, end)
        values = self._values[layer] = self._with_room(self._values[layer], v_BTKD, start, end)
        keys[:, start:end] = k_BTKD
        values[:, start:end] = v_BTKD
        self._lengths[layer] = end
        return keys[:, :end], values[:, :end]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        for held in (self._keys, self._values):
            for layer, tensor in enumerate(held):
                if tensor is not None:
                    held[layer] = tensor[torch.tensor(rows, device=tensor.device)]

    def _with_room(
        self, held: torch.Tensor | None, new: torch.Tensor, length: int, needed: int
    ) -> torch.Tensor:
        if held is not None and held.shape[1] >= needed:
            return held
        # Half as much again, so that a long text is copied a few times and not once a block.
        capacity = -(-max(needed, length + length // 2) // self.block) * self.block
        grown = new.new_empty(new.shape[0], capacity, *new.shape[2:])
        if held is not None:
            grown[:, :length] = held[:, :length]
        return grown
