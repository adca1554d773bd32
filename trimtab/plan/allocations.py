"""The sequence of allocations and frees of a training step, from the walks that predict its peak. Imports no torch.

Three approximations: the temporary buffers of an operation are one block, a quantized weight is one block, and the
tensors that an operation frees are freed before the next operation allocates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from trimtab.adapt import spec_quantized
from trimtab.adapt.spec_recompute import saved_under
from trimtab.facts.dtypes import nbytes
from trimtab.facts.operations import Activation, Operation, OperationKind
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
from trimtab.plan.memory import CUBLAS_BYTES, gradient_bytes
from trimtab.plan.outside_blocks import tensors_outside_blocks


class Event(NamedTuple):
    """An allocation of `size` bytes, or a free if `size` is None."""

    tensor_id: int
    """The tensor's id; negative for a workspace."""
    size: int | None


FORWARD_WORKSPACE, BACKWARD_WORKSPACE, DEQUANTIZED_WEIGHT = -1, -2, -3
"""Ids of workspaces, which later steps use again: cuBLAS's of the threads of the forward and the backward pass,
allocated before a step's tensors, and one dequantized weight, allocated by the first product that needs it."""


Sizes = dict[str, int]
Instants = list[tuple[str, list[Activation]]]
INPUTS = ("batch", "positions and masks")
ALLOCATED_SEPARATELY = ("dequantized weight", "gradients.parameter_gradients", *INPUTS)
"""Tensors that live longer than a phase: allocated once, not by each phase that lists them."""


def persistent_sizes(job: Job) -> Iterator[int]:
    """Yields the bytes of each weight, and each optimizer state."""
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


class StepAllocations(NamedTuple):
    """The allocations and frees of one training step; all but workspaces are freed before the step ends."""

    first: list[Event]
    """Of the first microbatch, whose gradients stay allocated."""
    following: list[Event]
    """Of each following microbatch, which adds to the gradients; empty without gradient accumulation."""
    update: list[Event]
    """Of the optimizer step, which frees the gradients."""


def step_allocations(job: Job) -> StepAllocations:
    """Returns the allocations and frees of one training step."""
    live = _LiveTensors()
    first = list(_Microbatch(job.changed(accumulation=1), live).events())
    following = list(_Microbatch(job, live).events()) if job.accumulation > 1 else []
    return StepAllocations(first, following, list(_update(job, live)))


def _update(job: Job, live: _LiveTensors) -> Iterator[Event]:
    """Yields the allocations of the optimizer step, and the frees of gradients after it."""
    if not job.in_backward:
        copies = job.trained.gradient_copies(job.optimizer)
        yield from live.allocate({f"copy {index}": size for index, size in enumerate(copies)})
        yield from live.allocate({"optimizer": update_scratch(job) - sum(copies)})
    yield from live.free(list(live.shared))


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


