"""Measures one cell: verifies the backend at a small length, then measures memory and times at the cell's length."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import _dynamo as dynamo

from trimtab.adapt.compiling import compilations, use_cache_folder
from trimtab.facts.devices import host_memory
from trimtab.facts.errors import ModelError
from trimtab.facts.units import format_bytes
from trimtab.kernels.attention import choose_attention
from trimtab.kernels.attention.spec import Case, make_inputs
from trimtab.kernels.triton_support import runs_triton
from trimtab.lab.contests import disagreement
from trimtab.lab.memory import peak_bytes, retained_bytes
from trimtab.lab.studies.attention.formula import minimum_bytes
from trimtab.lab.studies.attention.passes import Attend, AttentionRun, build_attention
from trimtab.lab.studies.attention.results import AttentionResult, PassTimes
from trimtab.lab.studies.attention.settings import PLAIN, TILED, AttentionSettings, Mode, is_weighted_sum
from trimtab.lab.study import NotSupported, PredictedOutOfMemory
from trimtab.lab.timing import cache_state, synchronize, time_samples

CHECKED_LENGTH, CHECKED_BATCH = 256, 3
"""Shape on which a backend is compared with fp64 before it is timed. The batch is uncommon, so that code compiled for
this shape is not found in the cache when the compile time of a cell's own shape is measured."""
RESULTS = ("o", "dq", "dk", "dv")


