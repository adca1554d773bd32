"""The rates of a device: calibrated on this machine, measured on the same model, or from its data sheet. No torch."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from importlib.resources import files

from trimtab.facts.calibration import Calibration, KernelSample
from trimtab.facts.devices import DeviceFacts
from trimtab.plan.rates import Rates

SHIPPED = "nvidia-h200"
"""The device whose measurements ship with the package; its efficiencies are used for unmeasured devices."""
GAP = 4e-7
"""Device seconds between two kernels of a CUDA graph: 35.8 − 34.7 ms over 1472 kernels and 237.8 − 234.3 ms over 4569
(benchmarks/results/step-profiles-h200.txt)."""
TINY = 7.5e-7
"""Device seconds of a kernel that casts, scales or adds a small tensor: 1.42 ms over 448, 1.14 ms over 512."""
SAME_RATE = 0.05
"""Largest difference between the rates of a calibrated machine and those of the measured device of the same model, up
to which both count as the same."""
BORROWED_RANGE = (0.8, 1.6)
"""The range around an estimate for an unmeasured device, as factors: its kernels may reach a larger or smaller
share of its peak rates than those of the measured device."""
MEASURED_RANGE = (0.9, 1.15)
"""The range around an estimate from measured kernels, calibrated on this machine or shipped, as factors."""


def rates_of(device: DeviceFacts, dtype: str) -> Rates | None:
    """Returns a device's rates, or None if they are unknown.

    Example:
        >>> h200 = DeviceFacts("NVIDIA H200", "cuda", 150 * 10**9, capability=(9, 0), bf16=True)
        >>> rates_of(h200, "bf16").basis
        'measured on an NVIDIA H200'
        >>> rates_of(DeviceFacts("a CPU", "cpu", 2**33), "fp32") is None
        True
    """
    if device.calibration is not None:
        return _rates_from_calibration(device, _with_shipped(device.calibration), dtype)
    if device.kind != "cuda":
        return None
    measured = shipped_calibration()
    if device.name == measured.device:
        return dataclasses.replace(
            _rates_from_calibration(device, measured, dtype), basis=f"measured on an {measured.device}"
        )
    ceilings = _ceilings(device, dtype)
    return None if ceilings is None else _rates_from_data_sheet(device, measured, dtype, *ceilings)


def _ceilings(device: DeviceFacts, dtype: str) -> tuple[float, float] | None:
    ceiling, bandwidth = device.ceiling(dtype), device.bandwidth
    return None if ceiling is None or bandwidth is None else (ceiling[0], bandwidth)


def _rates_from_calibration(device: DeviceFacts, measured: Calibration, dtype: str) -> Rates:
    when = measured.measured_at.partition("T")[0]
    return Rates(
        flops=measured.flops,
        copy=measured.copy,
        measured=measured,
        ceilings=_ceilings(device, dtype),
        launch=measured.launch_seconds if device.kind == "cuda" else 0.0,
        gap=GAP if device.kind == "cuda" else 0.0,
        tiny=TINY if device.kind == "cuda" else 0.0,
        to_host=measured.to_host or device.host_link,
        from_host=measured.from_host or device.host_link,
        disk_write=measured.disk_write,
        basis=f"calibrated on this machine{f' on {when}' if when else ''}{_doubt(measured)}",
        spread=MEASURED_RANGE,
    )


def _with_shipped(measured: Calibration) -> Calibration:
    """The calibration with the shipped samples if it is of the same device at the same rates: they are from whole
    training steps, and a calibration times kernels one by one in a minute."""
    shipped = shipped_calibration()
    products, copies = measured.flops.get("bf16", 0.0) / shipped.flops["bf16"], measured.copy / shipped.copy
    if measured.device != shipped.device or max(abs(products - 1), abs(copies - 1)) > SAME_RATE:
        return measured
    covered = {_kind(sample) for sample in shipped.samples}
    return dataclasses.replace(
        measured,
        flops={**measured.flops, **shipped.flops},
        copy=shipped.copy,
        samples=(*shipped.samples, *(one for one in measured.samples if _kind(one) not in covered)),
    )


def _kind(sample: KernelSample) -> tuple[object, ...]:
    return sample.kind, sample.dtype, sample.backward, sample.impl


def _doubt(measured: Calibration) -> str:
    """The first reason to doubt a calibration, as an addition to the basis; empty if there is none."""
    return f", with the warning that {measured.warnings[0]}" if measured.warnings else ""


def _rates_from_data_sheet(
    device: DeviceFacts, measured: Calibration, dtype: str, flops: float, bandwidth: float
) -> Rates:
    """Rates from a data sheet, scaled by the efficiencies of matmuls and copies on the measured device."""
    sheet = DeviceFacts(measured.device, "cuda", 1)
    ceilings = _ceilings(sheet, "bf16")
    assert ceilings is not None, "the measured device has a data sheet"
    flops_efficiency, copy_efficiency = measured.flops["bf16"] / ceilings[0], measured.copy / ceilings[1]
    return Rates(
        flops={dtype: flops * flops_efficiency},
        copy=bandwidth * copy_efficiency,
        measured=measured,
        ceilings=(flops, bandwidth),
        launch=measured.launch_seconds,
        gap=GAP,
        tiny=TINY,
        to_host=device.host_link,
        from_host=device.host_link,
        basis=f"the data sheet of {device.name} and the efficiencies measured on an {measured.device}; "
        "not measured on this device",
        spread=BORROWED_RANGE,
    )


@cache
def shipped_calibration() -> Calibration:
    """Returns the measurements that ship with the package."""
    text = files("trimtab.facts").joinpath("catalogue", "calibrations", f"{SHIPPED}.json").read_text("utf-8")
    return Calibration.from_dict(json.loads(text))
