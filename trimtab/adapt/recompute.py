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

from trimtab.adapt import sent_results
from trimtab.adapt.fused_lora import recomputing
from trimtab.adapt.lora_layers import LoRALinear
from trimtab.adapt.quantized_ops import Packing
from trimtab.adapt.spec_recompute import HOST, POLICIES
from trimtab.adapt.tiled import tiled
from trimtab.facts.errors import RecipeError
from trimtab.kernels.attention import Layout
from trimtab.kernels.gated_mlp import overwriting
from trimtab.model.decoder import Decoder, nothing_around
from trimtab.model.parts import Block

ATTENTION_OPERATORS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
    "trimtab::attention_forward",
    "flex_attention",
)
"""By name, so that one that this torch does not have is no mistake. Attention that is made of plain products
("reference", "sdpa_math") is computed again whole."""

PRODUCT_OPERATORS = ("aten::mm", "aten::addmm", "trimtab::packed_linear", "trimtab::lora_group")
"""Of linear layers, plain, packed and adapted; the input comes first, but for `addmm`."""

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
        block.recompute = way
        if isinstance(block.mlp.down_proj, LoRALinear):
            # Its output ends the block: computed again, it would only be thrown away.
            block.mlp.down_proj.last = block.recompute is not None
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
    contexts: dict[str, Callable[[Block], Callable[[], Any]]] = {
        "pointwise": _keeping_products,
        "selective": _of_any(_keeping_attention),
        "offload_half": offloading.half_contexts,
        "offload_attention": offloading.attention_contexts,
    }
    of = {policy: contexts.get(policy, _of_any(_no_contexts)) for policy in policies}
    shared = {policy: functools.partial(_again, of[policy]) for policy in policies if policy != "none"}
    for policy in policies:
        yield shared.get(policy) if mlp_tiles == 1 else _InTiles(policy, mlp_tiles, of[policy])


def _of_any(contexts: Callable[[], Any]) -> Callable[[Block], Callable[[], Any]]:
    return lambda block: contexts


def _again(
    contexts: Callable[[Block], Callable[[], Any]],
    block: Block,
    x_BTC: torch.Tensor,
    cos_BTF: torch.Tensor,
    sin_BTF: torch.Tensor,
    layout: Layout,
) -> torch.Tensor:
    """The block, computed again in the backward pass but for what the contexts keep."""
    if not torch.is_grad_enabled():
        return block.layers(x_BTC, cos_BTF, sin_BTF, layout)
    inputs = (x_BTC, cos_BTF, sin_BTF, layout)
    return _checkpoint(block.layers, *inputs, context_fn=contexts(block), alone=not _is_watched(block))


def _is_watched(block: Block) -> bool:
    """Whether somebody may have got hold of gate or up, and made something of them that the backward pass reads."""
    mlp = block.mlp
    return any(module._forward_hooks for layer in (mlp.gate_proj, mlp.up_proj) for module in layer.modules())


def _checkpoint(
    run: Callable[..., torch.Tensor],
    *inputs: Any,
    context_fn: Callable[[], Any] = _no_contexts,
    alone: bool = False,
) -> torch.Tensor:
    """`alone`: nobody but the gates themselves reads what they were computed from."""
    if not torch.compiler.is_compiling():  # a graph leaves out what nobody reads by itself
        context_fn = functools.partial(_and_recomputing, context_fn, alone)
    # What is random in a block is a function of step and place, so that no generator's state is kept.
    options: dict[str, Any] = {} if context_fn is _no_contexts else {"context_fn": context_fn}
    out: torch.Tensor = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, **options)
    return out


def _and_recomputing(context_fn: Callable[[], Any], alone: bool) -> Any:
    """The contexts of a checkpoint; the second pass is told that it is one.

    The graph is the first pass's. Its backward pass reads what the second has made for it alone, and may write there.
    """
    first, second = context_fn()
    return _Both(first, overwriting) if alone else first, _Both(second, recomputing)


