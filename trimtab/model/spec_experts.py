"""Declares the operations of a mixture-of-experts layer. No torch.

The declaration assumes grouped GEMMs: the router scores every expert, the tokens' rows are gathered in the order of
their experts, one grouped product per projection multiplies each row by its expert's matrix, and the weighted results
are summed per token. trimtab cannot train such layers yet, so no training step verifies the figures; a test compares
them with a small implementation of the same steps.

Legend: N tokens, E experts, K active experts per token, R = N · K routed rows, C hidden size, F width of an expert.
"""

from __future__ import annotations

import dataclasses

from trimtab.facts.blocks import ExpertsShape, FeedForwardShape, Linear
from trimtab.facts.dtypes import BYTES
from trimtab.facts.operations import (
    Activation,
    MemoryPart,
    Operation,
    OperationKind,
    PassCost,
    SavedActivation,
)
from trimtab.model.spec_operations import (
    DeclareProjections,
    Execution,
    Projections,
    add_gated_activation,
    linear_operation,
)

INDEX_BYTES = 8
"""Bytes per index in torch."""


def add_experts(
    found: list[Operation],
    shape: ExpertsShape,
    x: Activation,
    hidden_size: int,
    run: Execution,
    declare: DeclareProjections,
) -> Activation:
    """Adds the operations of a mixture of experts with input x; returns its output [N, C].

    Example:
        >>> from trimtab.model.spec_operations import plain_projections
        >>> run, operations = Execution(1, 8, "bf16", "triton", pointwise="triton"), []
        >>> x = run.activation("x", 16, MemoryPart.RESIDUAL)
        >>> _ = add_experts(operations, ExpertsShape(4, 2, 32), x, 16, run, plain_projections)
        >>> [operation.name for operation in operations][:4]
        ['mlp.gate', 'mlp.route', 'mlp.dispatch', 'mlp.experts.gate_proj']
    """
    weights = _route(found, shape, x, hidden_size, run)
    routed = dataclasses.replace(run, batch=1, tokens=run.num_tokens * shape.active)
    index = Activation("mlp.row_tokens", routed.num_tokens * INDEX_BYTES, MemoryPart.FEED_FORWARD)
    rows = _dispatch(found, x, index, hidden_size, run, routed)
    down = _feed_forward(found, shape.expert, rows, hidden_size, routed, declare, "mlp.experts", shape.count)
    y = _combine(found, down, weights, index, hidden_size, run, routed)
    shared = shape.shared_expert
    if shared is None:
        return y
    other = _feed_forward(found, shared, x, hidden_size, run, declare, "mlp.shared_experts")
    if shape.shared_gate:
        other = _scale_shared(found, shape, x, other, hidden_size, run)
    return _add_shared(found, y, other, hidden_size, run)


def _route(
    found: list[Operation], shape: ExpertsShape, x: Activation, hidden_size: int, run: Execution
) -> Activation:
    """Scores all experts in fp32; returns the weights [N, K] of the selected experts, which sum to 1."""
    N, E, K = run.num_tokens, shape.count, shape.active
    router = shape.router(hidden_size)
    logits = run.activation("mlp.logits", E, MemoryPart.FEED_FORWARD)
    found.append(_router_product(router, x, logits, run))
    weights = run.activation("mlp.weights", K, MemoryPart.FEED_FORWARD)
    scores = run.activation("mlp.scores", E, MemoryPart.FEED_FORWARD, "fp32")
    chosen = run.activation("mlp.chosen_scores", K, MemoryPart.FEED_FORWARD, "fp32")
    indices = Activation("mlp.chosen", N * K * INDEX_BYTES, MemoryPart.FEED_FORWARD)
    total = run.activation("mlp.score_sums", 1, MemoryPart.FEED_FORWARD, "fp32")
    reads = frozenset({logits.name})
    moved = float(logits.nbytes + 2 * scores.nbytes + indices.nbytes + weights.nbytes)
    found.append(
        Operation(
            "mlp.route",
            OperationKind.COPY,
            MemoryPart.FEED_FORWARD,
            (logits,),
            (weights,),
            tuple(SavedActivation(activation, reads) for activation in (scores, chosen, indices, total)),
            dtype="fp32",
            # An exponential counts as four FLOPs, as in gated activations.
            forward=PassCost(6.0 * N * E, moved, 4),
            backward=PassCost(3.0 * N * E, moved, 4, scores.nbytes),
        )
    )
    return weights


def _router_product(linear: Linear, x: Activation, y: Activation, run: Execution) -> Operation:
    """Declares a router's projection, which has no adapter, is not quantized, and whose result no policy saves."""
    group = Projections((linear,), x, (y,), MemoryPart.FEED_FORWARD, "router")
    return dataclasses.replace(linear_operation(linear, x, y, run, group), results=())


