"""Times the seven projections of a Llama-8B layer with NF4 weights and LoRA, forward and backward, and the peers'.

    python -m benchmarks.quantized_linear --commit $(git rev-parse --short HEAD)          (a CUDA GPU, a minute)

q, k and v have one input, o another, and the gated MLP a third; gradients of all inputs and adapters are computed. All
contestants have the same codes and the same adapters (fp32), compute in bf16, and are compared with fp64 before they
are timed. Peers run as in their libraries: bitsandbytes' layer with PEFT's adapters, in autocast; Unsloth's fused
functions, configured not to overwrite their inputs. Appends one JSON line per contestant to
benchmarks/results/quantized-linear-<device>.jsonl.
"""

# T tokens, C hidden size, I intermediate size, R rank

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from trimtab.adapt import spec_quantized
from trimtab.adapt.lora_layers import LoRALinear
from trimtab.adapt.quantized import QuantizedLinear, packed_state
from trimtab.adapt.spec import LoraSettings
from trimtab.kernels.gated_mlp import gated_activation
from trimtab.lab.contests import Candidates, Implementation, disagreement, missing
from trimtab.lab.memory import peak_bytes
from trimtab.lab.records import append_record, file_name, provenance
from trimtab.lab.timing import ceilings, time_together
from trimtab.model.parts import project

Sizes = dict[str, tuple[int, int]]
Outputs = list[torch.Tensor]
NAMES = ("q", "k", "v", "o", "gate", "up", "down")
INPUTS = {"attention": ("q", "k", "v"), "output": ("o",), "mlp": ("gate", "up")}
SCALING = 2.0


def llama_8b() -> Sizes:
    """(out, in) of each projection."""
    C, I, K = 4096, 14336, 1024  # noqa: E741
    return {"q": (C, C), "k": (K, C), "v": (K, C), "o": (C, C), "gate": (I, C), "up": (I, C), "down": (C, I)}


@dataclass
class Layer:
    """Weights, adapters, inputs and upstream gradients, shared by all contestants."""

    adapted: dict[str, LoRALinear]
    inputs: dict[str, torch.Tensor]
    grads: Outputs
    impl: str

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The tensors that need gradients: the inputs, then each A and B."""
        factors = [factor for name in NAMES for factor in self.adapted[name].factors("default")]
        return [*self.inputs.values(), *factors]

    def names(self) -> list[str]:
        outputs = [*INPUTS["attention"], "o", "mlp"]
        return [
            *outputs,
            *(f"d {name}" for name in INPUTS),
            *(f"d{f} {name}" for name in NAMES for f in "AB"),
        ]


def make_layer(sizes: Sizes, tokens: int, rank: int, device: str) -> Layer:
    """Random weights, nonzero adapters, inputs and gradients, from one seed."""
    impl = spec_quantized.choose_quantized_kernels(device=device).impl
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*dims: int, std: float) -> torch.Tensor:
        return torch.randn(dims, generator=generator, device=device) * std

    adapted = {}
    for name in NAMES:
        out, inside = sizes[name]
        base = QuantizedLinear(
            inside, out, bias=False, kind="nf4", dtype=torch.bfloat16, impl=impl, device=device
        )
        base.set_weight(drawn(out, inside, std=0.02))
        adapted[name] = LoRALinear(base, name)
        adapted[name].add("default", LoraSettings(r=rank), r=rank, scaling=SCALING)
        adapted[name].active = ("default",)
        a_RI, b_OR = adapted[name].factors("default")
        with torch.no_grad():
            a_RI.copy_(drawn(rank, inside, std=inside**-0.5))
            b_OR.copy_(drawn(out, rank, std=0.02))
    inputs = {
        name: drawn(1, tokens, sizes[users[0]][1], std=1.0).bfloat16().requires_grad_(True)
        for name, users in INPUTS.items()
    }
    rows = [sizes[name][0] for name in (*INPUTS["attention"], "o", "down")]
    return Layer(adapted, inputs, [drawn(1, tokens, size, std=1.0).bfloat16() for size in rows], impl)


def step(layer: Layer, forward: Callable[[dict[str, torch.Tensor]], Outputs]) -> list[torch.Tensor]:
    """Outputs and all gradients of a forward and backward pass."""
    outputs = forward(layer.inputs)
    return [*outputs, *torch.autograd.grad(outputs, layer.leaves, layer.grads)]


def ours(layer: Layer, *, fused: bool) -> Callable[[dict[str, torch.Tensor]], Outputs]:
    """trimtab's layers, fused in groups or one by one."""
    at = layer.adapted

    def group(x: torch.Tensor, names: tuple[str, ...]) -> Outputs:
        return project(x, *(at[n] for n in names)) if fused else [at[n](x) for n in names]

    def forward(inputs: dict[str, torch.Tensor]) -> Outputs:
        gate, up = group(inputs["mlp"], INPUTS["mlp"])
        middle = gated_activation(gate, up, impl=layer.impl)
        attention = group(inputs["attention"], INPUTS["attention"])
        return [*attention, at["o"](inputs["output"]), at["down"](middle)]

    return forward


