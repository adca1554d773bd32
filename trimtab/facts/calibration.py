"""What a device was measured to do: the figures that the time model is built on. No torch.

`trimtab.lab.calibrate` measures a machine and writes one file; the planner reads it. Measurements of other people's
devices that ship with the package have the same form.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from trimtab.facts.operations import Kind

VERSION = 1


@dataclass(frozen=True)
class KernelSample:
    """One measured run of an operation, in the terms of its declaration (`trimtab.facts.operations.Pass`).

    Example:
        >>> sample = KernelSample(Kind.PRODUCT, "bf16", flops=2.0 * 4096**3, moved=3.0 * 2 * 4096**2, seconds=2e-4,
        ...                       dims=(4096, 4096, 4096))
        >>> round(sample.flops / sample.seconds / 1e12)
        687
    """

    kind: Kind
    dtype: str
    """fp32, bf16, fp16, or of a dequantization the format that is read: nf4, int8."""
    flops: float
    moved: float
    """Bytes read and written at the least, as the operation declares them."""
    seconds: float
    """Median of several runs, device time only."""
    backward: bool = False
    impl: str = ""
    """The implementation, where there are several (`triton`, `reference`, `sdpa_flash`, …)."""
    dims: tuple[int, ...] = ()
    """Of a product [m, k] · [k, n]: (m, n, k); of attention: (keys that a query sees on average, head size); of the
    loss: (tokens, vocabulary, hidden size). Of other kinds their sizes, which only tell samples apart."""


@dataclass(frozen=True)
class Calibration:
    """The measured rates of one device.

    Example:
        >>> calibration = Calibration("a CPU", flops={"fp32": 1e11}, copy=2e10, launch_seconds=5e-6)
        >>> Calibration.from_dict(calibration.to_dict()) == calibration
        True
    """

    device: str
    """As torch or the operating system names it."""
    flops: dict[str, float]
    """The best rate of matrix products, by dtype."""
    copy: float
    """The best rate of a copy, bytes read and written per second."""
    launch_seconds: float
    """Host time to launch one operation in eager mode; on a CPU the overhead of one operator."""
    samples: tuple[KernelSample, ...] = ()
    to_host: float | None = None
    """Bytes per second from the device to pinned host memory; None on a CPU."""
    from_host: float | None = None
    disk_write: float | None = None
    """Bytes per second of a file that is written and synchronized."""
    disk_read: float | None = None
    threads: int | None = None
    """CPU threads during the measurement."""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    measured_at: str = ""
    """ISO 8601, UTC."""
    source: str = ""
    """Of shipped measurements, the file they come from; empty where this machine was measured."""
    warnings: tuple[str, ...] = ()
    """What made the measurement doubtful: other processes, a throttled clock."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        plain = dataclasses.asdict(self)
        plain["samples"] = [{**sample, "kind": sample["kind"].value} for sample in plain["samples"]]
        return {"version": VERSION, **plain}

    @staticmethod
    def from_dict(plain: dict[str, Any]) -> Calibration:
        """The calibration that `to_dict` wrote; KeyError, TypeError or ValueError where a file holds something else."""
        values = {key: value for key, value in plain.items() if key != "version"}
        if plain["version"] != VERSION:
            raise ValueError(f"version {plain['version']} of a calibration is not known")
        values["samples"] = tuple(
            KernelSample(**{**sample, "kind": Kind(sample["kind"]), "dims": tuple(sample["dims"])})
            for sample in values["samples"]
        )
        values["warnings"] = tuple(values["warnings"])
        return Calibration(**values)
