"""Multi-tensor launches: a device table of the tensors' addresses and of each program's work.

A tensor is a row of eight int64 (`records`); a program's work is one int64 (`tiles`): the tensor in its lower half, the
first block (or element) in its upper half. Both are built once. The values that change with every step (addresses of
gradients, random keys, learning rates, weight decay) are three int64 per tensor, copied to the device in one
asynchronous copy.
"""

# n tensors

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl

from trimtab.kernels.adamw8bit import State8bit, impl_triton
from trimtab.kernels.adamw8bit.spec import (
    BLOCK,
    GROUP,
    SMALL_TILE,
    Configuration,
    Part,
    configuration,
    grid,
    parts,
)
from trimtab.kernels.launching import capability_of, check_device

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.uint16, torch.float16: tl.float16}
"""Triton's type for each dtype; bf16 is read as its bits."""


@dataclass(frozen=True)
class Member:
    """A parameter, its moments (State8bit, or two fp32 tensors), and the index that keys its random bits."""

    param: torch.Tensor
    state: State8bit | tuple[torch.Tensor, torch.Tensor]
    index: int = 0
    offset: int = 0
    """Index of its first element in the unsharded tensor."""

    @property
    def is_8bit(self) -> bool:
        """Whether the moments are 8-bit."""
        return isinstance(self.state, State8bit)

    def record(self) -> list[int]:
        """The table's row: weight, moments, number of blocks (or elements), columns, offset."""
        addresses = [t.data_ptr() for t in (self.param, *self.state)]
        rows, columns, blocks = grid(tuple(self.param.shape))
        count = rows * blocks if self.is_8bit else self.param.numel()
        return [*addresses, *[0] * (5 - len(addresses)), count, columns, self.offset]

    def is_aligned(self) -> bool:
        """Whether rows begin at multiples of 16 bytes and consist of whole groups of 8, so that a group is loaded at
        once."""
        aligned = all(
            t.data_ptr() % 16 == 0 for t in (self.param, self.state[0], self.state[2 % len(self.state)])
        )
        return self.is_8bit and aligned and grid(tuple(self.param.shape))[1] % GROUP == 0

    def parts(self) -> list[Part | None]:
        """Parts of an 8-bit tensor, each updated by a launch; one launch (None) updates all of another tensor."""
        return [*parts(grid(tuple(self.param.shape))[1])] if self.is_8bit else [None]

    def tiles(self, part: Part | None, size: int) -> np.ndarray:
        """First block of a part (or element) of each program; `size` of them per program."""
        rows = grid(tuple(self.param.shape))[0]
        return np.arange(0, self.param.numel() if part is None else rows * part.blocks, size, dtype=np.int64)


@dataclass(frozen=True)
class Launch:
    """Tensors of one launch: the same kind, dtypes and alignment, and the same part of each."""

    weight: torch.dtype
    grad: torch.dtype
    aligned: bool
    kind: str
    """The kind of part, "" for tensors with fp32 moments."""
    width: int
    """Width of a block, 0 for tensors with fp32 moments."""
    tiles: torch.Tensor


def hashing_keys(seed: int, step: int, indices: np.ndarray, stream: int = 0) -> np.ndarray:
    """`stochastic_rounding.spec.keys` of many parameters: uint64, the first key in the lower half."""
    mask = 0xFFFFFFFFFFFFFFFF
    state = np.zeros(len(indices), np.uint64)
    for part in (
        np.uint64(seed & mask),
        np.uint64(step & mask),
        indices.astype(np.uint64),
        np.uint64(stream),
    ):
        state = (state ^ part) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return state


