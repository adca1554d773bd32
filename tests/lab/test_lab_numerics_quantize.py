"""Quantization: errors are those of trimtab's quantizers, clipping and rounding add up, the naive cast wraps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from command import call
from safetensors.torch import save_file

from trimtab.facts.errors import DataError, RecipeError
from trimtab.kernels import int8, nf4
from trimtab.lab.numerics.activation_scales import study_activation_scales
from trimtab.lab.numerics.clipping import round_uniformly, sweep_clipping
from trimtab.lab.numerics.naive_cast import naive_cast
from trimtab.lab.numerics.quantize import (
    QuantizeStudy,
    Scheme,
    check_blocks,
    parse_blocks,
    study_quantization,
)
from trimtab.lab.numerics.quantize_report import quantization_document
from trimtab.lab.numerics.samples import KINDS, MOST_VALUES, load_sample
from trimtab.report.document import Histogram, LineChart, Table


@pytest.fixture(scope="module", params=KINDS)
def study(request: pytest.FixtureRequest) -> QuantizeStudy:
    return study_quantization(request.param, [64, 256])


def snr(study: QuantizeStudy, scheme: Scheme, shared_by: str) -> float:
    return next(r.signal_to_noise for r in study.rows if (r.scheme, r.shared_by) == (scheme, shared_by))


def test_errors_are_those_of_the_quantizers(study: QuantizeStudy) -> None:
    x_RC = load_sample(study.data).values_RC
    rows = {(row.scheme, row.shared_by): row for row in study.rows}
    assert len(rows) == 2 * 4 + 2 * 2
    back = int8.dequantize(int8.quantize(x_RC, granularity="row", scheme="affine"))
    row = rows[Scheme.INT8_AFFINE, "row"]
    assert row.rms_error == pytest.approx(float((back - x_RC).double().square().mean().sqrt()))
    assert row.max_error == pytest.approx(float((back - x_RC).abs().max()))
    weight = nf4.quantize(x_RC, block=256, double=True)
    row = rows[Scheme.NF4_DOUBLE, "256 values"]
    assert row.bytes_per_value == weight.num_bytes / x_RC.numel()
    ratio = x_RC.square().mean() / (nf4.dequantize(weight) - x_RC).square().mean()
    assert row.signal_to_noise == pytest.approx(10 * math.log10(ratio), abs=1e-3)
    assert rows[Scheme.INT8_ABSMAX, "tensor"].bytes_per_value == pytest.approx(1 + 4 / x_RC.numel())
    assert rows[Scheme.INT8_AFFINE, "64 values"].bytes_per_value == 1 + 5 / 64


def test_finer_scales_lose_less(study: QuantizeStudy) -> None:
    for scheme in (Scheme.INT8_ABSMAX, Scheme.INT8_AFFINE):
        errors = [snr(study, scheme, word) for word in ("tensor", "row", "256 values", "64 values")]
        assert errors == sorted(errors)
    assert snr(study, Scheme.NF4, "64 values") > snr(study, Scheme.NF4, "256 values")


def test_schemes_compared_on_each_kind_of_data() -> None:
    by_kind = {kind: study_quantization(kind, [64]) for kind in KINDS}
    gauss, outliers, relu = by_kind["gauss"], by_kind["outliers"], by_kind["relu"]
    gain = {
        k: snr(s, Scheme.INT8_AFFINE, "tensor") - snr(s, Scheme.INT8_ABSMAX, "tensor")
        for k, s in by_kind.items()
    }
    assert gain["relu"] == pytest.approx(20 * math.log10(2), abs=0.3), "a zero point halves the step"
    assert abs(gain["uniform"]) < 0.5
    lost = snr(gauss, Scheme.INT8_ABSMAX, "tensor") - snr(outliers, Scheme.INT8_ABSMAX, "tensor")
    assert lost > 15, "one value in a thousand takes the range"
    eight, four = outliers.clipping
    assert four.best.threshold < 0.3 * four.whole.threshold
    assert eight.best.total <= eight.whole.total
    assert relu.spread.smallest == 0


def test_rounding_over_the_whole_range_is_the_kernels() -> None:
    x_RC = load_sample("gauss").values_RC
    absmax = float(x_RC.abs().max())
    ours = round_uniformly(x_RC.double(), absmax, 127)
    theirs = int8.dequantize(int8.quantize(x_RC, granularity="tensor")).double()
    assert float((ours - theirs).abs().max()) < 1e-6 * absmax + absmax / 127
    assert float(((ours - theirs).abs() > 1e-6 * absmax).double().mean()) < 1e-4, (
        "fp32 may break a tie otherwise"
    )


def test_clipping_and_rounding_add_up_to_the_error() -> None:
    x_RC = load_sample("outliers").values_RC.double()
    for bits, largest in ((8, 127), (4, 7)):
        sweep = sweep_clipping(x_RC, bits)
        thresholds = [point.threshold for point in sweep.points]
        assert thresholds == sorted(thresholds)
        assert thresholds[-1] == float(x_RC.abs().max())
        for point in sweep.points[::8]:
            error = round_uniformly(x_RC, point.threshold, largest) - x_RC
            assert point.total == pytest.approx(float(error.square().mean().sqrt()))
            over = (x_RC.abs() - point.threshold).clamp(min=0)
            assert point.clipping == pytest.approx(float(over.square().mean().sqrt()))
        clipping = [point.clipping for point in sweep.points]
        assert clipping == sorted(clipping, reverse=True)
        assert clipping[-1] == 0
        assert sweep.best.total == min(point.total for point in sweep.points)


def test_the_naive_cast_wraps_and_uint8_does_not() -> None:
    x_RC = torch.linspace(-1, 1, 256)[None]
    found = naive_cast(x_RC)
    assert found.wrapped == 0.5
    assert found.rms_error_uint8 < 1e-7, "these values are the bins"
    assert found.rms_error == pytest.approx(math.sqrt(0.5) * 256 * 2 / 255, rel=1e-6), (
        "half are 256 bins too low"
    )
    low, *_, high = found.rows
    assert (low.bin, low.as_int8, high.bin, high.as_int8) == (0, 0, 255, -1)
    assert high.from_int8 < -1 < 0 < high.from_uint8
    huge = naive_cast(torch.tensor([[-3e38, 0.0, 3e38]]))
    assert math.isfinite(huge.rms_error)


def test_histograms_count_every_value(study: QuantizeStudy) -> None:
    count = study.shape[0] * study.shape[1]
    for found in (study.values, *study.errors):
        assert all(len(one.counts) == len(found.edges) - 1 for one in found.counts)
        assert {sum(one.counts) for one in found.counts} == {count}


def test_the_report(study: QuantizeStudy) -> None:
    document = quantization_document(study)
    blocks = [block for section in document.sections for block in section.blocks]
    assert all(len(row) == len(b.head) for b in blocks if isinstance(b, Table) for row in b.rows)
    ids = [block.id for block in blocks if isinstance(block, Histogram | LineChart)]
    assert ids == ["values", "int8-errors", "nf4-errors", "clipping-8-bits", "clipping-4-bits"]
    assert "nan" not in str(document)


def save(folder: Path, **tensors: torch.Tensor) -> Path:
    path = folder / "model.safetensors"
    save_file(tensors, path)
    return path


def test_tensors_of_files(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    path = save(
        tmp_path,
        weight=torch.randn(8, 64, generator=generator, dtype=torch.bfloat16),
        bias=torch.randn(100, generator=generator),
        experts=torch.randn(2, 3, 32, generator=generator),
        signs=torch.tensor([[-1.0, 0.0, 1.0, 1.0]]),
    )
    assert load_sample(f"{path}:weight").values_RC.shape == (8, 64)
    assert load_sample(f"{path}:weight").description == "(8, 64), bfloat16 in model.safetensors"
    assert load_sample(f"{path}:bias").values_RC.shape == (1, 100)
    assert load_sample(f"{path}:experts").values_RC.shape == (6, 32)
    exact = study_quantization(f"{path}:signs", [32])
    assert snr(exact, Scheme.INT8_ABSMAX, "tensor") == math.inf
    document = quantization_document(exact)
    assert "+nan" not in str(document)
    code, shown = call("numerics", "quantize", "--data", f"{path}:signs", "--json", "--blocks", "32")
    assert code == 0, shown
    assert json.loads(shown, parse_constant=pytest.fail)["records"][0]["row"]["signal_to_noise"] == "inf"


def test_large_tensors_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_VALUES > 10**6
    monkeypatch.setattr("trimtab.lab.numerics.samples.MOST_VALUES", 64)
    values = torch.arange(400.0)
    shapes = {"wide": (400,), "tall": (50, 8), "deep": (2, 25, 8)}
    path = save(tmp_path, **{name: values.clone().reshape(shape) for name, shape in shapes.items()})
    for name in shapes:
        found = load_sample(f"{path}:{name}")
        assert found.values_RC.flatten().tolist() == list(range(64))
        assert "the first 64 values" in found.description


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    path = save(
        tmp_path,
        weight=torch.tensor([[1.0, math.nan, math.inf]]),
        ids=torch.arange(4),
        none=torch.zeros(0, 4),
        ones=torch.ones(3, 3),
    )
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not a header")
    cases = [
        (DataError, f"{tmp_path}/missing.safetensors:weight", "does not exist"),
        (DataError, f"{broken}:weight", "cannot be read"),
        (
            RecipeError,
            f"{path}:wieght",
            "did you mean weight\\? name one with :TENSOR; it has ids, none, ones, weight",
        ),
        (RecipeError, str(path), "name one with :TENSOR"),
        (DataError, f"{path}:weight", "2 values that are NaN or infinite"),
        (DataError, f"{path}:ids", "has the dtype torch.int64"),
        (DataError, f"{path}:none", "is empty"),
        (DataError, f"{path}:ones", "are equal"),
        (RecipeError, "gaus", "did you mean gauss"),
        (RecipeError, "", "use one of gauss"),
    ]
    for kind, data, said in cases:
        with pytest.raises(kind, match=said):
            load_sample(data)


def test_bad_blocks() -> None:
    assert check_blocks([64, 32, 64]) == (32, 64)
    assert parse_blocks(["-32"]) == [-32]
    for blocks in ([], [-32], [0], [33], [8192]):
        with pytest.raises(RecipeError, match="use some of 32, 64"):
            check_blocks(blocks)
    for word in ("a", "3.5", "--5", "9" * 5000):
        with pytest.raises(RecipeError, match="use whole numbers"):
            parse_blocks([word])


def test_the_command_line(tmp_path: Path) -> None:
    code, shown = call("numerics", "quantize", "--data", "uniform", "--blocks", "4096", "--out", tmp_path)
    assert code == 0, shown
    assert "come back 256 bins too low" in shown
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [record["row"]["shared_by"] for record in records if "row" in record][:3] == [
        "tensor",
        "row",
        "4096 values",
    ]
    assert {sweep["clipping"]["bits"] for sweep in records if "clipping" in sweep} == {8, 4}
    assert call("numerics", "quantize", "--blocks", "-64") == (
        2,
        "error: NF4 has no blocks of -64 values; use some of 32, 64, 128, 256, 512, 1024, 2048, 4096\n",
    )
    assert call("numerics", "quantize", "--data", f"{tmp_path}/no.safetensors:x")[0] == 3


def test_the_middle_edge_of_an_error_histogram_is_zero() -> None:
    study = study_quantization("gauss", [64])
    for errors in study.errors:
        assert errors.edges[len(errors.edges) // 2] == 0.0
        assert errors.edges[0] == -errors.edges[-1]
        assert list(errors.edges) == sorted(errors.edges)


def test_static_and_dynamic_scales_of_activations_by_hand() -> None:
    values_RC = load_sample("activations").values_RC.double()
    calibration_RC, x_RC = values_RC[:128], values_RC[128:]
    found = study_activation_scales()
    static, percentile, tensor, token = found.rows
    assert (found.calibration_tokens, found.tokens) == (128, 128)

    def rms(scale: torch.Tensor | float) -> float:
        codes_RC = (x_RC / scale).round().clamp(-127, 127)
        return float((codes_RC * scale - x_RC).square().mean().sqrt())

    absmax = float(calibration_RC.abs().max())
    assert static.rms_error == pytest.approx(rms(absmax / 127), rel=1e-6)
    limit = float(calibration_RC.abs().flatten().quantile(0.999))
    assert percentile.rms_error == pytest.approx(rms(limit / 127), rel=1e-6)
    assert percentile.clipped == pytest.approx(float((x_RC.abs() > limit).double().mean()))
    assert percentile.clipped > 0
    assert tensor.rms_error == pytest.approx(rms(float(x_RC.abs().max()) / 127), rel=1e-3)
    assert token.rms_error == pytest.approx(rms(x_RC.abs().amax(1, keepdim=True) / 127), rel=1e-3)
    assert token.clipped == tensor.clipped == 0
    assert token.signal_to_noise == pytest.approx(
        20 * math.log10(float(x_RC.square().mean().sqrt()) / token.rms_error)
    )


def test_activations_have_large_channels_and_tokens_of_different_magnitude() -> None:
    x_RC = load_sample("activations").values_RC
    by_channel = x_RC.square().mean(0).sqrt()
    large = (by_channel > 8 * by_channel.median()).nonzero().flatten().tolist()
    assert large == [0, 128, 256, 384]
    by_token = x_RC.square().mean(1).sqrt()
    assert 0.4 < float(by_token.log().std()) < 0.6


def test_the_report_compares_static_with_dynamic_scales_and_one_block_with_nothing() -> None:
    document = quantization_document(study_quantization("gauss", [64]))
    section = document.sections[-1]
    assert section.title == "Static and dynamic scales of activations"
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    assert [row[0] for row in table.rows] == ["static", "static", "dynamic", "dynamic"]
    lesson = "".join(getattr(block, "text", "") for block in document.sections[1].blocks)
    assert "From blocks" not in lesson
    assert "For NF4, scales in 8 bits save" in lesson
