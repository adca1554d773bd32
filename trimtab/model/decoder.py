"""One decoder for all families: `ModelShape` describes the differences between Llama, Mistral, SmolLM2 and Qwen.

The model does not depend on meshes, ranks, optimizers or files. Legend: B batch, T tokens, N = B · T, C hidden size,
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


def no_layer_context(layer: int, x_BTC: torch.Tensor) -> AbstractContextManager[None]:
    """The default `layer_context`: a context manager that does nothing."""
    return nullcontext()


def _rope_of(block: BlockShape) -> tuple[Rope, int]:
    """(RoPE settings, head size) of a block."""
    assert block.attention.rope is not None, "a layer without RoPE cannot be built"
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
    """A causal language model with Hugging Face's parameter names.

    Args:
        shape: the model's architecture.
        kernels: the implementations per layer.
        loss_impl: the implementation in `trimtab.kernels.linear_cross_entropy`.
        loss_memory: memory budget in bytes of the loss "triton", in addition to inputs and gradients; small by default.

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
        self.layer_context = no_layer_context
        """Context manager entered around each layer's call with its index and input, outside of compiled regions;
        used to offload a layer's input (`trimtab.adapt.recompute`)."""
        self.rotary = {kind: Rotary(*kind, shape.max_positions) for kind in map(_rope_of, shape.blocks)}
        """The RoPE tables of the layers, by settings and head size."""
        self.regions: list[Callable[..., torch.Tensor]] | None = None
        """The blocks compiled by `trimtab.adapt.compile_regions`, for training only."""
        self.model = Trunk(shape, self.kernels)
        self.lm_head = (
            None if shape.tie_embeddings else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        )

    @property
    def head_weight(self) -> torch.Tensor:
        """[V, C]: the head's weight, or that of tied embeddings."""
        if self.lm_head is None:
            return self.model.embed_tokens.weight
        # A head with an adapter has an effective weight of its own.
        effective = getattr(self.lm_head, "effective_weight", None)
        return self.lm_head.weight if effective is None else effective()

    def forward(
        self,
        input_ids_BT: torch.Tensor,
        positions_BT: torch.Tensor | None = None,
        layout: Layout | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """Returns hidden_BTC, the hidden states after the final norm.

        Args:
            input_ids_BT: int64 token ids.
            positions_BT: each token's position in its document; starts at the cache's length if None.
            layout: the attention mask (`Layout.packed(documents_BT)`); every row is one document if None.
            cache: key/value cache of earlier tokens, for generation.
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
                # With frozen embeddings the first block would be compiled separately from the others.
                x_BTC.requires_grad_()
        layouts = self._prepare_layouts(layout, x_BTC) if cache is None else {}
        for i, block in enumerate(blocks):
            cos_BTF, sin_BTF = angles[_rope_of(self.shape.blocks[i])]
            ready = layouts.get(self._layout_key(i, layout), layout)
            with self.layer_context(i, x_BTC):
                x_BTC = block(x_BTC, cos_BTF, sin_BTF, ready, cache)
        return self.model.norm(x_BTC)

    def _layout_key(self, layer: int, layout: Layout) -> tuple[str, int | None]:
        """(attention backend, window) of a layer, which determine its prepared layout."""
        kernels = self.kernels[layer]
        impl = kernels.attention if layout.is_packed else kernels.unpacked_attention
        return impl, self.shape.window(layer)

    def _prepare_layouts(self, layout: Layout, x_BTC: torch.Tensor) -> dict[tuple[str, int | None], Layout]:
        """Prepares a layout for each attention backend and window of the layers."""
        B, T, _ = x_BTC.shape
        kind, dtype = x_BTC.device.type, x_BTC.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        keys = dict.fromkeys(self._layout_key(i, layout) for i in range(self.shape.num_layers))
        return {key: layout.as_prepared(key[0], x_BTC.device, T, key[1], B=B, dtype=dtype) for key in keys}

    def logits(self, hidden_BTC: torch.Tensor) -> torch.Tensor:
        """Computes logits_BTV in fp32 (fp64 for an fp64 model) from the hidden states of `forward`."""
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
        """Cross-entropy with labels that are already shifted (-100: no target); does not materialize [N, V] logits.

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
