"""Operations of a block as data: inputs, outputs, saved activations and cost of each. No torch.

A block declares its operations once (`trimtab.model.spec_block`). The memory plan, the recompute policies, the offload
sizes and the FLOP counts are computed from that list; none of them depends on the architecture of a block.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from trimtab.facts.blocks import Split


class OperationKind(enum.Enum):
    """Kind of an operation."""

    NORM = "norm"
    PRODUCT = "matrix product"
    ROPE = "rope"
    ATTENTION = "attention"
    GATE = "gated activation"
    ADD = "residual addition"
    COPY = "copy"
    DEQUANTIZE = "dequantization"
    EMBEDDING = "embedding"
    LOSS = "loss"
    OPTIMIZER = "optimizer step"


class MemoryPart(enum.Enum):
    """Category of a step's memory in reports; `BLOCK_PARTS` are the categories of a block's activations."""

    RESIDUAL = "residual stream"
    NORMS = "norms"
    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"
    LOSS = "loss"
    INPUTS = "token ids, masks and RoPE tables"
    GRADIENTS = "gradients of activations"
    WORKSPACE = "workspace"
    CACHE = "key/value cache"
    PARAMETER_GRADIENTS = "gradients of parameters"


BLOCK_PARTS = (MemoryPart.RESIDUAL, MemoryPart.NORMS, MemoryPart.ATTENTION, MemoryPart.FEED_FORWARD)


@dataclass(frozen=True)
class Activation:
    """An activation tensor of one microbatch inside a block. Activations of equal name share memory.

    Example:
        >>> Activation("mlp.gate_proj", 4096, MemoryPart.FEED_FORWARD).nbytes
        4096
    """

    name: str
    nbytes: int
    part: MemoryPart


@dataclass(frozen=True)
class Gradient:
    """The gradient of a trainable parameter."""

    name: str
    """The parameter's name within the block."""
    dims: tuple[int, ...]
    computed_bytes: int
    """Bytes when the backward pass computes it, in the parameter's dtype."""
    stored_bytes: int
    """Bytes when it is stored, in the gradient dtype; it is cast if the two differ."""


@dataclass(frozen=True)
class SavableResult:
    """The result of a matrix product or of attention, which a recompute policy can save instead of recomputing."""

    activation: Activation
    factor: str = "weight"
    """For a matrix product, the matrix: "weight" or "adapter_a", as in `trimtab.model.labels`."""


@dataclass(frozen=True)
class SavedActivation:
    """An activation that autograd saves if one of the gradients that read it is computed."""

    activation: Activation
    reads: frozenset[str]
    """The gradients that read it: names of inputs, and `PARAMETERS` for the gradients of the parameters."""


PARAMETERS = "parameters"
"""Stands for an operation's trainable parameters in `SavedActivation.reads`."""


@dataclass(frozen=True)
class Collective:
    """A collective communication of an operation that is sharded over a mesh axis."""

    name: str
    """all_reduce, all_gather or reduce_scatter, as in torch.distributed."""
    nbytes: int
    """Bytes of the full, unsharded tensor."""
    backward: bool = False


