"""The sequence of allocations and frees of a training step, from the walks that predict its peak. Imports no torch.

Three approximations: the temporary buffers of an operation are one block, a quantized weight is one block, and
an operation's tensors are freed before the next operation allocates.
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
from trimtab.plan.outside_blocks import tensors_outside_blocks


class Event(NamedTuple):
    """An allocation of `size` bytes, or a free if `size` is None."""

    tensor_id: int
    """The tensor's id."""
    size: int | None


Sizes = dict[str, int]
INPUTS = ("batch", "positions and masks")
ALLOCATED_SEPARATELY = ("dequantized weight", "gradients.parameter_gradients", *INPUTS)
"""Tensors that live longer than a phase: allocated once, not by each phase that lists them."""


def persistent_sizes(job: Job) -> Iterator[int]:
    """Yields the bytes of each weight, each optimizer state, and the workspace allocated at the first matmul."""
    trained = {parameter.name for parameter in job.trained.parameters}
    packed = spec_quantized.linear_shapes(job.shape) if job.quantization is not None else {}
    for name, dims in job.shape.parameters():
        if name in packed and job.quantization is not None:
            kind, block, double = job.quantization.kind, job.quantization.block_size, job.quantization.double
            yield spec_quantized.packed_bytes(packed[name], kind, block=block, double=double)
        elif name not in trained:
            yield nbytes(job.weights_dtype, math.prod(dims))
    for parameter in job.trained.parameters:
        moments = optim_spec.state_bytes(job.optimizer, parameter.dims, parameter.dtype)
        yield from (nbytes(parameter.dtype, parameter.count), moments // 2, moments - moments // 2)
    for layer in range(job.dequantized_layers):
        copies = [
            spec_quantized.dequantized_bytes(job.shape, count, job.dtype) for count in (layer, layer + 1)
        ]
        yield copies[1] - copies[0]
    if workspace_bytes(job):
        yield workspace_bytes(job)


def step_allocations(job: Job) -> Iterator[Event]:
    """Yields the allocations and frees of one training step; each allocation is freed before the step ends."""
    return _Step(job).events()


class _LiveTensors:
    """The live tensors by name; turns sets of live tensors into allocations and frees."""

    def __init__(self) -> None:
        self.shared: dict[str, tuple[int, int]] = {}
        """(id, bytes) of tensors that outlive the current layer or phase."""
        self.current: dict[str, tuple[int, int]] = {}
        """(id, bytes) of the current layer's or phase's tensors; replaced at each instant."""
        self._ids = itertools.count()

    def replace_current(self, wanted: Sizes) -> Iterator[Event]:
        """Replaces the current tensors by `wanted`."""
        for name in [name for name, (_, size) in self.current.items() if wanted.get(name) != size]:
            yield Event(self.current.pop(name)[0], None)
        for name, size in wanted.items():
            if name not in self.current and name not in self.shared:
                self.current[name] = (next(self._ids), size)
                yield Event(*self.current[name])

    def move_to_current(self, names: Iterable[str]) -> None:
        """Moves shared tensors with these names to the current ones."""
        self.current |= {name: self.shared.pop(name) for name in names if name in self.shared}

    def finish_current(self, names: Collection[str]) -> Iterator[Event]:
        """Moves current tensors with these names to the shared ones and frees the others."""
        for name in list(self.current):
            tensor = self.current.pop(name)
            if name in names:
                self.shared[name] = tensor
            else:
                yield Event(tensor[0], None)

    def rename_current(self, names: Mapping[str, str]) -> None:
        """Renames current tensors."""
        self.current = {names.get(name, name): tensor for name, tensor in self.current.items()}

    def allocate(self, sizes: Sizes) -> Iterator[Event]:
        """Allocates shared tensors."""
        for name, size in sizes.items():
            if size and name not in self.shared:
                self.shared[name] = (next(self._ids), size)
                yield Event(*self.shared[name])

    def free(self, names: Iterable[str]) -> Iterator[Event]:
        """Frees shared tensors."""
        for name in names:
            yield Event(self.shared.pop(name)[0], None)


class _Step:
    """One training step of a job."""

    def __init__(self, job: Job) -> None:
        self.job, self.layers, self.live = job, Layers(job), _LiveTensors()
        self.retain_gradients = job.accumulation == 1 and not job.in_backward
        spans = self.layers.spans(segments_of(job.layer_policies))
        self.ordered_layers = [
            _Layer(layer, self.layers.blocks[group][0], policy)
            for policy, group, numbers in spans
            for layer in numbers
        ]
        self._forward: dict[tuple[int, str], list[list[Activation]]] = {}
        self._backward: dict[tuple[int, str], list[list[Activation]]] = {}

    def events(self) -> Iterator[Event]:
        job, live = self.job, self.live
        outside = tensors_outside_blocks(job, gradient_bytes(job), self.layers)
        if job.accumulation > 1:
            yield from live.allocate(
                {
                    f"{entry.name}.grad": nbytes(entry.gradient_dtype, entry.count)
                    for entry in job.trained.parameters
                }
            )
        yield from live.allocate(
            {entry.name: entry.nbytes for entry in outside.layers_forward if entry.name in INPUTS}
        )
        yield from live.allocate({"stream 0": self.layers.stream})
        for layer in self.ordered_layers:
            yield from self.forward(layer)
        num_layers = len(self.ordered_layers)
        names = {"x": f"stream {num_layers}", "x.grad": f"gradient {num_layers}", HEAD: HEAD}
        live.move_to_current([f"stream {num_layers}"])
        for phase in (outside.loss_forward, outside.loss_backward, outside.final_norm_backward):
            yield from live.replace_current(_sizes(phase, "loss", names))
        yield from live.finish_current((HEAD, f"gradient {num_layers}"))
        for index in reversed(range(num_layers)):
            offloading = (
                entry for entry in reversed(self.ordered_layers[:index]) if is_offloaded(job, entry.policy)
            )
            yield from self.backward(self.ordered_layers[index], next(offloading, None))
        live.move_to_current(["gradient 0"])
        names = {"x.grad": "gradient 0", HEAD: HEAD, "layers.parameter_gradients": ""}
        yield from live.replace_current(_sizes(outside.embedding_backward, "embedding", names))
        yield from live.finish_current(
            ("embedding embedding.parameter_gradients",) if self.retain_gradients else ()
        )
        yield from live.free([name for name in live.shared if "grad" not in name])
        if not job.in_backward:
            yield from live.allocate({"optimizer": update_scratch(job)})
        yield from live.free(list(live.shared))

    def forward(self, layer: _Layer) -> Iterator[Event]:
        live, names = self.live, layer.names
        before = [name for name in live.shared if name.startswith(IN_FLIGHT)]
        live.move_to_current([names[BLOCK_INPUT]])
        for tensors in self.instants(self._forward, layer):
            yield from live.replace_current(_sizes(tensors, layer.prefix, names))
        output = names[FEED_FORWARD_RESIDUAL]
        saved = layer.saved()
        yield from live.replace_current({**saved, output: self.layers.stream})
        if not is_offloaded(self.job, layer.policy):
            yield from live.finish_current({*saved, output})
            return
        # Stays on the device until the next offloading layer begins.
        live.rename_current({name: IN_FLIGHT + name for name in saved})
        yield from live.finish_current({*(IN_FLIGHT + name for name in saved), output})
        yield from live.free(before)

    def backward(self, layer: _Layer, below: _Layer | None) -> Iterator[Event]:
        live, names = self.live, layer.names
        if not layer.block.differentiates:
            return
        saved = layer.saved()
        if is_offloaded(self.job, layer.policy):
            live.move_to_current([IN_FLIGHT + name for name in saved])
            live.rename_current({IN_FLIGHT + name: name for name in saved})
            if below is not None:  # its offloaded activations are prefetched during this backward pass
                yield from live.allocate({IN_FLIGHT + name: size for name, size in below.saved().items()})
        live.move_to_current([*saved, names[f"{FEED_FORWARD_RESIDUAL}.grad"]])
        before: Collection[str] = ()
        for tensors in self.instants(self._backward, layer):
            before = set(live.current)
            yield from live.replace_current(_sizes(tensors, layer.prefix, names))
        # The gradient of the layer's input is a tensor that existed before the last operation.
        stream = [
            name for name, (_, size) in live.current.items() if size == self.layers.stream and "grad" in name
        ]
        input_gradient = next((name for name in stream if name in before), next(iter(stream), ""))
        live.rename_current({input_gradient: f"gradient {layer.number}"})
        remaining = {f"gradient {layer.number}"}
        if self.retain_gradients:
            gradients = [gradient for operation in layer.block.operations for gradient in operation.gradients]
            sizes = {f"{layer.prefix} {gradient.name}.grad": gradient.stored_bytes for gradient in gradients}
            # Without a cast to another dtype, the accumulated gradient is the computed tensor itself.
            temporary = {
                f"{layer.prefix} {gradient.name}.grad_made"
                for gradient in gradients
                if gradient.computed_bytes == gradient.stored_bytes
            }
            live.rename_current(
                {name: name.removesuffix("_made") for name in temporary if name in live.current}
            )
            remaining |= sizes.keys()
            current = {name: size for name, (_, size) in live.current.items() if name in remaining}
            yield from live.replace_current({**current, **sizes})
        yield from live.finish_current(remaining)

    def instants(
        self, cache: dict[tuple[int, str], list[list[Activation]]], layer: _Layer
    ) -> list[list[Activation]]:
        """Live tensors at each instant of a layer, computed once for equal layers."""
        key = (id(layer.block), layer.policy)
        if key not in cache:
            walk = (
                forward_instants(layer.block, layer.policy)
                if cache is self._forward
                else backward_instants(self.job, layer.block, layer.policy)
            )
            cache[key] = [instant.tensors() for instant in walk]
        return cache[key]


HEAD = "head.parameter_gradients"
IN_FLIGHT = "in flight "


class _Layer(NamedTuple):
    number: int
    block: DeclaredBlock
    policy: str

    @property
    def prefix(self) -> str:
        return str(self.number)

    @property
    def names(self) -> dict[str, str]:
        """Names of the tensors that a layer shares with its neighbours."""
        return {
            BLOCK_INPUT: f"stream {self.number}",
            FEED_FORWARD_RESIDUAL: f"stream {self.number + 1}",
            f"{FEED_FORWARD_RESIDUAL}.grad": f"gradient {self.number + 1}",
        }

    def saved(self) -> Sizes:
        """Sizes of its saved activations, by their names in the step."""
        return _sizes(saved_under(self.block, self.policy), self.prefix, self.names)


def _sizes(tensors: Iterable[Activation], prefix: str, names: Mapping[str, str]) -> Sizes:
    """Sizes of tensors by their names in the step; tensors with an empty name are left out."""
    sizes: Sizes = {}
    for tensor in tensors:
        name = names.get(tensor.name, f"{prefix} {tensor.name}")
        if tensor.name not in ALLOCATED_SEPARATELY and tensor.nbytes and name:
            sizes[name] = tensor.nbytes
    return sizes