def _dispatch(
    found: list[Operation],
    x: Activation,
    index: Activation,
    hidden_size: int,
    run: Execution,
    routed: Execution,
) -> Activation:
    """Gathers the rows of all tokens in the order of their experts, [R, C]; their gradients are summed per token.

    `index` is the token of each row.
    """
    rows = routed.activation("mlp.rows", hidden_size, MemoryPart.FEED_FORWARD)
    cast = run.activation(x.name, hidden_size, MemoryPart.FEED_FORWARD).nbytes
    moved = float(2 * rows.nbytes + 4 * index.nbytes)
    found.append(
        Operation(
            "mlp.dispatch",
            OperationKind.COPY,
            MemoryPart.FEED_FORWARD,
            (x,),
            (rows,),
            (SavedActivation(index, frozenset({x.name})),),
            dtype=run.dtype,
            # Sorting the expert indices takes a few launches; under autocast x is cast first.
            forward=PassCost(0.0, moved, 4, 3 * index.nbytes + (cast if cast != x.nbytes else 0)),
            backward=PassCost(float(rows.nbytes // BYTES[run.dtype]), moved, 1),
            split="sequence",
        )
    )
    return rows


def _feed_forward(
    found: list[Operation],
    shape: FeedForwardShape,
    x: Activation,
    hidden_size: int,
    run: Execution,
    declare: DeclareProjections,
    prefix: str,
    count: int = 1,
) -> Activation:
    """A gated feed-forward layer over the rows of `run`, for one expert or `count` stacked ones."""
    *inputs, down = shape.linears(hidden_size, prefix, count)
    part = MemoryPart.FEED_FORWARD
    made = tuple(run.activation(linear.name, linear.out_features, part) for linear in inputs)
    found += declare(Projections(tuple(inputs), x, made, part, "gate_up"), run)
    gated = add_gated_activation(found, shape, made[0], made[-1], run, prefix)
    y = run.activation(down.name, down.out_features, part)
    found += declare(Projections((down,), gated, (y,), part, "down"), run)
    return y


def _combine(
    found: list[Operation],
    down: Activation,
    weights: Activation,
    index: Activation,
    hidden_size: int,
    run: Execution,
    routed: Execution,
) -> Activation:
    """Weights and sums the outputs of each token's experts: [R, C] to [N, C]."""
    y = run.activation("mlp.combined", hidden_size, MemoryPart.FEED_FORWARD)
    of_rows, of_weights = frozenset({down.name}), frozenset({weights.name})
    sorted_weights = routed.activation("mlp.row_weights", 1, MemoryPart.FEED_FORWARD)
    order = Activation("mlp.row_order", routed.num_tokens * INDEX_BYTES, MemoryPart.FEED_FORWARD)
    elements = float(routed.num_tokens * hidden_size)
    found.append(
        Operation(
            "mlp.combine",
            OperationKind.COPY,
            MemoryPart.FEED_FORWARD,
            (down, weights),
            (y,),
            (
                SavedActivation(down, of_weights),
                SavedActivation(order, of_weights),
                SavedActivation(sorted_weights, of_rows),
                SavedActivation(index, of_rows | of_weights),
            ),
            dtype=run.dtype,
            # The weighted rows before the sum, and in the backward pass a row's gradient per expert.
            forward=PassCost(2 * elements, float(3 * down.nbytes + y.nbytes), 2, down.nbytes),
            backward=PassCost(3 * elements, float(4 * down.nbytes + y.nbytes), 3, down.nbytes),
            saves_results=True,
            split="sequence",
        )
    )
    return y


def _scale_shared(
    found: list[Operation],
    shape: ExpertsShape,
    x: Activation,
    shared: Activation,
    hidden_size: int,
    run: Execution,
) -> Activation:
    """sigmoid(gate · x) times the shared experts' output."""
    part = MemoryPart.FEED_FORWARD
    logit = run.activation("mlp.shared_logit", 1, part)
    found.append(_router_product(shape.shared_router(hidden_size), x, logit, run))
    gate = run.activation("mlp.shared_gate", 1, part)
    y = run.activation("mlp.shared_scaled", hidden_size, part)
    found.append(
        Operation(
            "mlp.shared_scale",
            OperationKind.COPY,
            part,
            (shared, logit),
            (y,),
            (
                SavedActivation(shared, frozenset({logit.name})),
                SavedActivation(gate, frozenset({shared.name, logit.name})),
            ),
            dtype=run.dtype,
            forward=PassCost(float(run.num_tokens * hidden_size), float(shared.nbytes + y.nbytes), 2),
            backward=PassCost(3.0 * run.num_tokens * hidden_size, float(3 * y.nbytes), 3, y.nbytes),
            split="sequence",
        )
    )
    return y


def _add_shared(
    found: list[Operation], y: Activation, shared: Activation, hidden_size: int, run: Execution
) -> Activation:
    total = run.activation("mlp.output", hidden_size, MemoryPart.FEED_FORWARD)
    found.append(
        Operation(
            "mlp.add_shared",
            OperationKind.COPY,
            MemoryPart.FEED_FORWARD,
            (y, shared),
            (total,),
            dtype=run.dtype,
            forward=PassCost(float(run.num_tokens * hidden_size), float(3 * total.nbytes), 1),
            shared_gradient=True,
            split="sequence",
        )
    )
    return total
