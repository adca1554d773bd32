"""Activation checkpointing: which activations each layer saves and which the backward pass recomputes.

| policy | saved per layer | recomputed |
|---|---|---|
| none | everything that the backward pass reads | nothing |
| pointwise | the layer's input, matrix products but the last, attention's output and log-sum-exp | norms, RoPE, gates |
| selective | the layer's input, attention's output and log-sum-exp | all but attention |
| block | the layer's input | everything |
| offload_half | the layer's input, attention's projections, output and log-sum-exp, offloaded | the feed-forward half |
| offload_attention | the same as `selective`, offloaded to the host | all but attention |
| offload | the layer's input, offloaded to the host | everything |

Policies save the results that take most FLOPs per byte. An element of attention's output costs 2 · T FLOPs for a
causal document of T tokens, an element of a projection 2 · C FLOPs for an input width C: in 16 bits C = 512 to 8192
FLOPs per saved byte, compared with almost none for norms, RoPE and gated activations, which are a third of a layer's
saved activations without recomputation. Attention's output is as small as the input and, from some thousand tokens on,
the most expensive: only `block` recomputes it. All policies give bitwise identical results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trimtab.adapt import offloaded_activations
from trimtab.adapt.spec_recompute import ATTENTION_OPERATORS, OFFLOADING, POLICIES, SAVED_PRODUCTS
from trimtab.adapt.tiled import tiled
from trimtab.facts.errors import RecipeError
from trimtab.kernels.attention import Layout
from trimtab.model.decoder import Decoder, no_layer_context
from trimtab.model.labels import current_label
from trimtab.model.parts import Block

SAVED_ATTENTION = frozenset(name for names in ATTENTION_OPERATORS.values() for name in names)
"""The operators of all attention backends whose results can be saved."""

PRODUCT_OPERATORS = ("aten::mm", "aten::addmm", "trimtab::packed_linear", "trimtab::lora_group")
"""The operators of linear layers: plain, quantized and adapted. The label of a product identifies its layer."""

LayerFunction = Callable[[Block, torch.Tensor, torch.Tensor, torch.Tensor, Layout], torch.Tensor]


def apply(decoder: Decoder, policies: Sequence[str], *, mlp_tiles: int = 1) -> Decoder:
    """Sets each layer's recompute policy, in place; no parameter and no name changes.

    Call it before compiling, which wraps it. The decoder may still be on the meta device.

    Args:
        decoder: the model, adapters included.
        policies: one of `POLICIES` per layer, in order. On a CPU nothing is offloaded: "offload" is the same
            as "block", and the other two offloading policies save the same activations without copying them.
        mlp_tiles: number of token tiles of every layer's feed-forward half, each recomputed in the backward pass, so
            that its activations are never materialized for all tokens; 1 for no tiling.

    Example:
        >>> apply(decoder, ["block"] * 28).loss(ids_BT, labels_BT).backward()  # doctest: +SKIP
    """
    blocks = list(decoder.model.layers)
    if len(policies) != len(blocks):
        raise RecipeError(
            f"there are {len(policies)} recompute policies for {len(blocks)} layers", "give one per layer"
        )
    for policy in policies:
        if policy not in POLICIES:
            raise RecipeError(f"unknown recompute policy {policy!r}", f"use one of {', '.join(POLICIES)}")
    assert mlp_tiles >= 1
    offloading = _Offloading(frozenset(i for i, policy in enumerate(policies) if policy in OFFLOADING))
    decoder.layer_context = offloading if offloading.layers else no_layer_context
    for block, function in zip(blocks, _functions(policies, mlp_tiles, offloading), strict=True):
        assert isinstance(block, Block)
        for impl in (block.self_attn.packed_impl, block.self_attn.unpacked_impl):
            assert impl in ATTENTION_OPERATORS, f"recompute policies do not support attention {impl}"
        block.recompute = function
    return decoder


def compile_block(
    block: torch.nn.Module, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Returns a callable for a block compiled by `compiler`: as one graph, or two if the feed-forward half is tiled.

    Args:
        block: after `apply`.
        compiler: such as `functools.partial(torch.compile, fullgraph=True)`.

    Example:
        >>> compile_block(block, torch.compile)(x_BTC, cos_BTF, sin_BTF, layout)  # doctest: +SKIP
    """
    assert isinstance(block, Block)
    if not isinstance(block.recompute, _TiledBlock):
        return compiler(block)
    # The loop over tiles stays outside the graph, which would otherwise unroll it.
    block.recompute.compile(compiler)
    return block


