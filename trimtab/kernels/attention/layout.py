"""The attention mask of a batch: computed once, then shared by every layer.

A document is a run of equal ids in a row of the batch. The backends read the mask in different forms: an additive mask,
cumulative offsets of the documents in the flattened batch, bounds of each token's document, or a block mask. `Layout`
builds a form at the first call and caches it.
"""

# B batch, T queries, S keys, Q documents in the batch

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trimtab.facts.errors import ModelError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# A key/value cache grows by one token per step, and each length needs another form: only the latest are cached.
MAX_CACHED_FORMS = 8


@dataclass(frozen=True)
class Mask:
    """Form for masked backends. If `bias` is None, `is_causal` decides between a causal mask and no mask."""

    bias: torch.Tensor | None
    """[B or 1, 1, T, S] in the dtype of the queries: 0 where a key is visible, −∞ elsewhere."""
    is_causal: bool
    fully_masked_BT: torch.Tensor | None = None
    """[B or 1, T] bool: fully masked queries; None if there cannot be any. `bias` is 0 for them, so that their softmax
    is finite, and their results must be replaced."""


@dataclass(frozen=True)
class Offsets:
    """Form for `varlen`: cumulative start of each document in the batch's flattened tokens."""

    starts_q: torch.Tensor
    """[Q + 1] int32 on the device; the last entry is the number of tokens."""
    starts_k: torch.Tensor
    longest_q: int
    """An upper bound, a power of two: few distinct values, so that a compiled region is not recompiled."""
    longest_k: int


@dataclass(frozen=True)
class Bounds:
    """Form for `triton`: the first and the last token of each token's document, counted from the first key.

    int32 on the device, None if each row is one document. Causal attention reads `first_BT` and `last_BS` only.
    """

    first_BT: torch.Tensor | None
    """First token of each query's document."""
    last_BS: torch.Tensor | None
    """Last token of each key's document."""
    last_BT: torch.Tensor | None = None
    first_BS: torch.Tensor | None = None


def effective_window(window: int | None, T: int, S: int, offset: int, causal: bool) -> int | None:
    """Returns the window, or None if it masks no key of any query."""
    max_distance = offset + T if causal else max(offset + T, S - offset)
    return None if window is None or window >= max_distance else window


