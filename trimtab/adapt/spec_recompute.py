"""What each recompute policy saves, offloads to the host and recomputes per layer. No torch.

A policy names results of operations; which operations a layer has is declared in `trimtab.model.spec_block`. Tests
compare what a policy declares as saved with what a run saves, byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trimtab.facts.operations import Activation, Kind, Operation, Result, saved_activations
from trimtab.model.spec_block import BETWEEN, BLOCK_INPUT, FEED_FORWARD_RESIDUAL, DeclaredBlock

POLICIES = ("none", "pointwise", "selective", "block", "offload_half", "offload_attention", "offload")
"""From the policy that saves most on the device to the one that saves least."""
OFFLOADING = ("offload_half", "offload_attention", "offload")
"""Policies that offload their saved activations to the host."""
IN_HALVES = ("none", "pointwise", "selective")
"""With a tiled feed-forward, policies that run the halves separately and save the residual stream between them."""

ATTENTION_OPERATORS: dict[str, tuple[str, ...]] = {
    "reference": (),
    "sdpa_math": (),
    "sdpa_flash": (
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    "sdpa_efficient": ("aten::_scaled_dot_product_efficient_attention",),
    "sdpa_cudnn": ("aten::_scaled_dot_product_cudnn_attention",),
    "varlen": ("torch_attn::_varlen_attn",),
    "flex": ("flex_attention",),
    "triton": ("trimtab::attention_forward",),
}
"""For each attention backend (`trimtab.kernels.attention.IMPLS`) the operators whose results the policies of
`SAVED_PRODUCTS` save. Backends of plain products have none and are fully recomputed. By name, so that an operator
that the installed torch does not have does not raise."""

SAVED_PRODUCTS: dict[str, frozenset[tuple[str, str]]] = {
    "pointwise": frozenset(
        (projection, factor) for projection in ("attention", "gate_up") for factor in ("weight", "adapter_a")
    ),
    "selective": frozenset(),
    "offload_half": frozenset({("attention", "weight")}),
    "offload_attention": frozenset(),
}
"""The policies that save results of single operators: attention's, and those of the matrix products with these labels
(`trimtab.model.labels`). `pointwise` excludes the down projection, whose result the backward pass does not read, and
an adapter's second product, which is cheap to recompute."""


def canonical(policies: Iterable[str] | Mapping[str, int]) -> tuple[str, ...]:
    """The same number of each policy, in the order with the lowest peak memory: layers that save least first.

    The backward pass begins at the last layer. Layers that save everything are finished, and their memory freed, before
    the first recomputation needs memory.

    Example:
        >>> canonical(["none", "block", "none"])
        ('block', 'none', 'none')
        >>> canonical({"selective": 1, "offload": 2})
        ('offload', 'offload', 'selective')
    """
    counts = dict(policies) if isinstance(policies, Mapping) else {}
    if not isinstance(policies, Mapping):
        for policy in policies:
            counts[policy] = counts.get(policy, 0) + 1
    return tuple(policy for policy in reversed(POLICIES) for _ in range(counts.get(policy, 0)))


def count_policies(policies: Sequence[str]) -> dict[str, int]:
    """Number of layers per policy, those that save least first.

    Example:
        >>> count_policies(("block", "none", "none"))
        {'block': 1, 'none': 2}
    """
    return {policy: policies.count(policy) for policy in reversed(POLICIES) if policy in policies}


