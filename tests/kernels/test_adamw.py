"""One launch for all parameters against its formulas, torch's operations, and fp64.

The interpreted kernel, which has no fused multiply-adds, is bitwise identical to the formulas written out. Against
torch's operations there is a tolerance, on a CPU and on a GPU: torch's versions and devices associate products and fuse
multiply-adds differently. The kernel's error in fp64 is at most twice theirs.
"""

from __future__ import annotations

import gc
import math
import re
import weakref
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from triton_tools import CHIPS, SHARED_LIMIT, compile_for, interpreted

pytest.importorskip("triton")

from trimtab.kernels.adamw import adamw_step, impl_reference, impl_triton, spec
from trimtab.kernels.adamw.table import Member, ParameterTable
from trimtab.kernels.adamw8bit.table import hashing_keys
from trimtab.kernels.stochastic_rounding import impl_triton as rounding_triton
from trimtab.kernels.stochastic_rounding import spec as rounding_spec
from trimtab.optim import AdamW, OptimizerInBackward

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HYPER: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}

UNITS = 8
"""Allowed difference of fp32 results in units in the last place of the largest term: 1e-6. Seen are 5: each result is
up to 4 from fp64's, after eight roundings and three rounded constants."""

FLIPPED = 1e-3
"""Share of bf16 results that may be rounded to the other neighbour. A difference of one fp32 unit does that to 2⁻¹⁶ of
them: the other result must be on the other side of the threshold, which the equal random bits determine."""


def gpu_moments_(
    first: torch.Tensor, second: torch.Tensor, grad: torch.Tensor, *, beta1: float, beta2: float
) -> None:
    """`update.moments_` as torch's GPU kernels compute it, with two roundings for each fused multiply-add."""
    pull = torch.tensor(1 - beta1, dtype=torch.float32)
    if pull < 0.5:
        first.copy_(pull * (grad - first) + first)
    else:
        first.copy_((1 - pull).neg() * (grad - first) + grad)
    rest = torch.tensor(1 - beta2, dtype=torch.float32)
    second.copy_(rest * (grad * grad) + second * torch.tensor(beta2, dtype=torch.float32))


def gpu_apply_(
    weight: torch.Tensor, first: torch.Tensor, root: torch.Tensor, *, lr: float, beta1: float, beta2: float,
    eps: float, weight_decay: float, step: int,
) -> None:  # fmt: skip
    """`update.apply_` as torch's GPU kernels compute it, with two roundings for each fused multiply-add."""

    def fp32(x: float) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.float32)

    denominator = root * (fp32(1.0) / fp32(math.sqrt(1 - beta2**step))) + fp32(eps)
    decayed = weight * fp32(1 - lr * weight_decay)
    weight.copy_(fp32(-lr / (1 - beta1**step)) * (first / denominator) + decayed)


