"""Measured performance of a device, the basis of the time model. No torch.

`trimtab.lab.calibrate` measures a machine and writes one file; the planner reads it. The measurements of other devices
that ship with the package have the same form.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from trimtab.facts.operations import OperationKind

VERSION = 2


@dataclass(frozen=True)
class KernelSample:
    """One measured run of an operation, in the terms of its declaration (`trimtab.facts.operations.Pass`).

    Example:
        >>> sample = KernelSample(OperationKind.PRODUCT, "bf16", flops=2.0 * 4096**3, moved=3.0 * 2 * 4096**2,
        ...                       seconds=2e-4, dims=(4096, 4096, 4096))
        >>> round(sample.flops / sample.seconds / 1e12)
        687
    """

    kind: OperationKind
    dtype: str
    """fp32, bf16, fp16, or for dequantization the format of the packed weights: nf4, int8."""
    flops: float
    moved: float
    """Minimum bytes read and written, as the operation declares them."""
    seconds: float
    """Median of several runs, device time only."""
    backward: bool = False
    impl: str = ""
    """The implementation, if there are several (`triton`, `reference`, `sdpa_flash`, …)."""
    dims: tuple[int, ...] = ()
    """For a matrix product [m, k] · [k, n]: (m, n, k); for attention: (average number of keys per query, head size,
    queries of all heads); for the loss: (tokens, vocabulary, hidden size). For other kinds, sizes that only distinguish
    samples."""


@dataclass(frozen=True)
class Calibration:
    """The measured rates of one device.

    Example:
        >>> calibration = Calibration("a CPU", flops={"fp32": 1e11}, copy=2e10, launch_seconds=5e-6)
        >>> Calibration.from_dict(calibration.to_dict()) == calibration
        True
    """

    device: str
    """Name that torch or the operating system reports."""
    flops: dict[str, float]
    """Peak measured FLOP/s of matrix products, by dtype."""
    copy: float
    """Peak measured bandwidth of a copy, in bytes read and written per second."""
    launch_seconds: float
    """Host time to launch one operation in eager mode; on a CPU the overhead of one operator."""
    samples: tuple[KernelSample, ...] = ()
    host_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Host time in eager mode: per declared launch of a training method (full, lora, nf4, int8), and per updated chunk
    of an optimizer; empty if it was not measured."""
    to_host: float | None = None
    """Bytes per second from the device to pinned host memory; None on a CPU."""
    from_host: float | None = None
    disk_write: float | None = None
    """Bytes per second of writing a file with fsync."""
    disk_read: float | None = None
    threads: int | None = None
    """CPU threads during the measurement."""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    measured_at: str = ""
    """ISO 8601, UTC."""
    source: str = ""
    """For shipped measurements, the file they come from; empty if this machine was measured."""
    warnings: tuple[str, ...] = ()
    """Reasons to doubt the measurement: other processes, a throttled clock."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, for JSON."""
        plain = dataclasses.asdict(self)
        plain["samples"] = [{**sample, "kind": sample["kind"].value} for sample in plain["samples"]]
        return {"version": VERSION, **plain}

    @staticmethod
    def from_dict(plain: dict[str, Any]) -> Calibration:
        """Inverse of `to_dict`; raises KeyError, TypeError or ValueError for malformed data."""
        values = {key: value for key, value in plain.items() if key != "version"}
        if plain["version"] != VERSION:
            raise ValueError(f"calibration version {plain['version']} is not supported")
        values["samples"] = tuple(
            KernelSample(**{**sample, "kind": OperationKind(sample["kind"]), "dims": tuple(sample["dims"])})
            for sample in values["samples"]
        )
        values["warnings"] = tuple(values["warnings"])
        return Calibration(**values)
