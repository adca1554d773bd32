"""Kernel samples from profiles of whole training steps: the time of kernels at the clock rate of a step, with inputs
that the previous kernel has just written. Imports no torch.

A profile has the kernels of one kind in one pass, not of one operation. Their time is divided among the declared
kernels of that kind in proportion to an estimate.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from trimtab.facts.calibration import KernelSample
from trimtab.facts.operations import Kernel, OperationKind
from trimtab.plan.job import Job
from trimtab.plan.rates import Rates
from trimtab.plan.step_time import BACKWARD, OperationTime, microbatch_times, update_times

GRADIENT_NORM = "gradient norm"
WHOLE_BLOCKS = 256
"""Rows that are no multiple of this had slower loads in the 8-bit optimizer when the steps were profiled."""


@dataclass(frozen=True)
class Group:
    """Kernels of a profile that run the declared kernels of some kinds in one pass."""

    name: str
    kinds: tuple[OperationKind, ...]
    kernels: str
    """Regular expression of their names."""
    backward: bool | None = None
    """Only the backward pass, only the others, or both."""
    operations: str = ""
    """Regular expression of the operations' names; all of the kinds if empty."""
    full_only: bool = False
    """Only in full fine-tuning with fp32 gradients: elsewhere the same kernels also do other work."""
    compute: bool = False
    """Limited by arithmetic: slower when steps follow each other without a pause, at a lower clock rate."""


GROUPS = (
    Group("products", (OperationKind.PRODUCT, OperationKind.LOSS),
          r"nvjet|splitKreduce|gemm|cutlass|^(loss_and_gradient|row_numbers|row_statistics|gradient)_kernel",
          compute=True),
    Group("attention", (OperationKind.ATTENTION,), r"flash_fprop|^attention_forward_kernel", False, compute=True),
    Group("attention", (OperationKind.ATTENTION,),
          r"flash_bprop|compute_dot_do_o|convert_dq|fmha_reduce_head|^attention_(key|query)_kernel", True,
          compute=True),
    Group("norm", (OperationKind.NORM, OperationKind.ADD), r"^_rms_norm_forward", False,
          operations=r"norm$(?<!gradient norm)|^attention_residual$"),
    Group("norm", (OperationKind.NORM,), r"^_rms_norm_backward|^_sum_kernel", True),
    Group("gate", (OperationKind.GATE,), r"^_gated_mlp_forward", False),
    Group("gate", (OperationKind.GATE,), r"^_gated_mlp_backward", True),
    Group("rope", (OperationKind.ROPE,), r"^_rope_kernel|^_normed_backward"),
    Group("addition", (OperationKind.ADD,), r"CUDAFunctor_add<c10::BFloat16>",
          operations=r"^feed_forward_residual|^(?!lm_head|gradients|mlp.tile).*\.grad$|\.bias_sum$"),
    Group("bias gradient", (OperationKind.ADD,), r"reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16",
          operations=r"\.bias$"),
    Group("gradient cast", (OperationKind.COPY,), r"unrolled_elementwise_kernel<at::native::direct_copy",
          operations=r"grad_cast$", full_only=True),
    Group("gradient norm", (OperationKind.NORM,), r"LpNorm", operations=f"^{GRADIENT_NORM}$"),
    Group("head gradient", (OperationKind.ADD,), r"^scale_kernel|CUDAFunctor_add<float>", operations=r"^lm_head\.",
          full_only=True),
    Group("optimizer", (OperationKind.OPTIMIZER,), r"^_step8_kernel|^_step32_kernel|FusedOptimizer", full_only=True),
)  # fmt: skip


Asked = tuple[Kernel, str, str, bool]
"""Kernel, dtype, implementation, whether it is in the backward pass."""


