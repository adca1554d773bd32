"""All probes of a calibration except matrix products, with their sizes.

Operations outside of blocks are declared here: dequantization, embedding, loss, optimizer steps and copies.

Legend: N tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from trimtab.adapt.spec_quantized import choose_quantized_kernels
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.dtypes import BYTES
from trimtab.facts.operations import OperationKind
from trimtab.kernels import int8, nf4
from trimtab.kernels.adamw8bit import spec as adamw8bit_spec
from trimtab.kernels.int8 import spec as int8_spec
from trimtab.kernels.linear_cross_entropy import linear_cross_entropy
from trimtab.kernels.linear_cross_entropy import spec as loss_spec
from trimtab.kernels.linear_cross_entropy.choice import choose_loss
from trimtab.kernels.nf4 import spec as nf4_spec
from trimtab.lab import probes_blocks as blocks
from trimtab.lab.probes import Cost, Probe, ProbeGroup, two_passes
from trimtab.lab.probes_blocks import KernelChoices
from trimtab.lab.probes_products import torch_dtype
from trimtab.model.spec import embedding_bytes_moved
from trimtab.optim import OPTIMIZERS, build
from trimtab.optim import spec as optim_spec
from trimtab.optim.choice import choose_optimizer
from trimtab.plan.step_time import CAST, optimizer_sample

ROWS = {
    "cuda": ((4096, 4096), (2048, 1024), (16384, 4096), (8192, 2048), (4096, 576)),
    "cpu": ((512, 1024), (256, 256), (2048, 576)),
}
"""(N, C) of norms, additions and embeddings."""
GATES = {
    "cuda": ((4096, 14336), (2048, 3072), (16384, 8192), (4096, 1536)),
    "cpu": ((512, 1536), (256, 512), (1024, 3072)),
}
"""(N, I) of gated activations; I is the intermediate size."""
HEADS = {
    "cuda": (
        (2, 2048, 32, 8, 128), (4, 2048, 32, 8, 64), (4, 1024, 16, 8, 128), (8, 512, 9, 3, 64), (1, 8192, 32, 8, 128),
        (1, 16384, 14, 2, 64),
    ),
    "cpu": ((1, 512, 9, 3, 64), (4, 128, 4, 2, 32), (1, 1024, 8, 4, 64)),
}  # fmt: skip
"""(B, T, H, K, D) of RoPE and attention."""
LONG_HEADS = {"cuda": ((1, 32768, 32, 8, 128), (1, 65536, 8, 2, 64)), "cpu": ((1, 2048, 2, 1, 64),)}
"""(B, T, H, K, D) of attention alone."""
WEIGHTS = {
    "cuda": ((4096, 4096), (1024, 1024), (14336, 4096)),
    "cpu": ((1024, 1024), (512, 256), (1536, 576)),
}
"""(rows, width) of quantized weights."""
CASTS = {"cuda": ((4096, 4096), (1024, 1024), (576, 576)), "cpu": ((512, 512), (64, 64))}
"""(rows, columns) of gradients that are cast to fp32."""
LOSSES = {
    "cuda": ((4096, 1024, 151_936), (4096, 4096, 128_256), (4096, 2048, 49_152), (16384, 1024, 151_936)),
    "cpu": ((128, 256, 8192), (512, 256, 4096), (64, 256, 49_152)),
}
"""(N, C, V) of losses."""
ELEMENTS = {"cuda": (2**28, 2**24), "cpu": (2**21, 2**18)}
"""Parameters of optimizer steps, in square matrices."""
COPIES = {"cuda": (2**30, 2**28, 2**24, 2**20), "cpu": (2**26, 2**22, 2**18)}
"""Bytes of copies."""
MATRIX = {"cuda": 4096, "cpu": 512}


def copy_groups(device: DeviceFacts, free_bytes: int) -> Iterator[ProbeGroup]:
    """Copies within the device's memory, the largest first."""
    for nbytes in COPIES[device.kind]:
        if 2 * nbytes <= free_bytes // 4:
            yield ProbeGroup(
                f"copy of {nbytes // 2**10} KiB", partial(_copy, device.kind, nbytes), 2 * nbytes
            )


