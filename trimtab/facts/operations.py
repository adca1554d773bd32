"""Operations of a block as data: what each reads, writes, saves for the backward pass and costs. No torch.

A block declares its operations once (`trimtab.model.spec_block`). The memory plan, the recompute policies, the offload
sizes and the FLOP counts are sums and walks over that list; none of them knows what a block is made of.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from trimtab.facts.blocks import Split


class Kind(enum.Enum):
    """What an operation computes."""

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


class Part(enum.Enum):
    """Where the memory of a step belongs in a report; `BLOCK_PARTS` are those of a block's activations."""

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


BLOCK_PARTS = (Part.RESIDUAL, Part.NORMS, Part.ATTENTION, Part.FEED_FORWARD)


@dataclass(frozen=True)
class Activation:
    """A tensor of one microbatch inside a block. Two operations that name the same one share its memory.

    Example:
        >>> Activation("mlp.gate_proj", 4096, Part.FEED_FORWARD).nbytes
        4096
    """

    name: str
    nbytes: int
    part: Part


@dataclass(frozen=True)
class Gradient:
    """The gradient of a trained tensor."""

    name: str
    """The parameter's name within the block."""
    dims: tuple[int, ...]
    made: int
    """Bytes as the backward pass makes it, in the parameter's dtype."""
    kept: int
    """Bytes as it is kept; a cast of what is made where these differ."""


@dataclass(frozen=True)
class Result:
    """The result of a matrix product or of attention, which a recompute policy can save instead of recomputing."""

    activation: Activation
    factor: str = "weight"
    """Of a product: "weight" or "adapter_a", as `trimtab.model.labels` names them."""


@dataclass(frozen=True)
class Saved:
    """An activation that autograd saves if one of these gradients is computed."""

    activation: Activation
    reads: frozenset[str]
    """Names of the inputs whose gradient reads it, and `PARAMETERS` if the trained tensors' gradients do."""


PARAMETERS = "parameters"
"""Stands for an operation's own trained tensors in `Saved.reads`."""


@dataclass(frozen=True)
class Collective:
    """What one rank sends when an operation is split over a mesh axis."""

    name: str
    """all_reduce, all_gather or reduce_scatter, as torch.distributed has them."""
    nbytes: int
    """Of the whole tensor that is communicated."""
    backward: bool = False


