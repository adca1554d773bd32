"""Saving and loading tensors: a host copy, and the safetensors writer and reader of torch.distributed.checkpoint (DCP).

Only DCP's Hugging Face writer and reader are used: their files are safetensors, while DCP's default `.metadata` is a
pickle. Every rank writes its shards with their offsets in the header; DCP reshards when another layout, or a single
process, loads them. Each pitfall below is covered by a test.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from trimtab.checkpoint.manifest import TensorEntry
from trimtab.checkpoint.ranks import Ranks
from trimtab.facts.errors import CheckpointError

# Training in one process without a group is normal; do not warn at each save.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def describe(tensors: dict[str, torch.Tensor]) -> dict[str, TensorEntry]:
    """Full shapes and dtypes by name. Values that are no tensors raise TypeError: DCP would pickle them."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, not a tensor; pass it in `scalars`")
        if tensor.is_meta:
            raise TypeError(f"{name} is on the meta device and has no values")
    return {
        name: TensorEntry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def nbytes(entry: TensorEntry) -> int:
    """Bytes of the full tensor.

    Example:
        >>> nbytes(TensorEntry("bfloat16", (2, 3)))
        12
    """
    count = 1
    for size in entry.shape:
        count *= size
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return count * dtype.itemsize


class HostCopy:
    """Host buffers that are reused by every save, so that host memory is one copy of the state.

    The buffers are pageable: pinned memory copies faster, but torch's pinned allocator rounds each buffer up to a power
    of two, which can double the memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy this rank's shard of each tensor to a contiguous host buffer."""
        previous = self._buffers
        self._buffers = {}
        copies: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, tensor in tensors.items():
                part = local(tensor)
                buffer = previous.pop(name, None)
                if buffer is None or buffer.shape != part.shape or buffer.dtype != part.dtype:
                    buffer = torch.empty(part.shape, dtype=part.dtype)
                self._buffers[name] = buffer.copy_(part)
                # from_local would move the copy back to the mesh's device; the planner needs only the layout.
                copies[name] = (
                    DTensor(buffer, tensor._spec, requires_grad=False)
                    if isinstance(tensor, DTensor)
                    else buffer
                )
        return copies


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor; the tensor itself if it is not distributed."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()


class _Writer(HuggingFaceStorageWriter):
    """Splits each rank's tensors into files of bounded size: the serializer needs twice a file's size in memory."""

    def __init__(self, folder: Path, file_bytes: int) -> None:
        super().__init__(str(folder), save_distributed=True, enable_consolidation=False)
        self.file_bytes = file_bytes
        # DCP syncs before its buffer is flushed; `manifest.digests` syncs after the files are closed.
        self.sync_files = False
        # The state is already on the host; copy-ahead would only create a CUDA context in this thread.
        self.per_thread_copy_ahead = 0

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.fqn_to_index_mapping = _assign_files(plans, self.file_bytes)
        return super().prepare_global_plan(plans)


def _assign_files(plans: list[SavePlan], file_bytes: int) -> dict[str, int]:
    """Tensor name → file number (from 1), such that no rank's file exceeds `file_bytes`."""
    share: dict[str, int] = {}
    for plan in plans:
        for item in plan.items:
            share[item.index.fqn] = max(share.get(item.index.fqn, 0), item.tensor_storage_size() or 0)
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for name, size in share.items():
        if filled and filled + size > file_bytes:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
    return numbers


def write(folder: Path, copies: dict[str, torch.Tensor], ranks: Ranks, file_bytes: int) -> None:
    """Write every rank's shards into `folder`, without fsync; collective."""
    try:
        dcp.save(
            dict(copies),
            storage_writer=_Writer(folder, file_bytes),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    except CheckpointException as error:
        raise _first_cause(error) from error


def own_files(folder: Path, ranks: Ranks) -> list[Path]:
    """The tensor files that this rank wrote."""
    return sorted(folder.glob(f"shard-{ranks.rank + 1:05d}-*.safetensors"))


def read_back(paths: list[Path], copies: dict[str, torch.Tensor]) -> None:
    """Compare files with the host copies they were written from, byte by byte (so that NaNs compare equal)."""
    for path in paths:
        try:
            with safe_open(str(path), framework="pt") as file:
                names = list(file.keys())
                changed = [n for n in names if not _same_bytes(file.get_tensor(n), local(copies[n]))]
        except SafetensorError as error:
            changed = [str(error)]
        if changed:
            raise CheckpointError(
                f"{path} reads back different from what was written ({changed[0]})",
                "check the disk; the earlier checkpoints were not touched",
            )


def read(folder: Path, tensors: dict[str, torch.Tensor], ranks: Ranks) -> None:
    """Load the given tensors in place from a verified folder; collective."""
    try:
        dcp.load(
            dict(tensors),
            storage_reader=HuggingFaceStorageReader(str(folder)),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    except CheckpointException as error:
        raise _first_cause(error) from error


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    same_layout = a.shape == b.shape and a.dtype == b.dtype
    return same_layout and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _first_cause(error: CheckpointException) -> BaseException:
    """The first of the ranks' exceptions, which DCP wraps into one BaseException."""
    return error.failures[min(error.failures)][0]