def plain(layer: Layer, dtype: torch.dtype) -> list[torch.Tensor]:
    """The same computation with torch operations on dequantized weights, in one dtype."""
    weights = {name: at.dense_weight().to(dtype) for name, at in layer.adapted.items()}
    factors = {
        name: [f.detach().to(dtype).requires_grad_(True) for f in layer.adapted[name].factors("default")]
        for name in NAMES
    }
    x = {name: value.detach().to(dtype).requires_grad_(True) for name, value in layer.inputs.items()}

    def linear(name: str, value: torch.Tensor) -> torch.Tensor:
        a_RI, b_OR = factors[name]
        return F.linear(value, weights[name]) + SCALING * (value @ a_RI.t()) @ b_OR.t()

    attention = [linear(name, x["attention"]) for name in INPUTS["attention"]]
    middle = F.silu(linear("gate", x["mlp"])) * linear("up", x["mlp"])
    outputs = [*attention, linear("o", x["output"]), linear("down", middle)]
    leaves = [*x.values(), *(factor for name in NAMES for factor in factors[name])]
    grads = torch.autograd.grad(outputs, leaves, [grad.to(dtype) for grad in layer.grads])
    return [value.detach() for value in (*outputs, *grads)]


def their_layers(layer: Layer) -> dict[str, Any]:
    """bitsandbytes' layers on the same codes."""
    import bitsandbytes as bnb

    found = {}
    for name in NAMES:
        base = layer.adapted[name].__dict__["base"]
        entries = packed_state(base)
        codes = entries.pop("weight")
        theirs = bnb.nn.Linear4bit(
            base.in_features, base.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
        theirs.weight = bnb.nn.Params4bit.from_prequantized(
            data=codes,
            quantized_stats={key.removeprefix("weight."): value for key, value in entries.items()},
            requires_grad=False,
            device=codes.device,
        )
        found[name] = theirs.train()
    return found


def bitsandbytes_and_peft(layer: Layer) -> Callable[[dict[str, torch.Tensor]], Outputs]:
    """As in PEFT and transformers' Trainer: fp32 adapters added to the layer, bf16 autocast."""
    bases = their_layers(layer)
    device = layer.grads[0].device.type

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        a_RI, b_OR = layer.adapted[name].factors("default")
        return bases[name](x) + F.linear(F.linear(x.to(a_RI.dtype), a_RI), b_OR) * SCALING

    def forward(inputs: dict[str, torch.Tensor]) -> Outputs:
        with torch.autocast(device, torch.bfloat16):
            attention = [linear(name, inputs["attention"]) for name in INPUTS["attention"]]
            middle = F.silu(linear("gate", inputs["mlp"])) * linear("up", inputs["mlp"])
            return [*attention, linear("o", inputs["output"]), linear("down", middle)]

    return forward


def unsloth_functions(layer: Layer) -> Callable[[dict[str, torch.Tensor]], Outputs]:
    """Unsloth's fused functions; importing it patches other libraries, so it is built last."""
    import unsloth  # noqa: F401 (its kernels cannot be imported without it)
    from unsloth.kernels.fast_lora import LoRA_MLP, LoRA_QKV, LoRA_W
    from unsloth.kernels.swiglu import swiglu_DWf_DW_dfg_kernel, swiglu_fg_kernel

    bases = their_layers(layer)

    def given(*names: str) -> list[Any]:
        found: list[Any] = []
        for name in names:
            weight = bases[name].weight
            found += [weight, weight.quant_state, *layer.adapted[name].factors("default"), SCALING]
        return found

    def forward(inputs: dict[str, torch.Tensor]) -> Outputs:
        attention = LoRA_QKV.apply(inputs["attention"], *given("q", "k", "v"), False)
        o = LoRA_W.apply(inputs["output"], *given("o"))
        gates = (swiglu_fg_kernel, swiglu_DWf_DW_dfg_kernel, False)
        return [*attention, o, LoRA_MLP.apply(inputs["mlp"], *given("gate", "up", "down"), *gates)]

    return forward


def bare(layer: Layer) -> Callable[[], object]:
    """Only the 14 matrix products with bf16 weights: the cost without adapters and quantization."""
    weights = {name: at.dense_weight() for name, at in layer.adapted.items()}
    tokens = layer.grads[0].shape[1]
    x = {name: weight.new_zeros(tokens, weight.shape[1]).normal_() for name, weight in weights.items()}
    dy = {name: weight.new_zeros(tokens, weight.shape[0]).normal_() for name, weight in weights.items()}
    return lambda: [(x[name] @ weight.t(), dy[name] @ weight) for name, weight in weights.items()]


def orders(layer: Layer) -> dict[str, Callable[[], object]]:
    """Both orders of accumulating the adapter's and the weight's product into the output of the largest projection."""
    at = layer.adapted["up"]
    a_RI, b_OR = (factor.detach().bfloat16() for factor in at.factors("default"))
    weight_OI, x_NI = at.dense_weight(), layer.inputs["mlp"].detach()[0]
    h_NR = x_NI @ a_RI.t()
    return {
        "up: weight's product, then the adapter's": lambda: (x_NI @ weight_OI.t()).addmm_(h_NR, b_OR.t()),
        "up: adapter's product, then the weight's": lambda: (h_NR @ b_OR.t()).addmm_(x_NI, weight_OI.t()),
    }


def build(layer: Layer) -> Candidates:
    """The contestants, each with its correctness check."""
    truth, reference = plain(layer, torch.float64), plain(layer, torch.bfloat16)
    contestants: dict[str, Implementation] = {}
    absent: dict[str, str] = {}

    def add(name: str, forward: Callable[[dict[str, torch.Tensor]], Outputs], *, own: bool = False) -> None:
        def check() -> str | None:
            found = [value.detach() for value in step(layer, forward)]
            return disagreement(layer.names(), found, truth, reference, "bf16")

        contestants[name] = Implementation(lambda: step(layer, forward), check, ours=own)

    add("trimtab", ours(layer, fused=True), own=True)
    add("trimtab, one by one", ours(layer, fused=False), own=True)
    if reason := missing("bitsandbytes"):
        absent["bitsandbytes + peft"] = absent["unsloth"] = reason
        return Candidates(contestants, absent)
    add("bitsandbytes + peft", bitsandbytes_and_peft(layer))
    if reason := missing("unsloth"):
        absent["unsloth"] = reason
    else:
        add("unsloth", unsloth_functions(layer))
    return Candidates(contestants, absent)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--commit", default=None)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    layer = make_layer(llama_8b(), arguments.tokens, arguments.rank, "cuda")
    bench = build(layer)
    verdicts = {name: contestant.check() for name, contestant in bench.contestants.items()}
    for name, verdict in verdicts.items():
        print(f"{name}: {'agrees' if verdict is None else verdict}")
    for name, reason in bench.absent.items():
        print(f"{name}: skipped, {reason}")
    agreeing = {name: c.run for name, c in bench.contestants.items() if verdicts[name] is None}
    others = {"products on bf16 weights alone": bare(layer), **orders(layer)}
    times = time_together({**agreeing, **others}, budget_ms=500)
    peaks = {name: peak_bytes(run) for name, run in agreeing.items()}
    measured = ceilings()
    flops = sum(2 * spec_quantized.flops(arguments.tokens, dims) for dims in llama_8b().values())
    path = (
        arguments.output
        or Path("benchmarks/results") / f"quantized-linear-{file_name(measured.device)}.jsonl"
    )
    where = provenance("cuda", ("torch", "triton", "bitsandbytes", "peft", "unsloth"), arguments.commit)
    for name, timing in times.items():
        row = {
            "case": f"Llama-8B layer, {arguments.tokens} tokens, r {arguments.rank}",
            "contestant": name,
            **asdict(timing),
            "peak_bytes": peaks.get(name),
            "floor_ms": flops / measured.matmul_flops_per_s * 1e3,
            **where,
        }
        append_record(path, row)
        peak = f", {peaks[name] / 2**20:,.0f} MiB above the inputs" if name in peaks else ""
        print(f"{name}: {timing.median_ms:.2f} ms ({timing.low_ms:.2f}–{timing.high_ms:.2f}){peak}")
    print(f"floor: {flops / measured.matmul_flops_per_s * 1e3:.2f} ms")
    if failed := [name for name, c in bench.contestants.items() if c.ours and verdicts[name] is not None]:
        raise SystemExit(f"error: wrong results, not timed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