def _no_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), nullcontext()


@contextmanager
def eager_blocks(decoder: Decoder) -> Iterator[None]:
    """Runs all blocks in eager mode inside the `with` block."""
    with ExitStack() as stack:
        for block in decoder.model.layers:
            if isinstance(block.recompute, _TiledBlock):
                stack.enter_context(block.recompute.uncompiled())
        yield


def _functions(
    policies: Sequence[str], mlp_tiles: int, offloading: _Offloading
) -> Iterator[LayerFunction | None]:
    """Yields the function that runs each layer. Layers of the same policy share one, and so share a compiled graph."""
    shared = {
        policy: functools.partial(_checkpointed, policy, offloading)
        for policy in policies
        if policy != "none"
    }
    for policy in policies:
        yield shared.get(policy) if mlp_tiles == 1 else _TiledBlock(policy, mlp_tiles, offloading)


def _context_fn(policy: str, offloading: _Offloading) -> Callable[[], Any]:
    """A checkpoint's `context_fn`: saves the results that the policy does not recompute, on the device or offloaded.

    A compiled graph cannot offload, and saves them on the device.
    """
    if policy not in SAVED_PRODUCTS:
        return _no_contexts
    if policy not in OFFLOADING or offloading.store is None or torch.compiler.is_compiling():
        return functools.partial(_selective_contexts, policy)
    return functools.partial(
        offloaded_activations.offloading_contexts, functools.partial(_is_saved, policy), offloading.store
    )


def _selective_contexts(policy: str) -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_checkpoint_policy, policy))


def _checkpoint_policy(
    policy: str, context: Any, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    saved = _is_saved(policy, operator)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _is_saved(policy: str, operator: Any) -> bool:
    """Whether a policy saves the results of an operator that is being dispatched: attention, or a labelled product."""
    name = _name(operator)
    if name in PRODUCT_OPERATORS:
        return current_label() in SAVED_PRODUCTS[policy]
    return name in SAVED_ATTENTION


def _name(operator: Any) -> str:
    return operator.name().split(".")[0] if hasattr(operator, "overloadpacket") else str(operator.name())


def _checkpointed(
    policy: str,
    offloading: _Offloading,
    block: Block,
    x_BTC: torch.Tensor,
    cos_BTF: torch.Tensor,
    sin_BTF: torch.Tensor,
    layout: Layout,
) -> torch.Tensor:
    """Runs a block under activation checkpointing: the backward pass recomputes everything but the saved results."""
    inputs = (x_BTC, cos_BTF, sin_BTF, layout)
    if not torch.is_grad_enabled():
        return block.compute(*inputs)
    # A compiled graph does not need these options: it eliminates unused products and reuses buffers by itself.
    run = block.compute if torch.compiler.is_compiling() else _CheckpointedLayers(block)
    return _checkpoint(run, *inputs, context_fn=_context_fn(policy, offloading))


class _CheckpointedLayers:
    """Runs a block's layers inside `checkpoint`: the first call is the forward pass, all later ones recompute.

    The backward pass reads the recomputed gate and up, which nothing else references unless a forward hook stored them;
    so their gradients may overwrite them. The output of a recomputation is discarded.
    """

    def __init__(self, block: Block) -> None:
        self.block, self.is_recomputation = block, False
        layers = block.mlp.gate_up_layers
        hooked = any(module._forward_hooks for layer in layers for module in layer.modules())
        self.overwrite_gate_inputs = not hooked

    def __call__(self, *inputs: Any) -> torch.Tensor:
        output_unused, self.is_recomputation = self.is_recomputation, True
        return self.block.compute(
            *inputs, overwrite_gate_inputs=self.overwrite_gate_inputs, output_unused=output_unused
        )


def _checkpoint(
    run: Callable[..., torch.Tensor], *inputs: Any, context_fn: Callable[[], Any] = _no_contexts
) -> torch.Tensor:
    # Random numbers in a block are counter-based, so that no RNG state has to be saved.
    options: dict[str, Any] = {} if context_fn is _no_contexts else {"context_fn": context_fn}
    out: torch.Tensor = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, **options)
    return out