def kernel_groups(device: DeviceFacts, dtype: str, free_bytes: int) -> Iterator[ProbeGroup]:
    """Every kind of operation at two to four sizes, the first size of each kind first."""
    choices, kind = KernelChoices(device, dtype), device.kind
    kinds: list[list[ProbeGroup]] = [
        [_group("norm", blocks.norm_probes, choices, *sizes) for sizes in ROWS[kind]],
        [_group("gated activation", blocks.gate_probes, choices, *sizes) for sizes in GATES[kind]],
        [_group("rope", blocks.rope_probes, choices, *sizes) for sizes in HEADS[kind]],
        [
            _group("attention", blocks.attention_probes, choices, *sizes)
            for sizes in (*HEADS[kind], *LONG_HEADS[kind])
        ],
        [_group("addition", blocks.add_probes, choices, *sizes) for sizes in ROWS[kind]],
        [_group("gradient cast", _casts, choices, *sizes) for sizes in CASTS[kind]],
        [_group("dequantization", _dequantize, choices, *sizes) for sizes in WEIGHTS[kind]],
        [_group("embedding", _embedding, choices, *sizes) for sizes in ROWS[kind]],
        [_group("loss", _loss, choices, *sizes) for sizes in LOSSES[kind]],
        [_group("optimizer step", _optimizers, choices, size) for size in ELEMENTS[kind]],
    ]
    for number in range(max(map(len, kinds))):
        for groups in kinds:
            if number < len(groups) and groups[number].nbytes <= free_bytes // 2:
                yield groups[number]


def _group(name: str, build: Any, choices: KernelChoices, *sizes: int) -> ProbeGroup:
    label = f"{choices.dtype} {name} {' × '.join(map(str, sizes))}"
    B, *rest = sizes
    nbytes = 16 * B * rest[0] if rest else 24 * B  # weights, gradients and states of all optimizers
    if name == "loss":
        nbytes = 8 * (sizes[0] + sizes[2]) * sizes[1] + choices.device.memory_bytes // 16
    elif len(sizes) == 5:
        nbytes = 32 * sizes[0] * sizes[1] * sizes[2] * sizes[4]
    return ProbeGroup(label, partial(build, choices, *sizes), nbytes)


def _copy(device: str, nbytes: int) -> list[Probe]:
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    run = partial(target.copy_, source)
    return [Probe(OperationKind.COPY, "uint8", 0.0, 2.0 * nbytes, run, impl="copy", dims=(nbytes,))]


def _casts(choices: KernelChoices, rows: int, columns: int) -> list[Probe]:
    gradient = choices.random(rows, columns).bfloat16()
    return [
        Probe(
            OperationKind.COPY,
            choices.dtype,
            0.0,
            rows * columns * float(BYTES["bf16"] + BYTES["fp32"]),
            gradient.float,
            backward=True,
            impl=CAST,
            dims=(rows, columns),
        )
    ]


def _dequantize(choices: KernelChoices, rows: int, width: int) -> list[Probe]:
    impl = choose_quantized_kernels(device=choices.kind, triton=choices.device.runs_triton).impl
    weight, shape, wide = choices.random(rows, width), (rows, width), BYTES[choices.dtype]
    space, kind = torch.empty_like(weight), torch_dtype(choices.dtype)
    in_nf4, in_int8 = (
        nf4.quantize(weight, check=False, impl=impl),
        int8.quantize(weight, check=False, impl=impl),
    )
    moved = float(nf4_spec.dequantize_bytes_moved(shape, wide))
    moved_int8 = float(int8_spec.bytes_moved(shape, width, False, wide))
    return [
        Probe(
            OperationKind.DEQUANTIZE,
            "nf4",
            0.0,
            moved,
            lambda: nf4.dequantize(in_nf4, out=space, impl=impl),
            impl=impl,
            dims=shape,
        ),
        Probe(
            OperationKind.DEQUANTIZE,
            "int8",
            0.0,
            moved_int8,
            lambda: int8.dequantize(in_int8, dtype=kind, impl=impl),
            impl=impl,
            dims=shape,
        ),
    ]