@dataclass(frozen=True)
class Kernel:
    """One kernel of a pass, where a pass has kernels of different kinds or sizes.

    Example:
        >>> Kernel.product(4096, 1024, 1024, width=2).flops
        8589934592.0
    """

    kind: Kind
    flops: float
    moved: float
    """Bytes read from and written to memory at the least."""
    dims: tuple[int, ...] = ()
    """Of a product [m, k] · [k, n]: (m, n, k); of attention: (keys that a query sees on average, head size)."""

    @staticmethod
    def product(m: int, n: int, k: int, *, width: int, added: bool = False, groups: int = 1) -> Kernel:
        """[m, k] · [k, n] of elements of `width` bytes, added to what is there or not.

        With `groups` the rows are split over so many matrices [k, n], and `dims` are those of one group.
        """
        moved = (m * k + groups * k * n + m * n * (2 if added else 1)) * width
        return Kernel(Kind.PRODUCT, 2.0 * m * n * k, float(moved), (max(m // groups, 1), n, k))

    @staticmethod
    def weight_gradient(m: int, n: int, k: int, *, width: int, groups: int = 1) -> Kernel:
        """[m, k] · [k, n] as `product`; with `groups` the k are split over them, and each has its own [m, n]."""
        moved = (m * k + k * n + groups * m * n) * width
        return Kernel(Kind.PRODUCT, 2.0 * m * n * k, float(moved), (m, n, max(k // groups, 1)))


@dataclass(frozen=True)
class Pass:
    """Cost of one pass, forward or backward, over one microbatch."""

    flops: float = 0.0
    moved: float = 0.0
    """Bytes read from and written to memory at the least."""
    launches: int = 0
    """Kernels."""
    scratch: int = 0
    """Temporary bytes beyond inputs, outputs, saved activations and gradients."""
    kernels: tuple[Kernel, ...] = ()
    """Of which it consists; empty if it is one kernel of the operation's own kind."""

    @staticmethod
    def of(*kernels: Kernel, launches: int | None = None, scratch: int = 0) -> Pass:
        """The sum of some kernels.

        Args:
            kernels: in their order.
            launches: all of them, where small ones are not listed.
            scratch: temporary bytes.

        Example:
            >>> Pass.of(Kernel.product(2, 2, 2, width=2), Kernel.product(2, 2, 2, width=2)).flops
            32.0
        """
        return Pass(
            sum(one.flops for one in kernels),
            sum(one.moved for one in kernels),
            len(kernels) if launches is None else launches,
            scratch,
            kernels,
        )


@dataclass(frozen=True)
class Operation:
    """One operation of a block.

    Example:
        >>> x, y = (Activation(name, 64, Part.RESIDUAL) for name in "xy")
        >>> down = Operation("down", Kind.PRODUCT, Part.FEED_FORWARD, (x,), (y,),
        ...                  saved=(Saved(x, frozenset({PARAMETERS})),))
        >>> down.saved_for({"x"})  # the weight is frozen: its gradient would read x, that of x does not
        []
    """

    name: str
    """As the module is called, or what is computed."""
    kind: Kind
    part: Part
    inputs: tuple[Activation, ...]
    outputs: tuple[Activation, ...]
    saved: tuple[Saved, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    """Of its trained tensors."""
    dtype: str = "fp32"
    """In which it computes."""
    forward: Pass = Pass()
    backward: Pass = Pass()
    """Gradients of the inputs."""
    parameter_backward: Pass = Pass()
    """Gradients of trained tensors."""
    recompute: Pass | None = None
    """Forward again where only what it saves is wanted, if that costs less than `forward`."""
    weights: int = 0
    """Elements of the matrices that a product reads, adapters not included."""
    results: tuple[Result, ...] = ()
    projection: str | None = None
    """Of a matrix product: "attention", "gate_up" or "down", as `trimtab.model.labels` names them."""
    in_place: frozenset[str] = frozenset()
    """Inputs whose gradients are written over saved activations when the block is recomputed."""
    saves_results: bool = False
    """Whether it saves its inputs only after its forward pass, as custom operators do: a recomputation runs it then."""
    shared_gradient: bool = False
    """Whether the gradient of the output is that of every input, without a copy (an addition)."""
    split: Split = "replicated"
    """How tensor parallelism cuts it."""
    communicates: tuple[Collective, ...] = ()
    """When it is split so."""

    def differentiates(self, requires_grad: Collection[str]) -> bool:
        """Whether it has a backward pass, given the inputs that require a gradient."""
        return bool(self.gradients) or any(one.name in requires_grad for one in self.inputs)

    def saved_for(self, requires_grad: Collection[str]) -> list[Activation]:
        """What autograd saves, given the inputs that require a gradient."""
        wanted = {one.name for one in self.inputs if one.name in requires_grad}
        if self.gradients:
            wanted.add(PARAMETERS)
        return [one.activation for one in self.saved if not wanted.isdisjoint(one.reads)]


def requiring_grad(operations: Sequence[Operation], given: Collection[str]) -> frozenset[str]:
    """Names of the activations that require a gradient, of inputs and results alike.

    Args:
        operations: in the order of the forward pass.
        given: the inputs of the first operations that do.
    """
    found = set(given)
    for operation in operations:
        if operation.differentiates(found):
            found.update(output.name for output in operation.outputs)
    return frozenset(found)


def saved_activations(operations: Sequence[Operation], requires_grad: Collection[str]) -> list[Activation]:
    """Everything that autograd saves of these operations, each activation once."""
    found: dict[str, Activation] = {}
    for operation in operations:
        for activation in operation.saved_for(requires_grad):
            found.setdefault(activation.name, activation)
    return list(found.values())


def total_bytes(activations: Collection[Activation]) -> int:
    """Bytes of activations, of which none may be there twice."""
    assert len({one.name for one in activations}) == len(activations), "an activation is counted twice"
    return sum(one.nbytes for one in activations)


def bytes_by_part(activations: Iterable[Activation]) -> dict[Part, int]:
    """The same, by part; parts without any are 0."""
    found = dict.fromkeys(Part, 0)
    for one in activations:
        found[one.part] += one.nbytes
    return found