class _Both(AbstractContextManager[None]):
    """Two contexts as one, anew each time: a graph that is kept is computed again more than once."""

    def __init__(
        self, around: AbstractContextManager[Any], within: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.around, self.within, self.stack = around, within, ExitStack()

    def __enter__(self) -> None:
        self.stack.enter_context(self.around)
        self.stack.enter_context(self.within())

    def __exit__(self, *raised: Any) -> bool | None:
        return self.stack.__exit__(*raised)


def _keeping_attention() -> Any:
    return _keeping(_is_attention)


def _keeping_products(block: Block) -> Callable[[], Any]:
    """Of attention and of products that sum over the stream's width or more: short ones (adapters') cost little.

    The block's last product, which sums over the feed-forward's width, is not needed in the backward pass.
    """
    attention, feed_forward = block.self_attn, block.mlp
    least = min(attention.q_proj.in_features, attention.o_proj.in_features)
    is_dear = functools.partial(_is_product, least, feed_forward.down_proj.in_features)
    return functools.partial(_keeping, is_dear)


def _is_product(least: int, last: int, operator: Any, args: Sequence[Any]) -> bool:
    """Whether an operator is attention, or a product over at least so many numbers and not over `last`."""
    name = _name(operator)
    if name not in PRODUCT_OPERATORS:
        return name in ATTENTION_OPERATORS
    summed = _sizes(name, args)[0]
    return summed >= least and summed != last


def _name(operator: Any) -> str:
    return operator.name().split(".")[0] if hasattr(operator, "overloadpacket") else str(operator.name())


def _attend_plain(
    block: Block, x_BTC: torch.Tensor, cos_BTF: torch.Tensor, sin_BTF: torch.Tensor, layout: Layout
) -> torch.Tensor:
    return block.attend(x_BTC, cos_BTF, sin_BTF, layout)


def _attend_pointwise(
    block: Block, x_BTC: torch.Tensor, cos_BTF: torch.Tensor, sin_BTF: torch.Tensor, layout: Layout
) -> torch.Tensor:
    return _checkpoint(block.attend, x_BTC, cos_BTF, sin_BTF, layout, context_fn=_keeping_products(block))


def _attend_selective(
    block: Block, x_BTC: torch.Tensor, cos_BTF: torch.Tensor, sin_BTF: torch.Tensor, layout: Layout
) -> torch.Tensor:
    return _checkpoint(block.attend, x_BTC, cos_BTF, sin_BTF, layout, context_fn=_keeping_attention)


def _feed(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.feed(x)


class _InTiles:
    """A block whose feed-forward half runs in tiles: they compute themselves again, whatever the policy is."""

    def __init__(self, policy: str, tiles: int, contexts: Callable[[Block], Callable[[], Any]]) -> None:
        self.tiles, self.contexts = tiles, contexts
        self.whole = policy in ("block", *HOST)
        self.attend: Way = {"pointwise": _attend_pointwise, "selective": _attend_selective}.get(
            policy, _attend_plain
        )
        self.feed: Callable[[Block, torch.Tensor], torch.Tensor] = _feed
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
            return _checkpoint(self._layers, *inputs, context_fn=self.contexts(block))
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
        return tiled(feed, x_BTC, learned, self.tiles, _mask_keys(block))


def _mask_keys(block: Block) -> list[torch.Tensor]:
    """Of the adapters' dropout in the feed-forward half."""
    keys = (getattr(module, "mask_key_2", None) for module in block.mlp.modules())
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

    def attention_contexts(self, block: Block) -> Callable[[], Any]:
        """Of a checkpoint in a layer whose input is being sent: attention's results go with it. From inside a graph
        nothing can be sent, and they stay on the device."""
        if self.store is None or torch.compiler.is_compiling():
            return _keeping_attention
        return functools.partial(sent_results.contexts, _is_attention, self.store)

    def half_contexts(self, block: Block) -> Callable[[], Any]:
        """The same with the products before attention and after it."""
        attention = block.self_attn
        sizes = frozenset(m.out_features for m in (attention.q_proj, attention.k_proj, attention.o_proj))
        least = min(attention.q_proj.in_features, attention.o_proj.in_features)
        is_dear = functools.partial(_is_of_half, sizes, least, block.mlp.down_proj.in_features)
        if self.store is None or torch.compiler.is_compiling():
            return functools.partial(_keeping, is_dear)
        return functools.partial(sent_results.contexts, is_dear, self.store)


def _is_attention(operator: Any, args: Sequence[Any] = ()) -> bool:
    return _name(operator) in ATTENTION_OPERATORS


def _is_of_half(sizes: frozenset[int], least: int, wide: int, operator: Any, args: Sequence[Any]) -> bool:
    """Whether an operator is attention, or a product that gives so many numbers a token, reads at least so many, and
    has nothing to do with the feed-forward's width. Where that is the width of the others too, attention alone."""
    name = _name(operator)
    if name not in PRODUCT_OPERATORS:
        return name in ATTENTION_OPERATORS
    summed, given = _sizes(name, args)
    return given in sizes and summed >= least and wide not in (given, summed)


def _sizes(name: str, args: Sequence[Any]) -> tuple[int, int]:
    """Of a product's rows: (numbers that are read, numbers that are given; of a group the first layer's)."""
    if name == "aten::addmm":
        return args[1].shape[-1], args[2].shape[-1]
    if name == "aten::mm":
        return args[0].shape[-1], args[1].shape[-1]
    text = args[6] if name == "trimtab::lora_group" else args[-1]
    return args[0].shape[-1], Packing.read(text.split(";")[0]).out_features


def _keeping(is_dear: sent_results.IsDear) -> Any:
    return create_selective_checkpoint_contexts(functools.partial(_keep, is_dear))


def _keep(is_dear: sent_results.IsDear, context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    keep = is_dear(operator, args)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