@dataclass(frozen=True)
class Kernel:
    """One kernel of a pass that has kernels of different kinds or sizes.

    Example:
        >>> Kernel.product(4096, 1024, 1024, width=2).flops
        8589934592.0
    """

    kind: OperationKind
    flops: float
    moved: float
    """Minimum bytes read from and written to memory."""
    dims: tuple[int, ...] = ()
    """For a product [m, k] · [k, n]: (m, n, k); for attention: (average number of keys per query, head size,
    queries of all heads)."""
    impl: str = ""
    """The backend of attention, which may differ between layers."""

    @staticmethod
    def product(m: int, n: int, k: int, *, width: int, added: bool = False, groups: int = 1) -> Kernel:
        """Matrix product [m, k] · [k, n] of elements of `width` bytes; with `added`, accumulated into its output.

        With `groups` (grouped GEMM) the rows are split over that many matrices [k, n]; `dims` are those of one group.
        """
        moved = (m * k + groups * k * n + m * n * (2 if added else 1)) * width
        return Kernel(OperationKind.PRODUCT, 2.0 * m * n * k, float(moved), (max(m // groups, 1), n, k))

    @staticmethod
    def weight_gradient(m: int, n: int, k: int, *, width: int, groups: int = 1) -> Kernel:
        """Gradient of a weight, a product [m, k] · [k, n]; with `groups` the k rows are split over the groups, and each
        group has its own result [m, n]."""
        moved = (m * k + k * n + groups * m * n) * width
        return Kernel(OperationKind.PRODUCT, 2.0 * m * n * k, float(moved), (m, n, max(k // groups, 1)))


@dataclass(frozen=True)
class PassCost:
    """Cost of one pass, forward or backward, over one microbatch."""

    flops: float = 0.0
    moved: float = 0.0
    """Minimum bytes read from and written to memory."""
    launches: int = 0
    """Number of kernel launches."""
    scratch: int = 0
    """Bytes of temporary buffers, beyond inputs, outputs, saved activations and gradients."""
    kernels: tuple[Kernel, ...] = ()
    """Its kernels; empty for a single kernel of the operation's kind."""

    @staticmethod
    def of(*kernels: Kernel, launches: int | None = None, scratch: int = 0) -> PassCost:
        """Returns the pass that consists of these kernels.

        Args:
            kernels: in execution order.
            launches: number of launches, if small kernels are not listed.
            scratch: bytes of temporary buffers.

        Example:
            >>> PassCost.of(Kernel.product(2, 2, 2, width=2), Kernel.product(2, 2, 2, width=2)).flops
            32.0
        """
        return PassCost(
            sum(kernel.flops for kernel in kernels),
            sum(kernel.moved for kernel in kernels),
            len(kernels) if launches is None else launches,
            scratch,
            kernels,
        )


@dataclass(frozen=True)
class Operation:
    """One operation of a block.

    Example:
        >>> x, y = (Activation(name, 64, MemoryPart.RESIDUAL) for name in "xy")
        >>> down = Operation("down", OperationKind.PRODUCT, MemoryPart.FEED_FORWARD, (x,), (y,),
        ...                  saved=(SavedActivation(x, frozenset({PARAMETERS})),))
        >>> down.saved_for({"x"})  # the weight is frozen: its gradient would read x, that of x does not
        []
    """

    name: str
    """Name of the module, or of the computation."""
    kind: OperationKind
    part: MemoryPart
    inputs: tuple[Activation, ...]
    outputs: tuple[Activation, ...]
    saved: tuple[SavedActivation, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    """Gradients of its trainable parameters."""
    dtype: str = "fp32"
    """Compute dtype."""
    forward: PassCost = PassCost()
    backward: PassCost = PassCost()
    """Computation of the inputs' gradients."""
    parameter_backward: PassCost = PassCost()
    """Computation of the parameters' gradients."""
    recompute: PassCost | None = None
    """Cost of recomputing only its saved activations, if that is less than `forward`."""
    weights: int = 0
    """Elements of the matrices that a product reads, without adapters."""
    results: tuple[SavableResult, ...] = ()
    projection: str | None = None
    """For a matrix product: "attention", "gate_up" or "down", as in `trimtab.model.labels`."""
    in_place: frozenset[str] = frozenset()
    """Inputs whose gradients overwrite saved activations when the block is recomputed."""
    saves_results: bool = False
    """Whether it saves its tensors after its forward pass, as custom operators do, so that a recomputation of the saved
    tensors has to run it; other operations save inputs before they run."""
    shared_gradient: bool = False
    """Whether the output's gradient is also the gradient of every input, without a copy (an addition)."""
    split: Split = "replicated"
    """How tensor parallelism shards it."""
    communicates: tuple[Collective, ...] = ()
    """Collectives that sharding requires."""

    def differentiates(self, requires_grad: Collection[str]) -> bool:
        """Whether it has a backward pass, given the activations that require a gradient."""
        return bool(self.gradients) or any(tensor.name in requires_grad for tensor in self.inputs)

    def saved_for(self, requires_grad: Collection[str]) -> list[Activation]:
        """Returns the activations that autograd saves, given the activations that require a gradient."""
        wanted = {tensor.name for tensor in self.inputs if tensor.name in requires_grad}
        if self.gradients:
            wanted.add(PARAMETERS)
        return [saved.activation for saved in self.saved if not wanted.isdisjoint(saved.reads)]


def requiring_grad(operations: Sequence[Operation], given: Collection[str]) -> frozenset[str]:
    """Returns the names of all activations that require a gradient, inputs and outputs.

    Args:
        operations: in the order of the forward pass.
        given: names of the block's inputs that require a gradient.
    """
    found = set(given)
    for operation in operations:
        if operation.differentiates(found):
            found.update(output.name for output in operation.outputs)
    return frozenset(found)


def saved_activations(operations: Sequence[Operation], requires_grad: Collection[str]) -> list[Activation]:
    """Returns the activations that autograd saves for these operations, each one once."""
    found: dict[str, Activation] = {}
    for operation in operations:
        for activation in operation.saved_for(requires_grad):
            found.setdefault(activation.name, activation)
    return list(found.values())


def total_bytes(activations: Collection[Activation]) -> int:
    """Returns the bytes of distinct activations."""
    assert len({activation.name for activation in activations}) == len(activations), (
        "an activation is counted twice"
    )
    return sum(activation.nbytes for activation in activations)


def bytes_by_part(activations: Iterable[Activation]) -> dict[MemoryPart, int]:
    """Returns the bytes of activations by part; 0 for parts without any."""
    sizes = dict.fromkeys(MemoryPart, 0)
    for activation in activations:
        sizes[activation.part] += activation.nbytes
    return sizes
