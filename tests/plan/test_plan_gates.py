"""Plans of steps with Triton norms, RoPE and gates against real steps, on a CPU without kernel launches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from plan_step import Step  # noqa: E402

from tests.kernels.triton_tools import leave_out_launches  # noqa: E402
from trimtab.adapt import LoraSettings, lora_dropout, spec_linears, workspace  # noqa: E402
from trimtab.adapt.spec_quantized import Quantization  # noqa: E402
from trimtab.facts.shapes import uniform_shape  # noqa: E402
from trimtab.plan.job import Job  # noqa: E402
from trimtab.plan.layers import dequantize_scratch_bytes, workspace_bytes  # noqa: E402
from trimtab.plan.memory import predict  # noqa: E402
from trimtab.trainer.memory import LiveBytes  # noqa: E402

SHAPE = uniform_shape("llama", 32, 64, 1024, 2, num_heads=2, num_kv_heads=1, head_dim=32)
NF4 = Quantization("nf4", double=True)
SOME = ("q_proj", "v_proj")


def case(policy: str = "block", lora: dict[str, Any] | None = None, **changes: Any) -> Job:
    settings = None if lora is None else LoraSettings(r=4, **lora)
    job = Job(SHAPE, batch=1, tokens=512, accumulation=2, dtype="fp32", weights_dtype="fp32", gradient_dtype="fp32",
              optimizer="adamw_torch", attention="sdpa_flash", device="cpu", pointwise="triton")  # fmt: skip
    return dataclasses.replace(job, lora=settings, policies=(policy,) * 2, **changes)


BF16 = {"dtype": "bf16", "weights_dtype": "bf16"}
DROP, DORA = {"lora_dropout": 0.1}, {"use_dora": True}
CASES = {
    "full": case(),
    "full, pointwise": case("pointwise"),
    "adapters": case(lora={}),
    "adapters, plain": case("none", lora={}),
    "adapters, selective": case("selective", lora={}),
    "adapters, in tiles": case(lora={}, mlp_tiles=4),
    "few adapters": case(lora={"target_modules": SOME}),
    "few adapters, plain": case("none", lora={"target_modules": SOME}),
    "few adapters, in tiles": case(lora={"target_modules": SOME}, mlp_tiles=4),
    "few adapters, plain, in tiles": case("none", lora={"target_modules": SOME}, mlp_tiles=2),
    "dropout": case(lora=DROP),
    "dropout, pointwise": case("pointwise", lora=DROP),
    "dropout, few adapters": case(lora={**DROP, "target_modules": SOME}),
    "DoRA": case(lora=DORA),
    "DoRA, pointwise": case("pointwise", lora=DORA),
    "DoRA and dropout": case(lora={**DORA, **DROP}),
    "packed": case(lora={}, quantization=NF4),
    "packed, dropout": case(lora=DROP, quantization=NF4),
    "packed, DoRA": case(lora=DORA, quantization=NF4),
    "packed, DoRA, pointwise": case("pointwise", lora=DORA, quantization=NF4),
    "packed, DoRA and dropout": case(lora={**DORA, **DROP}, quantization=NF4),
}


@pytest.mark.parametrize("formats", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_prediction_matches_a_step_with_fused_kernels(
    name: str, formats: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out_launches(monkeypatch)
    for module in (lora_dropout, spec_linears):  # as small relative to a layer as on a GPU
        monkeypatch.setattr(module, "DROPOUT_CHUNK", 1 << 13)
    job = dataclasses.replace(CASES[name], **formats)
    step = Step(job)
    workspace.release()
    with LiveBytes() as live:
        step.forward_backward()
    memory = predict(job)
    # A dispatch mode does not see allocations inside an operator.
    predicted = memory.forward_backward - workspace_bytes(job) - dequantize_scratch_bytes(job)
    assert 0.995 * live.peak <= predicted <= 1.02 * live.peak, (predicted / live.peak, memory.moments)
