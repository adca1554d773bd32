"""The allocations of a training step in order, from the walks that predict its peak. Imports no torch.

Three approximations: the temporary buffers of an operation are one block, a quantized weight is one block, and
what an operation frees is freed before the next one allocates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from trimtab.adapt import spec_quantized
from trimtab.adapt.spec_recompute import saved_under
from trimtab.facts.dtypes import nbytes
from trimtab.facts.operations import Activation
from trimtab.model.spec_block import BLOCK_INPUT, FEED_FORWARD_RESIDUAL, DeclaredBlock
from trimtab.optim import spec as optim_spec
from trimtab.plan.around import tensors_around
from trimtab.plan.job import Job
from trimtab.plan.layers import (
    Layers,
    backward_instants,
    forward_instants,
    is_offloaded,
    segments_of,
    update_scratch,
    workspace_bytes,
)
from trimtab.plan.memory import gradient_bytes


class Event(NamedTuple):
    """An allocation of so many bytes, or a free where `size` is None."""

    number: int
    """Of the tensor."""
    size: int | None


Sizes = dict[str, int]
INPUTS = ("batch", "positions and masks")
STANDING = ("dequantized weight", "gradients.parameter_gradients", *INPUTS)


def standing_sizes(job: Job) -> Iterator[int]:
    """Bytes of each weight and optimizer state, and of the workspace kept from the first matmul on."""
    trained = {one.name for one in job.trained.parameters}
    packed = spec_quantized.linear_shapes(job.shape) if job.quantization is not None else {}
    for name, dims in job.shape.parameters():
        if name in packed and job.quantization is not None:
            kind, block, double = job.quantization.kind, job.quantization.block_size, job.quantization.double
            yield spec_quantized.packed_bytes(packed[name], kind, block=block, double=double)
        elif name not in trained:
            yield nbytes(job.weights_dtype, math.prod(dims))
    for one in job.trained.parameters:
        moments = optim_spec.state_bytes(job.optimizer, one.dims, one.dtype)
        yield from (nbytes(one.dtype, one.count), moments // 2, moments - moments // 2)
    for layer in range(job.unpacked_layers):
        upto = [spec_quantized.dequantized_bytes(job.shape, count, job.dtype) for count in (layer, layer + 1)]
        yield upto[1] - upto[0]
    if workspace_bytes(job):
        yield workspace_bytes(job)


def step_allocations(job: Job) -> Iterator[Event]:
    """The allocations and frees of one training step; everything it allocates is freed by its end."""
    return _Step(job).events()


class _Alive:
    """The live tensors, by name; turns "these are live now" into allocations and frees."""

    def __init__(self) -> None:
        self.all: dict[str, tuple[int, int]] = {}
        """(number, bytes)."""
        self.own: dict[str, tuple[int, int]] = {}
        """Of the layer or phase at work: replaced from instant to instant."""
        self._numbers = itertools.count()

    def become(self, wanted: Sizes) -> Iterator[Event]:
        """Replaces the own tensors."""
        for name in [name for name, (_, size) in self.own.items() if wanted.get(name) != size]:
            yield Event(self.own.pop(name)[0], None)
        for name, size in wanted.items():
            if name not in self.own and name not in self.all:
                self.own[name] = (next(self._numbers), size)
                yield Event(*self.own[name])

    def take(self, names: Iterable[str]) -> None:
        """Tensors that are there become own ones."""
        self.own |= {name: self.all.pop(name) for name in names if name in self.all}

    def leave(self, names: Collection[str]) -> Iterator[Event]:
        """Own tensors with these names stay; the others are freed."""
        for name in list(self.own):
            tensor = self.own.pop(name)
            if name in names:
                self.all[name] = tensor
            else:
                yield Event(tensor[0], None)

    def rename(self, names: Mapping[str, str]) -> None:
        """Own tensors get other names."""
        self.own = {names.get(name, name): tensor for name, tensor in self.own.items()}

    def add(self, sizes: Sizes) -> Iterator[Event]:
        """More tensors that stay."""
        for name, size in sizes.items():
            if size and name not in self.all:
                self.all[name] = (next(self._numbers), size)
                yield Event(*self.all[name])

    def drop(self, names: Iterable[str]) -> Iterator[Event]:
        """Frees tensors that stayed."""
        for name in names:
            yield Event(self.all.pop(name)[0], None)


class _Step:
    """One step of a job."""

    def __init__(self, job: Job) -> None:
        self.job, self.layers, self.alive = job, Layers(job), _Alive()
        self.pile_up = job.accumulation == 1 and not job.in_backward
        pieces = self.layers.pieces(segments_of(job.layers))
        self.numbered = [
            _Layer(layer, self.layers.blocks[run][0], policy)
            for policy, run, numbers in pieces
            for layer in numbers
        ]
        self._forward: dict[tuple[int, str], list[list[Activation]]] = {}
        self._backward: dict[tuple[int, str], list[list[Activation]]] = {}

    def events(self) -> Iterator[Event]:
        job, alive = self.job, self.alive
        around = tensors_around(job, gradient_bytes(job), self.layers)
        if job.accumulation > 1:
            yield from alive.add(
                {f"{one.name}.grad": nbytes(one.gradient_dtype, one.count) for one in job.trained.parameters}
            )
        yield from alive.add({one.name: one.nbytes for one in around.layers_forward if one.name in INPUTS})
        yield from alive.add({"stream 0": self.layers.stream})
        for layer in self.numbered:
            yield from self.forward(layer)
        top = len(self.numbered)
        names = {"x": f"stream {top}", "x.grad": f"gradient {top}", HEAD: HEAD}
        alive.take([f"stream {top}"])
        for phase in (around.loss_forward, around.loss_backward, around.final_norm_backward):
            yield from alive.become(_sizes(phase, "loss", names))
        yield from alive.leave((HEAD, f"gradient {top}"))
        for place in reversed(range(top)):
            offloading = (one for one in reversed(self.numbered[:place]) if is_offloaded(job, one.policy))
            yield from self.backward(self.numbered[place], next(offloading, None))
        alive.take(["gradient 0"])
        names = {"x.grad": "gradient 0", HEAD: HEAD, "layers.parameter_gradients": ""}
        yield from alive.become(_sizes(around.embedding_backward, "embedding", names))
        yield from alive.leave(("embedding embedding.parameter_gradients",) if self.pile_up else ())
        yield from alive.drop([name for name in alive.all if "grad" not in name])
        if not job.in_backward:
            yield from alive.add({"optimizer": update_scratch(job)})
        yield from alive.drop(list(alive.all))

    def forward(self, layer: _Layer) -> Iterator[Event]:
        alive, names = self.alive, layer.names
        before = [name for name in alive.all if name.startswith(PASSING)]
        alive.take([names[BLOCK_INPUT]])
        for tensors in self.instants(self._forward, layer):
            yield from alive.become(_sizes(tensors, layer.prefix, names))
        output = names[FEED_FORWARD_RESIDUAL]
        kept = layer.kept()
        yield from alive.become({**kept, output: self.layers.stream})
        if not is_offloaded(self.job, layer.policy):
            yield from alive.leave({*kept, output})
            return
        # Until the next layer that offloads has begun.
        alive.rename({name: PASSING + name for name in kept})
        yield from alive.leave({*(PASSING + name for name in kept), output})
        yield from alive.drop(before)

    def backward(self, layer: _Layer, below: _Layer | None) -> Iterator[Event]:
        alive, names = self.alive, layer.names
        if not layer.block.differentiates:
            return
        kept = layer.kept()
        if is_offloaded(self.job, layer.policy):
            alive.take([PASSING + name for name in kept])
            alive.rename({PASSING + name: name for name in kept})
            if below is not None:  # what the next one offloaded comes back meanwhile
                yield from alive.add({PASSING + name: size for name, size in below.kept().items()})
        alive.take([*kept, names[f"{FEED_FORWARD_RESIDUAL}.grad"]])
        before: Collection[str] = ()
        for tensors in self.instants(self._backward, layer):
            before = set(alive.own)
            yield from alive.become(_sizes(tensors, layer.prefix, names))
        # The gradient of the input is in one of those that were there before the last operation.
        stream = [
            name for name, (_, size) in alive.own.items() if size == self.layers.stream and "grad" in name
        ]
        mine = next((name for name in stream if name in before), next(iter(stream), ""))
        alive.rename({mine: f"gradient {layer.number}"})
        left = {f"gradient {layer.number}"}
        if self.pile_up:
            own = [one for operation in layer.block.operations for one in operation.gradients]
            sizes = {f"{layer.prefix} {one.name}.grad": one.kept for one in own}
            # Where it is kept in the dtype in which it is made, it is the same tensor.
            made = {f"{layer.prefix} {one.name}.grad_made" for one in own if one.made == one.kept}
            alive.rename({name: name.removesuffix("_made") for name in made if name in alive.own})
            left |= sizes.keys()
            there = {name: size for name, (_, size) in alive.own.items() if name in left}
            yield from alive.become({**there, **sizes})
        yield from alive.leave(left)

    def instants(
        self, known: dict[tuple[int, str], list[list[Activation]]], layer: _Layer
    ) -> list[list[Activation]]:
        """Of layers that are alike, once."""
        key = (id(layer.block), layer.policy)
        if key not in known:
            walk = (
                forward_instants(layer.block, layer.policy)
                if known is self._forward
                else backward_instants(self.job, layer.block, layer.policy)
            )
            known[key] = [one.tensors() for one in walk]
        return known[key]


HEAD = "head.parameter_gradients"
PASSING = "passing "


class _Layer(NamedTuple):
    number: int
    block: DeclaredBlock
    policy: str

    @property
    def prefix(self) -> str:
        return str(self.number)

    @property
    def names(self) -> dict[str, str]:
        """Tensors that a layer shares with its neighbours."""
        return {
            BLOCK_INPUT: f"stream {self.number}",
            FEED_FORWARD_RESIDUAL: f"stream {self.number + 1}",
            f"{FEED_FORWARD_RESIDUAL}.grad": f"gradient {self.number + 1}",
        }

    def kept(self) -> Sizes:
        """What it saves, by the names of the whole step."""
        return _sizes(saved_under(self.block, self.policy), self.prefix, self.names)


def _sizes(tensors: Iterable[Activation], prefix: str, names: Mapping[str, str]) -> Sizes:
    """Tensors by their names in the whole step; an empty name leaves one out."""
    found: Sizes = {}
    for one in tensors:
        name = names.get(one.name, f"{prefix} {one.name}")
        if one.name not in STANDING and one.nbytes and name:
            found[name] = one.nbytes
    return found