class Layout:
    """The documents of a batch's rows, which define the attention mask: one document per row, or several packed ones.

    Example:
        >>> layout = Layout.packed(torch.tensor([[0, 0, 1, 1, 1, -1]]))
        >>> layout.is_packed, layout.visible(6, 6, None)[0, 3].int().tolist()
        (True, [0, 0, 1, 1, 0, 0])
    """

    def __init__(self, documents_BT: torch.Tensor | None, first_key: int | None = None) -> None:
        self.documents_BT = documents_BT
        """Index of each position's run of equal ids within its row, int32; None if each row is one document. Usually
        the keys are at all of these positions, and the queries at the last ones."""
        self.first_key = first_key
        """Position of the first key, if the keys are only a part of these positions (`from_key`); else None."""
        self._forms: dict[tuple[Any, ...], Any] = {}

    @staticmethod
    def causal() -> Layout:
        """Returns the layout of one document per row; with more keys than queries, queries are the last positions."""
        return Layout(None)

    @staticmethod
    def packed(documents_BT: torch.Tensor) -> Layout:
        """Returns the layout of packed documents: tokens attend only to their own document.

        Args:
            documents_BT: Integer ids; a document is a run of equal ids, so an id that recurs later in the row is
                another document, and padding (-1) is its own. Pass the tensor on the CPU: the offsets that `varlen`
                needs are then computed without a GPU synchronization.
        """
        assert documents_BT.ndim == 2, f"documents are [batch, tokens], not {tuple(documents_BT.shape)}"
        changes_BT = torch.zeros_like(documents_BT, dtype=torch.int32)
        changes_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
        return Layout(changes_BT.cumsum(1, dtype=torch.int32))

    @staticmethod
    def left_padded(padding_B: Sequence[int], length: int) -> Layout:
        """Returns the layout of left-padded rows.

        Padding attends only to padding, so that it stays finite and no text token attends to it.

        Args:
            padding_B: Number of padding tokens before each row.
            length: Keys per row, padding included. There may be fewer queries: the last positions of a cache.

        Example:
            >>> Layout.left_padded([0, 2], 4).visible(1, 4, None).int().tolist()
            [[[1, 1, 1, 1]], [[0, 0, 1, 1]]]
        """
        if not any(padding_B):
            return Layout.causal()
        starts_B1 = torch.tensor(padding_B)[:, None]
        return Layout((torch.arange(length) >= starts_B1).int())

    def last(self, keys: int) -> Layout:
        """Returns the layout of the last `keys` keys, for a cache that dropped keys outside the sliding window.

        Example:
            >>> Layout.left_padded([0, 2], 4).last(3).visible(1, 3, None).int().tolist()
            [[[1, 1, 1]], [[0, 1, 1]]]
        """
        if self.documents_BT is None or self.documents_BT.shape[1] == keys:
            return self
        assert keys < self.documents_BT.shape[1], f"{keys} keys of {self.documents_BT.shape[1]}"
        if ("last", keys) not in self._forms:
            self._forms["last", keys] = Layout(self.documents_BT[:, -keys:])
        return self._forms["last", keys]

    def from_key(self, first_key: int) -> Layout:
        """Returns the layout for keys that start at this position; their number is that of the call.

        For attention over a part of the keys, with results that are combined by their log-sum-exp. The `offset` of the
        queries is relative to the first key; queries may be before or after these keys.

        Example:
            >>> rows = Layout.packed(torch.tensor([[0, 0, 1, 1, 1, 1]]))
            >>> rows.from_key(2).visible(2, 2, None, offset=2).int().tolist()  # queries 4, 5 and keys 2, 3
            [[[1, 1], [1, 1]]]
        """
        return Layout(None) if self.documents_BT is None else Layout(self.documents_BT, first_key)

    @property
    def is_packed(self) -> bool:
        """Whether rows may contain several documents."""
        return self.documents_BT is not None

    def prepare(
        self,
        impl: str,
        device: torch.device | str,
        T: int,
        window: int | None = None,
        *,
        S: int | None = None,
        B: int = 1,
        dtype: torch.dtype = torch.float32,
        causal: bool = True,
        offset: int | None = None,
    ) -> Any:
        """Returns the form that `impl` reads, built at the first call with these arguments and cached.

        `attention` calls this; calling it before the first layer moves the work out of a compiled or timed region.

        Args:
            T, S: Number of queries and of keys (T if not given).
            window: As in `attention`.
            B: Rows of the batch; only required by `varlen` without packed documents.
            dtype: Dtype of the queries, and of additive masks.
            causal, offset: As in `attention`.
        """
        S = T if S is None else S
        offset = S - T if offset is None else offset
        self._check(T, S, offset)
        window = effective_window(window, T, S, offset, causal)
        device = torch.device(device)
        if impl == "varlen":
            key: tuple[Any, ...] = ("offsets", device, B, T, S)
        elif impl == "flex":
            key = ("blocks", device, T, S, window)
        elif impl == "triton":
            key = ("bounds", device, T, S, offset)
        else:
            key = ("mask", device, T, S, window, dtype, causal, offset)
        form = self._forms.get(key)
        if form is None:
            if impl == "varlen":
                form = self._offsets(B, T, S, device)
            elif impl == "flex":
                form = self._blocks(T, S, window, device)
            elif impl == "triton":
                form = self._bounds(T, S, offset, device)
            else:
                form = self._mask(T, S, window, device, dtype, causal, offset)
            if len(self._forms) >= MAX_CACHED_FORMS:
                del self._forms[next(iter(self._forms))]
            self._forms[key] = form
        return form

    def _check(self, T: int, S: int, offset: int) -> None:
        if self.documents_BT is None:
            return
        L, first_key = self.documents_BT.shape[1], self.first_key or 0
        keys_fit = S == L if self.first_key is None else 0 <= first_key <= L - S
        if not keys_fit or not 0 <= first_key + offset <= L - T:
            raise ModelError(
                f"the layout has documents of {L} tokens, but the call has {T} queries from position "
                f"{first_key + offset} on and {S} keys from position {first_key} on",
                "with a key/value cache give the documents of all keys, or Layout.causal()",
            )

    def as_prepared(
        self,
        impl: str,
        device: torch.device | str,
        T: int,
        window: int | None = None,
        *,
        B: int = 1,
        dtype: torch.dtype = torch.float32,
        causal: bool = True,
    ) -> PreparedLayout:
        """Returns this layout with only the form that `impl` reads, to pass to a compiled region.

        The forms cached here are keyed by lengths and windows in a dict, and a compiled region would guard on all of
        them. A prepared layout is tensors and a flag, so that other lengths and documents do not recompile.

        Example:
            >>> ready = Layout.packed(torch.tensor([[0, 0, 1]])).as_prepared("triton", "cpu", 3)
            >>> ready.prepare("triton", "cpu", 3).first_BT
            tensor([[0, 0, 2]], dtype=torch.int32)
        """
        if impl == "reference":  # its scores, and so its mask, are at least fp32
            dtype = torch.promote_types(dtype, torch.float32)
        return PreparedLayout(
            self.prepare(impl, device, T, window, B=B, dtype=dtype, causal=causal), self.documents_BT
        )

    def visible(
        self,
        T: int,
        S: int,
        window: int | None,
        device: torch.device | str | None = None,
        *,
        causal: bool = True,
        offset: int | None = None,
    ) -> torch.Tensor:
        """[B or 1, T, S] bool: whether query t attends to key s. The definition of all forms."""
        offset = S - T if offset is None else offset
        i_T1 = torch.arange(offset, offset + T, device=device)[:, None]
        j_S = torch.arange(S, device=device)
        seen_BTS = (j_S <= i_T1)[None] if causal else torch.ones(1, T, S, dtype=torch.bool, device=device)
        if window is not None:
            seen_BTS = seen_BTS & (i_T1 - j_S < window)
            seen_BTS = seen_BTS if causal else seen_BTS & (j_S - i_T1 < window)
        if self.documents_BT is not None:
            documents_BL, first_key = self.documents_BT.to(i_T1.device), self.first_key or 0
            of_queries_BT = documents_BL[:, first_key + offset :][:, :T]
            of_keys_BS = documents_BL[:, first_key:][:, :S]
            seen_BTS = seen_BTS & (of_queries_BT[:, :, None] == of_keys_BS[:, None, :])
        return seen_BTS

    def _mask(
        self,
        T: int,
        S: int,
        window: int | None,
        device: torch.device,
        dtype: torch.dtype,
        causal: bool,
        offset: int,
    ) -> Mask:
        if self.documents_BT is None and window is None:
            if not causal or offset >= S - 1:
                return Mask(None, is_causal=False)
            if T == S and offset == 0:
                return Mask(None, is_causal=True)
        seen_BTS = self.visible(T, S, window, device, causal=causal, offset=offset)
        fully_masked_BT = None
        if offset < 0 or offset + T > S:  # other queries attend at least to the key at their own position
            fully_masked_BT = ~seen_BTS.any(-1)
            seen_BTS = seen_BTS | fully_masked_BT[:, :, None]
        # Rows are padded to 8 elements: otherwise CUDA's memory-efficient kernel would copy the mask in each layer.
        padded_BTS = torch.empty(*seen_BTS.shape[:2], -(-S // 8) * 8, device=device, dtype=dtype)
        bias_BTS = padded_BTS[:, :, :S].fill_(float("-inf")).masked_fill_(seen_BTS, 0.0)
        return Mask(bias_BTS[:, None], is_causal=False, fully_masked_BT=fully_masked_BT)

    def _offsets(self, B: int, T: int, S: int, device: torch.device) -> Offsets:
        if self.documents_BT is None:
            starts_q = torch.arange(0, (B + 1) * T, T, device=device, dtype=torch.int32)
            starts_k = torch.arange(0, (B + 1) * S, S, device=device, dtype=torch.int32)
            return Offsets(starts_q, starts_k, T, S)
        documents_BT = self.documents_BT
        first_BT = torch.ones_like(documents_BT, dtype=torch.bool)
        first_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
        starts_Q = first_BT.flatten().nonzero()[:, 0]  # synchronizes if the documents are on a GPU
        starts = torch.cat([starts_Q, starts_Q.new_tensor([documents_BT.numel()])])
        longest = min(1 << (int(starts.diff().max()) - 1).bit_length(), S)
        # Queries are the last T of a row's S positions: a document that ends before them has no query.
        row, place = starts // S, starts % S
        starts_q = (row * T + (place - (S - T)).clamp(min=0)).to(device=device, dtype=torch.int32)
        starts_k = starts.to(device=device, dtype=torch.int32)
        return Offsets(starts_q, starts_k, min(longest, T), longest)

    def _bounds(self, T: int, S: int, offset: int, device: torch.device) -> Bounds:
        """Builds `Bounds` without a GPU synchronization, also if the documents are on a GPU."""
        if self.documents_BT is None:
            return Bounds(None, None)
        documents_BL = self.documents_BT
        L, first_key = documents_BL.shape[1], self.first_key or 0
        place_L = torch.arange(L, dtype=torch.int32, device=documents_BL.device)
        starts_BL = torch.ones_like(documents_BL, dtype=torch.bool)
        starts_BL[:, 1:] = documents_BL[:, 1:] != documents_BL[:, :-1]
        ends_BL = starts_BL.roll(-1, 1)  # a document ends where the next one starts, or at the row's end
        first_BL = torch.where(starts_BL, place_L, 0).cummax(1).values - first_key
        last_BL = torch.where(ends_BL, place_L, L - 1).flip(1).cummin(1).values.flip(1) - first_key

        def cut(x_BL: torch.Tensor, start: int, length: int) -> torch.Tensor:
            return x_BL[:, start : start + length].to(device, torch.int32).contiguous()

        first_BS, last_BS = (cut(x, first_key, S) for x in (first_BL, last_BL))
        if T == S and offset == 0:
            return Bounds(first_BS, last_BS, last_BS, first_BS)
        first_BT, last_BT = (cut(x, first_key + offset, T) for x in (first_BL, last_BL))
        return Bounds(first_BT, last_BS, last_BT, first_BS)

    def _blocks(self, T: int, S: int, window: int | None, device: torch.device) -> BlockMask:
        from trimtab.kernels.attention.impl_flex import block_mask

        return block_mask(self._bounds(T, S, S - T, device).first_BT, T, S, window, device)


class PreparedLayout(Layout):
    """A layout with a single prepared form (`Layout.as_prepared`), for one backend, window and length."""

    def __init__(self, form: Any, documents_BT: torch.Tensor | None) -> None:
        super().__init__(documents_BT)
        self.form = form
        self.packed_rows = documents_BT is not None

    @property
    def is_packed(self) -> bool:
        """Whether rows may contain several documents."""
        return self.packed_rows

    def prepare(
        self,
        impl: str,
        device: torch.device | str,
        T: int,
        window: int | None = None,
        *,
        S: int | None = None,
        B: int = 1,
        dtype: torch.dtype = torch.float32,
        causal: bool = True,
        offset: int | None = None,
    ) -> Any:
        """Returns the prepared form; arguments are ignored."""
        return self.form
