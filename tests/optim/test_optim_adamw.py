"""The four AdamW variants: parity with torch, decay, bf16 weights, resuming, unusual inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.facts.errors import CheckpointError, RecipeError
from trimtab.optim import OPTIMIZERS, AdamW, AdamW8bit, build, parameter_groups

HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8}


def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [
        torch.nn.Linear(70, 80),
        torch.nn.LayerNorm(80),
        torch.nn.Linear(80, 3),
    ]  # 5600 elements, and small
    return torch.nn.Sequential(*layers).to(dtype)


def set_grads(module: torch.nn.Module, step: int, dtype: torch.dtype | None = None) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in module.parameters():
        grad = torch.randn(p.shape, generator=generator)
        if dtype is not None and dtype != p.dtype:
            p.grad_dtype = dtype
        p.grad = grad.to(p.device, dtype or p.dtype)


def weights(module: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused"])
def test_fp32_equals_torch_bit_for_bit(name: str) -> None:
    ours, theirs = model(), model()
    optimizer = build(name, ours.named_parameters(), **HYPER, weight_decay=0.1)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    fused = torch.optim.AdamW(groups, **HYPER, fused=True)
    plain_model = model()
    plain_groups = [
        {"params": [p for p in plain_model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in plain_model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(plain_groups, **HYPER, foreach=False)
    for step in range(60):
        for module in (ours, theirs, plain_model):
            set_grads(module, step)
        for group in (*fused.param_groups, *plain.param_groups):
            group["lr"] = 1e-2 / (step + 1)
        optimizer.step(lr=1e-2 / (step + 1))
        fused.step()
        plain.step()
    for a, b, c in zip(weights(ours), weights(theirs), weights(plain_model), strict=True):
        assert torch.equal(a, b)
        assert torch.allclose(a, c, rtol=0, atol=1e-7)


def test_plain_arithmetic_equals_torch_too() -> None:
    """The code path of bf16, with fp32 weights: fp64 gradients select it."""
    ours, theirs = model(), model()
    optimizer = AdamW([{"params": list(ours.named_parameters())}], **HYPER, weight_decay=0.1)
    reference = torch.optim.AdamW(theirs.parameters(), **HYPER, weight_decay=0.1, foreach=False)
    for step in range(60):
        set_grads(ours, step, torch.float64)
        set_grads(theirs, step)
        optimizer.step()
        reference.step()
    for a, b in zip(weights(ours), weights(theirs), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decay_does_not_affect_the_moments(name: str, dtype: torch.dtype) -> None:
    small, large = model(dtype), model(dtype)
    none = build(name, small.named_parameters(), **HYPER, weight_decay=0.0)
    much = build(name, large.named_parameters(), **HYPER, weight_decay=10.0)
    for step in range(3):
        set_grads(small, step)
        set_grads(large, step)
        none.step()
        much.step()
    assert all(torch.equal(a, much.tensors()[key]) for key, a in none.tensors().items())
    assert large[0].weight.norm() < 0.9 * small[0].weight.norm()
    assert torch.equal(large[1].weight, small[1].weight), "norms and biases are not decayed"
    assert torch.equal(large[0].bias, small[0].bias)


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_bf16", "adamw_8bit"])
def test_bf16_weights_follow_fp32_on_average_and_not_without_stochastic_rounding(name: str) -> None:
    """A learning rate of 2e-5 on weights near 1, whose bf16 neighbours are 4e-3 away: 1/200 of that per step."""
    start, steps, lr = torch.full((64, 128), 0.9), 100, 2e-5

    def train(kind: str, weight: torch.Tensor) -> torch.Tensor:
        p = torch.nn.Parameter(weight.clone())
        optimizer = build(kind, [("w", p)], lr=lr, weight_decay=0.1)
        for _ in range(steps):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return p.detach().float()

    true = train("adamw_torch", start)
    moved = (true - start.bfloat16().float()).mean()
    assert -2.5e-3 < moved - (start - start.bfloat16().float()).mean() < -1.5e-3
    start16 = start.bfloat16()
    got = train(name, start16)
    expected = train("adamw_torch", start16.float()).mean()
    gap = 2.0**-8
    deviation = gap / 2 / got.numel() ** 0.5  # at most half a gap each
    assert abs(got.mean() - expected) < 5 * deviation
    assert abs(expected - start16.float().mean()) > 20 * deviation, "unchanged weights would pass"
    assert torch.equal(train("adamw_torch_fused", start16), start16.float()), (
        "rounding to nearest changes nothing"
    )


def test_bf16_moments_do_not_get_stuck() -> None:
    """At β₂ = 0.999 a decaying second moment changes by less than half a bf16 step."""
    p = torch.nn.Parameter(torch.zeros(64, 64))
    random = AdamW([{"params": [("w", p)]}], lr=0.0, state_dtype="bf16")
    nearest = AdamW([{"params": [("w", p)]}], lr=0.0, state_dtype="bf16", stochastic_rounding=False)
    for optimizer in (random, nearest):
        for step in range(700):
            p.grad = torch.full_like(p, 1.0 if step == 0 else 0.0)
            optimizer.step()
    true = 1e-3 * 0.999**699
    assert abs(random.tensors()["exp_avg_sq.w"].float().mean() / true - 1) < 0.02
    assert nearest.tensors()["exp_avg_sq.w"].float().mean() / true > 1.5


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_is_bitwise_identical(name: str, dtype: torch.dtype) -> None:
    whole = model(dtype)
    optimizer = build(name, whole.named_parameters(), **HYPER, weight_decay=0.1, seed=7)
    for step in range(3):
        set_grads(whole, step)
        optimizer.step()
    saved = {key: t.clone() for key, t in optimizer.tensors().items()}
    scalars = json.loads(json.dumps(optimizer.scalars()))
    resumed = model(dtype, seed=1)
    resumed.load_state_dict(whole.state_dict())
    other = build(name, resumed.named_parameters(), **HYPER, weight_decay=0.1, seed=0)
    assert other.tensors().keys() == saved.keys(), "a new optimizer has all states"
    for key, t in other.tensors().items():
        t.copy_(saved[key])
    other.restore_scalars(scalars)
    for step in range(3, 6):
        for module, stepped in ((whole, optimizer), (resumed, other)):
            set_grads(module, step)
            stepped.step()
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))
    assert all(torch.equal(a, other.tensors()[key]) for key, a in optimizer.tensors().items())
    assert other.scalars() == {"step": 6, "seed": 7}


def test_state_dict_round_trip_and_errors() -> None:
    module = model(torch.bfloat16)
    optimizer = build("adamw_8bit", module.named_parameters(), **HYPER)
    set_grads(module, 0)
    optimizer.step()
    fresh = build("adamw_8bit", module.named_parameters(), **HYPER)
    fresh.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(a, fresh.tensors()[key]) for key, a in optimizer.tensors().items())
    with pytest.raises(CheckpointError, match="another model or optimizer"):
        build("adamw_torch", module.named_parameters(), **HYPER).load_state_dict(optimizer.state_dict())
    with pytest.raises(CheckpointError, match="cannot be read"):
        fresh.restore_scalars({"steps": 3})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_random_bits_do_not_depend_on_groups_or_order(name: str) -> None:
    one, two = model(torch.bfloat16), model(torch.bfloat16)
    first = build(name, one.named_parameters(), **HYPER)
    second = build(name, reversed(list(two.named_parameters())), **HYPER, decay_all=True)
    for step in range(3):
        for module, optimizer in ((one, first), (two, second)):
            set_grads(module, step)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(two), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_shapes_strides_and_gradient_dtypes(name: str, dtype: torch.dtype) -> None:
    shapes = {
        "scalar": (),
        "empty": (0,),
        "none": (4, 0),
        "vector": (5000,),
        "rows": (20, 300),
        "cube": (5, 7, 257),
    }
    torch.manual_seed(0)
    start = {key: torch.randn(shape).to(dtype) for key, shape in shapes.items()}
    results = []
    for strided in (False, True):
        params = {key: torch.nn.Parameter(value.clone()) for key, value in start.items()}
        params["unused"] = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        optimizer = build(name, params.items(), **HYPER, weight_decay=0.1)
        generator = torch.Generator().manual_seed(1)
        for key, p in params.items():
            if key == "unused":
                continue
            p.grad_dtype = torch.float32
            grad = torch.randn(p.shape, generator=generator)
            p.grad = grad.t().contiguous().t() if strided and p.ndim == 2 else grad
        optimizer.step(grad_scale=torch.tensor(0.5))
        assert torch.equal(params["unused"], torch.ones(3, dtype=dtype))
        results.append(params)
    for key, value in start.items():
        assert torch.equal(results[0][key], results[1][key])
        assert results[0][key].isfinite().all()
        # Adam's first step changes a weight by the learning rate, whatever the gradient: 0.01 and rounding
        change = (results[0][key].detach().float() - value.float()).abs()
        assert not change.numel() or change.max() < 0.01 + 0.005 * value.float().abs().max()
        assert not change.numel() or change.float().mean() > 0.004


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_grad_scale_may_be_a_number_or_a_tensor(name: str) -> None:
    results = []
    for scale, factor in ((1.0, 0.25), (0.25, 1.0), (torch.tensor(0.25), 1.0)):
        module = model()
        optimizer = build(name, module.named_parameters(), **HYPER)
        for step in range(3):
            set_grads(module, step)
            for p in module.parameters():
                p.grad.mul_(factor)
            optimizer.step(grad_scale=scale)
        results.append(weights(module))
    for a, b, c in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)
        assert torch.equal(b, c)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_skipped_step_changes_nothing(name: str, dtype: torch.dtype, on_device: bool) -> None:
    """`on_device`: as on a GPU, where the host does not read the flag."""
    module = model(dtype)
    optimizer = build(name, module.named_parameters(), **HYPER, weight_decay=0.1)
    set_grads(module, 0)
    optimizer.step()
    before = weights(module)
    states = {key: t.clone() for key, t in optimizer.tensors().items()}

    def step(flag: bool) -> None:
        set_grads(module, 1)
        if flag:
            module[0].weight.grad[0, 0] = torch.nan
        if not on_device:
            optimizer.step(skip=torch.tensor(flag), grad_scale=torch.tensor(0.5))
            return
        optimizer.count += 1
        with torch.no_grad():
            for group in optimizer.param_groups:
                optimizer._update(group, 1e-2, torch.tensor(0.5), torch.tensor(flag))

    step(True)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(module), strict=True))
    assert all(torch.equal(t, states[key]) for key, t in optimizer.tensors().items())
    assert optimizer.scalars()["step"] == (2 if on_device else 1)
    step(False)
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(module), strict=True))
    assert all(w.isfinite().all() for w in weights(module))


def test_small_tensors_keep_fp32_moments() -> None:
    params = {
        "large": torch.nn.Parameter(torch.zeros(64, 64)),
        "small": torch.nn.Parameter(torch.zeros(63, 65)),
    }
    tensors = AdamW8bit([{"params": list(params.items())}], lr=0.1).tensors()
    assert {key: str(t.dtype) for key, t in tensors.items()} == {
        "exp_avg_codes.large": "torch.uint8",
        "exp_avg_scale.large": "torch.float32",
        "root_codes.large": "torch.uint8",
        "root_scale.large": "torch.float32",
        "exp_avg.small": "torch.float32",
        "exp_avg_sq.small": "torch.float32",
    }


def test_parameter_groups() -> None:
    module = model()
    module[2].bias.requires_grad_(False)
    decayed, spared = parameter_groups(module.named_parameters(), 0.1)
    assert [name for name, _ in decayed["params"]] == ["0.weight", "2.weight"]
    assert [name for name, _ in spared["params"]] == ["0.bias", "1.weight", "1.bias"]
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    (everything,) = parameter_groups(module.named_parameters(), 0.1, decay_all=True)
    assert len(everything["params"]) == 5


def test_invalid_arguments_raise() -> None:
    p = torch.nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(RecipeError, match="unknown optimizer 'adam'; choose one of adamw_torch"):
        build("adam", [("p", p)], lr=1.0)
    with pytest.raises(RecipeError, match="no trainable parameters"):
        build("adamw_torch", [], lr=1.0)
    with pytest.raises(RecipeError, match="float16"):
        build("adamw_torch", [("p", torch.nn.Parameter(torch.zeros(3, dtype=torch.float16)))], lr=1.0)
    with pytest.raises(RecipeError, match="not contiguous"):
        build("adamw_torch", [("p", torch.nn.Parameter(torch.zeros(3, 4).t()))], lr=1.0)
    with pytest.raises(RecipeError, match="adam_beta2"):
        build("adamw_torch", [("p", p)], lr=1.0, betas=(0.9, 1.0))
    with pytest.raises(RecipeError, match="fused kernel"):
        AdamW([{"params": [("p", p)]}], lr=1.0, state_dtype="bf16", fused=True)


def test_the_examples_in_the_documentation_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "optimizer.md").read_text()
    names: dict[str, Any] = {}
    first, second = (part.split("```")[0] for part in page.split("```python\n")[1:3])
    exec(first, names)
    assert names["optimizer"].scalars()["step"] == 100
    exec(second, names)
    assert names["steps"].optimizer.scalars()["step"] == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_agrees_and_never_synchronizes(name: str, dtype: torch.dtype) -> None:
    from trimtab.optim import clip_factor, global_norm

    here, there = model(dtype), model(dtype).cuda()
    mine, theirs = (
        build(name, here.named_parameters(), **HYPER),
        build(name, there.named_parameters(), **HYPER),
    )
    for step in range(3):
        set_grads(here, step)
        set_grads(there, step)
        mine.step(grad_scale=clip_factor(global_norm(here.parameters()), 1.0))
        torch.cuda.set_sync_debug_mode("error")
        try:
            factor = clip_factor(global_norm(there.parameters()), 1.0)
            theirs.step(grad_scale=factor, skip=factor.isnan())
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(weights(here), weights(there), strict=True):
        assert torch.allclose(
            a.float(), b.cpu().float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3
        )


def test_adamw_accepts_named_parameters() -> None:
    layer = torch.nn.Linear(64, 64)
    plain = AdamW8bit(layer.named_parameters(), lr=1e-3)
    groups = AdamW8bit([{"params": list(layer.named_parameters())}], lr=1e-3)
    assert sorted(plain.tensors()) == sorted(groups.tensors())
    with pytest.raises(RecipeError, match=r"got a Parameter without a name; pass model.named_parameters\(\)"):
        AdamW8bit(layer.parameters(), lr=1e-3)  # type: ignore[arg-type]
