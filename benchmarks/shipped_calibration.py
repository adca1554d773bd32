"""Writes the shipped calibration of the H200 from the records in `benchmarks/results`.

    python -m benchmarks.shipped_calibration

Kernels were timed individually (`kernels-h200.jsonl`) and within whole training steps, at the clock rate under load
(`step-profiles-h200.txt`, and the profiles of the development list of `benchmarks.plan_accuracy`). Where a kernel has
samples from training steps, they are the ones that ship.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.plan_accuracy import table
from benchmarks.plan_accuracy.cases import Case
from benchmarks.plan_accuracy.replan import H200, job_of, prepare_case
from benchmarks.step_samples import merged, samples_of
from trimtab.facts.calibration import Calibration, KernelSample
from trimtab.facts.files import write_json
from trimtab.facts.operations import Kernel, OperationKind
from trimtab.kernels.attention import spec as attention_spec
from trimtab.kernels.linear_cross_entropy import spec as loss_spec
from trimtab.kernels.rope import spec as rope_spec
from trimtab.optim import spec as optim_spec
from trimtab.optim.spec import BY_CHUNKS
from trimtab.plan.device_rates import rates_of
from trimtab.plan.step_time import IN_BACKWARD

RESULTS = Path(__file__).parent / "results"
STEPS = RESULTS / "plan-accuracy-development-nvidia-h200.jsonl"
TARGET = Path(__file__).parents[1] / "trimtab/facts/catalogue/calibrations/nvidia-h200.json"
MEMORY_BOUND = {
    "rms_norm": OperationKind.NORM,
    "rope": OperationKind.ROPE,
    "gated_mlp": OperationKind.GATE,
    "adamw8bit": OperationKind.OPTIMIZER,
}
OPTIMIZERS = {"trimtab triton": "triton", "torch fused, bf16 states": "adamw_torch_fused"}
LOSSES = {
    "triton, fast": ("triton", 2**62),
    "triton, low memory": ("triton", None),
    "chunked": ("chunked", None),
}

UNSUITABLE = {"in_backward", "limit"}
"""Options of cases whose profiles are not used."""

Product = tuple[int, int, int]


@dataclass(frozen=True)
class Profiled:
    """Matrix products that one kernel of a profile computed; its time is divided among them by FLOPs."""

    heading: str
    kernel: str
    products: tuple[tuple[Product, int], ...]
    """((m, n, k), calls)."""
    backward: bool = False
    other_ms: float = 0.0
    """The part of its time that was spent on products of the loss."""


def _square(tokens: int) -> tuple[tuple[Product, int], ...]:
    """Products of q, k, v, o and down in 32 layers of Llama-8B."""
    N = tokens
    return (((N, 4096, 4096), 64), ((N, 1024, 4096), 64), ((N, 4096, 14336), 32))


def _inputs(tokens: int) -> tuple[tuple[Product, int], ...]:
    """Gradients of the inputs of gate, up, q, k, v and o; the first layer's q, k and v need none."""
    N = tokens
    return (((N, 4096, 14336), 64), ((N, 4096, 4096), 63), ((N, 4096, 1024), 62))


LLAMA_4K = "===== llama-8b qlora 2×2048, limit None GiB, unpacked_layers=32"
LLAMA_8K = "===== llama-8b qlora 1×8192, limit 7.8 GiB, recompute=offload_half"
LLAMA_32K = "===== llama-8b qlora 1×32768, limit 14.0 GiB, recompute=offload_attention"
QWEN_4K, QWEN_16K = "===== qwen3-0.6b;full;4;1024;0;", "===== qwen3-0.6b;full;4;4096;0;"
PROFILED = (
    Profiled(LLAMA_4K, "320x128_64x3_1x2_h_badd_coopB_TNT", (((4096, 14336, 4096), 64),)),
    Profiled(LLAMA_4K, "256x128_64x4_1x2_h_badd_coopA_TNT", _square(4096)),
    Profiled(LLAMA_4K, "256x128_64x4_1x2_h_badd_coopA_NNT", _inputs(4096), backward=True),
    Profiled(LLAMA_4K, "320x128_64x3_1x2_h_badd_coopB_NNT", (((4096, 14336, 4096), 32),), backward=True),
    Profiled(LLAMA_4K, "32x128_64x10_1x2_h_bz_splitK_NNN", (((4096, 16, 14336), 64),), backward=True),
    Profiled(LLAMA_4K, "32x128_64x10_1x4_h_bz_NTN", (((14336, 16, 4096), 64),), backward=True),
    Profiled(LLAMA_8K, "320x128_64x3_1x2_h_badd_coopB_TNT", (((8192, 14336, 4096), 128),)),
    Profiled(LLAMA_8K, "256x128_64x4_1x2_h_badd_coopA_TNT", _square(8192)),
    Profiled(LLAMA_8K, "256x128_64x4_1x2_h_badd_coopA_NNT", _inputs(8192), backward=True),
    Profiled(LLAMA_8K, "320x128_64x3_1x2_h_badd_coopB_NNT", (((8192, 14336, 4096), 32),), backward=True),
    Profiled(LLAMA_8K, "32x128_64x10_1x2_h_bz_splitK_NNN", (((8192, 16, 14336), 64),), backward=True),
    Profiled(LLAMA_32K, "192x192_64x4_1x2_h_badd_coopB_TNN", (((32768, 14336, 4096), 128),)),
    Profiled(
        LLAMA_32K,
        "192x192_64x4_2x1_v_badd_coopB_TNN",
        (((32768, 4096, 4096), 128), ((32768, 4096, 14336), 32)),
    ),
    Profiled(LLAMA_32K, "256x128_64x4_1x2_h_badd_coopA_TNT", (((32768, 1024, 4096), 128),)),
    Profiled(LLAMA_32K, "192x192_64x3_2x1_v_badd_coopB_NNN", _inputs(32768), backward=True),
    Profiled(LLAMA_32K, "192x192_64x3_1x2_h_badd_coopB_NNN", (((32768, 14336, 4096), 32),), backward=True),
)


