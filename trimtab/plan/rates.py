"""Time of one kernel on a device: a roofline with measured efficiencies. No torch.

A kernel takes at least max(FLOPs / rate, bytes / bandwidth). The time above that bound depends on its kind, its
implementation and its size, and was measured (`trimtab.facts.calibration.KernelSample`):

- kernels bound by memory traffic: a line, `overhead + roofline / efficiency`, fitted to the samples of their kind;
- matmuls, attention and the loss: an efficiency interpolated between samples of similar sizes.

An unmeasured device uses the efficiencies of a measured device with the rates of its own data sheet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from trimtab.facts.calibration import Calibration, KernelSample
from trimtab.facts.operations import Kernel, OperationKind

INTERPOLATED = (OperationKind.PRODUCT, OperationKind.ATTENTION, OperationKind.LOSS)
"""Kinds whose efficiency depends on their dimensions and not only on the amount of work."""
ATTENTION_SCALE = (1.0, 4.0, 1.0)
"""Head sizes that differ by a factor of 2 are as far apart as 16 times as many keys: other kernels compute them."""
NEIGHBOURS = 4
"""Number of samples from which an efficiency is interpolated."""
METHODS = ("full", "lora", "nf4", "int8")
"""Training methods that differ in the host time of a launch."""
COMPILED_SHARE = 0.7
"""Host time of compiled layers relative to eager ones."""
BEST = 1.25
"""The largest efficiency: kernels with their input in cache exceed the roofline of device memory."""


Efficiencies = tuple[tuple[tuple[int, ...], float], ...]
"""(dimensions, efficiency) of samples."""


@dataclass(frozen=True)
class RooflineFit:
    """Seconds as a function of roofline seconds: `overhead + roofline / efficiency`."""

    overhead: float
    efficiency: float

    def seconds(self, roofline: float) -> float:
        """Returns the seconds of a kernel from its roofline seconds."""
        return self.overhead + roofline / self.efficiency


def fit_line(points: Sequence[tuple[float, float]]) -> RooflineFit:
    """Returns the line through (roofline seconds, measured seconds) with the smallest relative errors.

    Example:
        >>> line = fit_line([(8e-6, 12.7e-6), (64e-6, 70e-6)])
        >>> round(line.overhead * 1e6, 1), round(line.efficiency, 2)
        (4.5, 0.98)
    """
    assert points, "a line needs a sample"
    best = min(1 / BEST, min(measured / roofline for roofline, measured in points if roofline > 0))
    # Relative errors: both sides are divided by the measurement, 1 = overhead / y + slope · x / y.
    rows = [(1 / y, x / y) for x, y in points]
    aa = sum(a * a for a, _ in rows)
    ab = sum(a * b for a, b in rows)
    bb = sum(b * b for _, b in rows)
    sa, sb = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    if len(points) > 1 and determinant > 1e-12 * aa * bb:
        overhead = (sa * bb - sb * ab) / determinant
        slope = (aa * sb - ab * sa) / determinant
        if overhead >= 0 and slope >= best:
            return RooflineFit(overhead, 1 / slope)
    return RooflineFit(0.0, bb / sb)


@dataclass(frozen=True)
class Rates:
    """A device's FLOP/s and bandwidths, and the efficiency of each kind of kernel."""

    flops: Mapping[str, float]
    """FLOP/s of matmuls, by dtype."""
    copy: float
    """Bytes read and written per second."""
    measured: Calibration
    """The measured kernels; they may be from another device."""
    ceilings: tuple[float, float] | None = None
    """(FLOP/s, bytes/s) of the data sheet, if known: no kernel can be faster."""
    launch: float = 0.0
    """Host seconds per kernel in eager mode."""
    gap: float = 0.0
    """Device seconds between two kernels of a CUDA graph."""
    tiny: float = 0.0
    """Device seconds of a kernel with almost no work."""
    to_host: float = 0.0
    from_host: float = 0.0
    """Bytes per second over the host link."""
    disk_write: float | None = None
    basis: str = ""
    """A description of the source of the rates."""
    spread: tuple[float, float] = (1.0, 1.0)
    """Factors for the lower and upper end of an estimate's range."""
    _models: dict[tuple[OperationKind, str, str, bool, bool], RooflineFit | Efficiencies] = field(
        default_factory=dict, repr=False, compare=False
    )
    _seconds: dict[tuple[Kernel, str, str, bool], float] = field(
        default_factory=dict, repr=False, compare=False
    )

    def roofline(self, kernel: Kernel, dtype: str) -> float:
        """Returns the seconds of a kernel at the best measured rates."""
        arithmetic = kernel.flops / self._rate(dtype) if kernel.kind in INTERPOLATED else 0.0
        return max(arithmetic, kernel.moved / self.copy)

    def floor(self, kernel: Kernel, dtype: str) -> float:
        """Returns the minimum seconds of a kernel by the data sheet, or else by the best measured rates."""
        flops, copy = self.ceilings or (self._rate(dtype), self.copy)
        return max(kernel.flops / flops if kernel.kind in INTERPOLATED else 0.0, kernel.moved / copy)

    def host_seconds(self, name: str, *, compiled: bool = False) -> float:
        """Returns the host time per launch of a training method, or per updated chunk of an optimizer.

        Example:
            >>> rates = Rates({"bf16": 1e14}, 1e12, Calibration("a GPU", {"bf16": 1e14}, 1e12, 0.0), launch=5e-5)
            >>> rates.host_seconds("full"), rates.host_seconds("adamw_8bit")
            (5e-05, 0.0)
        """
        if not self.launch:
            return 0.0
        methods = dict.fromkeys(METHODS, self.launch)
        seconds = (methods | self.measured.host_seconds).get(name, 0.0)
        return COMPILED_SHARE * seconds if compiled else seconds

    def _rate(self, dtype: str) -> float:
        return self.flops.get(dtype) or max(self.flops.values())

    def seconds(self, kernel: Kernel, dtype: str, *, impl: str = "", backward: bool = False) -> float:
        """Returns the estimated seconds of a kernel.

        Example:
            >>> sample = KernelSample(OperationKind.NORM, "bf16", 0.0, 1e6, 2e-6)
            >>> rates = Rates({"bf16": 1e14}, 1e12, Calibration("a GPU", {"bf16": 1e14}, 1e12, 0.0, (sample,)))
            >>> rates.seconds(Kernel(OperationKind.NORM, 0.0, 3e6), "bf16")
            6e-06
        """
        arguments = (kernel, dtype, impl, backward)
        if arguments not in self._seconds:
            self._seconds[arguments] = self._estimate(*arguments)
        return self._seconds[arguments]

    def _estimate(self, kernel: Kernel, dtype: str, impl: str, backward: bool) -> float:
        roofline = self.roofline(kernel, dtype)
        if roofline == 0:
            return 0.0
        key = (kernel.kind, dtype, impl, backward, self._is_compute_bound(kernel, dtype))
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = self._model(*key)
        if isinstance(model, RooflineFit):
            return model.seconds(roofline)
        scale = ATTENTION_SCALE if kernel.kind is OperationKind.ATTENTION else (1.0, 1.0, 1.0)
        return roofline / interpolate(model, kernel.dims, scale)

    def _model(
        self, kind: OperationKind, dtype: str, impl: str, backward: bool, compute_bound: bool
    ) -> RooflineFit | Efficiencies:
        efficiencies = self._samples(kind, dtype, impl, backward, True) if compute_bound else ()
        return efficiencies or self._fit(kind, dtype, impl, backward, compute_bound)

    def _is_compute_bound(self, kernel: Kernel, dtype: str) -> bool:
        return kernel.kind in INTERPOLATED and kernel.flops / self._rate(dtype) >= kernel.moved / self.copy

    def _fit(
        self, kind: OperationKind, dtype: str, impl: str, backward: bool, compute_bound: bool
    ) -> RooflineFit:
        pairs = [
            (seconds, sample.seconds)
            for seconds, sample in self._pairs(kind, dtype, impl, backward, compute_bound)
        ]
        if pairs:
            return fit_line(pairs)
        everything = [(seconds, sample.seconds) for seconds, sample in self._all_memory_bound]
        return fit_line(everything) if everything else RooflineFit(0.0, 1.0)

    @cached_property
    def _all_memory_bound(self) -> list[tuple[float, KernelSample]]:
        """Samples used for kinds without measurements."""
        return [
            pair for pair in self._with_roofline(self.measured.samples) if pair[1].kind not in INTERPOLATED
        ]

    def _samples(
        self, kind: OperationKind, dtype: str, impl: str, backward: bool, compute_bound: bool
    ) -> Efficiencies:
        """Efficiencies of the samples most similar to a kernel."""
        return tuple(
            (sample.dims, min(seconds / sample.seconds, BEST))
            for seconds, sample in self._pairs(kind, dtype, impl, backward, compute_bound)
            if sample.dims
        )

    def _pairs(
        self, kind: OperationKind, dtype: str, impl: str, backward: bool, compute_bound: bool
    ) -> list[tuple[float, KernelSample]]:
        """(roofline seconds, sample) of the same kind. Filters by direction, implementation and dtype, in this order,
        and skips a filter that no sample passes."""
        pairs = [
            (seconds, sample)
            for seconds, sample in self._with_roofline(self.measured.samples)
            if sample.kind is kind
            and (kind not in INTERPOLATED or self._sample_is_compute_bound(sample) == compute_bound)
        ]
        for same in (
            lambda sample: sample.backward == backward,
            lambda sample: sample.impl.partition(" ")[0] == impl.partition(" ")[0],
            lambda sample: sample.impl == impl,
            lambda sample: sample.dtype == dtype,
        ):
            pairs = [pair for pair in pairs if same(pair[1])] or pairs
        return pairs

    def _sample_is_compute_bound(self, sample: KernelSample) -> bool:
        rate = self.measured.flops.get(sample.dtype) or max(self.measured.flops.values())
        return sample.flops / rate >= sample.moved / self.measured.copy

    def _with_roofline(self, samples: Iterable[KernelSample]) -> list[tuple[float, KernelSample]]:
        """Pairs samples with their roofline seconds on the device that was measured."""
        pairs = []
        for sample in samples:
            rate = self.measured.flops.get(sample.dtype) or max(self.measured.flops.values())
            arithmetic = sample.flops / rate if sample.kind in INTERPOLATED else 0.0
            pairs.append((max(arithmetic, sample.moved / self.measured.copy), sample))
        return pairs


