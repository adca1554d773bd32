"""How much of each layer is kept for the backward pass, and how much is computed again: applied from outside.

| policy | kept of a layer | computed again |
|---|---|---|
| none | everything that the backward pass reads | nothing |
| pointwise | results of matrix products and of attention | norms, rotary positions, gates |
| selective | the layer's input, attention's output and row sums | all but attention |
| block | the layer's input | everything |
| offload_half | the layer's input, results of the attention half's products, in the host's memory | the other half |
| offload_attention | what `selective` keeps, in the host's memory | all but attention |
| offload | the layer's input, in the host's memory | everything |

What is dear is kept first. A number that attention gives costs 2 · T multiply-adds of a causal document of T tokens,
one of a product 2 · C of the width it sums over: 512 to 8192 for each byte kept, against none to speak of for norms,
rotary positions and gates, which are a third of what a plain layer keeps. Attention's output is as small as the input
and, from some thousand tokens on, the dearest of all: only `block` gives it up. Every policy gives the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trimtab.adapt import offloaded_activations
from trimtab.adapt.spec_recompute import ATTENTION_OPERATORS, HOST, POLICIES, SAVED_PRODUCTS
from trimtab.adapt.tiled import tiled
from trimtab.facts.errors import RecipeError
from trimtab.kernels.attention import Layout
from trimtab.model.decoder import Decoder, nothing_around
from trimtab.model.labels import current_label
from trimtab.model.parts import Block

SAVED_ATTENTION = frozenset(name for names in ATTENTION_OPERATORS.values() for name in names)
"""The operators of all attention backends whose results can be saved."""

PRODUCT_OPERATORS = ("aten::mm", "aten::addmm", "trimtab::packed_linear", "trimtab::lora_group")
"""Of linear layers: plain, quantized and adapted. Which layer a product belongs to is its label."""

Way = Callable[[Block, torch.Tensor, torch.Tensor, torch.Tensor, Layout], torch.Tensor]


def apply(decoder: Decoder, policies: Sequence[str], *, mlp_tiles: int = 1) -> Decoder:
    """Gives each layer its policy; in place, no parameter and no name changes.

    Before compiling, which goes around it. The decoder may still be on the meta device.

    Args:
        decoder: the model, adapters included.
        policies: one of `POLICIES` for each layer, the first layer's first. On a CPU, whose memory is the host's,
            "offload" is "block", and the other two that send what they keep, keep it where it is.
        mlp_tiles: parts of the tokens that the feed-forward half of every layer is computed in, each part computed
            again in the backward pass, so that its activations never exist whole; 1 computes it at once.

    Example:
        >>> apply(decoder, ["block"] * 28).loss(ids_BT, labels_BT).backward()  # doctest: +SKIP
    """
    blocks = list(decoder.model.layers)
    if len(policies) != len(blocks):
        raise RecipeError(
            f"{len(policies)} recompute policies for {len(blocks)} layers", "give one for each layer"
        )
    for policy in policies:
        if policy not in POLICIES:
            raise RecipeError(f"there is no recompute policy {policy!r}", f"use one of {', '.join(POLICIES)}")
    assert mlp_tiles >= 1
    offloading = _Offloading(frozenset(i for i, policy in enumerate(policies) if policy in HOST))
    decoder.around = offloading if offloading.layers else nothing_around
    for block, way in zip(blocks, _ways(policies, mlp_tiles, offloading), strict=True):
        assert isinstance(block, Block)
        for impl in (block.self_attn.packed_impl, block.self_attn.unpacked_impl):
            assert impl in ATTENTION_OPERATORS, f"no recompute policy knows the operators of attention {impl}"
        block.recompute = way
    return decoder


def compiled(
    block: torch.nn.Module, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """What to call instead of a block whose graphs `compiler` makes: all of it, or both halves if one is in tiles.

    Args:
        block: after `apply`.
        compiler: such as `functools.partial(torch.compile, fullgraph=True)`.

    Example:
        >>> compiled(block, torch.compile)(x_BTC, cos_BTF, sin_BTF, layout)  # doctest: +SKIP
    """
    assert isinstance(block, Block)
    if not isinstance(block.recompute, _InTiles):
        return compiler(block)
    # The loop over tiles stays outside: a graph would hold every tile's copy of the same operations.
    block.recompute.compile(compiler)
    return block


def _no_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), nullcontext()


@contextmanager
def uncompiled(decoder: Decoder) -> Iterator[None]:
    """Inside, no part of a block runs compiled."""
    with ExitStack() as stack:
        for block in decoder.model.layers:
            if isinstance(block.recompute, _InTiles):
                stack.enter_context(block.recompute.uncompiled())
        yield


def _ways(policies: Sequence[str], mlp_tiles: int, offloading: _Offloading) -> Iterator[Way | None]:
    """How each layer runs. Layers alike have the very same way, so that compiled they are one program."""
    shared = {
        policy: functools.partial(_checkpointed, policy, offloading)
        for policy in policies
        if policy != "none"
    }
    for policy in policies:
        yield shared.get(policy) if mlp_tiles == 1 else _InTiles(policy, mlp_tiles, offloading)


def _context_fn(policy: str, offloading: _Offloading) -> Callable[[], Any]:
    """A checkpoint's `context_fn`: saves what the policy does not recompute, on the device or in the host's memory.

    From inside a compiled graph nothing can be sent to the host; there it stays on the device.
    """
    if policy not in SAVED_PRODUCTS:
        return _no_contexts
    if policy not in HOST or offloading.store is None or torch.compiler.is_compiling():
        return functools.partial(_selective_contexts, policy)
    return functools.partial(
        offloaded_activations.offloading_contexts, functools.partial(_is_saved, policy), offloading.store
    )


def _selective_contexts(policy: str) -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_decide, policy))


def _decide(policy: str, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
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
    """The block under activation checkpointing: recomputed in the backward pass, except for what the contexts save."""
    inputs = (x_BTC, cos_BTF, sin_BTF, layout)
    if not torch.is_grad_enabled():
        return block.layers(*inputs)
    # A compiled graph has no use for the hints: it drops unused products and reuses buffers by itself.
    run = block.layers if torch.compiler.is_compiling() else _CheckpointedLayers(block)
    return _checkpoint(run, *inputs, context_fn=_context_fn(policy, offloading))


class _CheckpointedLayers:
    """A block's layers as one call of `checkpoint` runs them: first the forward pass, then only recomputations.

    Autograd's graph is the forward pass's, and its backward reads the recomputed gate and up, which nothing else has
    unless a hook took them: so their gradients may be written over them. The output of a recomputation is discarded.
    """

    def __init__(self, block: Block) -> None:
        self.block, self.is_recomputation = block, False
        layers = block.mlp.gate_up_layers
        hooked = any(module._forward_hooks for layer in layers for module in layer.modules())
        self.overwrite_gate_inputs = not hooked

    def __call__(self, *inputs: Any) -> torch.Tensor:
        output_unused, self.is_recomputation = self.is_recomputation, True
        return self.block.layers(
            *inputs, overwrite_gate_inputs=self.overwrite_gate_inputs, output_unused=output_unused
        )


def _checkpoint(
    run: Callable[..., torch.Tensor], *inputs: Any, context_fn: Callable[[], Any] = _no_contexts
) -> torch.Tensor:
    # Randomness in a block is a function of step and place, so that no generator's state has to be saved.
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


class _InTiles:
    """A block whose feed-forward half runs in tiles: they compute themselves again, whatever the policy is."""

    def __init__(self, policy: str, tiles: int, offloading: _Offloading) -> None:
        self.policy, self.tiles, self.offloading = policy, tiles, offloading
        self.whole = policy in ("block", *HOST)
        self.attend: Way = {"pointwise": _attend_pointwise, "selective": _attend_selective}.get(
            policy, _attend_plain
        )
        self.feed: Callable[..., torch.Tensor] = _feed
        self.plain = (self.attend, self.feed)

    def compile(self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Both halves as graphs of their own, in training."""
        self.attend, self.feed = compiler(self.attend), compiler(self.feed)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Inside, both halves run as they are written."""
        kept, (self.attend, self.feed) = (self.attend, self.feed), self.plain
        try:
            yield
        finally:
            self.attend, self.feed = kept

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
        if self.whole:
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
        learned = [*block.post_attention_layernorm.parameters(), *block.mlp.parameters()]
        x_BTC = self.attend(block, x_BTC, cos_BTF, sin_BTF, layout)
        feed = functools.partial(self.feed, block)
        recompute = functools.partial(self.feed, block, output_unused=True)
        return tiled(feed, x_BTC, learned, self.tiles, _mask_keys(block), recompute)


def _mask_keys(block: Block) -> list[torch.Tensor]:
    """Of the adapters' dropout in the feed-forward half."""
    keys = (getattr(module, "mask_key_5", None) for module in block.mlp.modules())
    return [key for key in keys if key is not None]


class _Offloading:
    """Sends what some layers keep to the host; on a CPU, where it is already, it does nothing."""

    def __init__(self, layers: frozenset[int]) -> None:
        self.layers = layers
        self.store: Any = None

    def __call__(self, layer: int, x_BTC: torch.Tensor) -> AbstractContextManager[None]:
        if layer not in self.layers or not torch.is_grad_enabled() or x_BTC.device.type != "cuda":
            return nullcontext()
        if self.store is None:
            from trimtab.adapt.offload import HostStore

            self.store = HostStore(x_BTC.device)
        kept: AbstractContextManager[None] = self.store.keeping(x_BTC)
        return kept