@pytest.fixture
def formulas(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`formulas(device)` makes the reference on a CPU use the formulas of torch's GPU kernels."""

    def use(device: str) -> None:
        if device == "cpu":
            monkeypatch.setattr(impl_reference, "moments_", gpu_moments_)
            monkeypatch.setattr(impl_reference, "apply_", gpu_apply_)
            monkeypatch.setattr(
                torch.Tensor, "sqrt", lambda x: torch.from_numpy(np.sqrt(x.numpy())), raising=True
            )

    return use


def on(device: str) -> Any:
    """Kernels run on this device, interpreted on a CPU."""
    return nullcontext() if device == "cuda" else interpreted(impl_triton, rounding_triton)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.detach().contiguous().view(torch.int16 if t.element_size() == 2 else torch.int32)


def unit(t: torch.Tensor) -> torch.Tensor:
    """The unit in the last place of an fp32 or bf16 tensor's numbers, in fp64."""
    exponent, digits = (0x7F80, 7) if t.dtype == torch.bfloat16 else (0x7F800000, 23)
    power = (bits(t) & exponent).view(t.dtype).double()
    return power.clamp_min(torch.finfo(t.dtype).tiny) * 2.0**-digits


def check_close(
    name: str,
    mine: torch.Tensor,
    theirs: torch.Tensor,
    largest: torch.Tensor,
    *,
    steps: int = 1,
    flips: bool = False,
) -> None:
    """Checks that two results differ as rounding does: `largest` is the magnitude of the largest term, in fp32.

    fp32: `UNITS` per step. bf16, and with `flips` also fp32, which bf16 moments of an earlier step affect: more in a
    share of `FLIPPED` per step, but at most one unit of bf16 per step.
    """
    assert torch.equal(mine.isnan(), theirs.isnan()), name
    finite = mine.isfinite() & theirs.isfinite()
    assert torch.equal(mine[~finite].nan_to_num(0.0), theirs[~finite].nan_to_num(0.0)), name
    difference = (mine[finite].double() - theirs[finite].double()).abs()
    small = UNITS * steps * unit(largest[finite])
    bf16 = mine.dtype == torch.bfloat16
    if not bf16 and not flips:
        worst = (difference / unit(largest[finite])).amax().item() if len(difference) else 0.0
        assert worst <= UNITS * steps, f"{name}: {worst} units"
        return
    differing = int((difference > small).sum())
    assert differing <= 1 + steps * FLIPPED * mine.numel(), f"{name}: {differing} of {mine.numel()} differ"
    if bf16 and not flips:
        neighbour = torch.maximum(unit(mine[finite]), unit(theirs[finite]))
    else:
        neighbour = unit(largest[finite].bfloat16())
    assert (difference <= steps * neighbour + small).all(), f"{name}: {difference.max()}"


def fp64_step(
    before: list[torch.Tensor], grad: torch.Tensor, *, lr: float, weight_decay: float, beta1: float, beta2: float,
    eps: float, step: int, grad_scale: torch.Tensor | float = 1.0,
) -> list[torch.Tensor]:  # fmt: skip
    """Weight and moments after a step, in fp64, before they are rounded."""
    weight, first, second = (t.double() for t in before)
    gradient = grad.double() * float(grad_scale)
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * gradient**2
    root = (second / (1 - beta2**step)).pow(0.5)
    weight = weight - lr * weight_decay * weight - lr * first / (1 - beta1**step) / (root + eps)
    return [weight, first, second]


class Errors(NamedTuple):
    """Errors in units of fp32 at the largest term: maximum and root mean square."""

    largest: float
    rms: float

    @classmethod
    def of(cls, pieces: list[torch.Tensor]) -> Errors:
        all_ = torch.cat([p.flatten() for p in pieces])
        return cls(all_.amax().item(), all_.square().mean().sqrt().item())


class Twins:
    """The same parameters and moments twice: for a table, and for the reference."""

    def __init__(self, shapes: list[tuple[int, ...]], weight: str, moment: str, device: str) -> None:
        self.shapes, self.count = shapes, 0
        one = [spec.make_inputs(s, seed=i, weight_dtype=weight)[0].to(device) for i, s in enumerate(shapes)]
        self.sets = [
            [
                (p.clone(), *(torch.zeros(p.shape, dtype=DTYPES[moment], device=device) for _ in "mv"))
                for p in one
            ]
            for _ in range(2)
        ]
        self.table: ParameterTable | None = None
        self.largest = [[t.float().abs() for t in tensors] for tensors in self.sets[0]]
        self.since = 0

    def step(self, grads: list[torch.Tensor | None], **more: Any) -> None:
        self.count += 1
        self.since += 1
        mine, theirs = self.sets
        decay = [0.1 if i % 2 else 0.0 for i in range(len(grads))]
        common = {**HYPER, "step": self.count, "seed": 2**40 + 5, **more}
        before = [[t.clone() for t in tensors] for tensors in theirs]
        if self.table is None:
            self.table = ParameterTable([Member(*tensors, index=i) for i, tensors in enumerate(mine)])
        self.table.step(grads, lr=[1e-2] * len(grads), weight_decay=decay, **common)
        for i, ((p, m, v), grad) in enumerate(zip(theirs, grads, strict=True)):
            if grad is not None:
                impl_reference.adamw_step(
                    p, grad, m, v, lr=1e-2, weight_decay=decay[i], param_index=i, **common
                )
        self.before, self.grads = before, grads
        self.arguments = [
            {
                key: value
                for key, value in common.items()
                if key not in ("seed", "skip", "stochastic_rounding")
            }
            | {"lr": 1e-2, "weight_decay": d}
            for d in decay
        ]
        self._record_largest_terms()

    def _record_largest_terms(self) -> None:
        """Running maxima: of states, of the weight's change, and of what the change is where m's terms cancel."""
        for largest, old, new, grad, more in zip(
            self.largest, self.before, self.sets[1], self.grads, self.arguments, strict=True
        ):
            if grad is None:
                continue
            for t, y in zip(largest, new, strict=True):
                torch.maximum(t, y.float().abs(), out=t)
            second = fp64_step(old, grad, **more)[2] / (1 - more["beta2"] ** more["step"])
            rate = more["lr"] / (1 - more["beta1"] ** more["step"])
            change = largest[1].double() * rate / (second.pow(0.5) + more["eps"])
            torch.maximum(largest[0], change.nan_to_num(0.0).float(), out=largest[0])

    def check_equal(self) -> None:
        """Bitwise identical."""
        for shape, mine, theirs in zip(self.shapes, *self.sets, strict=True):
            for name, a, b in zip(spec.STREAMS, mine, theirs, strict=True):
                assert torch.equal(bits(a), bits(b)), f"{name} of {shape}"

    def check_close(self) -> None:
        """As close as the number of steps since both had the same states allows."""
        for shape, mine, theirs, largest in zip(self.shapes, *self.sets, self.largest, strict=True):
            flips = self.since > 1 and mine[1].dtype == torch.bfloat16
            for name, a, b, size in zip(spec.STREAMS, mine, theirs, largest, strict=True):
                check_close(f"{name} of {shape}", a, b, size, steps=self.since, flips=flips)

    def check_unchanged(self) -> None:
        """Neither has changed in the last step, from the same states."""
        for tensors in self.sets:
            for after, before in zip(tensors, self.before, strict=True):
                assert all(torch.equal(bits(a), bits(b)) for a, b in zip(after, before, strict=True))

    def check_errors(self) -> None:
        """After a step from the same states the kernel's error is at most twice that of torch's operations."""
        true = []
        for before, grad, arguments in zip(self.before, self.grads, self.arguments, strict=True):
            assert grad is not None
            true.append(fp64_step(before, grad, **arguments))
        for j, name in enumerate(spec.STREAMS):
            mine, theirs = (
                Errors.of(
                    [
                        (tensors[j].double() - t[j]).abs() / unit(size[j])
                        for tensors, t, size in zip(which, true, self.largest, strict=True)
                    ]
                )
                for which in self.sets
            )
            assert mine.largest <= 2 * theirs.largest, (name, mine, theirs)
            assert mine.rms <= 2 * theirs.rms, (name, mine, theirs)

    def use_their_states(self) -> None:
        """Continues with identical states."""
        for mine, theirs in zip(*self.sets, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                a.copy_(b)
        self.largest = [[t.float().abs() for t in tensors] for tensors in self.sets[0]]
        self.since = 0


def gradients(shapes: list[tuple[int, ...]], step: int, dtype: str, device: str) -> list[torch.Tensor | None]:
    return [
        spec.make_inputs(s, seed=100 * step + i)[1].to(device, DTYPES[dtype]) for i, s in enumerate(shapes)
    ]


COMBINATIONS = [
    ("bf16", "fp32", "bf16"),
    ("bf16", "fp32", "fp32"),
    ("bf16", "bf16", "bf16"),
    ("bf16", "bf16", "fp32"),
    ("fp32", "bf16", "fp32"),
    ("fp32", "fp32", "bf16"),
    ("bf16", "bf16", "fp16"),
]


def shapes_on(device: str) -> list[tuple[int, ...]]:
    more = [(40, 512)] if device == "cpu" else [(1000, 1024), (77, 12345), (3, 1 << 21)]
    return [*spec.CASES, *more]


def step_of(twins: Twins, step: int, grad: str, stochastic: bool, device: str) -> None:
    """A clip factor in odd steps; the third step is skipped, by a flag on the device."""
    scale = torch.tensor(0.7, device=device) if step % 2 else 1.0
    skip = None if step == 1 else torch.tensor(step == 3, device=device)
    grads = gradients(twins.shapes, step, grad, device)
    twins.step(grads, grad_scale=scale, skip=skip, stochastic_rounding=stochastic)


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize(("weight", "moment", "grad"), COMBINATIONS)
def test_interpreted_kernel_equals_its_formulas(
    weight: str, moment: str, grad: str, stochastic: bool, formulas: Any
) -> None:
    """Odd and whole sizes, several steps, a clip factor, weight decay of 0 and 0.1, a skipped step."""
    formulas("cpu")
    twins = Twins(shapes_on("cpu"), weight, moment, "cpu")
    with on("cpu"):
        for step in (1, 2, 3, 4):
            step_of(twins, step, grad, stochastic, "cpu")
            twins.check_equal()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize(("weight", "moment", "grad"), COMBINATIONS)
def test_a_step_is_as_accurate_as_torchs(
    weight: str, moment: str, grad: str, stochastic: bool, device: str
) -> None:
    """Steps from identical states differ from torch's by rounding, and from fp64 by at most twice as much."""
    twins = Twins(shapes_on(device), weight, moment, device)
    with on(device):
        for step in (1, 2, 3, 4):
            step_of(twins, step, grad, stochastic, device)
            if step == 3:
                twins.check_unchanged()
            else:
                twins.check_close()
                twins.check_errors()
            twins.use_their_states()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize(("weight", "moment", "grad"), COMBINATIONS)
def test_several_steps_follow_torch(
    weight: str, moment: str, grad: str, stochastic: bool, device: str
) -> None:
    """Four steps, of which one is skipped, without equal states in between."""
    twins = Twins(shapes_on(device), weight, moment, device)
    with on(device):
        for step in (1, 2, 3, 4):
            step_of(twins, step, grad, stochastic, device)
    twins.check_close()


def test_a_step_with_other_results_is_found() -> None:
    """The checks above can fail: a larger rate, other random bits, fp32 results in bf16's precision."""
    twins = Twins([(40, 512)], "fp32", "fp32", "cpu")
    grads = gradients([(40, 512)], 1, "fp32", "cpu")
    with on("cpu"):
        twins.step(grads)
    twins.check_close()
    twins.check_errors()
    weight, first, _ = twins.sets[0][0]
    kept = weight.clone()
    weight.sub_((weight - twins.before[0][0]).mul_(1e-5))
    for check in (twins.check_close, twins.check_errors):
        with pytest.raises(AssertionError, match="weight"):
            check()
    weight.copy_(kept)
    first.copy_(first.bfloat16())
    for check in (twins.check_close, twins.check_errors):
        with pytest.raises(AssertionError, match="exp_avg"):
            check()

    twins = Twins([(40, 512)], "bf16", "bf16", "cpu")
    with on("cpu"):
        twins.step(grads)
        twins.check_close()
        twins.use_their_states()
        twins.step(grads)
        twins.check_close()
        impl_reference.adamw_step(
            *(twins.sets[0][0][0].copy_(twins.before[0][0]), grads[0], *twins.before[0][1:]),
            **twins.arguments[0], seed=3,
        )  # fmt: skip
    with pytest.raises(AssertionError, match=r"weight.* differ"):
        twins.check_close()


@pytest.mark.parametrize(
    ("device", "exact"), [("cpu", True), ("cpu", False), pytest.param("cuda", False, marks=gpu)]
)
@pytest.mark.parametrize("beta1", [0.0, 0.3, 0.5, 0.95])
@pytest.mark.parametrize("beta2", [0.0, 0.95])
def test_other_betas(beta1: float, beta2: float, exact: bool, device: str, formulas: Any) -> None:
    """Below β₁ = 1/2 torch's lerp uses another formula. Zero gradients and weights show the sign of zero."""
    shapes = [(7, 300), (64, 256)]
    if exact:
        formulas(device)
    twins = Twins(shapes, "bf16", "fp32", device)
    grads = gradients(shapes, 1, "fp32", device)
    for which in twins.sets:
        which[0][0][:3] = torch.tensor([0.0, -0.0, 1.0], device=device)[:, None].bfloat16()
    assert grads[0] is not None
    grads[0][:, ::2] = -0.0
    twins.use_their_states()
    with on(device):
        for _ in range(2):
            twins.step(grads, beta1=beta1, beta2=beta2, eps=1e-6)
            if exact:
                twins.check_equal()
            else:
                twins.check_close()
                twins.check_errors()
                twins.use_their_states()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stochastic", [True, False])
def test_nan_and_overflow(stochastic: bool, device: str) -> None:
    """NaN of a gradient, infinite gradients, and weights beyond the largest bf16."""
    shapes = [(64, 256)]
    twins = Twins(shapes, "bf16", "bf16", device)
    grads = gradients(shapes, 1, "fp32", device)
    assert grads[0] is not None
    grads[0][0, :5] = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 3e38], device=device)
    for which in twins.sets:
        which[0][0][1] = 3.3895e38
        which[0][0][2] = -3.3895e38
    twins.use_their_states()
    with on(device):
        for _ in range(2):
            twins.step(grads, stochastic_rounding=stochastic)
            twins.check_close()
            assert twins.sets[0][0][0].isnan().sum() >= 2
            twins.use_their_states()