def interpolate(
    samples: Efficiencies, dims: tuple[int, ...], scale: tuple[float, ...] = (1.0, 1.0, 1.0)
) -> float:
    """Returns the mean efficiency of the nearest samples, weighted by inverse squared distance.

    Distances are between logarithms of dimensions, times `scale`; samples of the kernel's own dimensions are averaged.

    Example:
        >>> interpolate((((1024, 1024, 1024), 0.5), ((4096, 4096, 4096), 0.9)), (4096, 4096, 4096))
        0.9
        >>> round(interpolate((((1024, 1024, 1024), 0.5), ((4096, 4096, 4096), 0.9)), (2048, 2048, 2048)), 3)
        0.7
    """
    assert all(len(sample_dims) == len(dims) for sample_dims, _ in samples), (
        "samples of one kind have the same dimensions"
    )
    distances = sorted(
        (
            sum(
                (s * math.log(max(a, 1) / max(b, 1))) ** 2
                for s, a, b in zip(scale, dims, sample_dims, strict=True)
            ),
            efficiency,
        )
        for sample_dims, efficiency in samples
    )
    same = [efficiency for squared, efficiency in distances if squared < 1e-6]
    if same:
        return sum(same) / len(same)
    weights = [(1 / squared, efficiency) for squared, efficiency in distances[:NEIGHBOURS]]
    return sum(w * e for w, e in weights) / sum(w for w, _ in weights)