class WrongResult(Exception):
    """A backend has a larger error than allowed; it is not timed."""


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Measures one cell of the study.

    Example:
        >>> cell = AttentionSettings("sdpa_flash", length=64, batch=1, repetitions=2)
        >>> len(measure(cell.to_dict())["forward"]["times_ms"])
        2
    """
    if is_weighted_sum(settings):
        from trimtab.lab.studies.attention.weighted_sum import measure_weighted_sum

        return measure_weighted_sum(settings)
    return measure_attention(AttentionSettings.from_dict(settings)).to_dict()


def measure_attention(settings: AttentionSettings) -> AttentionResult:
    """Verifies the backend, then measures memory and times."""
    if settings.memory_bytes is not None:
        needed, available = format_bytes(minimum_bytes(settings)), format_bytes(settings.memory_bytes)
        raise PredictedOutOfMemory(f"needs at least {needed}, and the device has {available}")
    _check(settings)
    return _measured(settings)


def prepare(settings: dict[str, Any]) -> dict[str, Any]:
    """Compiles what a cell needs, in a process alongside others; returns the fields of its result that are known then.

    Example:
        >>> prepare(AttentionSettings("sdpa_flash", length=64, batch=1).to_dict())
        {}
    """
    from trimtab.lab.preparing import without_tuning

    chosen = AttentionSettings.from_dict(settings)
    with without_tuning():
        _check(chosen)
        run = AttentionRun(chosen)
        if is_compiled(chosen):
            seconds, cached = _first_call(run)
            return {"compile_seconds": round(seconds, 3), "compile_cached": cached}
        run.forward_backward()
        synchronize(chosen.device)
    return {}


def _check(settings: AttentionSettings) -> None:
    """Verifies the backend at a small length."""
    check_supported(settings, _capability(settings.device), triton=runs_triton(torch.device(settings.device)))
    if is_compiled(settings):
        use_cache_folder()
        dynamo.reset()  # otherwise the second shape would be compiled with dynamic shapes
    _verify(replace(settings, batch=CHECKED_BATCH, length=CHECKED_LENGTH, repetitions=1, seconds=1.0))
    _release(settings.device)


def check_supported(settings: AttentionSettings, capability: tuple[int, int] | None, *, triton: bool) -> None:
    """Raises NotSupported if the backend does not run on the device with these settings.

    Args:
        settings: the cell.
        capability: compute capability of a CUDA device; None on a CPU.
        triton: whether Triton kernels run on the device.

    Example:
        >>> check_supported(AttentionSettings("sdpa_flash", device="cuda", dtype="bf16"), (9, 0), triton=True)
    """
    if settings.backend == TILED:
        if settings.mode is Mode.COMPILED:
            raise NotSupported("torch.compile would unroll its loop over tiles into one graph")
        return
    try:
        choose_attention(
            device=settings.device,
            capability=capability,
            dtype=settings.dtype,
            head_dim=settings.head_dim,
            packed=False,
            window=None,
            training=True,
            requested=settings.backend,
            tokens=settings.length,
            triton=triton,
            causal=settings.causal,
        )
    except ModelError as error:
        raise NotSupported(error.cause.partition("cannot be used here: ")[2] or error.cause) from None


def is_compiled(settings: AttentionSettings) -> bool:
    """Whether torch.compile is used: FlexAttention is always compiled.

    Example:
        >>> is_compiled(AttentionSettings("flex")), is_compiled(AttentionSettings("sdpa_math"))
        (True, False)
    """
    return settings.mode is Mode.COMPILED or settings.backend == "flex"


@cache  # once in a process for each backend and dtype, not for each length
def _verify(settings: AttentionSettings) -> None:
    """Compares output and gradients with the reference in fp64; raises WrongResult if their error exceeds that of the
    reference in the same dtype, plus a small share."""
    s = settings
    case = Case("check", s.batch, s.length, s.length, s.heads, s.heads, s.head_dim, causal=s.causal)
    plain = build_attention(replace(s, backend=PLAIN, mode=Mode.EAGER))
    truth = _results(plain, *make_inputs(case, "fp64", s.device)[:4])
    same_dtype = _results(plain, *make_inputs(case, s.dtype, s.device)[:4])
    got = _results(build_attention(s), *make_inputs(case, s.dtype, s.device)[:4])
    sentence = disagreement(RESULTS, got, truth, same_dtype, s.dtype)
    if sentence is not None:
        raise WrongResult(f"{s.backend} in {s.dtype} is not timed: {sentence}")


def _results(
    attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor
) -> list[torch.Tensor]:
    """Output and gradients, in the order of `RESULTS`."""
    inputs = [x.requires_grad_() for x in (q, k, v)]
    o = attend(*inputs)
    return [o.detach(), *torch.autograd.grad(o, inputs, gradient)]


def _measured(settings: AttentionSettings) -> AttentionResult:
    device, usable = settings.device, _usable_bytes(settings.device)
    run = AttentionRun(settings)
    compile_seconds, compile_cached = _first_call(run) if is_compiled(settings) else (0.0, False)
    if not is_compiled(settings):
        run.forward_backward()  # allocates library workspaces, which are not memory of the operation
    saved = retained_bytes(run.forward, device)
    peak = peak_bytes(run.forward_backward, device)
    forward, backward = (
        time_samples(
            prepare,
            device=device,
            repetitions=settings.repetitions,
            budget_ms=1e3 * settings.seconds / 2,
            warm_up=1,
        )
        for prepare in (run.prepare_forward, run.prepare_backward)
    )
    return AttentionResult(
        PassTimes(forward, backward, cache_state(device)),
        before_backward_bytes=run.input_bytes + saved,
        peak_bytes=run.input_bytes + peak,
        usable_bytes=usable,
        compile_seconds=compile_seconds,
        compile_cached=compile_cached,
    )


def _first_call(run: AttentionRun) -> tuple[float, bool]:
    """Runs both passes once; returns (seconds of compiling, whether all compiled code was in torch's cache)."""
    dynamo.reset()  # the check has compiled another shape
    counters = dynamo.utils.counters["inductor"]
    hits, misses, (_, seconds) = counters["fxgraph_cache_hit"], counters["fxgraph_cache_miss"], compilations()
    run.forward_backward()
    missed = counters["fxgraph_cache_miss"] > misses
    return compilations()[1] - seconds, counters["fxgraph_cache_hit"] > hits and not missed


def _release(device: str) -> None:
    """Empties the allocator's cache after earlier cells of this process."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def _capability(device: str) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if device.startswith("cuda") else None


def _usable_bytes(device: str) -> int:
    """Total memory of a GPU; on a host, the remainder of this process's limit, or all memory without a limit."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info()[1]
    import resource  # not on Windows, where no limit is set

    everything, statm = host_memory()[0], Path("/proc/self/statm")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or not statm.exists():
        return everything
    return min(everything, limit - int(statm.read_text().split()[0]) * resource.getpagesize())