@pytest.mark.parametrize("device", DEVICES)
def test_missing_odd_and_moved_tensors(device: str, formulas: Any) -> None:
    shapes = [(6, 300), (3, 512), (5, 4), (8, 256)]
    formulas(device)
    twins = Twins(shapes, "bf16", "bf16", device)
    grads = gradients(shapes, 1, "bf16", device)
    assert grads[0] is not None
    assert grads[3] is not None
    grads[0] = grads[0].t().contiguous().t()  # a gradient with strides
    grads[1] = None
    grads[3] = torch.cat([grads[3].flatten()[:1], grads[3].flatten()])[1:].view(8, 256)  # not aligned
    before = twins.sets[0][1][0].clone()
    check = twins.check_equal if device == "cpu" else twins.check_close
    with on(device):
        twins.step(grads)
        assert torch.equal(twins.sets[0][1][0], before)
        check()
        twins.use_their_states()
        grads[1] = torch.ones(3, 512, device=device)  # now with a gradient, of another dtype
        twins.step(grads)
        check()
    assert twins.table is not None
    assert {(launch.grad, launch.aligned) for launch in twins.table.launches} == {
        (torch.bfloat16, False),
        (torch.bfloat16, True),
        (torch.float32, True),
    } - ({(torch.bfloat16, True)} if grads[0].data_ptr() % 16 else set())


