"""Declares the saved, offloaded and recomputed activations of each recompute policy, per layer. No torch.

A policy selects results of operations; `trimtab.model.spec_block` declares the operations of a layer. Tests compare the
declared saved activations with those of a run, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trimtab.facts.operations import Activation, Operation, OperationKind, SavableResult, saved_activations
from trimtab.model.spec_block import ATTENTION_RESIDUAL, BLOCK_INPUT, FEED_FORWARD_RESIDUAL, DeclaredBlock

POLICIES = ("none", "pointwise", "selective", "block", "offload_half", "offload_attention", "offload")
"""In decreasing order of activation memory on the device."""
OFFLOADING = ("offload_half", "offload_attention", "offload")
"""Policies that offload their saved activations to the host."""
IN_HALVES = ("none", "pointwise", "selective")
"""Policies that, with a tiled feed-forward, run the halves separately and save the residual stream between them."""

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
"""For each attention backend (`trimtab.kernels.attention.IMPLS`), the operators whose results the policies of
`SAVED_PRODUCTS` save. Backends made of plain matrix products have none and are fully recomputed. By name, so that an
operator that the installed torch lacks does not raise."""

SAVED_PRODUCTS: dict[str, frozenset[tuple[str, str]]] = {
    "pointwise": frozenset(
        (projection, factor) for projection in ("attention", "gate_up") for factor in ("weight", "adapter_a")
    ),
    "selective": frozenset(),
    "offload_half": frozenset({("attention", "weight")}),
    "offload_attention": frozenset(),
}
"""Policies that save results of single operators: of attention, and of the matrix products with these labels
(`trimtab.model.labels`). `pointwise` excludes the down projection, whose result the backward pass does not read, and an
adapter's second product, which is cheap to recompute."""


def sort_policies(policies: Iterable[str] | Mapping[str, int]) -> tuple[str, ...]:
    """Sorts policies into the order with the lowest peak memory: layers that save least first.

    The backward pass begins at the last layer. Layers that save everything finish, and free their memory, before the
    first recomputation allocates memory.

    Example:
        >>> sort_policies(["none", "block", "none"])
        ('block', 'none', 'none')
        >>> sort_policies({"selective": 1, "offload": 2})
        ('offload', 'offload', 'selective')
    """
    counts = dict(policies) if isinstance(policies, Mapping) else {}
    if not isinstance(policies, Mapping):
        for policy in policies:
            counts[policy] = counts.get(policy, 0) + 1
    return tuple(policy for policy in reversed(POLICIES) for _ in range(counts.get(policy, 0)))


def count_policies(policies: Sequence[str]) -> dict[str, int]:
    """Returns the number of layers per policy, policies that save least first.

    Example:
        >>> count_policies(("block", "none", "none"))
        {'block': 1, 'none': 2}
    """
    return {policy: policies.count(policy) for policy in reversed(POLICIES) if policy in policies}


def tile_rows(tokens: int, tiles: int) -> int:
    """Returns the number of tokens per tile: a power of two, with at most `tiles` tiles.

    Example:
        >>> tile_rows(100_000, 8), tile_rows(4096, 4), tile_rows(3, 8)
        (16384, 1024, 1)
    """
    return 1 << (max(-(-tokens // tiles), 1) - 1).bit_length()


def saved_under(block: DeclaredBlock, policy: str) -> list[Activation]:
    """Returns a layer's saved activations under a policy: on the device, or offloaded to the host.

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
    between = next(
        y for operation in block.attention for y in operation.outputs if y.name == ATTENTION_RESIDUAL
    )
    if policy == "none":
        operations = block.attention if tiled else block.operations
        found = saved_activations(operations, block.requires_grad)
        return [*found, between] if tiled and between not in found else found
    x = next(x for operation in block.attention for x in operation.inputs if x.name == BLOCK_INPUT)
    results = [
        result.activation
        for operation in (block.attention if tiled else block.operations)
        for result in operation.results
        if is_saved_result(policy, operation, result)
    ]
    # With tiles the residual stream between the halves is saved, unless the whole layer is checkpointed.
    own = [between] if tiled and policy in IN_HALVES else []
    return list(dict.fromkeys([x, *results, *own]))


def is_saved_result(policy: str, operation: Operation, result: SavableResult) -> bool:
    """Whether a policy saves this result of an operation."""
    if policy not in SAVED_PRODUCTS:
        return False
    if operation.kind is OperationKind.ATTENTION:
        return True
    return (operation.projection, result.factor) in SAVED_PRODUCTS[policy]


@dataclass(frozen=True)
class RecomputeCost:
    """FLOPs of the recomputation in one layer, for one microbatch."""

    products: float = 0.0
    """FLOPs of matrix products."""
    attention: float = 0.0
    """FLOPs of attention."""


def recomputed_operations(block: DeclaredBlock, policy: str) -> list[Operation]:
    """Returns the operations that the backward pass recomputes, in order, without those of a tiled feed-forward.

    Results that the policy saves are not recomputed.
    """
    operations = block.attention if block.tile else block.operations
    return [
        operation
        for operation in operations[: last_recomputed(block, policy) + 1]
        if not operation.results
        or not all(is_saved_result(policy, operation, result) for result in _own_results(operation))
    ]


def last_recomputed(block: DeclaredBlock, policy: str) -> int:
    """Returns the index of the last recomputed operation, −1 if none is recomputed.

    Recomputation stops at the last activation that the backward pass reads: the last product of a block, whose result
    is only added to the residual stream, is not recomputed unless it saves another tensor.
    """
    if policy == "none" or not block.differentiates:
        return -1
    operations = block.attention if block.tile else block.operations
    wanted = {activation.name for activation in saved_activations(operations, block.requires_grad)}
    if block.tile and policy not in IN_HALVES:
        wanted.add(ATTENTION_RESIDUAL)
    return max(
        (i for i, operation in enumerate(operations) if not wanted.isdisjoint(_produced_names(operation))),
        default=-1,
    )


def _produced_names(operation: Operation) -> set[str]:
    """Names of the activations that an operation produces: its outputs and its saved tensors."""
    read = set() if operation.saves_results else {x.name for x in operation.inputs}
    own = {saved.activation.name for saved in operation.saved} - read
    return own | {y.name for y in operation.outputs}


def _own_results(operation: Operation) -> list[SavableResult]:
    """The results of a product with the layer's weight; those of adapters are negligible."""
    return [result for result in operation.results if result.factor == "weight"]


def recompute_cost(block: DeclaredBlock, policy: str, num_tiles: int = 1) -> RecomputeCost:
    """Returns the cost of a policy in addition to forward and backward pass.

    Args:
        block: the layer's operations.
        policy: one of `POLICIES`.
        num_tiles: tiles of the feed-forward half; each is fully recomputed.
    """
    recomputed = [(operation, 1) for operation in recomputed_operations(block, policy)]
    if block.tile and block.differentiates:
        recomputed += [
            (operation, num_tiles) for operation in block.tile if operation.name != FEED_FORWARD_RESIDUAL
        ]
    products = attention = 0.0
    for operation, times in recomputed:
        cost = operation.recompute or operation.forward
        if operation.kind is OperationKind.PRODUCT:
            products += times * cost.flops
        elif operation.kind is OperationKind.ATTENTION:
            attention += times * cost.flops
    return RecomputeCost(products, attention)
