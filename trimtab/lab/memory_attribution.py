"""Attributes the profiler's allocation events to the recorded operations around them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from trimtab.facts.operations import MemoryPart
from trimtab.facts.phases import RunPhase
from trimtab.facts.tensor_kinds import TensorKind
from trimtab.lab.memory import EnclosingRanges, MemoryEvent
from trimtab.lab.memory_blocks import AttributedTimeline, MemoryBlock, Role, spans
from trimtab.lab.memory_roles import Place, role_of
from trimtab.run.live_tensors import Origin, States, named_tensors

UNKNOWN = Role(TensorKind.OTHER)
SCRATCH = Role(TensorKind.ACTIVATIONS, MemoryPart.WORKSPACE)
UNNAMED = MemoryBlock(0, Role(TensorKind.OTHER), "allocated before")


@dataclass(frozen=True)
class OperationResult:
    """A tensor returned by an operation."""

    address: int
    nbytes: int
    index: int
    """Index among the operation's results."""
    text: str
    """Its shape and dtype."""


@dataclass(frozen=True)
class OperationRecord:
    """An executed operation."""

    name: str
    origin: Origin
    place: Place
    made: tuple[OperationResult, ...] = ()


@dataclass(frozen=True)
class NamedAddress:
    """The named tensor that is stored at an address after a number of operations."""

    address: int
    operations: int
    kind: TensorKind
    name: str


def attribute(
    events: Sequence[MemoryEvent],
    operations: Sequence[OperationRecord],
    forward: Mapping[int, Origin],
    known: Sequence[NamedAddress],
    persistent: Sequence[MemoryBlock],
) -> AttributedTimeline:
    """Blocks from allocation events.

    Args:
        events: allocations and releases with the ranges around them, whose labels are numbers of operations.
        operations: in order.
        forward: the forward operation of each backward node, by autograd's sequence number.
        known: named tensors at some addresses, in order.
        persistent: blocks that were allocated before the run.
    """
    blocks = list(persistent)
    alive = {block.address: index for index, block in enumerate(blocks)}
    phases: list[RunPhase] = []
    makers: dict[int, list[tuple[int, int]]] = {}
    for number, event in enumerate(events):
        after = event.around.after
        phases.append(RunPhase.OTHER if after is None else operations[after].place.phase)
        if event.nbytes > 0:
            alive[event.address] = len(blocks)
            makers.setdefault(event.address, []).append((after or 0, len(blocks)))
            blocks.append(_block(event, number, phases[-1], operations, forward))
            continue
        index = alive.pop(event.address, None)
        if index is None:  # an unknown block that was allocated before the run
            blocks.append(replace(UNNAMED, nbytes=-event.nbytes, end=number, address=event.address))
        else:
            start = blocks[index].start
            allocation = None if start is None else events[start].around
            blocks[index] = replace(_released(blocks[index], allocation, event.around), end=number)
    for entry in known:
        index = _latest(makers.get(entry.address, []), entry.operations)
        if index is not None:
            blocks[index] = replace(blocks[index], role=Role(entry.kind), name=entry.name)
    return AttributedTimeline(tuple(blocks), spans(phases), len(events))


def _block(
    event: MemoryEvent,
    number: int,
    phase: RunPhase,
    operations: Sequence[OperationRecord],
    forward: Mapping[int, Origin],
) -> MemoryBlock:
    around = event.around
    short = around.operation.removeprefix("aten::") or "unknown"
    block = MemoryBlock(event.nbytes, UNKNOWN, short, phase=phase, start=number, address=event.address)
    if around.label is None and around.node is None:
        return replace(block, role=role_of(Place(phase), "", None))
    if around.label is None:
        origin = forward.get(around.sequence or 0, Origin())
        part = MemoryPart.PARAMETER_GRADIENTS if around.accumulates else MemoryPart.GRADIENTS
        module = f"backward of {origin.module}" if origin.module else "backward"
        return replace(block, role=Role(TensorKind.ACTIVATIONS, part), module=module, line=origin.line)
    operation = operations[around.label]
    block = replace(block, module=operation.origin.module, line=operation.origin.line)
    if operation.place.phase is RunPhase.BACKWARD:  # recomputation: results are not recorded
        return replace(block, role=role_of(operation.place, around.operation, 0))
    result = next((tensor for tensor in operation.made if tensor.address == event.address), None)
    role = role_of(operation.place, operation.name, None if result is None else result.index)
    if result is None:
        return replace(block, role=role, name=f"scratch of {short}")
    return replace(block, role=role, name=f"{short} {result.text}", tensor_bytes=result.nbytes)


def _released(
    block: MemoryBlock, allocated: EnclosingRanges | None, released: EnclosingRanges
) -> MemoryBlock:
    """Refines a block's role by the place of its release: scratch, or a temporary gradient of a parameter."""
    if allocated is None or block.role.kind is not TensorKind.ACTIVATIONS:
        return block
    if allocated.label is None and allocated.node is not None and allocated.node == released.node:
        return replace(block, role=SCRATCH, name=f"scratch of {block.name}")
    if allocated.label is not None and allocated.call is not None and allocated.call == released.call:
        return replace(block, role=SCRATCH)
    if released.accumulates and block.role.part is MemoryPart.GRADIENTS:
        return replace(block, role=replace(block.role, part=MemoryPart.PARAMETER_GRADIENTS))
    return block


def _latest(allocations: Sequence[tuple[int, int]], operations: int) -> int | None:
    """The last block at an address that was allocated before operation number `operations`."""
    candidates = [block for operation, block in allocations if operation < operations]
    return candidates[-1] if candidates else None


def persistent_blocks(model: torch.nn.Module, optimizer: States | None, device: str) -> list[MemoryBlock]:
    """Blocks allocated before the run: on a GPU all of the allocator's, on a CPU the named tensors."""
    kind = "cuda" if device.startswith("cuda") else "cpu"
    blocks: dict[int, MemoryBlock] = {}
    for named in named_tensors(model, optimizer):
        storage = named.tensor.untyped_storage()
        if named.tensor.device.type == kind and storage.nbytes():
            block = MemoryBlock(
                storage.nbytes(),
                Role(named.kind),
                named.name,
                named.module,
                tensor_bytes=storage.nbytes(),
                address=storage.data_ptr(),
            )
            blocks.setdefault(block.address, block)
    if kind == "cpu":
        return list(blocks.values())
    return list(_allocated(torch.cuda.memory_snapshot(), torch.cuda.current_device(), blocks))


def _allocated(segments: Any, device: int, named: dict[int, MemoryBlock]) -> Iterator[MemoryBlock]:
    """The allocated blocks of a snapshot of torch's CUDA allocator, named where possible."""
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if segment["device"] == device and block["state"] == "active_allocated":
                yield replace(named.get(address, UNNAMED), nbytes=block["size"], address=address)
            address += block["size"]
