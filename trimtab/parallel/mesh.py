"""The data-parallel mesh of a run's processes; a single process is a mesh of size 1."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Mesh:
    """The data-parallel rank of this process, and the collectives that the training loop calls.

    On a mesh of size 1 they return their argument, so the loop needs no special case.

    Example:
        >>> Mesh.single().sum_int(3)
        3
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @staticmethod
    def single() -> Mesh:
        """A mesh of one process."""
        return Mesh()

    @staticmethod
    def world() -> Mesh:
        """The processes of the default process group; a mesh of size 1 if it is not initialized."""
        if not dist.is_initialized():
            return Mesh()
        return Mesh(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def sum_int(self, value: int) -> int:
        """The sum of a host integer over the mesh."""
        if self.size == 1:
            return value
        total = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(total, group=self.group)
        return int(total)

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the mesh, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sums every parameter's gradient over the mesh (losses are divided by the global token count)."""
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.group)

    def first_text(self, text: str | None) -> str | None:
        """Returns on every process the text of the lowest rank that has one; None if none has."""
        if self.size == 1:
            return text
        own_bytes = (text or "").encode()
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(own_bytes)
        dist.all_reduce(lengths, group=self.group)
        source = next((rank for rank, length in enumerate(lengths.tolist()) if length), None)
        if source is None:
            return None
        encoded = torch.zeros(int(lengths[source]), dtype=torch.uint8)
        if source == self.rank:
            encoded.copy_(torch.frombuffer(bytearray(own_bytes), dtype=torch.uint8))
        dist.broadcast(encoded, group_src=source, group=self.group)
        return bytes(encoded.tolist()).decode()