def tile_rows(tokens: int, tiles: int) -> int:
    """Tokens per tile: a power of two, with at most `tiles` tiles.

    Example:
        >>> tile_rows(100_000, 8), tile_rows(4096, 4), tile_rows(3, 8)
        (16384, 1024, 1)
    """
    return 1 << (max(-(-tokens // tiles), 1) - 1).bit_length()


def saved_under(block: DeclaredBlock, policy: str) -> list[Activation]:
    """The activations that a layer saves for the backward pass under a policy: on the device, or offloaded to the host.

    Args:
        block: the layer's operations; with tiles if its feed-forward half is tiled.
        policy: one of `POLICIES`.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> from trimtab.model.spec_block import declare_block
        >>> from trimtab.model.spec_operations import Execution
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> block = declare_block(tiny.blocks[0], 16, Execution(1, 8, "fp32", "sdpa_flash"))
        >>> [activation.name for activation in saved_under(block, "selective")]
        ['x', 'self_attn.attended', 'attention.lse']
    """
    tiled = bool(block.tile)
    if not block.differentiates:
        return []
    between = next(one for operation in block.attention for one in operation.outputs if one.name == BETWEEN)
    if policy == "none":
        operations = block.attention if tiled else block.operations
        found = saved_activations(operations, block.requires_grad)
        return [*found, between] if tiled and between not in found else found
    x = next(one for operation in block.attention for one in operation.inputs if one.name == BLOCK_INPUT)
    results = [
        result.activation
        for operation in (block.attention if tiled else block.operations)
        for result in operation.results
        if is_saved_result(policy, operation, result)
    ]
    # With tiles the residual stream between the halves is saved, unless the whole layer is checkpointed.
    own = [between] if tiled and policy in IN_HALVES else []
    return list(dict.fromkeys([x, *results, *own]))


def is_saved_result(policy: str, operation: Operation, result: Result) -> bool:
    """Whether a policy saves the result of an attention operator or of a product with these labels."""
    if policy not in SAVED_PRODUCTS:
        return False
    if operation.kind is Kind.ATTENTION:
        return True
    return (operation.projection, result.factor) in SAVED_PRODUCTS[policy]


@dataclass(frozen=True)
class Recomputation:
    """What a policy recomputes in one layer, for one microbatch."""

    products: float = 0.0
    """FLOPs of matrix products."""
    attention: float = 0.0
    """FLOPs of attention."""


def recomputed_operations(block: DeclaredBlock, policy: str) -> list[Operation]:
    """The operations that the backward pass recomputes, in order; without those of a tiled feed-forward.

    Results that the policy saved are not recomputed.
    """
    operations = block.attention if block.tile else block.operations
    return [
        one
        for one in operations[: last_recomputed(block, policy) + 1]
        if not one.results or not all(is_saved_result(policy, one, result) for result in _own_results(one))
    ]


def last_recomputed(block: DeclaredBlock, policy: str) -> int:
    """The index of the last recomputed operation, −1 where nothing is recomputed.

    Recomputation stops at the last activation that the backward pass reads: the last product of a block, whose result
    is only added to the residual stream, does not run again unless it saves something of its own.
    """
    if policy == "none" or not block.differentiates:
        return -1
    operations = block.attention if block.tile else block.operations
    wanted = {one.name for one in saved_activations(operations, block.requires_grad)}
    if block.tile and policy not in IN_HALVES:
        wanted.add(BETWEEN)
    return max((i for i, one in enumerate(operations) if not wanted.isdisjoint(_makes(one))), default=-1)


def _makes(operation: Operation) -> set[str]:
    """Names of the activations that an operation produces: its outputs, and what it saves."""
    read = set() if operation.saves_results else {one.name for one in operation.inputs}
    own = {one.activation.name for one in operation.saved} - read
    return own | {one.name for one in operation.outputs}


def _own_results(operation: Operation) -> list[Result]:
    """The results of a product with the layer's own weight: an adapter's are negligible."""
    return [result for result in operation.results if result.factor == "weight"]


def recomputation(block: DeclaredBlock, policy: str, num_tiles: int = 1) -> Recomputation:
    """The cost of a policy in addition to a plain forward and backward pass.

    Args:
        block: the layer's operations.
        policy: one of `POLICIES`.
        num_tiles: tiles of the feed-forward half; each is fully recomputed.
    """
    again = [(one, 1) for one in recomputed_operations(block, policy)]
    if block.tile and block.differentiates:
        again += [(one, num_tiles) for one in block.tile if one.name != FEED_FORWARD_RESIDUAL]
    products = attention = 0.0
    for one, times in again:
        cost = one.recompute or one.forward
        if one.kind is Kind.PRODUCT:
            products += times * cost.flops
        elif one.kind is Kind.ATTENTION:
            attention += times * cost.flops
    return Recomputation(products, attention)
