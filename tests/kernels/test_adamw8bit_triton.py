"""The Triton step against the torch reference: bitwise identical where that is promised, close elsewhere."""

from __future__ import annotations

import gc
import re
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from triton_tools import CHIPS, SHARED_LIMIT, compile_for, interpreted

pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.kernels.adamw8bit import State8bit, adamw8bit_step, impl_triton, new_state, spec
from trimtab.kernels.adamw8bit.impl_reference import fp32_step
from trimtab.kernels.adamw8bit.table import Member, ParameterTable, hashing_keys
from trimtab.kernels.stochastic_rounding import impl_triton as rounding_triton
from trimtab.kernels.stochastic_rounding import spec as rounding_spec
from trimtab.optim import AdamW8bit, OptimizerInBackward

HYPER: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
SHAPES = [(3, 512), (7, 300), (33, 5), (4097,), (2, 2, 257), (1, 1), (16,), (0,), (9, 8), (40, 576), (5, 712)]
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def triton_on() -> Any:
    """`with triton_on(device):` runs the kernels there, interpreted on a CPU."""

    def on(device: str) -> Any:
        return nullcontext() if device == "cuda" else interpreted(impl_triton, rounding_triton)

    return on


class Twins:
    """Two copies of the same tensors and states: for a table, and for the reference one by one."""

    def __init__(
        self, shapes: list[tuple[int, ...]], weight: str, device: str, exact: bool, small: int = 64
    ) -> None:
        self.shapes, self.device = shapes, device
        self.table: ParameterTable | None = None
        self.exact, self.count = exact, 0
        params = [
            spec.make_inputs(s, seed=i, weight_dtype=weight)[0].to(device) for i, s in enumerate(shapes)
        ]
        self.params = (params, [p.clone() for p in params])
        self.states = tuple(
            [
                (torch.zeros(p.shape, device=device), torch.zeros(p.shape, device=device))
                if p.numel() < small
                else new_state(p)
                for p in params
            ]
            for _ in range(2)
        )

    def step(self, grads: list[torch.Tensor | None], reference: bool = True, **more: Any) -> None:
        self.count += 1
        mine, theirs = self.params
        if self.table is None:
            members = [
                Member(p, s, index=i) for i, (p, s) in enumerate(zip(mine, self.states[0], strict=True))
            ]
            self.table = ParameterTable([m for m in members if m.param.numel()], self.exact)
        kept = [i for i, p in enumerate(mine) if p.numel()]
        decay = [0.1 if i % 2 else 0.0 for i in range(len(grads))]
        common = {**HYPER, "step": self.count, "seed": 5, **more}
        rates = [1e-2] * len(kept)
        self.table.step([grads[i] for i in kept], lr=rates, weight_decay=[decay[i] for i in kept], **common)
        for i, (p, s, grad) in enumerate(zip(theirs, self.states[1], grads, strict=True)):
            if grad is not None and reference:
                one = {**common, "lr": 1e-2, "weight_decay": decay[i], "param_index": i}
                if isinstance(s, State8bit):
                    adamw8bit_step(p, grad, s, **one)
                else:
                    fp32_step(p, grad, s, **one)

    def tensors(self, which: int) -> list[torch.Tensor]:
        return [*self.params[which], *(t for s in self.states[which] for t in s)]


def gradients(shapes: list[tuple[int, ...]], step: int, dtype: str, device: str) -> list[torch.Tensor | None]:
    return [
        spec.make_inputs(s, seed=100 * step + i)[1].to(device, DTYPES[dtype]) for i, s in enumerate(shapes)
    ]