def _qwen(heading: str, tokens: int, loss_ms: float) -> Iterator[Profiled]:
    """Forward products, input gradients and weight gradients of 28 layers of Qwen3-0.6B."""
    N, layers = tokens, 28
    forward = (((N, 2048, 1024), 28), ((N, 1024, 1024), 56), ((N, 1024, 2048), 28), ((N, 3072, 1024), 56),
               ((N, 1024, 3072), 28))  # fmt: skip
    inputs = tuple(((m, k, n), calls) for (m, n, k), calls in forward)
    yield Profiled(heading, "256x128_64x4_1x2_h_bz_coopA_TNT", forward)
    yield Profiled(heading, "256x128_64x4_1x2_h_bz_coopA_NNT", inputs, backward=True, other_ms=loss_ms)
    for kernel, product, calls in (
        ("128x192_64x5_2x1_v_bz_coopB_NTN", (3072, 1024, N), 2 * layers),
        ("128x128_64x6_1x2_h_bz_NTT", (2048, 1024, N), 2 * layers),
        ("192x128_64x5_1x2_h_bz_coopB_NTT", (1024, 3072, N), layers),
    ):
        yield Profiled(heading, kernel, ((product, calls),), backward=True)


CUDNN = {
    False: ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop",),
    True: (
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop",
        "void cudnn::fusion::compute_dot_do_o_specialized",
        "void cudnn::fusion::convert_dq_to_16bits",
        "void cudnn::fusion::fmha_reduce_head",
    ),
}
"""Kernels of cuDNN's attention, forward and backward."""
ATTENTION = (
    (QWEN_4K, 28, (4, 1024, 16, 8, 128)),
    (QWEN_16K, 28, (4, 4096, 16, 8, 128)),
    (LLAMA_4K, 32, (2, 2048, 32, 8, 128)),
    (LLAMA_8K, 32, (1, 8192, 32, 8, 128)),
    (LLAMA_32K, 32, (1, 32768, 32, 8, 128)),
)
"""(profile, layers, (batch, tokens, heads, key/value heads, head size))."""