def test_keys_of_streams_equal_the_definition() -> None:
    got = hashing_keys(2**62 + 1, 12, np.array([0, 7]), 2).tolist()
    expected = [rounding_spec.keys(2**62 + 1, 12, index, 2) for index in (0, 7)]
    assert [(key & 0xFFFFFFFF, key >> 32) for key in got] == expected


def test_one_parameter_alone_and_unknown_impl() -> None:
    """The values that change are arguments of the launch, not a table."""
    param, grad = spec.make_inputs((7, 300))
    mine, theirs = ([param.clone(), torch.zeros(7, 300), torch.zeros(7, 300)] for _ in range(2))
    where: dict[str, Any] = {**HYPER, "lr": 1e-2, "weight_decay": 0.1, "step": 1, "param_index": 2**31 - 1}
    with on("cpu"):
        adamw_step(*[mine[0], grad, *mine[1:]], **where, seed=2**63, impl="triton")
    adamw_step(*[theirs[0], grad, *theirs[1:]], **where, seed=2**63)
    assert (mine[0] != theirs[0]).sum() <= 2, "the same random bits"
    with pytest.raises(ValueError, match="no impl"):
        adamw_step(param, grad, *mine[1:], **where, impl="cuda")


def signature(constexprs: dict[str, Any]) -> dict[str, str]:
    kinds = {f"{name}_ptr": "*i64" for name in ("tile", "record", "live")}
    kinds |= {"scale_ptr": "*fp32", "skip_ptr": "*u8", "number": "i32"}
    kinds |= {f"one_{name}": "i64" for name in ("grad", "hyper", "key", "key1", "key2")}
    names = impl_triton._adamw_kernel.arg_names
    return {name: kinds.get(name, "fp32") for name in names if name not in constexprs}


