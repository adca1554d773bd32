"""One decoder for every family: what differs between Llama, Mistral, SmolLM2 and Qwen is in the `ModelShape`.

The model knows no mesh, rank, optimizer or file. Legend: B batch, T tokens, N = B · T, C hidden size,
V vocabulary, F rotary frequencies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn import functional as F

from trimtab.facts.blocks import BlockShape, Rope
from trimtab.facts.shapes import ModelShape
from trimtab.kernels.attention import Layout
from trimtab.kernels.linear_cross_entropy import linear_cross_entropy
from trimtab.model.parts import Block, Cache, LayerKernels, RMSNorm
from trimtab.model.rope import Rotary


def nothing_around(layer: int, x_BTC: torch.Tensor) -> AbstractContextManager[None]:
    """What stands around a layer's call unless something is put there."""
    return nullcontext()


def _rope_of(block: BlockShape) -> tuple[Rope, int]:
    """What a block's angles depend on: RoPE and the size of a head."""
    assert block.attention.rope is not None, "a layer without positions cannot be built"
    return block.attention.rope, block.attention.head_dim


class Trunk(nn.Module):
    """Embeddings, blocks and the final norm: everything before the head."""

    def __init__(self, shape: ModelShape, kernels: Sequence[LayerKernels]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            Block(block, shape.hidden_size, i, kernels[i]) for i, block in enumerate(shape.blocks)
        )
        self.norm = RMSNorm(shape.hidden_size, shape.final_norm.eps, kernels[-1].pointwise)


class Decoder(nn.Module):
    """A causal language model whose parameters carry Hugging Face's names.

    Args:
        shape: every number that decides the model.
        kernels: the implementations of each layer.
        loss_impl: the implementation in `trimtab.kernels.linear_cross_entropy`.
        loss_memory: bytes that the loss "triton" may hold beyond inputs and gradients; little by default.

    Example:
        >>> decoder = build(read_shape("my-model"), dtype="fp32", device="cpu",
        ...                 attention="reference")                                   # doctest: +SKIP
        >>> load_weights(decoder, "my-model")                                        # doctest: +SKIP
        >>> logits_BTV = decoder.logits(decoder(torch.tensor([[1, 2, 3]])))          # doctest: +SKIP
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        kernels: Sequence[LayerKernels],
        loss_impl: str = "chunked",
        loss_memory: int | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.kernels = shape, tuple(kernels)
        self.loss_impl, self.loss_memory = loss_impl, loss_memory
        self.around = nothing_around
        """Entered around each layer's call with its number and input, outside of what is compiled; a way to keep a
        layer's input elsewhere (`trimtab.adapt.recompute`)."""
        self.rotary = {kind: Rotary(*kind, shape.max_positions) for kind in map(_rope_of, shape.blocks)}
        """RoPE of each kind that layers have, by its description and the head size."""
        self.regions: list[Callable[..., torch.Tensor]] | None = None
        """The blocks as `trimtab.adapt.compile_regions` compiled them, for training alone."""
        self.model = Trunk(shape, self.kernels)
        self.lm_head = (
            None if shape.tie_embeddings else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        )

    @property
    def head_weight(self) -> torch.Tensor:
        """[V, C]: the head's own matrix, or the embeddings where they are tied."""
        if self.lm_head is None:
            return self.model.embed_tokens.weight
        # A head with an adapter on it is more than its weight.
        effective = getattr(self.lm_head, "effective_weight", None)
        return self.lm_head.weight if effective is None else effective()

    def forward(
        self,
        input_ids_BT: torch.Tensor,
        positions_BT: torch.Tensor | None = None,
        layout: Layout | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """Hidden states after the final norm, hidden_BTC.

        Args:
            input_ids_BT: int64 token ids.
            positions_BT: each token's position in its document; counted from the cache's length if None.
            layout: which tokens see which (`Layout.packed(documents_BT)`); every row one document if None.
            cache: keys and values of earlier tokens, for generating.
        """
        T = input_ids_BT.shape[1]
        if positions_BT is None:
            start = 0 if cache is None else cache.length
            positions_T = torch.arange(start, start + T, device=input_ids_BT.device)
            positions_BT = positions_T.expand_as(input_ids_BT)
        layout = Layout.causal() if layout is None else layout
        x_BTC = self.model.embed_tokens(input_ids_BT)
        angles = {
            kind: rotary.cos_sin(positions_BT, x_BTC.dtype, layout.documents_BT)
            for kind, rotary in self.rotary.items()
        }
        blocks: Iterable[Callable[..., torch.Tensor]] = self.model.layers
        if self.regions is not None and cache is None and torch.is_grad_enabled():
            blocks = self.regions
            if not x_BTC.requires_grad:
                # Frozen embeddings would make the first block another program than the rest, to be compiled as well.
                x_BTC.requires_grad_()
        layouts = self._ready(layout, x_BTC) if cache is None else {}
        for i, block in enumerate(blocks):
            cos_BTF, sin_BTF = angles[_rope_of(self.shape.blocks[i])]
            ready = layouts.get(self._layout_key(i, layout), layout)
            with self.around(i, x_BTC):
                x_BTC = block(x_BTC, cos_BTF, sin_BTF, ready, cache)
        return self.model.norm(x_BTC)

    def _layout_key(self, layer: int, layout: Layout) -> tuple[str, int | None]:
        """(attention implementation, window) of a layer: what its form of a layout depends on."""
        kernels = self.kernels[layer]
        impl = kernels.attention if layout.is_packed else kernels.unpacked_attention
        return impl, self.shape.window(layer)

    def _ready(self, layout: Layout, x_BTC: torch.Tensor) -> dict[tuple[str, int | None], Layout]:
        """The layout in the form that attention reads, for each implementation and window that layers have."""
        B, T, _ = x_BTC.shape
        kind, dtype = x_BTC.device.type, x_BTC.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        keys = dict.fromkeys(self._layout_key(i, layout) for i in range(self.shape.num_layers))
        return {key: layout.ready(key[0], x_BTC.device, T, key[1], B=B, dtype=dtype) for key in keys}

    def logits(self, hidden_BTC: torch.Tensor) -> torch.Tensor:
        """logits_BTV in fp32 (fp64 for an fp64 model) of hidden states from `forward`."""
        logits_BTV = F.linear(hidden_BTC, self.head_weight)
        return logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))

    def loss(
        self,
        input_ids_BT: torch.Tensor,
        labels_BT: torch.Tensor,
        positions_BT: torch.Tensor | None = None,
        layout: Layout | None = None,
        *,
        reduction: str = "sum",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> torch.Tensor:
        """Cross entropy against labels that are already shifted (-100: no target); never holds [N, V].

        `label_smoothing` and `z_loss` are those of `trimtab.kernels.linear_cross_entropy`.

        Returns a 0-dim fp32 tensor ("sum", "mean"), or per-token losses [N] ("none").
        """
        hidden_BTC = self(input_ids_BT, positions_BT, layout)
        return linear_cross_entropy(
            hidden_BTC.flatten(0, 1),
            self.head_weight,
            labels_BT.flatten(),
            impl=self.loss_impl,
            reduction=reduction,
            memory_bytes=self.loss_memory,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        )
