"""Probes of a block's operations except matrix products, with the implementations that training chooses on a device.

FLOPs and bytes come from the kernels' own specs, so that measured efficiencies match the planner's declarations.

Legend: N = B · T tokens, C hidden size, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.dtypes import BYTES
from trimtab.facts.operations import OperationKind
from trimtab.kernels.attention import Layout, attention, choose_attention
from trimtab.kernels.attention import spec as attention_spec
from trimtab.kernels.choice import choose_pointwise
from trimtab.kernels.gated_mlp import gated_activation
from trimtab.kernels.gated_mlp import spec as gate_spec
from trimtab.kernels.rms_norm import add_rms_norm, rms_norm
from trimtab.kernels.rms_norm import spec as norm_spec
from trimtab.kernels.rope import rope
from trimtab.kernels.rope import spec as rope_spec
from trimtab.lab.probes import Cost, Probe, two_passes
from trimtab.lab.probes_products import torch_dtype

TRITON_RATIO = 4
"""Query heads per key head for which packed attention is measured with Triton."""
DOCUMENT = {"cuda": 512, "cpu": 128}
"""Tokens per document of packed sequences."""


@dataclass(frozen=True)
class KernelChoices:
    """The implementations that training chooses on a device.

    Example:
        >>> gpu = DeviceFacts("a GPU", "cuda", 2**34, capability=(9, 0), bf16=True)
        >>> KernelChoices(gpu, "bf16").pointwise, KernelChoices(gpu, "bf16").attention(128, 4096, packed=False)
        ('triton', 'sdpa_cudnn')
    """

    device: DeviceFacts
    dtype: str
    """Dtype of weights and products."""

    @property
    def kind(self) -> str:
        """cpu or cuda."""
        return self.device.kind

    @property
    def pointwise(self) -> str:
        """The implementation of norms, RoPE and gated activations."""
        return choose_pointwise(triton=self.device.runs_triton, autocast=False).impl

    def attention(self, head_dim: int, tokens: int, *, packed: bool) -> str:
        """The attention backend."""
        return choose_attention(
            device=self.kind,
            capability=self.device.capability,
            dtype=self.dtype,
            head_dim=head_dim,
            packed=packed,
            window=None,
            training=True,
            tokens=tokens,
            triton=self.device.triton,
        ).impl

    def random(self, *dims: int) -> torch.Tensor:
        """Normally distributed values in the training dtype."""
        return torch.randn(dims, device=self.kind, dtype=torch_dtype(self.dtype))


def norm_probes(choices: KernelChoices, N: int, C: int) -> list[Probe]:
    dtype, impl = choices.dtype, choices.pointwise
    inputs = {"x": choices.random(N, C), "weight_D": choices.random(C)}

    def costs(**more: bool) -> tuple[Cost, Cost]:
        return (
            Cost(norm_spec.flops(N, C), norm_spec.bytes_moved(N, C, dtype, **more)),
            Cost(
                norm_spec.flops(N, C, backward=True),
                norm_spec.bytes_moved(N, C, dtype, backward=True, **more),
            ),
        )

    norm = partial(rms_norm, eps=1e-6, impl=impl)
    probes = two_passes(OperationKind.NORM, dtype, impl, norm, inputs, costs(), dims=(N, C))
    if impl == "triton":  # the kernel of a block's second norm includes the residual addition before it
        both = partial(add_rms_norm, eps=1e-6, impl=impl)
        inputs = {**inputs, "residual": choices.random(N, C)}
        name = f"{impl} with addition"
        probes += two_passes(OperationKind.NORM, dtype, name, both, inputs, costs(residual=True), dims=(N, C))
    return probes


def gate_probes(choices: KernelChoices, N: int, width: int) -> list[Probe]:
    dtype, impl = choices.dtype, choices.pointwise
    costs = (
        Cost(gate_spec.flops(N, width), gate_spec.bytes_moved(N, width, dtype)),
        Cost(gate_spec.flops(N, width, backward=True), gate_spec.bytes_moved(N, width, dtype, backward=True)),
    )
    inputs = {"gate": choices.random(N, width), "up": choices.random(N, width)}
    gate = partial(gated_activation, impl=impl)
    return two_passes(OperationKind.GATE, dtype, impl, gate, inputs, costs, dims=(N, width))


def rope_probes(choices: KernelChoices, B: int, T: int, H: int, K: int, D: int) -> list[Probe]:
    dtype, impl, probes = choices.dtype, choices.pointwise, []
    # Triton's RoPE kernel also normalizes queries and keys; elsewhere these norms are separate kernels.
    for norm in (False, True) if impl == "triton" else (False,):
        arguments = rope_spec.make_inputs(
            rope_spec.Case("probe", B, T, H, K, D, norm=norm), dtype, choices.kind
        )
        angles = {"cos_BTF": arguments["cos"], "sin_BTF": arguments["sin"]}
        inputs = {"q_BTHD": arguments["q"], "k_BTKD": arguments["k"], **angles}
        if norm:
            inputs |= {"q_weight_D": arguments["q_weight"], "k_weight_D": arguments["k_weight"]}
        forward, backward = (
            Cost(
                rope_spec.flops(B * T, H, K, D, norm=norm, backward=way),
                rope_spec.bytes_moved(B * T, H, K, D, dtype, norm=norm, backward=way),
            )
            for way in (False, True)
        )
        probes += two_passes(
            OperationKind.ROPE,
            dtype,
            f"{impl} with norm" if norm else impl,
            partial(rope, impl=impl),
            inputs,
            (forward, backward),
            dims=(B, T, H, K, D),
            frozen=tuple(angles),
        )
    return probes


def attention_probes(choices: KernelChoices, B: int, T: int, H: int, K: int, D: int) -> list[Probe]:
    dtype, document = choices.dtype, DOCUMENT[choices.kind]
    packed = choices.attention(D, T, packed=True)
    runs = [(choices.attention(D, T, packed=False), False)]
    # Triton compiles its kernels for each ratio of heads, which takes seconds.
    if packed != "triton" or H == TRITON_RATIO * K:
        if packed != runs[0][0]:
            runs.append((packed, False))
        if document < T and T % document == 0:
            runs.append((packed, True))
    inputs = {
        "q_BTHD": choices.random(B, T, H, D),
        "k_BSKD": choices.random(B, T, K, D),
        "v_BSKD": choices.random(B, T, K, D),
    }
    probes = []
    for impl, documents in runs:
        masked = impl in attention_spec.MASKED  # it reads a mask and skips no pairs
        layout = Layout.causal()
        pairs = B * attention_spec.visible_pairs(T, T)
        if documents:
            layout = Layout.packed((torch.arange(T) // document).expand(B, T))
            if not masked:
                pairs = B * (T // document) * attention_spec.visible_pairs(document, document)
        ready = layout.as_prepared(impl, choices.kind, T, B=B, dtype=torch_dtype(dtype))
        forward, backward = (
            Cost(
                attention_spec.flops(pairs, H, D, backward=way),
                attention_spec.bytes_moved(B, T, T, H, K, D, dtype, backward=way),
            )
            for way in (False, True)
        )
        probes += two_passes(
            OperationKind.ATTENTION,
            dtype,
            f"{impl} packed" if documents and masked else impl,
            partial(attention, layout=ready, impl=impl),
            inputs,
            (forward, backward),
            dims=(pairs // (B * T), D, B * T * H),
        )
    return probes


def add_probes(choices: KernelChoices, N: int, C: int) -> list[Probe]:
    x, y = choices.random(N, C), choices.random(N, C)
    moved = 3.0 * N * C * BYTES[choices.dtype]
    run = partial(torch.add, x, y)
    return [Probe(OperationKind.ADD, choices.dtype, float(N * C), moved, run, impl="torch", dims=(N, C))]
