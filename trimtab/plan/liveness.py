"""Liveness of a layer's tensors in forward and backward, from walks over its declared operations. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from trimtab.facts.operations import Activation, Gradient, MemoryPart, Operation, OperationKind


@dataclass(frozen=True)
class ParameterGradients:
    """How long parameter gradients live during a backward pass."""

    retain: bool = True
    """Whether they stay allocated: False if they are added to accumulated gradients or applied immediately."""
    update_scratch: int = 0
    """Temporary bytes of an optimizer step within the backward pass."""


class Instant(NamedTuple):
    """The live tensors while one operation runs."""

    operation: Operation | None
    total: int
    """Bytes of all live tensors."""
    tensors: Callable[[], list[Activation]]
    """Returns the live tensors, `total` bytes together. Call it before advancing the walk."""
    after: Mapping[str, Activation] = {}
    """In a forward walk: tensors still live after the operation, by name."""


class _Gradients:
    """Live gradients of activations; activations may share one gradient tensor."""

    def __init__(self) -> None:
        self.owner: dict[str, str] = {}
        self.nbytes: dict[str, int] = {}

    def add(self, name: str, size: int) -> None:
        """Adds a gradient of an activation: a new tensor, unless the activation already has a gradient that no other
        activation shares; then it is accumulated into that one."""
        if name not in self.owner or self._is_shared(name):
            key = name
            while key in self.nbytes:
                key += "'"
            self.nbytes[key] = size
            self._drop(name)
            self.owner[name] = key

    def share(self, name: str, source: str) -> None:
        """Makes `name` share the gradient of `source`, unless it already has one to add to."""
        if name not in self.owner:
            self.owner[name] = self.owner[source]

    def free(self, name: str) -> None:
        """Frees the gradient of an activation."""
        self._drop(name)

    def total(self) -> int:
        return sum(self.nbytes.values())

    def _is_shared(self, name: str) -> bool:
        return list(self.owner.values()).count(self.owner[name]) > 1

    def _drop(self, name: str) -> None:
        key = self.owner.pop(name, None)
        if key is not None and key not in self.owner.values():
            del self.nbytes[key]


def activation_gradients(sizes: Mapping[str, int]) -> list[Activation]:
    """Returns separate gradient tensors, by activation name."""
    return [Activation(f"{name}.grad", size, MemoryPart.GRADIENTS) for name, size in sizes.items()]


def parameter_gradients(gradients: Iterable[Gradient], *, computed: bool = False) -> list[Activation]:
    """Returns parameter gradients with their stored size, or with the size that the backward pass computes
    (`computed`): without a cast the same tensors."""
    return [
        Activation(
            f"{gradient.name}.grad_made",
            gradient.computed_bytes,
            MemoryPart.PARAMETER_GRADIENTS,
        )
        if computed and gradient.computed_bytes != gradient.stored_bytes
        else Activation(f"{gradient.name}.grad", gradient.stored_bytes, MemoryPart.PARAMETER_GRADIENTS)
        for gradient in gradients
    ]


def workspace(name: str, size: int) -> list[Activation]:
    """Returns an operation's temporary buffer as a list of tensors; empty for 0 bytes."""
    return [Activation(f"{name}.workspace", size, MemoryPart.WORKSPACE)] if size else []


def walk_backward(
    operations: Sequence[Operation],
    requires_grad: frozenset[str],
    saved_tensors: Mapping[str, Activation],
    output: Activation,
    parameters: ParameterGradients,
    *,
    recomputed: bool = False,
) -> Iterator[Instant]:
    """Yields the live tensors while each operation's gradients are computed, from the last operation to the first.

    Args:
        operations: in the order of the forward pass.
        requires_grad: activations that have a gradient.
        saved_tensors: saved activations at the start of the walk, by name.
        output: the activation whose gradient is the input of the walk.
        parameters: how long parameter gradients live.
        recomputed: whether saved activations are recomputed copies that gradients may overwrite.
    """
    active = [operation for operation in operations if operation.differentiates(requires_grad)]
    users: dict[str, int] = {}
    for operation in active:
        for activation in operation.saved_for(requires_grad):
            users[activation.name] = users.get(activation.name, 0) + 1
    live = dict(saved_tensors)
    gradients, retained_bytes, retained = _Gradients(), 0, list[Gradient]()
    gradients.add(output.name, output.nbytes)
    for operation in reversed(active):
        gradients_before, new_gradients = dict(gradients.nbytes), dict[str, int]()
        overwritten = operation.in_place if recomputed else frozenset()
        for activation in operation.inputs:
            if activation.name not in requires_grad:
                continue
            if operation.shared_gradient and activation.nbytes == operation.outputs[0].nbytes:
                gradients.share(activation.name, operation.outputs[0].name)
                continue
            if activation.name not in overwritten:
                new_gradients[activation.name] = activation.nbytes
            gradients.add(activation.name, activation.nbytes)
        computed_bytes = sum(gradient.computed_bytes for gradient in operation.gradients)
        saved = sum(activation.nbytes for activation in live.values())
        common = saved + sum(gradients_before.values()) + sum(new_gradients.values()) + retained_bytes
        extra = max(computed_bytes + operation.backward.scratch, parameters.update_scratch)
        state = (operation, live, gradients_before, new_gradients, retained, parameters.update_scratch)
        yield Instant(operation, common + extra, partial(_backward_tensors, *state))
        for activation in operation.outputs:
            gradients.free(activation.name)
        for activation in operation.saved_for(requires_grad):
            users[activation.name] -= 1
            if not users[activation.name]:
                live.pop(activation.name, None)
        casts = [
            gradient for gradient in operation.gradients if gradient.stored_bytes != gradient.computed_bytes
        ]
        if casts:  # after the operation's saved activations are freed
            saved = sum(activation.nbytes for activation in live.values())
            cast_bytes = sum(gradient.stored_bytes for gradient in casts)
            total = saved + gradients.total() + retained_bytes + computed_bytes + cast_bytes
            yield Instant(operation, total, partial(_cast_tensors, operation, live, gradients, retained))
        if parameters.retain:
            retained.extend(operation.gradients)
            retained_bytes += sum(gradient.stored_bytes for gradient in operation.gradients)