def _attend_plain(
    block: Block, x_BTC: torch.Tensor, cos_BTF: torch.Tensor, sin_BTF: torch.Tensor, layout: Layout
) -> torch.Tensor:
    return block.attend(x_BTC, cos_BTF, sin_BTF, layout)


def _attend_pointwise(
    block: Block, x_BTC: torch.Tensor, cos_BTF: torch.Tensor, sin_BTF: torch.Tensor, layout: Layout
) -> torch.Tensor:
    return _checkpoint(
        block.attend,
        x_BTC,
        cos_BTF,
        sin_BTF,
        layout,
        context_fn=functools.partial(_selective_contexts, "pointwise"),
    )


def _attend_selective(
    block: Block, x_BTC: torch.Tensor, cos_BTF: torch.Tensor, sin_BTF: torch.Tensor, layout: Layout
) -> torch.Tensor:
    return _checkpoint(
        block.attend,
        x_BTC,
        cos_BTF,
        sin_BTF,
        layout,
        context_fn=functools.partial(_selective_contexts, "selective"),
    )


def _feed(block: Block, x: torch.Tensor, *, output_unused: bool = False) -> torch.Tensor:
    return block.feed(x, output_unused=output_unused)


class _TiledBlock:
    """A block with a tiled feed-forward half, whose tiles are recomputed under every policy."""

    def __init__(self, policy: str, tiles: int, offloading: _Offloading) -> None:
        self.policy, self.tiles, self.offloading = policy, tiles, offloading
        self.checkpoints_whole_block = policy in ("block", *OFFLOADING)
        self.attend: LayerFunction = {"pointwise": _attend_pointwise, "selective": _attend_selective}.get(
            policy, _attend_plain
        )
        self.feed: Callable[..., torch.Tensor] = _feed
        self.plain = (self.attend, self.feed)

    def compile(self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Compiles both halves as separate graphs, for training."""
        self.attend, self.feed = compiler(self.attend), compiler(self.feed)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Runs both halves in eager mode inside the `with` block."""
        saved, (self.attend, self.feed) = (self.attend, self.feed), self.plain
        try:
            yield
        finally:
            self.attend, self.feed = saved

    def __call__(
        self,
        block: Block,
        x_BTC: torch.Tensor,
        cos_BTF: torch.Tensor,
        sin_BTF: torch.Tensor,
        layout: Layout,
    ) -> torch.Tensor:
        inputs = (block, x_BTC, cos_BTF, sin_BTF, layout)
        if not torch.is_grad_enabled():
            return tiled(block.feed, _attend_plain(*inputs), (), self.tiles, _mask_keys(block))
        if self.checkpoints_whole_block:
            return _checkpoint(self._layers, *inputs, context_fn=_context_fn(self.policy, self.offloading))
        return self._layers(*inputs)

    def _layers(
        self,
        block: Block,
        x_BTC: torch.Tensor,
        cos_BTF: torch.Tensor,
        sin_BTF: torch.Tensor,
        layout: Layout,
    ) -> torch.Tensor:
        parameters = [*block.post_attention_layernorm.parameters(), *block.mlp.parameters()]
        x_BTC = self.attend(block, x_BTC, cos_BTF, sin_BTF, layout)
        feed = functools.partial(self.feed, block)
        recompute = functools.partial(self.feed, block, output_unused=True)
        return tiled(feed, x_BTC, parameters, self.tiles, _mask_keys(block), recompute)


def _mask_keys(block: Block) -> list[torch.Tensor]:
    """The dropout mask keys of the adapters in the feed-forward half."""
    keys = (getattr(module, "mask_key_5", None) for module in block.mlp.modules())
    return [key for key in keys if key is not None]


class _Offloading:
    """Offloads the saved activations of some layers to the host; a no-op on a CPU."""

    def __init__(self, layers: frozenset[int]) -> None:
        self.layers = layers
        self.store: Any = None

    def __call__(self, layer: int, x_BTC: torch.Tensor) -> AbstractContextManager[None]:
        if layer not in self.layers or not torch.is_grad_enabled() or x_BTC.device.type != "cuda":
            return nullcontext()
        if self.store is None:
            from trimtab.adapt.offload import HostStore

            self.store = HostStore(x_BTC.device)
        context: AbstractContextManager[None] = self.store.offload_input(x_BTC)
        return context
