"""Observed behaviour of autocast: dtypes of modules and operations, and norms in 16 bits."""

from __future__ import annotations

import json
import math

import pytest
import torch
from command import call

from trimtab.facts.errors import RecipeError, ResourceError
from trimtab.lab.numerics.autocast import AutocastStudy, study_autocast
from trimtab.lab.numerics.autocast_report import autocast_document
from trimtab.lab.numerics.formats import FORMATS
from trimtab.lab.numerics.norms import SCALES, study_norms
from trimtab.report.document import Table, Text
from trimtab.run.dtype_trace import DtypeTrace


@pytest.fixture(scope="module", params=["bf16", "fp16"])
def study(request: pytest.FixtureRequest) -> AutocastStudy:
    return study_autocast(request.param)


def test_parameters_stay_and_products_are_cast(study: AutocastStudy) -> None:
    for model in study.models:
        assert model.parameters == model.gradients == model.loss == "fp32"
        assert model.first_layer == study.dtype
        products = [one for one, _ in model.operations if one.name in ("mm", "bmm")]
        assert products
        assert {(one.inputs, one.output) for one in products} == {(study.dtype, study.dtype)}


def test_norms_and_logits_of_the_decoder_are_fp32(study: AutocastStudy) -> None:
    toy, decoder = study.models
    assert (decoder.norm, decoder.logits) == ("fp32", "fp32")
    assert (toy.norm, toy.logits) == (study.dtype, study.dtype), (
        "the CPU's autocast has no layer_norm on its list"
    )
    sums = [one for one, _ in decoder.operations if one.name in ("rsqrt", "_softmax", "_log_softmax", "mean")]
    assert {(one.inputs, one.output) for one in sums} == {("fp32", "fp32")}
    norm = {one.name for one, _ in decoder.operations if one.module == "model.layers.0.input_layernorm"}
    assert {"pow", "mean", "rsqrt"} <= norm, "operations are found at their module"
    silu = next(one for one, _ in decoder.operations if one.name == "silu")
    assert (silu.module, silu.backward) == ("model.layers.0.mlp", False)


def test_the_trace_sees_both_passes_and_modules() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    with DtypeTrace() as trace:
        model(torch.ones(2, 4)).sum().backward()
        _ = torch.ones(2) + 1
    seen = {(one.module, one.backward, one.name): times for one, times in trace.counts.items()}
    assert seen["0", False, "addmm"] == 1
    assert seen["1", False, "tanh"] == 1
    assert seen["1", True, "tanh_backward"] == 1
    assert seen["", False, "add"] == 1
    assert {one.name for one in trace.counts if one.is_view} >= {"t"}
    before = dict(trace.counts)
    model(torch.ones(2, 4))
    assert trace.counts == before, "nothing is noted outside"


def test_norms_in_16_bits() -> None:
    rows = {(row.format, row.scale): row for row in study_norms()}
    assert len(rows) == 2 * len(SCALES)
    for row in rows.values():
        # one rounding at the end: at most half of a spacing, relative
        assert row.error_fp32_inside <= float(FORMATS[row.format].epsilon) / 2
        assert row.error > row.error_fp32_inside
    overflowed = rows["fp16", 1000.0]
    assert overflowed.torch_mean_square == math.inf
    assert overflowed.error == pytest.approx(1.0)
    assert overflowed.overflowed > 0.5
    assert rows["fp16", 1e-4].vanished > 0.5
    assert rows["bf16", 1000.0].overflowed == 0
    halved = rows["bf16", 1.0]
    assert halved.sequential_mean_square < 0.6 * halved.mean_square


def test_the_report_groups_modules(study: AutocastStudy) -> None:
    document = autocast_document(study)
    tables = [b for s in document.sections for b in s.blocks if isinstance(b, Table)]
    assert all(len(row) == len(table.head) for table in tables for row in table.rows)
    assert ("parameters", "fp32", "fp32") in tables[0].rows
    forward = tables[3]
    modules = [row[0] for row in forward.rows if row[0]]
    assert "input_layernorm, post_attention_layernorm, norm" in modules
    assert not any("layers.1" in module for module in modules), "one block stands for all"
    assert ("block: residual stream", "add", f"fp32, {study.dtype}", "fp32", "2") in forward.rows
    text = " ".join(b.text for s in document.sections for b in s.blocks if isinstance(b, Text))
    assert f"its output stays {study.dtype}" in text
    assert "beyond fp16 from 256 on" in text


def test_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="not in 'fp32'"):
        study_autocast("fp32")
    with pytest.raises(RecipeError, match="did you mean bf16"):
        study_autocast("bf61")
    assert study_autocast("bfloat16").dtype == "bf16"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with pytest.raises(ResourceError, match=r"bf16 needs a GPU.*; use --dtype fp16"):
        study_autocast("bf16", "cuda")


def test_the_command_line() -> None:
    code, shown = call("numerics", "autocast", "--dtype", "bf16", "--device", "cpu", "--json")
    assert code == 0, shown
    records = json.loads(shown, parse_constant=pytest.fail)["records"]
    assert records[0]["model"] == "toy model"
    assert {one["pass"] for one in records[1]["operations"]} == {"forward", "backward"}
    assert records[2]["norms"][5]["torch_mean_square"] == "inf"
    assert call("numerics", "autocast", "--dtype", "int8")[0] == 2
    if not torch.cuda.is_available():
        assert call("numerics", "autocast", "--device", "cuda")[0] == 6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_on_a_gpu_layer_norm_is_fp32(dtype: str) -> None:
    found = study_autocast(dtype, "cuda")
    toy, decoder = found.models
    assert (toy.first_layer, toy.norm, toy.loss, toy.gradients) == (dtype, "fp32", "fp32", "fp32")
    assert (decoder.first_layer, decoder.norm, decoder.logits) == (dtype, "fp32", "fp32")
    assert "among those that it runs in fp32" in str(autocast_document(found))