def fixed(weight: Any, moment: Any, grad: Any, aligned: bool, chip: int, near: bool = True) -> dict[str, Any]:
    config = spec.configuration(chip)
    return {
        "WEIGHT": weight, "MOMENT": moment, "GRAD": grad, "ALIGNED": aligned, "NEAR": near, "STOCHASTIC": True,
        "SIZE": config.size, "TIMES": config.times, "STAGES": config.stages,
    }  # fmt: skip


@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_for_every_chip(chip: int) -> None:
    import triton.language as tl

    config = spec.configuration(chip)
    for weight, moment, grad, aligned in (
        (tl.uint16, tl.float32, tl.float32, True),
        (tl.uint16, tl.float32, tl.uint16, True),
        (tl.uint16, tl.uint16, tl.uint16, True),
        (tl.uint16, tl.uint16, tl.float32, True),
        (tl.float32, tl.uint16, tl.float32, True),
        (tl.uint16, tl.float32, tl.uint16, False),
    ):
        constants = fixed(weight, moment, grad, aligned, chip)
        compiled = compile_for(
            chip, impl_triton._adamw_kernel, signature(constants), constants,
            num_warps=config.warps, num_stages=config.stages,
        )  # fmt: skip
        assert compiled.shared <= SHARED_LIMIT[chip] // 2
        assert not compiled.spills
        if aligned:
            narrow = re.findall(r"(?:ld|st)\.global\S*\.[bsu](?:8|16)\b.*", compiled.ptx)
            assert len(narrow) == 1, "only the skip flag is loaded alone"


