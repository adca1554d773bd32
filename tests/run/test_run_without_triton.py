"""GPUs on which Triton does not run: everything that is chosen there is torch's."""

from __future__ import annotations

import pytest
import torch
from tiny_model import tiny_shape

from trimtab.adapt import spec_quantized
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import RecipeError
from trimtab.kernels import triton_support
from trimtab.kernels.triton_support import runs_triton
from trimtab.plan.layers import update_scratch
from trimtab.plan.make import job_of
from trimtab.recipe import loads
from trimtab.run.resolve import resolve_backends

OLD = DeviceFacts("Tesla V100", "cuda", memory_bytes=2**34, capability=(7, 0))
BARE = DeviceFacts("an RTX 4090", "cuda", memory_bytes=2**34, capability=(8, 9), bf16=True, triton=False)
NEW = DeviceFacts("an RTX 4090", "cuda", memory_bytes=2**34, capability=(8, 9), bf16=True)


@pytest.mark.parametrize("device", [OLD, BARE], ids=["too old for it", "not installed"])
@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_auto_selects_no_triton_kernels(device: DeviceFacts, bits: str) -> None:
    text = (
        f"model: x\ndata: {{train: y}}\nmax_seq_length: 64\nlora: {{r: 4}}\noptim: adamw_8bit\n{bits}: true"
    )
    found = resolve_backends(loads(text), tiny_shape(), device, threads=1)
    assert found.quantization is not None
    chosen = [
        found.quantization.impl,
        found.loss.impl,
        found.optimizer.impl,
        *(impl for layer in found.attention.layers for impl in (layer.packed, layer.unpacked)),
    ]
    assert "triton" not in [*chosen, found.pointwise.impl]
    assert found.quantization.reason == "torch operations: the Triton kernels do not run here"
    better = resolve_backends(loads(text), tiny_shape(), NEW, threads=1).quantization
    assert better is not None
    assert better.impl == "triton"


@pytest.mark.parametrize(
    ("recipe", "device", "impl", "reason"),
    [
        ("optim: adamw_torch", NEW, "triton", "one kernel for all weights, in fp32"),
        ("optim: adamw_bf16", NEW, "triton", "one kernel for all weights, in fp32"),
        ("optim: adamw_torch", BARE, "torch", "torch's own operations"),
        ("optim: adamw_torch\nweights_dtype: fp32", NEW, "torch", "torch's fused kernel"),
        ("optim: adamw_torch\nlora: {r: 4}", NEW, "torch", "torch's fused kernel"),
        ("optim: adamw_torch\nlora: {r: 4, modules_to_save: [embed_tokens]}", NEW, "triton", "one kernel"),
        ("optim: adamw_bf16\nweights_dtype: fp32", NEW, "triton", "one kernel for all weights"),
        ("optim: adamw_torch_fused", NEW, "torch", "torch's fused kernel"),
    ],
)
def test_implementation_of_an_optimizer(recipe: str, device: DeviceFacts, impl: str, reason: str) -> None:
    """Triton for weights or moments in bf16, torch's fused kernel for fp32 ones; the planned memory follows."""
    found = loads(f"model: x\ndata: {{train: y}}\nmax_seq_length: 64\n{recipe}")
    resolved = resolve_backends(found, tiny_shape(), device, threads=1)
    assert (resolved.optimizer.name, resolved.optimizer.impl) == (found.optim, impl)
    assert resolved.optimizer.reason.startswith(reason)
    job = job_of(found, tiny_shape(), device, resolved)
    if impl == "triton":
        assert update_scratch(job) == 0
    if device is BARE:
        assert update_scratch(job) > 0


def test_requesting_triton_raises() -> None:
    with pytest.raises(RecipeError, match="do not run here"):
        spec_quantized.choose_quantized_kernels(device="cuda", triton=False, requested="triton")


@pytest.mark.parametrize(
    ("installed", "capability", "runs"),
    [(True, (7, 5), True), (True, (7, 0), False), (False, (9, 0), False)],
)
def test_support_depends_on_capability(
    monkeypatch: pytest.MonkeyPatch, installed: bool, capability: tuple[int, int], runs: bool
) -> None:
    monkeypatch.setattr(triton_support, "find_spec", lambda _: object() if installed else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    runs_triton.cache_clear()
    try:
        assert runs_triton(torch.device("cuda", 0)) is runs
    finally:
        runs_triton.cache_clear()
