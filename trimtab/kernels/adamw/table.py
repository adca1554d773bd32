"""Multi-tensor launches: a device table of the tensors' addresses and of each program's work.

A tensor is a row of four int64 (`records`); a program's work is one int64 (`tiles`): the tensor in its lower half, the
first tile in its upper half. Both are built once. The values that change with every step are five int64 per tensor,
copied to the device in one asynchronous copy.
"""

# n tensors

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trimtab.kernels.adamw import impl_triton
from trimtab.kernels.adamw.spec import GROUP, STREAMS, configuration
from trimtab.kernels.adamw8bit.table import TYPES, hashing_keys
from trimtab.kernels.launching import capability_of, check_device
from trimtab.kernels.stochastic_rounding.spec import keys


@dataclass(frozen=True)
class Member:
    """A parameter, its moments, and the index that keys its random bits."""

    param: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    index: int = 0

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Weight and moments."""
        return self.param, self.exp_avg, self.exp_avg_sq

    def record(self) -> list[int]:
        """The table's row: weight, moments, number of elements."""
        return [*(t.data_ptr() for t in self.tensors), self.param.numel()]

    def is_aligned(self) -> bool:
        """Whether groups of 8 elements can be loaded at once."""
        return self.param.numel() % GROUP == 0 and all(t.data_ptr() % 16 == 0 for t in self.tensors)


@dataclass(frozen=True)
class Launch:
    """Tensors of one launch: the same dtypes and alignment."""

    weight: torch.dtype
    moment: torch.dtype
    grad: torch.dtype
    aligned: bool
    tiles: torch.Tensor


class ParameterTable:
    """Parameters on one device and their moments; `step` updates all that have a gradient.

    Example:
        table = ParameterTable([Member(w, torch.zeros_like(w), torch.zeros_like(w), index=7)])
        table.step([w.grad], lr=[1e-3], weight_decay=[0.1], beta1=0.9, beta2=0.999, eps=1e-8, step=1)
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)
        self.device = members[0].param.device
        check_device(impl_triton._adamw_kernel, members[0].param)
        for m in self.members:
            assert all(t.is_contiguous() for t in m.tensors), "weights and moments must be contiguous"
            assert m.exp_avg.dtype == m.exp_avg_sq.dtype, (m.exp_avg.dtype, m.exp_avg_sq.dtype)
            assert m.param.device == self.device, "one table per device"
        self.config = configuration(capability_of(members[0].param))
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
        scale = self._unscaled
        if isinstance(grad_scale, torch.Tensor):
            scale = grad_scale.to(self.device, torch.float32, non_blocking=True)
        elif grad_scale != 1.0:
            scale = torch.full_like(self._unscaled, grad_scale)
        arguments = self._arguments(beta1, beta2, eps, step) | {
            "scale_ptr": scale,
            "skip_ptr": None if skip is None else skip.view(torch.uint8),
            "STOCHASTIC": stochastic_rounding,
        }
        # for a single tensor, as in `OptimizerInBackward`, the five values are kernel arguments, without a copy
        one = tuple(int(x) for x in live[:, 0]) if len(self.members) == 1 else (0,) * 5
        where = None if len(self.members) == 1 else live.to(self.device, non_blocking=True)
        for launch in self.launches:
            impl_triton._adamw_kernel[(len(launch.tiles),)](
                launch.tiles, self.records, where, len(self.members), *one, **arguments,
                WEIGHT=TYPES[launch.weight], MOMENT=TYPES[launch.moment], GRAD=TYPES[launch.grad],
                ALIGNED=launch.aligned, SIZE=self.config.size, TIMES=self.config.times,
                STAGES=self.config.stages, num_warps=self.config.warps, enable_fp_fusion=False,
            )  # fmt: skip

    @staticmethod
    def _arguments(beta1: float, beta2: float, eps: float, step: int) -> dict[str, Any]:
        """The step's constants in fp32, as torch computes them from Python's numbers."""
        pull = np.float32(1 - beta1)
        near = bool(pull < 0.5)  # torch's lerp: m + w (g − m), or g − (g − m) (1 − w) where w ≥ 1/2
        # torch multiplies by the reciprocal of a Python scalar instead of dividing
        inverse_root = np.float32(1) / np.float32(math.sqrt(1 - beta2**step))
        return {
            "pull": float(pull if near else np.float32(1) - pull),
            "NEAR": near,
            "beta2": beta2,
            "rest2": 1 - beta2,
            "inverse_root": float(inverse_root),
            "eps": eps,
        }

    def _prepare(self, grads: list[torch.Tensor | None]) -> None:
        """Rebuilds tables and launches when a weight's address or the gradients' dtype changed."""
        addresses = [m.param.data_ptr() for m in self.members]
        kinds = [None if g is None else (g.dtype, g.data_ptr() % 16 == 0) for g in grads]
        if addresses == self.addresses and kinds == self.kinds:
            return
        self.addresses, self.kinds = addresses, kinds
        self.records = torch.tensor([m.record() for m in self.members], dtype=torch.int64).to(self.device)
        together: dict[tuple[torch.dtype, torch.dtype, torch.dtype, bool], list[np.ndarray]] = {}
        size = self.config.size
        for i, (m, kind) in enumerate(zip(self.members, kinds, strict=True)):
            if kind is not None:
                key = (m.param.dtype, m.exp_avg.dtype, kind[0], m.is_aligned() and kind[1])
                tiles = np.arange(0, -(-m.param.numel() // size), self.config.times, dtype=np.int64)
                together.setdefault(key, []).append(tiles << 32 | i)
        self.launches = [
            Launch(*key, torch.from_numpy(np.concatenate(tiles)).to(self.device))
            for key, tiles in together.items()
        ]

    def _live(
        self,
        grads: list[torch.Tensor | None],
        lr: Sequence[float],
        weight_decay: Sequence[float],
        beta1: float,
        step: int,
        seed: int,
    ) -> torch.Tensor:
        """int64 [5, n]: gradients' addresses (0: none), rate and decay as fp32, the random keys of each stream."""
        count = len(self.members)
        # a new pinned buffer per step: torch's allocator does not reuse it before the copy is done
        pinned = self.device.type == "cuda" and count > 1
        host = torch.empty(5, count, dtype=torch.int64, pin_memory=pinned)
        rows = host.numpy()
        rows[0] = [0 if g is None else g.data_ptr() for g in grads]
        rates = np.array(lr, np.float64)
        pair = rows[1].view(np.float32).reshape(count, 2)
        pair[:, 0] = -rates / (1 - beta1**step)
        pair[:, 1] = 1 - rates * np.array(weight_decay, np.float64)
        for row, stream in zip(rows[2:], STREAMS.values(), strict=True):
            if count == 1:  # a fifth of the time of arrays with one element
                key0, key1 = keys(seed, step, self.members[0].index, stream)
                row.view(np.uint64)[0] = key1 << 32 | key0
            else:
                row[:] = hashing_keys(seed, step, self.indices, stream).view(np.int64)
        return host
