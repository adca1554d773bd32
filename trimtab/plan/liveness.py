"""Which tensors of a layer are alive in forward and backward: walks over its declared operations. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from trimtab.facts.operations import Activation, Gradient, Kind, Operation, Part


@dataclass(frozen=True)
class ParameterGradients:
    """What becomes of the gradients of trained tensors during a backward pass."""

    pile_up: bool = True
    """Whether they stay: False if they are added to those of an earlier microbatch, or used at once."""
    update: int = 0
    """Temporary bytes of an optimizer that steps in the backward pass."""


class Instant(NamedTuple):
    """What is alive while one operation runs."""

    operation: Operation | None
    total: int
    """Bytes."""
    tensors: Callable[[], list[Activation]]
    """Each tensor with the part it belongs to; together `total`. To be called before the walk goes on."""
    after: Mapping[str, Activation] = {}
    """Of a forward walk: what stays alive after the operation, by name."""


class _Gradients:
    """Gradients of activations that are held; names of one tensor share it."""

    def __init__(self) -> None:
        self.owner: dict[str, str] = {}
        self.nbytes: dict[str, int] = {}

    def put(self, name: str, size: int) -> None:
        """A new tensor; it is added in place to one that is there, unless that is another activation's as well."""
        if name not in self.owner or self._is_shared(name):
            key = name
            while key in self.nbytes:
                key += "'"
            self.nbytes[key] = size
            self._drop(name)
            self.owner[name] = key

    def share(self, name: str, other: str) -> None:
        """The gradient of `other` is that of `name` too, or is added to it."""
        if name not in self.owner:
            self.owner[name] = self.owner[other]

    def take(self, name: str) -> None:
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
    """Gradients of activations as tensors of their own, by the activations' names."""
    return [Activation(f"{name}.grad", size, Part.GRADIENTS) for name, size in sizes.items()]


def parameter_gradients(gradients: Iterable[Gradient], *, made: bool = False) -> list[Activation]:
    """Gradients of trained tensors as they are kept, or as the backward pass makes them."""
    suffix = ".grad_made" if made else ".grad"
    return [
        Activation(one.name + suffix, one.made if made else one.kept, Part.PARAMETER_GRADIENTS)
        for one in gradients
    ]


def workspace(name: str, size: int) -> list[Activation]:
    """Temporary bytes of an operation; nothing where there are none."""
    return [Activation(f"{name}.workspace", size, Part.WORKSPACE)] if size else []


def walk_backward(
    operations: Sequence[Operation],
    requires_grad: frozenset[str],
    held: Mapping[str, Activation],
    output: Activation,
    parameters: ParameterGradients,
    *,
    recomputed: bool = False,
) -> Iterator[Instant]:
    """What is held while each operation's gradients are computed, from the last operation to the first.

    Args:
        operations: in the order of the forward pass.
        requires_grad: activations that have a gradient.
        held: saved activations that are there when the walk begins, by name.
        output: the activation whose gradient is given.
        parameters: what becomes of trained tensors' gradients.
        recomputed: whether saved activations are the walk's own, so that gradients may be written over them.
    """
    active = [one for one in operations if one.differentiates(requires_grad)]
    users: dict[str, int] = {}
    for one in active:
        for activation in one.saved_for(requires_grad):
            users[activation.name] = users.get(activation.name, 0) + 1
    live = dict(held)
    gradients, piled, pile = _Gradients(), 0, list[Gradient]()
    gradients.put(output.name, output.nbytes)
    for one in reversed(active):
        before, fresh = dict(gradients.nbytes), dict[str, int]()
        over = one.in_place if recomputed else frozenset()
        for activation in one.inputs:
            if activation.name not in requires_grad:
                continue
            if one.shared_gradient and activation.nbytes == one.outputs[0].nbytes:
                gradients.share(activation.name, one.outputs[0].name)
                continue
            if activation.name not in over:
                fresh[activation.name] = activation.nbytes
            gradients.put(activation.name, activation.nbytes)
        made = sum(gradient.made for gradient in one.gradients)
        saved = sum(activation.nbytes for activation in live.values())
        common = saved + sum(before.values()) + sum(fresh.values()) + piled
        extra = max(made + one.backward.scratch, parameters.update)
        yield Instant(
            one, common + extra, partial(_backward_tensors, one, live, before, fresh, pile, parameters.update)
        )
        for activation in one.outputs:
            gradients.take(activation.name)
        for activation in one.saved_for(requires_grad):
            users[activation.name] -= 1
            if not users[activation.name]:
                live.pop(activation.name, None)
        casts = [gradient for gradient in one.gradients if gradient.kept != gradient.made]
        if casts:  # when what the operation saved is freed
            saved = sum(activation.nbytes for activation in live.values())
            total = saved + gradients.total() + piled + made + sum(gradient.kept for gradient in casts)
            yield Instant(one, total, partial(_cast_tensors, one, live, gradients, pile))
        if parameters.pile_up:
            pile.extend(one.gradients)
            piled += sum(gradient.kept for gradient in one.gradients)