@pytest.mark.parametrize("near", [True, False])
def test_only_torchs_multiply_adds_are_fused(near: bool) -> None:
    """Per element one for each of lerp, addcmul and addcdiv; quotient and root are IEEE's."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = impl_triton._adamw_kernel
    constants = fixed(tl.uint16, tl.float32, tl.uint16, True, 90, near) | {"STAGES": 1}
    types = {
        name: "constexpr" if name in constants else signature(constants)[name] for name in kernel.arg_names
    }
    compiled = triton.compile(
        ASTSource(kernel, types, constants), target=GPUTarget("cuda", 90, 32),
        options={"enable_fp_fusion": False, "num_warps": 4},
    )  # fmt: skip
    ptx = compiled.asm["ptx"]
    per_thread = constants["SIZE"] // (4 * 32)
    expected = {"fma": 3, "sqrt": 1, "div": 1, "mul": 5, "add": 1, "sub": 1}
    for name, count in expected.items():
        assert len(re.findall(rf"\b{name}\.rn\.f32", ptx)) == count * per_thread, name
    assert not re.findall(r"\b(?:fma|mul|add|sub)\.f32", ptx), "PTX's assembler may fuse these"
    assert "approx" not in ptx
    assert "ftz" not in ptx


def model(device: str, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(70, 80), torch.nn.LayerNorm(80), torch.nn.Linear(80, 256, bias=False)]
    return torch.nn.Sequential(*layers).to(device, dtype)


def tensors_of(net: torch.nn.Module, optimizer: AdamW) -> dict[str, torch.Tensor]:
    """The weights and moments themselves, not copies."""
    return {**{f"weight.{name}": p.detach() for name, p in net.named_parameters()}, **optimizer.tensors()}


def optimizer_of(net: torch.nn.Module, state: str, impl: str) -> AdamW:
    layers = [(n, p) for n, p in net.named_parameters() if not n.startswith("1.")]
    norms = [(n, p) for n, p in net.named_parameters() if n.startswith("1.")]
    groups: list[dict[str, Any]] = [
        {"params": layers, "weight_decay": 0.1},
        {"params": norms, "lr_scale": 0.5},
    ]
    return AdamW(groups, lr=1e-2, seed=4, state_dtype=state, impl=impl)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_optimizers_agree(dtype: torch.dtype, state: str, device: str, formulas: Any) -> None:
    """adamw_torch and adamw_bf16: groups, clip factor, skipped steps, exchanged states, a moved weight.

    On a CPU bitwise identical, on a GPU as close as `check_close` demands after each step from identical states.
    """
    formulas(device)
    with on(device):
        mine, theirs = model(device, dtype), model(device, dtype)
        mine[1].to(torch.float32), theirs[1].to(torch.float32)  # some parameters are fp32
        optimizers = [optimizer_of(m, state, impl) for m, impl in ((mine, "triton"), (theirs, "torch"))]
        for step in range(4):
            if step == 2:  # each continues from the other's state
                states = [
                    {**o.state_dict(), "tensors": {k: t.clone() for k, t in o.tensors().items()}}
                    for o in optimizers
                ]
                optimizers[0].load_state_dict(states[1])
                optimizers[1].load_state_dict(states[0])
                mine[0].weight.data = mine[0].weight.data.clone()  # the weight has another address now
            for i, (p, q) in enumerate(zip(mine.parameters(), theirs.parameters(), strict=True)):
                grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i))
                p.grad, q.grad = (grad.to(device, p.dtype).clone() for _ in range(2))
            factor = torch.tensor(0.5, device=device)
            skip = torch.tensor(step == 1, device=device) if device == "cuda" or step != 1 else None
            before = [tensors_of(m, o) for m, o in zip((mine, theirs), optimizers, strict=True)]
            before = [{name: t.clone() for name, t in tensors.items()} for tensors in before]
            for optimizer in optimizers:
                optimizer.step(lr=1e-2, grad_scale=factor, skip=skip)
            a, b = (tensors_of(m, o) for m, o in zip((mine, theirs), optimizers, strict=True))
            assert a.keys() == b.keys()
            if skip is not None and step == 1:
                for after, kept in zip((a, b), before, strict=True):
                    assert all(torch.equal(bits(after[name]), bits(kept[name])) for name in after)
            for name in a:
                if device == "cpu":
                    assert torch.equal(bits(a[name]), bits(b[name])), name
                else:
                    # a weight's change is at most 3e-2 in these steps
                    largest = torch.maximum(a[name].float().abs(), before[0][name].float().abs())
                    if name.startswith("weight."):
                        largest = largest.clamp_min(3e-2)
                    check_close(name, a[name], b[name], largest)
                    a[name].copy_(b[name])
    assert optimizers[0].scalars() == optimizers[1].scalars()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_in_backward_equals_a_step_after_it(device: str, state: str, impl: str) -> None:
    with on(device) if impl == "triton" else nullcontext():
        mine, theirs = model(device), model(device)
        first, second = (optimizer_of(m, state, impl) for m in (mine, theirs))
        during = OptimizerInBackward(first)
        for step in range(2):
            x = torch.randn(4, 70, generator=torch.Generator().manual_seed(step)).to(device, torch.bfloat16)
            during.begin(lr=1e-2)
            mine(x).square().mean().backward()
            assert all(p.grad is None for p in mine.parameters())
            theirs(x).square().mean().backward()
            second.step(lr=1e-2)
            second.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(mine.parameters(), theirs.parameters(), strict=True))
    assert all(torch.equal(t, second.tensors()[name]) for name, t in first.tensors().items())


@pytest.mark.parametrize("device", DEVICES)
def test_a_deleted_optimizer_is_freed(device: str) -> None:
    """Without Python's garbage collector: its states take more memory than the weights."""
    with on(device):
        net = model(device)
        optimizer = AdamW(net.named_parameters(), lr=1e-2, impl="triton")
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step(lr=1e-2)
        state = weakref.ref(next(iter(optimizer.tensors().values())))
        gc.disable()
        try:
            del optimizer
            assert state() is None
        finally:
            gc.enable()


