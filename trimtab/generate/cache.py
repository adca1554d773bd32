"""The KV cache: keys and values of earlier tokens, so that a decoding step computes only the new token.

Legend: B rows, T new tokens, S tokens so far, K key/value heads, D head size.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn


class KVCache:
    """A KV cache that grows in blocks; every row has the same number of tokens (shorter rows are left-padded).

    A layer with sliding-window attention drops keys and values that no later token attends to, so its memory and
    time per token do not grow with the sequence length.

    Args:
        num_layers: the number of layers of the model.
        windows: sliding-window size of each layer, None for full attention (the default for all layers).
        block: number of tokens by which the buffers grow.

    Example:
        >>> cache = KVCache(num_layers=1, block=4)
        >>> k_BTKD = torch.zeros(2, 3, 1, 8)
        >>> k_BSKD, v_BSKD = cache.update(0, k_BTKD, k_BTKD)
        >>> k_BSKD.shape, cache.length
        (torch.Size([2, 3, 1, 8]), 3)
    """

    def __init__(
        self, num_layers: int, *, windows: Sequence[int | None] | None = None, block: int = 256
    ) -> None:
        assert num_layers >= 1
        assert block >= 1
        self.block = block
        self.windows = tuple(windows or [None] * num_layers)
        assert len(self.windows) == num_layers, f"{len(self.windows)} windows for {num_layers} layers"
        self._dropped = [0] * num_layers
        """Number of leading tokens that each layer has dropped."""
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers
        self._lengths = [0] * num_layers

    @property
    def length(self) -> int:
        """Number of cached tokens; during a forward pass, the number before that pass."""
        return min(self._lengths)

    @property
    def nbytes(self) -> int:
        """Allocated memory, including the preallocated space for later tokens."""
        return sum(t.nbytes for t in (*self._keys, *self._values) if t is not None)

    def update(
        self, layer: int, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append a layer's new keys and values; returns views k_BSKD and v_BSKD of all that the new tokens attend to.

        S counts the new tokens and all earlier ones, or those within the layer's sliding window.
        """
        T, window = k_BTKD.shape[1], self.windows[layer]
        cached = self._lengths[layer] - self._dropped[layer]
        attended = cached if window is None else min(cached, window - 1)
        if cached - attended >= self.block:
            self._drop(layer, cached - attended)
            cached = attended
        end = cached + T
        keys = self._keys[layer] = self._with_capacity(self._keys[layer], k_BTKD, cached, end)
        values = self._values[layer] = self._with_capacity(self._values[layer], v_BTKD, cached, end)
        keys[:, cached:end] = k_BTKD
        values[:, cached:end] = v_BTKD
        self._lengths[layer] += T
        return keys[:, cached - attended : end], values[:, cached - attended : end]

    def _drop(self, layer: int, count: int) -> None:
        """Free the first `count` cached tokens of a layer."""
        end = self._lengths[layer] - self._dropped[layer]
        for buffers in (self._keys, self._values):
            tensor = buffers[layer]
            assert tensor is not None
            buffers[layer] = tensor[:, count:end].clone()
        self._dropped[layer] += count

    def select(self, rows: Sequence[int], *, start: int = 0) -> None:
        """Keep only these rows, in this order, without their first `start` tokens (padding in all of them)."""
        for buffers in (self._keys, self._values):
            for layer, tensor in enumerate(buffers):
                if tensor is not None:
                    first = max(start - self._dropped[layer], 0)
                    buffers[layer] = tensor[torch.tensor(rows, device=tensor.device), first:]
        self._lengths = [length - start for length in self._lengths]
        self._dropped = [max(dropped - start, 0) for dropped in self._dropped]

    def can_truncate(self, length: int) -> bool:
        """Whether no dropped token is needed after truncation to `length` tokens."""
        pairs = zip(self._dropped, self.windows, strict=True)
        return all(not dropped or dropped <= length - ((window or 1) - 1) for dropped, window in pairs)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; the next ones overwrite the rest.

        Example:
            >>> cache = KVCache(num_layers=1)
            >>> _ = cache.update(0, torch.zeros(1, 5, 1, 8), torch.zeros(1, 5, 1, 8))
            >>> cache.truncate(3)
            >>> cache.length
            3
        """
        assert 0 <= length <= self.length, f"{length} of {self.length} tokens"
        assert self.can_truncate(length), f"the window before token {length} was dropped"
        self._lengths = [length] * len(self._lengths)

    def _with_capacity(
        self, buffer: torch.Tensor | None, new: torch.Tensor, length: int, needed: int
    ) -> torch.Tensor:
        if buffer is not None and buffer.shape[1] >= needed:
            return buffer
        # Grow by half: a long sequence is then copied a few times instead of once per block.
        capacity = -(-max(needed, length + length // 2) // self.block) * self.block
        grown = new.new_empty(new.shape[0], capacity, *new.shape[2:])
        if buffer is not None:
            grown[:, :length] = buffer[:, :length]
        return grown


class WeightState:
    """Identifies the current weights of a model, to detect stale keys and values in a cache.

    It holds only weak references to the weights. Replacing a tensor or writing to it is detected; writing through
    `tensor.data` is not.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> before = WeightState(layer)
        >>> before.matches(WeightState(layer))
        True
        >>> _ = nn.init.zeros_(layer.weight)
        >>> before.matches(WeightState(layer))
        False
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        # Tensors created in inference mode have no version counter.
        self._versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]

    def matches(self, other: WeightState) -> bool:
        """Whether both identify the same, unchanged tensors."""
        pairs = zip(self._tensors, other._tensors, strict=False)
        return self._versions == other._versions and all(
            tensor() is not None and tensor() is other_tensor() for tensor, other_tensor in pairs
        )


class PromptCache:
    """A prefix cache for several calls of `generate`: a prompt is prefilled only from where it differs from the last.

    If the weights have changed, the whole prompt is prefilled. Switching adapters is not detected: use a new cache
    for other adapters.

    Example:
        >>> cache = PromptCache()
        >>> cache.ids = [5, 6, 7, 8]
        >>> kv = cache.begin(num_layers=1, prompt=[5, 6, 9])
        >>> cache.ids, kv.length                  # no keys and values are cached yet
        ([], 0)
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        """The tokens in the cache, including those of an interrupted forward pass."""
        self._cache: KVCache | None = None
        self._weights: WeightState | None = None

    def begin(
        self,
        num_layers: int,
        prompt: Sequence[int],
        *,
        windows: Sequence[int | None] | None = None,
        weights: WeightState | None = None,
    ) -> KVCache:
        """Return the cache, truncated to the prefix that it shares with a prompt, without the prompt's last token.

        The cache is empty if `weights` differ from the last call, or if sliding windows dropped keys and values that
        the next token of the prompt attends to.
        """
        if weights is not None and (self._weights is None or not self._weights.matches(weights)):
            self._cache, self._weights = None, weights
        if self._cache is None:
            self._cache = KVCache(num_layers, windows=windows)
        shared = 0
        for cached_id, prompt_id in zip(self.ids[: self._cache.length], prompt[:-1], strict=False):
            if cached_id != prompt_id:
                break
            shared += 1
        if not self._cache.can_truncate(shared):
            self._cache, shared = KVCache(num_layers, windows=windows), 0
        self._cache.truncate(shared)
        self.ids = list(prompt[:shared])
        return self._cache