def agree(twins: Twins) -> None:
    """Weights to a few units in the last place (bf16: the same neighbour except for one in a thousand), codes that
    differ by at most one level, rarely."""
    for a, b in zip(twins.tensors(0), twins.tensors(1), strict=True):
        if a.dtype == torch.uint8:
            assert ((a.int() - b.int()).abs() <= 1).all()
            assert (a != b).sum() <= 1e-3 * a.numel() + 1
        elif a.dtype == torch.bfloat16:
            assert torch.allclose(a.float(), b.float(), rtol=2**-7, atol=1e-6)
            assert (a != b).sum() <= 1e-3 * a.numel() + 1
        else:
            assert torch.allclose(a, b, rtol=2e-5, atol=2e-8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("weight", "grad"), [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32"), ("bf16", "fp16")]
)
def test_many_tensors_step_as_the_reference(
    device: str, exact: bool, weight: str, grad: str, triton_on: Any
) -> None:
    shapes = SHAPES if device == "cpu" else [*SHAPES, *spec.CASES, (1000, 1024), (77, 12345)]
    twins = Twins(shapes, weight, device, exact)
    with triton_on(device):
        for step in (1, 2, 3):
            scale = torch.tensor(0.7, device=device)
            twins.step(gradients(shapes, step, grad, device), grad_scale=scale)
            if device == "cpu" or not exact:
                # torch's square root on a CPU is not IEEE's: the last bit may differ
                agree(twins)
                for mine, other in zip(twins.tensors(0), twins.tensors(1), strict=True):
                    mine.copy_(other)  # rounding differences would grow
            else:
                assert all(torch.equal(a, b) for a, b in zip(twins.tensors(0), twins.tensors(1), strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exact", [True, False])
def test_rows_can_be_resharded(device: str, exact: bool, triton_on: Any) -> None:
    """Two halves of the rows, with their offset, are bitwise identical to the whole, whatever the tiles."""
    shape = (10, 300) if device == "cpu" else (1000, 3000)
    impl = "triton_exact" if exact else "triton"
    param, grad = spec.make_inputs(shape, weight_dtype="bf16")
    param, grad, cut = param.to(device), grad.to(device), shape[0] * 2 // 5
    state = new_state(param)
    with triton_on(device):
        adamw8bit_step(param, grad, state, **HYPER, lr=1e-2, weight_decay=0.1, step=1, impl=impl)
        pieces = [
            (param[a:b].clone(), State8bit(*(t[a:b].clone() for t in state)), slice(a, b))
            for a, b in ((0, cut), (cut, shape[0]))
        ]
        place: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "step": 2, "seed": 3, "impl": impl}
        adamw8bit_step(param, grad, state, **HYPER, **place)
        for piece, mine, rows in pieces:
            adamw8bit_step(piece, grad[rows], mine, **HYPER, **place, offset=rows.start * shape[1])
            assert torch.equal(piece, param[rows])
            assert all(torch.equal(a, b[rows]) for a, b in zip(mine, state, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_missing_odd_and_untouched_gradients(device: str, triton_on: Any) -> None:
    shapes = [(6, 300), (3, 512), (5, 4), (8, 256)]
    twins = Twins(shapes, "fp32", device, True, small=64)
    grads = gradients(shapes, 1, "fp32", device)
    grads[0] = grads[0].t().contiguous().t()  # a gradient with strides
    grads[1] = None
    grads[3] = torch.cat([torch.ones(1, device=device), grads[3].flatten()])[1:].view(8, 256)  # not aligned
    before = [None if g is None else g.clone() for g in grads]
    untouched = twins.params[0][1].clone()
    with triton_on(device):
        for _ in range(2):
            twins.step(grads)
    agree(twins)
    assert torch.equal(twins.params[0][1], untouched)
    assert all(g is None or torch.equal(g, b) for g, b in zip(grads, before, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_skip_flag_on_the_device_changes_nothing(device: str, triton_on: Any) -> None:
    shapes = [(3, 300), (2, 256), (7,)]
    twins = Twins(shapes, "bf16", device, False)
    with triton_on(device):
        twins.step(gradients(shapes, 1, "bf16", device), reference=False)
        before = [t.clone() for t in twins.tensors(0)]
        grads = [torch.full_like(g, torch.nan) for g in gradients(shapes, 2, "bf16", device) if g is not None]
        twins.step(grads, reference=False, skip=torch.tensor(True, device=device))
        assert all(torch.equal(a, b) for a, b in zip(before, twins.tensors(0), strict=True))
        twins.step(
            gradients(shapes, 3, "bf16", device), reference=False, skip=torch.tensor(False, device=device)
        )
        assert not torch.equal(before[0], twins.tensors(0)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weight", ["fp32", "bf16"])
@pytest.mark.parametrize("impl", ["triton", "triton_exact", "reference"])
def test_a_learning_rate_of_zero_changes_no_weight(
    impl: str, weight: str, device: str, triton_on: Any
) -> None:
    """The first warm-up step; the fused kernel divides by the learning rate. Zero weights show the smallest change."""
    param, grad = (t.to(device) for t in spec.make_inputs((4, 300), weight_dtype=weight))
    grad[0, :7] = 0.0
    param[:, ::2] = 0.0
    before, state = param.clone(), new_state(param)
    with triton_on(device):
        adamw8bit_step(param, grad, state, **HYPER, lr=0.0, weight_decay=0.1, step=1, impl=impl)
    assert torch.equal(param, before)
    assert state.scale1.all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_learning_rate_of_zero_changes_no_small_tensor(device: str, triton_on: Any) -> None:
    """Tensors with fp32 moments, through the table."""
    twins = Twins([(40,)], "fp32", device, exact=False)
    twins.params[0][0].zero_()
    grads = gradients([(40,)], 1, "fp32", device)
    with triton_on(device):
        twins.step(grads, reference=False)
        assert twins.table is not None
        before = twins.params[0][0].clone()
        twins.table.step(grads, lr=[0.0], weight_decay=[0.1], **HYPER, step=2, seed=5)
        assert torch.equal(twins.params[0][0], before)
        twins.params[0][0].zero_()
        twins.table.step(grads, lr=[0.0], weight_decay=[0.1], **HYPER, step=3, seed=5)
    assert not twins.params[0][0].any()


@pytest.mark.parametrize("device", DEVICES)
def test_nan_propagates(device: str, triton_on: Any) -> None:
    param, _ = (t.to(device) for t in spec.make_inputs((4, 300), weight_dtype="bf16"))
    state, grad = new_state(param), torch.ones(4, 300, device=device)
    grad[1, 280], grad[2, 3] = torch.nan, torch.inf
    with triton_on(device):
        adamw8bit_step(param, grad, state, **HYPER, lr=1e-2, weight_decay=0.1, step=1, impl="triton")
    assert param[1, 280].isnan()
    assert state.scale1[1, 1].isnan()
    assert state.scale2[1, 1].isnan()
    assert state.scale1[2, 0].isinf()
    assert param.isnan().sum() <= 2


def test_launches_of_a_table() -> None:
    """Rows of any length have full blocks without idle lanes, and a launch for the blocks that end rows."""
    shapes = [(16, 896), (8, 4864), (300,), (16, 576), (40, 8), (4, 1001), (64, 896)]
    twins = Twins(shapes, "bf16", "cpu", False, small=301)
    with interpreted(impl_triton, rounding_triton):
        twins.step(gradients(shapes, 1, "fp32", "cpu"))
    assert twins.table is not None
    launches = {(k.kind, k.width, k.aligned): len(k.tiles) for k in twins.table.launches}
    # a program has 16 tiles of 512 elements: 32 blocks of 256, 64 of 128, 128 of 64
    assert launches == {
        ("full", 256, True): 2 + 1 + 6,
        ("last", 128, True): 1 + 1,
        ("all", 256, True): 5,
        ("", 0, False): 1,
        ("last", 64, True): 1,
        ("all", 8, True): 1,
        ("full", 256, False): 1,
        ("last", 256, False): 1,
    }


@settings(max_examples=12, deadline=None)
@given(rows=st.integers(1, 5), columns=st.integers(1, 700), offset=st.sampled_from([0, 8, 2**32 - 256]))
def test_any_shape(rows: int, columns: int, offset: int) -> None:
    param, grad = spec.make_inputs((rows, columns), seed=columns)
    copy, state = param.clone(), new_state(param)
    other = new_state(param)
    place: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "step": 1, "offset": offset, "seed": 1}
    with interpreted(impl_triton, rounding_triton):
        adamw8bit_step(param, grad, state, **HYPER, **place, impl="triton_exact")
    adamw8bit_step(copy, grad, other, **HYPER, **place)
    assert torch.allclose(param, copy, rtol=1e-6, atol=1e-8)
    assert ((state.codes1.int() - other.codes1.int()).abs() <= 1).all()
    assert (state.codes1 != other.codes1).sum() <= 1


def test_batched_keys_equal_the_definition() -> None:
    import numpy as np

    indices = [0, 7, 2**31 - 1]
    got = hashing_keys(2**62 + 1, 12, np.array(indices))
    for key, index in zip(got.tolist(), indices, strict=True):
        assert (key & 0xFFFFFFFF, key >> 32) == rounding_spec.keys(2**62 + 1, 12, index)


def test_words_of_a_group_are_not_correlated() -> None:
    """Eight neighbours share a hash: their fractions and upper halves must still look independent."""
    from trimtab.kernels.adamw8bit.impl_reference import _words

    count = 1 << 15
    where = {"seed": 1, "step": 2, "param_index": 3, "offset": 0}
    words = _words(count, 8, where, torch.device("cpu")).long()
    parts = torch.cat([(words >> 7) & 0xFFFF, (words >> 16) & 0xFFFF], dim=1).double() / 65536 - 0.5
    limit = 5 / count**0.5 / 12  # five standard deviations of a product's mean
    product = parts.t() @ parts / count
    assert (product.diag() - 1 / 12).abs().max() < limit
    # a word's two parts overlap in seven bits, the highest of one and the lowest of the other
    allowed = torch.eye(16).bool() | torch.eye(16).roll(8, 1).bool()
    assert product[~allowed].abs().max() < limit
    assert product[torch.eye(16).roll(8, 1).bool()].abs().max() < limit + 1 / 12 / 2**8
    assert parts.mean(0).abs().max() < 5 / (12 * count) ** 0.5


def test_operator() -> None:
    param, grad = spec.make_inputs((3, 300))
    more = (torch.ones(()), None, 1e-2, 0.9, 0.999, 1e-8, 0.1, 1, 0, 0, True, 0, False)
    from trimtab.kernels.adamw8bit import operator

    with interpreted(impl_triton, rounding_triton):
        torch.library.opcheck(operator.step_, (param, grad, *new_state(param), *more))


def signature(kernel: Any, constexprs: dict[str, Any]) -> dict[str, str]:
    kinds = {
        "tile_ptr": "*i64",
        "record_ptr": "*i64",
        "live_ptr": "*i64",
        "scale_ptr": "*fp32",
        "number": "i32",
    }
    kinds |= {"skip_ptr": "*u8", "one_grad": "i64", "one_key": "i64", "one_hyper": "i64"}
    return {name: kinds.get(name, "fp32") for name in kernel.arg_names if name not in constexprs}


@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_for_every_chip(chip: int) -> None:
    import triton.language as tl

    config = spec.configuration(chip)
    for weight, grad, part, width, aligned in (
        (tl.uint16, tl.uint16, "all", 256, True),
        (tl.float32, tl.float32, "all", 256, True),
        (tl.uint16, tl.float32, "full", 256, True),
        (tl.uint16, tl.float32, "last", 64, True),
        (tl.uint16, tl.float32, "last", 256, True),
        (tl.uint16, tl.float32, "full", 256, False),
        (tl.uint16, tl.float32, "last", 256, False),
        (tl.float32, tl.float32, "all", 8, True),
        (tl.uint16, tl.uint16, "last", 64, False),
    ):
        fixed: dict[str, Any] = {
            "WEIGHT": weight,
            "GRAD": grad,
            "PART": part,
            "ALIGNED": aligned,
            "STOCHASTIC": True,
            "EXACT": False,
        }
        blocks = config.blocks * spec.BLOCK // width
        fixed |= {"ASM": True, "B": blocks, "E": width, "TIMES": config.times, "STAGES": config.stages}
        compiled = compile_for(
            chip,
            impl_triton._step8_kernel,
            signature(impl_triton._step8_kernel, fixed),
            fixed,
            num_warps=config.warps,
        )
        assert compiled.shared <= SHARED_LIMIT[chip]
        assert not compiled.spills
        if aligned:
            narrow = re.findall(r"(?:ld|st)\.global\S*\.[bsu](?:8|16)\b.*", compiled.ptx)
            assert len(narrow) == 1, "only the skip flag is loaded alone"
            wide = re.search(r"ld\.global\.v4|cp\.async\.cg\S* \[.*\], \[.*\], 0x10", compiled.ptx)
            assert wide, "loads are 16 bytes wide"
    fixed = {
        "WEIGHT": tl.uint16,
        "GRAD": tl.uint16,
        "STOCHASTIC": True,
        "EXACT": False,
        "SIZE": spec.SMALL_TILE,
    }
    kernel = impl_triton._step32_kernel
    assert compile_for(chip, kernel, signature(kernel, fixed), fixed).shared == 0


def test_the_exact_kernel_fuses_nothing() -> None:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = impl_triton._step8_kernel
    fixed: dict[str, Any] = {"WEIGHT": tl.float32, "GRAD": tl.float32, "PART": "all", "ALIGNED": True}
    fixed |= {"STOCHASTIC": True, "EXACT": True, "ASM": True, "B": 4, "E": 256, "TIMES": 8, "STAGES": 1}
    types = {n: "constexpr" if n in fixed else signature(kernel, fixed)[n] for n in kernel.arg_names}
    options = {"enable_fp_fusion": False}
    compiled = triton.compile(
        ASTSource(kernel, types, fixed), target=GPUTarget("cuda", 90, 32), options=options
    )
    assert "fma" not in compiled.asm["ptx"]
    assert "approx" not in compiled.asm["ptx"]


def model(device: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(70, 80), torch.nn.LayerNorm(80), torch.nn.Linear(80, 256, bias=False)]
    return torch.nn.Sequential(*layers).to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_the_optimizer_steps_all_and_its_state_is_the_references(device: str, triton_on: Any) -> None:
    with triton_on(device):
        mine, theirs = model(device), model(device)
        optimizers = [
            AdamW8bit([{"params": list(m.named_parameters())}], lr=1e-2, seed=4, impl=impl)
            for m, impl in ((mine, "triton_exact"), (theirs, "reference"))
        ]
        for step in range(3):
            if step == 2:  # each continues from the other's state
                states = [
                    {**o.state_dict(), "tensors": {k: t.clone() for k, t in o.tensors().items()}}
                    for o in optimizers
                ]
                optimizers[0].load_state_dict(states[1])
                optimizers[1].load_state_dict(states[0])
                mine[0].weight.data = mine[0].weight.data.clone()  # the weight has another address now
            for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(device)
                q.grad = p.grad.clone()
            for optimizer in optimizers:
                optimizer.step(lr=1e-2, grad_scale=torch.tensor(0.5, device=device))
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q) if device == "cuda" else torch.allclose(p, q, rtol=1e-5, atol=1e-7)
    assert optimizers[0].tensors().keys() == optimizers[1].tensors().keys()
    assert optimizers[0].scalars() == optimizers[1].scalars()


@pytest.mark.parametrize("device", DEVICES)
def test_a_deleted_optimizer_is_freed(device: str, triton_on: Any) -> None:
    """Without Python's garbage collector: its states take as much memory as the weights."""
    with triton_on(device):
        net = model(device)
        optimizer = AdamW8bit([{"params": list(net.named_parameters())}], lr=1e-2, impl="triton")
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_in_backward_equals_a_step_after_it(device: str, impl: str, triton_on: Any) -> None:
    with triton_on(device) if impl == "triton" else nullcontext():
        mine, theirs = model(device, torch.bfloat16), model(device, torch.bfloat16)
        first, second = (
            AdamW8bit([{"params": list(m.named_parameters())}], lr=1e-2, impl=impl) for m in (mine, theirs)
        )
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_more_than_2_to_the_31_elements() -> None:
    """The last rows of a tensor of 2.2 billion elements, against the same rows alone."""
    shape = (8_500_000, 257)
    param = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    state, rows = new_state(param), slice(shape[0] - 64, shape[0])
    piece, mine = param[rows].clone(), State8bit(*(t[rows].clone() for t in state))
    place: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "step": 1, "impl": "triton"}
    adamw8bit_step(param, grad, state, **HYPER, **place)
    adamw8bit_step(piece, grad[rows], mine, **HYPER, **place, offset=rows.start * 257)
    assert torch.equal(param[rows], piece)
    assert all(torch.equal(a[rows], b) for a, b in zip(state, mine, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_runs_are_bitwise_identical_and_never_synchronize() -> None:
    results = []
    for _ in range(2):
        module = model("cuda", torch.bfloat16)
        optimizer = AdamW8bit([{"params": list(module.named_parameters())}], lr=1e-2, impl="triton")
        for step in range(4):
            for p in module.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).cuda().bfloat16()
            factor = torch.ones((), device="cuda")
            torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
            try:
                optimizer.step(grad_scale=factor, skip=factor.isnan())
            finally:
                torch.cuda.set_sync_debug_mode("default")
        results.append([p.detach().clone() for p in module.parameters()] + list(optimizer.tensors().values()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
