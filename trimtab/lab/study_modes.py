"""Compiles or captures a study step, and verifies it against the eager step.

Loss, global gradient norm and the norm of each gradient are compared before anything is timed. A step that differs from
eager mode is not timed.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trimtab.kernels.triton_support import runs_triton
from trimtab.lab.step_settings import Loss, Mode, TimedPart
from trimtab.lab.study import NotSupported
from trimtab.lab.study_graphs import GraphStep
from trimtab.lab.study_step import StudyStep
from trimtab.lab.timing import Run, synchronize
from trimtab.lab.worker import caused_by_out_of_memory

SMALL_NORM = 0.01
"""Lower bound, as a share of the largest norm, of the norm that a gradient's difference is divided by: small gradients
are differences of large sums, with large relative rounding errors."""


@dataclass(frozen=True)
class Tolerance:
    """Allowed relative differences: of the loss and the global gradient norm, and of each gradient's norm."""

    whole: float
    each: float


FP32_TOLERANCE = Tolerance(whole=1e-4, each=1e-3)
TOLERANCE = Tolerance(whole=5e-3, each=2e-2)
"""For TF32, bf16 and fp16: compiled kernels keep intermediate results in fp32 that eager mode rounds."""


@dataclass(frozen=True)
class Fingerprint:
    """Loss and gradient norms of one step."""

    loss: float
    norms: tuple[float, ...]
    scale: float
    """The divisor of loss differences: a sum of logits may be near zero by chance."""


@dataclass(frozen=True)
class Preparation:
    """Compile time of a step, and its difference to eager mode."""

    compile_seconds: float | None = None
    """The first forward and backward pass, compilation included; None if nothing is compiled."""
    from_cache: bool = False
    """Whether compiled kernels came from the cache on disk."""
    difference: float | None = None
    """The largest relative difference of loss and gradient norms to eager mode; None in eager mode, and if eager mode
    runs out of memory."""


@dataclass(frozen=True)
class ReadyStep:
    """A step in one mode, ready to be timed."""

    prepare: Callable[[], Run]
    """Called before each run; returns the run."""
    preparation: Preparation = Preparation()


def ready_step(step: StudyStep, mode: Mode, part: TimedPart) -> ReadyStep:
    """Prepares a part of a step in a mode.

    Raises:
        NotSupported: the device has no CUDA graphs, or there is no compiler.
        RuntimeError: the results differ from eager mode.

    Example:
        >>> from trimtab.lab.step_settings import StepSettings
        >>> ready = ready_step(StudyStep(StepSettings("tiny", 16, 2)), Mode.EAGER, TimedPart.FORWARD)
        >>> ready.prepare()().shape
        torch.Size([])
    """
    check_mode(mode, step.settings.device)
    if mode is Mode.EAGER:
        return ReadyStep(step.prepared(part))
    expected = _eager_fingerprint(step)
    if mode is Mode.GRAPHS:
        captured = GraphStep(step, part)
        loss, norms = captured.verify()
        actual = Fingerprint(loss, norms, _scale(step, loss))
        return ReadyStep(captured.prepared, Preparation(difference=_compare(step, actual, expected)))
    seconds, from_cache = compile_step(step)
    difference = _compare(step, fingerprint(step), expected)
    return ReadyStep(step.prepared(part), Preparation(seconds, from_cache, difference))


def check_mode(mode: Mode, device: str) -> None:
    """Raises NotSupported for a mode that a device cannot run, before a model is built.

    Example:
        >>> check_mode(Mode.GRAPHS, "cpu")
        Traceback (most recent call last):
        ...
        trimtab.lab.study.NotSupported: CUDA graphs need a CUDA GPU
    """
    cuda = device.startswith("cuda")
    if mode is Mode.GRAPHS and not cuda:
        raise NotSupported("CUDA graphs need a CUDA GPU")
    if mode is Mode.COMPILED and cuda and not runs_triton(torch.device(device)):
        raise NotSupported("torch.compile needs Triton, which does not run on this GPU or is not installed")