class _Microbatch:
    """Forward and backward of a microbatch: with gradient accumulation of one after the first, whose gradients are
    live."""

    def __init__(self, job: Job, live: _LiveTensors) -> None:
        self.job, self.layers, self.live = job, Layers(job), live
        self.following = job.accumulation > 1
        self.retain_gradients = not self.following and not job.in_backward
        self.prefix = "following " if self.following else ""
        """Of its tensors' names."""
        self.head = self.prefix + HEAD
        spans = self.layers.spans(segments_of(job.layer_policies))
        self.ordered_layers = [
            _Layer(layer, self.layers.blocks[group][0], policy, f"{self.prefix}{layer}")
            for policy, group, numbers in spans
            for layer in numbers
        ]
        self._forward: dict[tuple[int, str], Instants] = {}
        self._backward: dict[tuple[int, str], Instants] = {}
        self.largest_products = _largest_products(job)
        self.allocated_workspaces: set[int] = set()

    def events(self) -> Iterator[Event]:
        """Yields its allocations and frees; the gradients of a first microbatch stay allocated."""
        job, live = self.job, self.live
        outside = tensors_outside_blocks(job, gradient_bytes(job), self.layers)
        for number in (FORWARD_WORKSPACE, BACKWARD_WORKSPACE):
            yield Event(number, CUBLAS_BYTES["cuda"] // 2)
        yield from live.allocate(
            {entry.name: entry.nbytes for entry in outside.layers_forward if entry.name in INPUTS}
        )
        yield from live.allocate({"stream 0": self.layers.stream})
        for layer in self.ordered_layers:
            yield from self.forward(layer)
        num_layers = len(self.ordered_layers)
        names = {"x": f"stream {num_layers}", "x.grad": f"gradient {num_layers}", HEAD: self.head}
        live.move_to_current([f"stream {num_layers}"])
        yield from live.replace_current(_sizes(outside.loss_forward, "loss", names))
        logits = next((tensor.name for tensor in outside.loss_backward if tensor.name == "logits"), "")
        sizes = _sizes(outside.loss_backward, "loss", names)
        yield from self.replace(sizes, logits)
        yield from live.replace_current(_sizes(outside.final_norm_backward, "loss", names))
        yield from live.finish_current((self.head, f"gradient {num_layers}"))
        if self.retain_gradients and job.trained.final_norm is not None:
            yield from live.allocate({"final norm.grad": job.trained.final_norm.stored_bytes})
        for index in reversed(range(num_layers)):
            offloading = (
                entry for entry in reversed(self.ordered_layers[:index]) if is_offloaded(job, entry.policy)
            )
            yield from self.backward(self.ordered_layers[index], next(offloading, None))
        live.move_to_current(["gradient 0"])
        names = {"x.grad": "gradient 0", HEAD: self.head, "layers.parameter_gradients": ""}
        prefix = f"{self.prefix}embedding"
        for phase in (outside.embedding_gradient, outside.embedding_cast):
            yield from live.replace_current(_sizes(phase, prefix, names))
        # The gradient of a tied embedding is added to the head's in place.
        cast = f"{prefix} embedding.cast.parameter_gradients"
        gradient = cast if cast in live.current else f"{prefix} embedding.parameter_gradients"
        retained = self.retain_gradients and not job.shape.tie_embeddings
        yield from live.finish_current({gradient} if retained else ())
        temporary = [name for name in live.shared if "grad" not in name or name.startswith("following")]
        yield from live.free(temporary)

    def forward(self, layer: _Layer) -> Iterator[Event]:
        live, names = self.live, layer.names
        before = [name for name in live.shared if name.startswith(IN_FLIGHT)]
        live.move_to_current([names[BLOCK_INPUT]])
        for product, tensors in self.instants(self._forward, layer):
            yield from self.replace(_sizes(tensors, layer.prefix, names), product)
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
        for product, tensors in self.instants(self._backward, layer):
            before = set(live.current)
            yield from self.replace(_sizes(tensors, layer.prefix, names), product)
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
            remaining |= sizes.keys()
            current = {name: size for name, (_, size) in live.current.items() if name in remaining}
            yield from live.replace_current({**current, **sizes})
        yield from live.finish_current(remaining)

    def instants(self, cache: dict[tuple[int, str], Instants], layer: _Layer) -> Instants:
        """Live tensors at each instant of a layer, and the name of its matrix product, computed once for equal
        layers."""
        key = (id(layer.block), layer.policy)
        if key not in cache:
            walk = (
                forward_instants(layer.block, layer.policy)
                if cache is self._forward
                else backward_instants(self.job, layer.block, layer.policy)
            )
            cache[key] = [(_product_of(instant.operation), instant.tensors()) for instant in walk]
        return cache[key]

    def replace(self, sizes: Sizes, product: str = "") -> Iterator[Event]:
        """Replaces the current tensors. A product of a largest quantized weight also allocates the dequantized weight's
        workspace, if the step has not yet: after its result, and after the adapter's small product before it. (Without
        a result it does not run: a recomputation reads saved results.)"""
        events = list(self.live.replace_current(sizes))
        start = next((at for at, event in enumerate(events) if event.size is not None), len(events))
        if product in self.largest_products and start < len(events):
            results = list(self.live.current)[len(self.live.current) - (len(events) - start) :]
            saved = sum(name.endswith(".lora_A") for name in results[:1])
            self.insert(events, start + saved + 1, DEQUANTIZED_WEIGHT, workspace_bytes(self.job))
        yield from events

    def insert(self, events: list[Event], at: int, number: int, size: int) -> None:
        """Inserts the allocation of a workspace that the step has not allocated yet."""
        if number not in self.allocated_workspaces:
            events.insert(at, Event(number, size))
            self.allocated_workspaces.add(number)


def _product_of(operation: Operation | None) -> str:
    """The name of a matrix product; empty for other operations."""
    return operation.name if operation is not None and operation.kind is OperationKind.PRODUCT else ""


def _largest_products(job: Job) -> frozenset[str]:
    """Names of the projections of a block whose dequantized weights are the largest."""
    if not workspace_bytes(job):
        return frozenset()
    sizes = {name: math.prod(dims) for name, dims in spec_quantized.linear_shapes(job.shape).items()}
    most = max(sizes.values())
    return frozenset(
        name.split(".", 3)[3].removesuffix(".weight") for name, size in sizes.items() if size == most
    )


HEAD = "head.parameter_gradients"
IN_FLIGHT = "in flight "


class _Layer(NamedTuple):
    number: int
    block: DeclaredBlock
    policy: str
    prefix: str
    """Of its tensors' names."""

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