@dataclass(frozen=True)
class _Recording(Rates):
    """Rates that record the kernels they estimate."""

    asked: dict[Asked, float] = field(default_factory=dict)

    def seconds(self, kernel: Kernel, dtype: str, *, impl: str = "", backward: bool = False) -> float:
        if kernel.kind is OperationKind.DEQUANTIZE:
            return 0.0  # separate kernels, which no group of products contains
        found = super().seconds(kernel, dtype, impl=impl, backward=backward)
        self.asked[kernel, dtype, impl, backward] = found
        return found


def operations_of(job: Job, rates: Rates) -> Iterator[tuple[OperationTime, dict[Asked, float]]]:
    """The operations of a step, each with the kernels that its time consists of and their estimated seconds."""
    fields = {f.name: getattr(rates, f.name) for f in dataclasses.fields(Rates) if f.name[0] != "_"}
    recording = _Recording(**fields | {"tiny": 0.0})
    for operation in itertools.chain(microbatch_times(job, recording), update_times(job, recording)):
        yield operation, dict(recording.asked)
        recording.asked.clear()


def samples_of(
    profile: dict[str, Any], job: Job, rates: Rates, step_seconds: float | None
) -> Iterator[KernelSample]:
    """Samples of one profiled step; kinds of kernels that are not among the recorded ones are left out.

    Args:
        profile: from `benchmarks.plan_accuracy`.
        job: the planned job of the step.
        rates: the estimate in proportion to which time is divided.
        step_seconds: the time of a step among others, without profiler; None if launches limit it.
    """
    operations = list(operations_of(job, rates))
    slower = 1.0 if step_seconds is None else _sustained(profile, step_seconds, rates.gap)
    for group in GROUPS:
        if group.full_only and (job.lora is not None or job.gradient_dtype != "fp32"):
            continue
        if group.name == "optimizer" and job.shape.hidden_size % WHOLE_BLOCKS:
            continue
        mine = [(one, kernels) for one, kernels in operations if _belongs(one, group)]
        measured = _seconds(profile, group) * (slower if group.compute else 1.0)
        estimated = sum(one.total for one, _ in mine)
        if not measured or not estimated:
            continue
        distinct = {asked: seconds for _, kernels in mine for asked, seconds in kernels.items()}
        for (kernel, dtype, impl, backward), seconds in distinct.items():
            if kernel.kind is OperationKind.ADD and OperationKind.NORM in group.kinds:
                continue  # part of the norm's kernel
            yield KernelSample(
                kernel.kind,
                dtype,
                kernel.flops,
                kernel.moved,
                seconds * measured / estimated,
                backward,
                impl,
                kernel.dims,
            )


def _seconds(profile: dict[str, Any], group: Group) -> float:
    """The time of a group's kernels in a profile."""
    return sum(k["ms"] for k in profile["kernels"] if re.search(group.kernels, k["name"])) / 1e3


def _sustained(profile: dict[str, Any], step_seconds: float, gap: float) -> float:
    """How much longer compute-bound kernels take in a step among others than in the profiled one, which follows a pause
    of the GPU."""
    compute = sum(_seconds(profile, group) for group in GROUPS if group.compute)
    copies = sum(k["ms"] for k in profile["kernels"] if k["name"].startswith("Memcpy")) / 1e3
    others = profile["busy_ms"] / 1e3 - copies - compute + gap * profile["launches"]
    return min(max((step_seconds - others) / compute, 1.0), 1.1)


def _belongs(one: OperationTime, group: Group) -> bool:
    if one.kind not in group.kinds:
        return False
    if group.backward is not None and (one.phase == BACKWARD) != group.backward:
        return False
    return re.search(group.operations, one.name) is not None


def merged(samples: Iterable[KernelSample]) -> list[KernelSample]:
    """One sample for those that differ only in their time, with the geometric mean."""
    times: dict[KernelSample, list[float]] = {}
    for sample in samples:
        times.setdefault(dataclasses.replace(sample, seconds=0.0), []).append(sample.seconds)
    return [
        dataclasses.replace(sample, seconds=math.exp(sum(map(math.log, found)) / len(found)))
        for sample, found in times.items()
    ]