def _backward_tensors(
    operation: Operation,
    live: Mapping[str, Activation],
    gradients_before: Mapping[str, int],
    new_gradients: Mapping[str, int],
    retained: Sequence[Gradient],
    update: int,
) -> list[Activation]:
    # A gradient is a separate tensor until it is added to an existing gradient.
    names = {
        f"{name}.part" if name in gradients_before else name: size for name, size in new_gradients.items()
    }
    tensors = [*live.values(), *activation_gradients(gradients_before), *parameter_gradients(retained)]
    computed = parameter_gradients(operation.gradients, computed=True)
    if update > sum(gradient.nbytes for gradient in computed) + operation.backward.scratch:
        return tensors + activation_gradients(names) + workspace("optimizer", update)
    new = (activation_gradients(names), computed, workspace(operation.name, operation.backward.scratch))
    # In the order of allocation: a product's weight gradient is computed before its input's.
    for part in reversed(new) if operation.kind is OperationKind.PRODUCT else new:
        tensors += part
    return tensors


def _cast_tensors(
    operation: Operation, live: Mapping[str, Activation], gradients: _Gradients, retained: Sequence[Gradient]
) -> list[Activation]:
    casts = [gradient for gradient in operation.gradients if gradient.stored_bytes != gradient.computed_bytes]
    tensors = [*live.values(), *activation_gradients(gradients.nbytes), *parameter_gradients(retained)]
    return tensors + parameter_gradients(operation.gradients, computed=True) + parameter_gradients(casts)


def branch_gradient(addition: Operation) -> int:
    """Returns the bytes of the gradient of a residual branch, if its dtype differs from the stream's."""
    output = addition.outputs[0]
    return sum(activation.nbytes for activation in addition.inputs if activation.nbytes != output.nbytes)


def gradient_bytes(operations: Sequence[Operation]) -> int:
    """Returns the bytes of these operations' parameter gradients."""
    return sum(gradient.stored_bytes for operation in operations for gradient in operation.gradients)


def _last_use(operations: Sequence[Operation]) -> dict[str, int]:
    """Returns for each activation the index of the last operation during which it is live.

    That is its last reader. References from a module's arguments and local variables extend it: tensors of attention
    and feed-forward live until the module's last matmul, the result of attention until the end of the block. Queries
    before RoPE and outputs of a QK-norm are freed after their last reader.
    """
    last_use: dict[str, int] = {}
    for index, operation in enumerate(operations):
        for activation in operation.inputs:
            last_use[activation.name] = index
        for result in operation.results:
            last_use.setdefault(result.activation.name, index)
    additions = [i for i, operation in enumerate(operations) if operation.kind is OperationKind.ADD]
    for index, operation in enumerate(operations):
        end = next((i for i in additions if i > index), len(operations)) - 1
        reassigned = operation.kind is OperationKind.NORM and operation.part is MemoryPart.ATTENTION
        for activation in () if reassigned or operation.kind is OperationKind.ADD else operation.outputs:
            final_use = len(operations) - 1 if index == end and index + 1 in additions else end
            last_use[activation.name] = max(last_use.get(activation.name, -1), final_use)
    producers = {activation.name: operation for operation in operations for activation in operation.outputs}
    for index, operation in enumerate(operations):
        if operation.kind is OperationKind.ROPE:
            queries = operation.inputs[0].name
            last_use[queries] = index
            if queries in producers and producers[queries].kind is OperationKind.NORM:
                last_use[producers[queries].inputs[0].name] = index
    return last_use


def walk_forward(
    operations: Sequence[Operation],
    requires_grad: frozenset[str],
    initial: Sequence[Activation],
    stay_live: Collection[str],
) -> Iterator[Instant]:
    """Yields the live tensors while each operation runs, in the order of the forward pass.

    In a recomputation, saved results are read instead of computed, and freed after their last reader.

    Args:
        operations: the operations of the forward pass; in a recomputation up to the last that backward needs.
        requires_grad: activations that have a gradient.
        initial: tensors live at the start: the block's input, and in a recomputation the saved activations.
        stay_live: names of the activations that stay live.
    """
    last_use = _last_use(operations)
    live = {activation.name: activation for activation in initial}
    stay_live_names = set(stay_live)
    for index, operation in enumerate(operations):
        created = [
            *operation.outputs,
            *(result.activation for result in operation.results if result.activation.name in stay_live_names),
        ]
        saved = [
            activation
            for activation in operation.saved_for(requires_grad)
            if activation.name in stay_live_names
        ]
        # In the order of allocation: an adapter's small product, which is saved, is computed first.
        adapted = operation.kind is OperationKind.PRODUCT
        for activation in saved + created if adapted else created + saved:
            live.setdefault(activation.name, activation)
        total = sum(activation.nbytes for activation in live.values()) + operation.forward.scratch
        during = dict(live)
        for name in [
            name for name in live if name not in stay_live_names and last_use.get(name, -1) <= index
        ]:
            del live[name]
        yield Instant(operation, total, partial(_forward_tensors, operation, during), dict(live))


def _forward_tensors(operation: Operation, during: Mapping[str, Activation]) -> list[Activation]:
    return [*during.values(), *workspace(operation.name, operation.forward.scratch)]