def _profiled_attention(profiles: dict[str, dict[str, tuple[int, float]]]) -> Iterator[KernelSample]:
    """Attention within a training step, where the clock rate is lower than in a benchmark of attention alone."""
    for heading, layers, (B, T, H, K, D) in ATTENTION:
        for backward, names in CUDNN.items():
            rows = profiles[heading].items()
            ms = sum(ms for kernel, (_, ms) in rows if kernel.startswith(names))
            pairs = B * attention_spec.visible_pairs(T, T)
            moved = attention_spec.bytes_moved(B, T, T, H, K, D, "bf16", backward=backward)
            work = attention_spec.flops(pairs, H, D, backward=backward)
            yield KernelSample(
                OperationKind.ATTENTION, "bf16", float(work), float(moved), ms / layers / 1e3, backward, "sdpa_cudnn",
                (pairs // (B * T), D, B * T * H),
            )  # fmt: skip


LOSS_PRODUCTS = ("320x128_64x3_1x2_h_bz_coopB_TNT", "256x128_64x4_1x2_h_bz_coopA_NTT")
"""Kernels of the logits and of the head's gradient in the profiles of Qwen3-0.6B, one call each."""


def _loss_product_ms(rows: dict[str, tuple[int, float]]) -> float:
    """Time of the hidden states' gradient, which has no row: the mean of the loss's other two products."""
    return sum(rows[name][1] for name in LOSS_PRODUCTS) / len(LOSS_PRODUCTS)


def main() -> None:
    """Write the file, first without the samples of training steps: planning those steps reads it."""
    write_json(TARGET, from_kernels().to_dict())
    calibration = measured()
    write_json(TARGET, calibration.to_dict())
    print(f"{len(calibration.samples)} samples in {TARGET}")


def measured() -> Calibration:
    """Build the calibration from all records."""
    base = from_kernels()
    in_steps = merged(from_steps(base))
    covered = {_kind(sample) for sample in in_steps}
    kept = [sample for sample in base.samples if _kind(sample) not in covered]
    products = [sample for sample in base.samples if sample.kind is OperationKind.PRODUCT]
    return dataclasses.replace(
        base,
        samples=(*kept, *products, *in_steps),
        host_seconds=HOST,
        source=f"{base.source}, {STEPS.name}",
    )


def _kind(sample: KernelSample) -> tuple[OperationKind, str, bool, str]:
    return sample.kind, sample.dtype, sample.backward, sample.impl


def from_steps(base: Calibration) -> Iterator[KernelSample]:
    """Samples from the profiled steps of the development list, without those with thousands of small launches and
    those whose settings a memory limit chose with these very rates."""
    # Under another name: a calibration of the shipped device would be used with the samples that already ship.
    alone = dataclasses.replace(base, device="kernels of the H200")
    rates = rates_of(dataclasses.replace(H200, calibration=alone), "bf16")
    assert rates is not None
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, record in table.read(STEPS).items():
            case = Case.parse(name)
            profile = record.get("measured", {}).get("profile")
            if not profile or case.options.get("optim") in BY_CHUNKS or UNSUITABLE & case.options.keys():
                continue
            prepared = prepare_case(case, root)
            job = job_of(case, prepared, root)
            seconds = record["measured"]["step_seconds"] if prepared.resolved.graphs.enabled else None
            yield from samples_of(profile, job, rates, seconds)


def from_kernels() -> Calibration:
    """Build the calibration from individually timed kernels, and from the profiles in text form."""
    rows = [json.loads(line) for line in (RESULTS / "kernels-h200.jsonl").read_text().splitlines()]
    ceilings = max((row["ceilings"] for row in rows), key=lambda one: one["matmul_flops_per_s"])
    flops, copy = ceilings["matmul_flops_per_s"], ceilings["copy_bytes_per_s"]
    samples = [sample for row in rows for sample in _kernel_samples(row)]
    profiles = _profiles((RESULTS / "step-profiles-h200.txt").read_text())
    qwen = [
        profiled
        for heading, tokens in ((QWEN_4K, 4096), (QWEN_16K, 16384))
        for profiled in _qwen(heading, tokens, _loss_product_ms(profiles[heading]))
    ]
    for profiled in (*PROFILED, *qwen):
        samples += _product_samples(profiled, profiles[profiled.heading])
    samples += _profiled_attention(profiles)
    for heading, tokens, width in ((QWEN_4K, 4096, 1024), (QWEN_16K, 16384, 1024), (LLAMA_4K, 4096, 4096)):
        calls, ms = profiles[heading]["vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add"]
        samples.append(
            KernelSample(OperationKind.ADD, "bf16", 0.0, 3.0 * 2 * tokens * width, ms / calls / 1e3)
        )
    calls, ms = profiles[LLAMA_4K]["_rope_kernel"]  # forward and backward take the same time
    rotated = float(rope_spec.bytes_moved(4096, 32, 8, 128, "bf16"))
    for backward in (False, True):
        samples.append(
            KernelSample(OperationKind.ROPE, "bf16", 0.0, rotated, ms / calls / 1e3, backward, impl="triton")
        )
    return Calibration(
        device=ceilings["device"],
        flops={"bf16": flops, "fp16": flops},
        copy=copy,
        launch_seconds=LAUNCH,
        samples=tuple(samples),
        to_host=LINK,
        from_host=LINK,
        versions=rows[0]["versions"],
        measured_at=max(row["time"] for row in rows),
        source="benchmarks/results/kernels-h200.jsonl, step-profiles-h200.txt",
    )


LAUNCH = 8e-5
"""Host seconds per declared launch of full fine-tuning, from eager steps of `STEPS`: 69 µs (108 ms over 1560 launches)
to 110 (156 ms over 1423). The host of the measured machine is up to 1.6 times as slow from one minute to the next."""
HOST = {
    "full": LAUNCH,
    "lora": 5.3e-5,
    "nf4": 6.5e-5,
    "int8": 5e-5,
    "adamw_torch_fused": 1e-5,
    IN_BACKWARD: 5e-4,
}
"""Host seconds per declared launch of each method, and per parameter of an optimizer, from eager steps: of `STEPS`
(LoRA 256 ms over 3868 launches and 107 over 2062, INT8 176 over 3427, in backward 217 less 1193 launches over 310
parameters), of build-h200.jsonl (Llama-8B 2×2048 eager, 294 ms over 4569) and of host-launches-h200.txt."""
LINK = 55e9
"""Bytes per second each way, pinned."""


def _kernel_samples(row: dict) -> Iterator[KernelSample]:
    copy, rate = row["ceilings"]["copy_bytes_per_s"], row["ceilings"]["matmul_flops_per_s"]
    case, floor = row["case"], row["floor_ms"] / 1e3
    backward = case.endswith("backward")
    for name, one in row["contestants"].items():
        if not one.get("median_ms") or not one.get("exact", True):
            continue
        seconds = one["median_ms"] / 1e3
        if row["op"] in MEMORY_BOUND:
            impl = OPTIMIZERS.get(name) if row["op"] == "adamw8bit" else name
            moved = floor * copy
            if impl == "adamw_torch_fused":
                moved = float(optim_spec.bytes_moved(impl, (596_049_920,), "bf16", "bf16"))
            if impl in ("triton", "adamw_torch_fused"):
                yield KernelSample(MEMORY_BOUND[row["op"]], "bf16", 0.0, moved, seconds, backward, impl)
        elif row["op"] == "nf4" and case.startswith("dequantize") and name == "trimtab":
            yield KernelSample(OperationKind.DEQUANTIZE, "nf4", 0.0, floor * copy, seconds, impl="triton")
        elif row["op"] == "attention" and name in attention_spec.TILED and name != "sdpa_cudnn":
            yield _attention_sample(case, name, seconds, floor * rate, backward)
        elif row["op"] == "linear_cross_entropy" and name in LOSSES:
            impl, memory = LOSSES[name]
            N, C, V = map(int, re.findall(r"\d+", case)[:3])
            work = loss_spec.flops(N, C, V, impl=impl, memory_bytes=memory)
            moved = float(loss_spec.bytes_moved(N, C, V, "bf16"))
            yield KernelSample(
                OperationKind.LOSS, "bf16", float(work), moved, seconds, impl=impl, dims=(N, V, C)
            )


def _attention_sample(case: str, impl: str, seconds: float, flops: float, backward: bool) -> KernelSample:
    B, T = map(int, re.search(r"(\d+)x(\d+)", case).groups())  # type: ignore[union-attr]
    heads, D = re.search(r"([\d/]+) heads of (\d+)", case).groups()  # type: ignore[union-attr]
    H, K = (int(heads), int(heads)) if "/" not in heads else map(int, heads.split("/"))
    moved = attention_spec.bytes_moved(B, T, T, H, K, int(D), "bf16", backward=backward)
    pairs = flops / ((10 if backward else 4) * H * int(D))
    dims = max(round(pairs / (B * T)), 1), int(D), B * T * H
    return KernelSample(OperationKind.ATTENTION, "bf16", flops, float(moved), seconds, backward, impl, dims)


def _profiles(text: str) -> dict[str, dict[str, tuple[int, float]]]:
    """By heading: kernel → (calls, milliseconds); the last profile of a heading is used."""
    found: dict[str, dict[str, tuple[int, float]]] = {}
    rows: dict[str, tuple[int, float]] = {}
    for line in text.splitlines():
        if line.startswith("====="):
            rows = found[line.strip()] = {}
        match = re.match(r"\s+([\d.]+) ms\s+(\d+) [x×] (.+)", line)
        if match:
            name = match[3].removeprefix("nvjet_sm90_tst_").removeprefix("void at::native::")
            rows[name.split("<c10")[0]] = (int(match[2]), float(match[1]))
    return found


def _product_samples(one: Profiled, rows: dict[str, tuple[int, float]]) -> Iterator[KernelSample]:
    """Divide a kernel's time among its products in proportion to their FLOPs."""
    _, ms = rows[one.kernel]
    kernels = [(Kernel.product(*dims, width=2), calls) for dims, calls in one.products]
    total = sum(kernel.flops * calls for kernel, calls in kernels)
    for kernel, _ in kernels:
        seconds = (ms - one.other_ms) / 1e3 * kernel.flops / total
        yield KernelSample(
            OperationKind.PRODUCT, "bf16", kernel.flops, kernel.moved, seconds, one.backward, dims=kernel.dims
        )


if __name__ == "__main__":
    main()