def compile_step(step: StudyStep) -> tuple[float, bool]:
    """Compiles the whole model of a step and runs it once; (seconds, whether kernels came from the cache).

    Example:
        >>> compile_step(StudyStep(StepSettings("tiny", 16, 2)))           # doctest: +SKIP
        (35.8, False)
    """
    # Here, because the compiler takes as long to import as all of torch, and most worker processes never compile.
    from torch import _dynamo as dynamo
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.exc import InvalidCxxCompiler

    from trimtab.adapt.compiling import use_cache_folder

    use_cache_folder()
    dynamo.reset()  # programs of previous cells guard other models
    dynamo.utils.counters.clear()
    step.compiled_loss = torch.compile(step.plain_loss, dynamic=False)
    device = step.settings.device
    start = time.perf_counter()
    try:
        step.forward_backward()
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, InvalidCxxCompiler):
            raise NotSupported("torch.compile needs a C++ compiler, and found none") from None
        raise
    synchronize(device)
    seconds = time.perf_counter() - start
    step.drop_gradients()
    counted = dynamo.utils.counters["inductor"]
    return seconds, counted["fxgraph_cache_hit"] > 0 and counted["fxgraph_cache_miss"] == 0


def fingerprint(step: StudyStep) -> Fingerprint:
    """Loss and gradient norms of one forward and backward pass.

    Example:
        >>> from trimtab.lab.step_settings import StepSettings
        >>> len(fingerprint(StudyStep(StepSettings("tiny", 16, 2))).norms)
        21
    """
    step.drop_gradients()
    loss = step.forward()
    step.backward(loss)
    norms = torch.stack([torch.linalg.vector_norm(p.grad) for p in step.parameters if p.grad is not None])
    step.drop_gradients()
    value = float(loss.detach())
    return Fingerprint(value, tuple(norms.tolist()), _scale(step, value))


def disagreement(actual: Fingerprint, expected: Fingerprint) -> tuple[float, float]:
    """Relative differences: (of the loss or the global gradient norm, the larger; the largest of a gradient's norm).

    Example:
        >>> disagreement(Fingerprint(1.0, (3.0, 4.0), 1.0), Fingerprint(1.0, (3.0, 4.04), 1.0))[1] < 0.0101
        True
    """
    if not all(
        math.isfinite(value) for value in (actual.loss, expected.loss, *actual.norms, *expected.norms)
    ):
        return math.inf, math.inf  # `max` would pass over a NaN
    loss = abs(actual.loss - expected.loss) / expected.scale
    if not expected.norms:
        return loss, 0.0
    floor = SMALL_NORM * max(expected.norms)
    each = max(abs(a - b) / max(b, floor, 1e-30) for a, b in zip(actual.norms, expected.norms, strict=True))
    total = math.hypot(*expected.norms)
    return max(loss, abs(math.hypot(*actual.norms) - total) / max(total, 1e-30)), each


def _eager_fingerprint(step: StudyStep) -> Fingerprint | None:
    """The eager step's fingerprint; None if eager mode runs out of memory: other modes may need less."""
    try:
        return fingerprint(step)
    except (RuntimeError, MemoryError) as error:
        if not caused_by_out_of_memory(error):
            raise
    step.drop_gradients()
    gc.collect()
    if step.settings.device.startswith("cuda"):
        torch.cuda.empty_cache()
    return None


def _compare(step: StudyStep, actual: Fingerprint, expected: Fingerprint | None) -> float | None:
    if expected is None:
        return None
    if not actual.norms:  # a captured forward pass has no gradients
        expected = Fingerprint(expected.loss, (), expected.scale)
    allowed = FP32_TOLERANCE if step.settings.precision.value == "fp32" else TOLERANCE
    whole, each = disagreement(actual, expected)
    if whole > allowed.whole or each > allowed.each:
        raise RuntimeError(
            f"loss or gradients differ from eager mode: {whole:.2g} in total (allowed {allowed.whole:g}), "
            f"{each:.2g} in one parameter (allowed {allowed.each:g})"
        )
    return max(whole, each)


def _scale(step: StudyStep, loss: float) -> float:
    if step.settings.loss is Loss.CROSS_ENTROPY:
        return max(abs(loss), 1e-30)
    logits = step.ids_BT.numel() * step.decoder.shape.vocab_size
    return max(abs(loss), math.sqrt(logits))