class ParameterTable:
    """Parameters on one device and their states; `step` updates all that have a gradient.

    Example:
        table = ParameterTable([Member(w, new_state(w), index=7)])
        table.step([w.grad], lr=[1e-3], weight_decay=[0.1], beta1=0.9, beta2=0.999, eps=1e-8, step=1)
    """

    def __init__(
        self, members: Sequence[Member], exact: bool = False, config: Configuration | None = None
    ) -> None:
        self.members, self.exact = list(members), exact
        self.device = members[0].param.device
        check_device(impl_triton._step8_kernel, members[0].param)
        for m in self.members:
            assert all(t.is_contiguous() for t in (m.param, *m.state)), (
                "weights and states must be contiguous"
            )
            assert m.param.device == self.device, "one table per device"
        self.config = config or configuration(capability_of(members[0].param))
        self.indices = np.array([m.index for m in self.members], np.int64)
        self._unscaled = torch.ones((), device=self.device)
        self.addresses: list[int] = []
        self.kinds: list[tuple[torch.dtype, bool] | None] = []
        self.launches: list[Launch] = []

    def step(
        self,
        grads: Sequence[torch.Tensor | None],
        *,
        lr: Sequence[float],
        weight_decay: Sequence[float],
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
        seed: int = 0,
        grad_scale: torch.Tensor | float = 1.0,
        skip: torch.Tensor | None = None,
        stochastic_rounding: bool = True,
    ) -> None:
        """One AdamW step of every member whose gradient is not None; no device synchronization."""
        kept = [None if g is None or g.numel() == 0 else g.contiguous() for g in grads]
        self._prepare(kept)
        live = self._live(kept, lr, weight_decay, beta1, step, seed)
        hyper = self._hyper(beta1, beta2, eps, step, grad_scale, skip, stochastic_rounding)
        # for a single tensor, as in `OptimizerInBackward`, the three values are kernel arguments, without a copy
        one = tuple(int(x) for x in live[:, 0]) if len(self.members) == 1 else (0, 0, 0)
        where = None if len(self.members) == 1 else live.to(self.device, non_blocking=True)
        for launch in self.launches:
            self._launch(launch, where, one, hyper)

    def _hyper(
        self,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
        grad_scale: torch.Tensor | float,
        skip: torch.Tensor | None,
        stochastic_rounding: bool,
    ) -> dict[str, Any]:
        scale = self._unscaled
        if isinstance(grad_scale, torch.Tensor):
            scale = grad_scale.to(self.device, torch.float32, non_blocking=True)
        elif grad_scale != 1.0:
            scale = torch.full_like(self._unscaled, grad_scale)
        return {
            "scale_ptr": scale,
            "skip_ptr": None if skip is None else skip.view(torch.uint8),
            "beta1": beta1,
            "beta2": beta2,
            "rest1": 1 - beta1,
            "rest2_root": math.sqrt(1 - beta2),
            "correction": 1 / math.sqrt(1 - beta2**step),
            "eps": eps,
            "STOCHASTIC": stochastic_rounding,
            "EXACT": self.exact,
            "enable_fp_fusion": not self.exact,
        }

    def _launch(
        self, launch: Launch, live: torch.Tensor | None, one: tuple[int, ...], hyper: dict[str, Any]
    ) -> None:
        place = (launch.tiles, self.records, live, len(self.members), *one)
        programs = (len(launch.tiles),)
        types = {"WEIGHT": TYPES[launch.weight], "GRAD": TYPES[launch.grad]}
        if not launch.width:
            impl_triton._step32_kernel[programs](*place, **hyper, **types, SIZE=SMALL_TILE)
            return
        _, times, warps, stages = self.config
        hyper = dict(hyper)
        root = math.sqrt(hyper.pop("beta2"))
        impl_triton._step8_kernel[programs](
            *place, **hyper, **types, beta2_root=root, PART=launch.kind, ALIGNED=launch.aligned,
            ASM=self.device.type == "cuda", B=self._blocks(launch.width), E=launch.width, TIMES=times,
            STAGES=stages, num_warps=warps,
        )  # fmt: skip

    def _prepare(self, grads: list[torch.Tensor | None]) -> None:
        """Rebuilds tables and launches when a weight's address or the gradients' dtype changed."""
        addresses = [m.param.data_ptr() for m in self.members]
        kinds = [None if g is None else (g.dtype, g.data_ptr() % 16 == 0) for g in grads]
        if addresses == self.addresses and kinds == self.kinds:
            return
        self.addresses, self.kinds = addresses, kinds
        self.records = torch.tensor([m.record() for m in self.members], dtype=torch.int64).to(self.device)
        together: dict[tuple[torch.dtype, torch.dtype, bool, str, int], list[np.ndarray]] = {}
        for i, (m, kind) in enumerate(zip(self.members, kinds, strict=True)):
            if kind is None:
                continue
            for part in m.parts():
                where = ("", 0) if part is None else (part.kind, part.width)
                key = (m.param.dtype, kind[0], m.is_aligned() and kind[1], *where)
                size = self._blocks(part.width) * self.config.times if part else SMALL_TILE
                together.setdefault(key, []).append(m.tiles(part, size) << 32 | i)
        self.launches = [
            Launch(*key, torch.from_numpy(np.concatenate(tiles)).to(self.device))
            for key, tiles in together.items()
        ]

    def _blocks(self, width: int) -> int:
        """Blocks per tile: always the same number of elements."""
        return self.config.blocks * BLOCK // width

    def _live(
        self,
        grads: list[torch.Tensor | None],
        lr: Sequence[float],
        weight_decay: Sequence[float],
        beta1: float,
        step: int,
        seed: int,
    ) -> torch.Tensor:
        """int64 [3, n]: gradients' addresses (0: none), random keys, learning rate and weight decay as fp32."""
        count = len(self.members)
        # a new pinned buffer per step: torch's allocator does not reuse it before the copy is done
        pinned = self.device.type == "cuda" and count > 1
        host = torch.empty(3, count, dtype=torch.int64, pin_memory=pinned)
        rows = host.numpy()
        rows[0] = [0 if g is None else g.data_ptr() for g in grads]
        rows[1] = hashing_keys(seed, step, self.indices).view(np.int64)
        rates = np.array(lr, np.float64)
        pair = rows[2].view(np.float32).reshape(count, 2)
        pair[:, 0] = rates / (1 - beta1**step)
        pair[:, 1] = 1 - rates * np.array(weight_decay, np.float64)
        return host