def test_fp32_weights_keep_torchs_kernel() -> None:
    """adamw_torch on fp32 weights, and adamw_torch_fused, have no table."""
    net = model("cpu", torch.float32)
    assert not AdamW(net.named_parameters(), lr=1e-2, impl="triton")._tables
    net = model("cpu")
    fused = AdamW(net.named_parameters(), lr=1e-2, state_dtype="weights", fused=True, impl="triton")
    assert not fused._tables
    with pytest.raises(ValueError, match="unknown AdamW implementation"):
        AdamW(net.named_parameters(), lr=1e-2, impl="triton_exact")


def check_ends(
    mine: list[torch.Tensor], theirs: list[torch.Tensor], size: int = 1 << 24, middle: int = 1 << 31
) -> None:
    """The first and last `size` elements, and those around element `middle`."""
    for name, a, b in zip(spec.STREAMS, mine, theirs, strict=True):
        for start in (0, middle - size // 2, len(a) - size):
            x, y = a[start : start + size], b[start : start + size]
            assert x.count_nonzero() > 0.9 * size, "updated"
            check_close(f"{name} from {start}", x, y, y.float().abs())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_more_than_2_to_the_31_elements() -> None:
    """A tensor of 2.2 billion elements, against torch's operations."""
    shape = (2_200_000_000,)
    grad = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    mine = [torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    theirs = [t.clone() for t in mine]
    where: dict[str, Any] = {**HYPER, "lr": 1e-2, "weight_decay": 0.1, "step": 1}
    adamw_step(mine[0], grad, *mine[1:], **where, impl="triton")
    adamw_step(theirs[0], grad, *theirs[1:], **where)
    check_ends(mine, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_steps_never_synchronize(state: str) -> None:
    net = model("cuda")
    optimizer = optimizer_of(net, state, "triton")
    for step in range(4):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        factor = torch.ones((), device="cuda")
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            optimizer.step(grad_scale=factor, skip=factor.isnan())
        finally:
            torch.cuda.set_sync_debug_mode("default")
