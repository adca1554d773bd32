"""One of two ranks that save and load sharded states; run by test_checkpoint_sharded.py.

python sharded_rank.py RANK FOLDER DEVICE    FOLDER/single holds a checkpoint that one process saved
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trimtab.checkpoint import SavedCheckpoint, Store
from trimtab.checkpoint import tensors as files
from trimtab.facts.errors import CheckpointError, ResourceError

WORLD = 2
# rows: 7 is uneven over two ranks, 1 leaves the second rank empty, "empty" holds nothing at all
SHAPES = {"even": (4, 6), "uneven": (7, 5), "single_row": (1, 4), "empty": (0, 3), "vector": (9,)}
DTYPES = {"even": torch.float32, "uneven": torch.bfloat16, "single_row": torch.int64}


def whole(name: str) -> torch.Tensor:
    """The full tensor of a name: the same on every rank and in the test."""
    shape = SHAPES[name]
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 50).reshape(shape).to(DTYPES.get(name, torch.float32))


def own_stage(rank: int) -> dict[str, torch.Tensor]:
    """What only one rank has, as in a pipeline."""
    return {f"stage.{rank}.weight": torch.full((3, 2), float(rank))}


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3, bias=False))


def layout(dim: int, fill: bool, device: str) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh(device, (WORLD,))
    made: dict[str, torch.Tensor] = {}
    for name in SHAPES:
        full = whole(name) if fill else torch.zeros_like(whole(name))
        placement = Shard(dim) if dim < full.ndim else Replicate()
        made[name] = distribute_tensor(full.to(device), mesh, [placement])
    return made


def compare(tensors: dict[str, torch.Tensor]) -> None:
    # Shard by shard: full_tensor() on CUDA over gloo ends in a segmentation fault in torch 2.11.
    for name, tensor in tensors.items():
        assert isinstance(tensor, DTensor)
        expected = distribute_tensor(whole(name).to(tensor.device), tensor.device_mesh, tensor.placements)
        assert torch.equal(tensor.to_local(), expected.to_local()), name


def step(store: Store) -> SavedCheckpoint:
    found = store.latest()
    assert found is not None
    return found


def exercise(rank: int, folder: Path, device: str) -> None:
    saved = layout(0, fill=True, device=device)
    sharded = model(0).to(device)
    fully_shard(sharded, mesh=init_device_mesh(device, (WORLD,)))
    plain = {"replicated": torch.arange(10.0)}
    states = dict(sharded.state_dict())
    with Store(folder / "two", on_event=lambda _: None, file_bytes=64) as store:
        store.save(1, {**saved, **plain, **states, **own_stage(rank)}, {"windows": 12})
        for _ in range(20):  # training continues meanwhile, through its own group
            number = torch.ones(1)
            dist.all_reduce(number)
            assert number.item() == WORLD
        store.wait()

        # Another layout of the same tensors, the same pair of ranks.
        target = layout(1, fill=False, device=device)
        other = model(1).to(device)
        fully_shard(other, mesh=init_device_mesh(device, (WORLD,)))
        rest = {"replicated": torch.zeros(10), f"stage.{rank}.weight": torch.zeros(3, 2)}
        assert store.load(step(store), {**target, **rest, **other.state_dict()}) == {"windows": 12}
        compare(target)
        assert torch.equal(rest["replicated"], plain["replicated"])
        assert torch.equal(rest[f"stage.{rank}.weight"], own_stage(rank)[f"stage.{rank}.weight"])
        for name, tensor in other.state_dict().items():
            assert torch.equal(tensor.to_local(), states[name].to_local()), name

        fail_on_one_rank(store, rank, saved)
        assert step(store).step == 1

        wrong = {
            **saved,
            **plain,
            **states,
            **own_stage(rank),
            "strange" if rank else "replicated": torch.zeros(10),
        }
        with pytest.raises(CheckpointError, match="missing in the checkpoint: strange"):
            store.load(step(store), wrong)  # only rank 1 asks for it

    # What one process saved, into shards.
    target = layout(0, fill=False, device=device)
    with Store(folder / "single", on_event=lambda _: None) as single:
        single.load(step(single), target)
    compare(target)


def fail_on_one_rank(store: Store, rank: int, tensors: dict[str, torch.Tensor]) -> None:
    """An error on rank 1 fails the save on both, and leaves nothing."""
    original = files.read_back

    def refuse(*_: object) -> None:
        raise CheckpointError("a disk of this rank is broken")

    files.read_back = refuse if rank == 1 else original
    store.save(2, tensors, {})
    with pytest.raises(CheckpointError, match="a disk of this rank is broken"):
        store.wait()
    files.read_back = original
    dist.barrier()
    assert not [path for path in store.folder.iterdir() if path.name.startswith(".tmp")]

    # Out of space inside DCP's own writer arrives as what it is, too.
    stream = FileSystem.create_stream

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if rank == 1:
        FileSystem.create_stream = full  # type: ignore[method-assign, assignment]
    store.save(2, tensors, {})
    with pytest.raises(ResourceError, match="not enough disk space for the checkpoint of step 2"):
        store.wait()
    FileSystem.create_stream = stream  # type: ignore[method-assign]
    # Rank 0 removes what was written after all have failed.
    dist.barrier()
    assert not [path for path in store.folder.iterdir() if path.name.startswith(".tmp")]


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=WORLD
    )
    exercise(rank, folder, sys.argv[3])
    gc.collect()  # sharded modules hold the group in cycles: its threads end with the last of them
    dist.destroy_process_group()
    sys.stdout.flush()
    # Threads of gloo that outlive the interpreter abort the process now and then ("terminate called without an active
    # exception", then -11). Everything was asserted by here, so the process ends without a teardown.
    os._exit(0)


if __name__ == "__main__":
    main()