def _embedding(choices: KernelChoices, N: int, C: int) -> list[Probe]:
    V = 32_768 if choices.kind == "cuda" else 4096
    ids_N = torch.randint(0, V, (N,), device=choices.kind)
    forward, backward = (
        Cost(0.0, embedding_bytes_moved(N, C, V, choices.dtype, backward=way)) for way in (False, True)
    )
    inputs = {"weight": choices.random(V, C)}
    embed = partial(F.embedding, ids_N)
    costs = (forward, backward)
    return two_passes(OperationKind.EMBEDDING, choices.dtype, "torch", embed, inputs, costs, dims=(N, C, V))


def _loss(choices: KernelChoices, N: int, C: int, V: int) -> list[Probe]:
    """Forward and backward in one sample: implementations differ in the pass that computes the gradients."""
    device, dtype = choices.device, choices.dtype
    chosen = choose_loss(
        triton=device.runs_triton, memory_bytes=device.memory_bytes, dtype=dtype, tokens=N, vocabulary=V
    )
    labels_N = torch.randint(0, V, (N,), device=choices.kind)
    hidden_NC = choices.random(N, C).requires_grad_()
    weight_VC = (choices.random(V, C) * C**-0.5).requires_grad_()

    def both(weight_grad: bool) -> object:
        weight = weight_VC if weight_grad else weight_VC.detach()
        loss = linear_cross_entropy(
            hidden_NC,
            weight,
            labels_N,
            impl=chosen.impl,
            reduction="sum",
            memory_bytes=chosen.memory_bytes,
        )
        return torch.autograd.grad(loss, [hidden_NC, weight] if weight_grad else [hidden_NC])

    memory: dict[str, Any] = {"impl": chosen.impl, "dtype": dtype, "memory_bytes": chosen.memory_bytes}
    return [
        Probe(
            OperationKind.LOSS,
            dtype,
            float(loss_spec.flops(N, C, V, weight_grad=trained, **memory)),
            float(loss_spec.bytes_moved(N, C, V, dtype)),
            partial(both, trained),
            impl=chosen.impl if trained else f"{chosen.impl} frozen head",
            dims=(N, V, C),
        )
        for trained in (True, False)
    ]


def _optimizers(choices: KernelChoices, elements: int) -> list[Probe]:
    """One step over square matrices, gradients in the weights' dtype."""
    size, dtype, device = MATRIX[choices.kind], choices.dtype, choices.device
    parameters = []
    for number in range(elements // size**2):
        parameter = torch.nn.Parameter(choices.random(size, size) * 0.02)
        parameter.grad = choices.random(size, size) * 1e-3
        parameters.append((str(number), parameter))
    grad_scale, skip = (torch.tensor(value, device=choices.kind) for value in (1.0, False))
    probes = []
    for name in OPTIMIZERS:
        impl = choose_optimizer(name, [dtype], device=choices.kind, triton=device.runs_triton).impl
        step = build(name, parameters, lr=1e-5, impl=impl).step
        shape = (size, size)
        flops = adamw8bit_spec.flops(shape) * len(parameters) if name == "adamw_8bit" else 0
        probes.append(
            Probe(
                OperationKind.OPTIMIZER,
                dtype,
                float(flops),
                float(optim_spec.bytes_moved(name, shape, dtype, dtype) * len(parameters)),
                partial(step, lr=1e-5, grad_scale=grad_scale, skip=skip),
                impl=optimizer_sample(name, impl),
                dims=(elements,),
            )
        )
    return probes