def _backward_tensors(
    one: Operation,
    live: Mapping[str, Activation],
    before: Mapping[str, int],
    fresh: Mapping[str, int],
    pile: Sequence[Gradient],
    update: int,
) -> list[Activation]:
    # A gradient that is added to one that is there, is a tensor of its own until then.
    names = {f"{name}.part" if name in before else name: size for name, size in fresh.items()}
    found = [*live.values(), *activation_gradients(before), *activation_gradients(names)]
    found += parameter_gradients(pile)
    own = parameter_gradients(one.gradients, made=True)
    if update > sum(gradient.nbytes for gradient in own) + one.backward.scratch:
        return found + workspace("optimizer", update)
    return found + own + workspace(one.name, one.backward.scratch)


def _cast_tensors(
    one: Operation, live: Mapping[str, Activation], gradients: _Gradients, pile: Sequence[Gradient]
) -> list[Activation]:
    casts = [gradient for gradient in one.gradients if gradient.kept != gradient.made]
    found = [*live.values(), *activation_gradients(gradients.nbytes), *parameter_gradients(pile)]
    return found + parameter_gradients(one.gradients, made=True) + parameter_gradients(casts)


def branch_gradient(addition: Operation) -> int:
    """Bytes of the gradient of what a residual addition adds, where it has another dtype than the stream's."""
    output = addition.outputs[0]
    return sum(one.nbytes for one in addition.inputs if one.nbytes != output.nbytes)


def gradient_bytes(operations: Sequence[Operation]) -> int:
    """Bytes of the trained tensors' gradients that these operations leave."""
    return sum(gradient.kept for one in operations for gradient in one.gradients)


def _held_until(operations: Sequence[Operation]) -> dict[str, int]:
    """For each activation the index of the last operation during which it is held.

    That is the last one that reads it. While a module's forward runs, its arguments and local variables are held too:
    those of attention and feed-forward until their last product, the result of attention until the block ends.
    Queries before RoPE, and what a QK-norm returns, are not held longer than they are read.
    """
    until: dict[str, int] = {}
    for index, one in enumerate(operations):
        for activation in one.inputs:
            until[activation.name] = index
        for result in one.results:
            until.setdefault(result.activation.name, index)
    additions = [i for i, one in enumerate(operations) if one.kind is Kind.ADD]
    for index, one in enumerate(operations):
        end = next((i for i in additions if i > index), len(operations)) - 1
        rebound = one.kind is Kind.NORM and one.part is Part.ATTENTION
        for activation in () if rebound or one.kind is Kind.ADD else one.outputs:
            last = len(operations) - 1 if index == end and index + 1 in additions else end
            until[activation.name] = max(until.get(activation.name, -1), last)
    makers = {activation.name: one for one in operations for activation in one.outputs}
    for index, one in enumerate(operations):
        if one.kind is Kind.ROPE:
            queries = one.inputs[0].name
            until[queries] = index
            if queries in makers and makers[queries].kind is Kind.NORM:
                until[makers[queries].inputs[0].name] = index
    return until


def walk_forward(
    operations: Sequence[Operation],
    requires_grad: frozenset[str],
    kept: Sequence[Activation],
    wanted: Collection[str],
) -> Iterator[Instant]:
    """What is held while each operation runs, in the order of the forward pass.

    In a recomputation, results that were kept are read instead of computed, and freed when nothing reads them any more.

    Args:
        operations: of the forward pass; of a recomputation up to the last one that makes what the backward pass reads.
        requires_grad: activations that have a gradient.
        kept: what is there before: a block's input, and in a recomputation what the policy kept.
        wanted: names of the activations that stay.
    """
    until = _held_until(operations)
    live = {one.name: one for one in kept}
    saves = set(wanted)
    for index, one in enumerate(operations):
        made = [
            *one.outputs,
            *(result.activation for result in one.results if result.activation.name in saves),
        ]
        made += [activation for activation in one.saved_for(requires_grad) if activation.name in saves]
        for activation in made:
            live.setdefault(activation.name, activation)
        total = sum(activation.nbytes for activation in live.values()) + one.forward.scratch
        during = dict(live)
        for name in [name for name in live if name not in saves and until.get(name, -1) <= index]:
            del live[name]
        yield Instant(one, total, partial(_forward_tensors, one, during), dict(live))


def _forward_tensors(one: Operation, during: Mapping[str, Activation]) -> list[Activation]:
    return [*during.values(), *workspace(one.name, one.forward.scratch)]
