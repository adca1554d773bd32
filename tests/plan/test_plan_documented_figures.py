"""The arithmetic of docs/planning.md, "By hand", against the plan's own figures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from plan_jobs import FULL, QWEN

from trimtab.kernels.attention import spec as attention_spec
from trimtab.plan.attention import attention_table
from trimtab.plan.memory import predict

P = 596_049_920
TEXT = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")

ROWS = {
    "weights in bf16 | P × 2": P * 2,
    "gradients in bf16 | P × 2": P * 2,
    "AdamW's two moments in fp32 | P × 2 × 4": P * 2 * 4,
    "the same in 8 bits | P × 2 × 1": P * 2,
    "their scales, one fp32 number for 256 elements and moment | P / 256 × 4 × 2": P // 256 * 4 * 2,
    "training in fp32 with AdamW: 16 bytes per parameter | P × (4 + 4 + 2 × 4)": P * 16,
    "plain attention, 1024 tokens: scores and weights of all heads | 4 × 28 × 16 × 2 × 1024² × 2": (
        4 * 28 * 16 * 2 * 1024**2 * 2
    ),
    "flash attention, 1024 tokens: outputs and log-sum-exps of all heads | 4 × 28 × 16 × 1024 × (128 × 2 + 4)": (
        4 * 28 * 16 * 1024 * (128 * 2 + 4)
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_documentation_has_the_figure(row: str) -> None:
    assert f"| {row} | {ROWS[row] / 1e9:.3f} GB |\n" in TEXT


def test_weights_gradients_and_states() -> None:
    assert QWEN.num_parameters == P
    peak = predict(FULL).peak
    assert peak.weights == peak.gradients == P * 2
    fp32_states = predict(dataclasses.replace(FULL, optimizer="adamw_torch")).peak
    assert fp32_states.optimizer == P * 2 * 4
    assert peak.optimizer == pytest.approx(P * 2 + P // 256 * 4 * 2, rel=4e-4)
    assert peak.optimizer > P * 2 + P // 256 * 4 * 2


def test_sixteen_bytes_per_parameter() -> None:
    formats = {"dtype": "fp32", "weights_dtype": "fp32", "gradient_dtype": "fp32"}
    peak = predict(dataclasses.replace(FULL, optimizer="adamw_torch", pointwise="reference", **formats)).peak
    assert peak.weights + peak.gradients + peak.optimizer == 16 * P


def test_attention_of_all_heads() -> None:
    """The table against the declared saved activations of attention."""
    (row,) = attention_table(QWEN, batch=4, lengths=[1024])
    assert row.plain == ROWS[next(name for name in ROWS if name.startswith("plain attention"))]
    assert row.flash == ROWS[next(name for name in ROWS if name.startswith("flash attention"))]
    saved = dict(attention_spec.saved_activations("triton", 4, 1024, 16, 8, 128, "bf16"))
    assert row.flash == 28 * (saved["o"] + saved["lse"])
    one_head = [round(table_row.plain_one_head / 1e6) for table_row in attention_table(QWEN, batch=4)]
    assert one_head == [117, 470, 1879, 7516, 30_065]


def test_attention_is_quadratic_only_without_flash() -> None:
    quadratic, flash = (
        [
            predict(dataclasses.replace(FULL, attention=impl, tokens=tokens)).peak.activations
            for tokens in (1024, 2048)
        ]
        for impl in ("reference", "triton")
    )
    assert quadratic[1] > 3 * quadratic[0]
    assert flash[1] < 2.1 * flash[0]
