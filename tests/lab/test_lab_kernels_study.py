"""`trimtab bench kernels`: options, one measured cell, and reports of good, failed and damaged cells."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trimtab.facts.errors import DataError, RecipeError
from trimtab.lab.kernel_kinds import KernelKind
from trimtab.lab.profile_data import Entry, Profile
from trimtab.lab.profile_tables import kernel_sections
from trimtab.lab.studies.kernels import measure as measuring
from trimtab.lab.studies.kernels.attention_flops import product_flops, softmax_flops
from trimtab.lab.studies.kernels.cells import cells
from trimtab.lab.studies.kernels.report import sections
from trimtab.lab.studies.kernels.results import AttentionPart, KernelsResult, ProfiledPass
from trimtab.lab.study import Cell, CellOutcome, Machine, Measurement
from trimtab.lab.worker import measure_cell as in_worker
from trimtab.report.document import Block, Section, Table, Text

MACHINE = Machine("a GPU", {"torch": "2.13.0"})
PLACE = "trimtab.lab.studies.kernels.measure:measure"


def measurement(
    cell: Cell, result: dict[str, Any], outcome: CellOutcome = CellOutcome.MEASURED
) -> Measurement:
    message = "" if outcome is CellOutcome.MEASURED else "because"
    return Measurement(cell, outcome, result, message, 1.0, MACHINE, "abc", "2026-01-01T00:00:00")


def text_of(section: Section) -> str:
    return "\n".join(block.text for block in section.blocks if isinstance(block, Text))


def tables(blocks: tuple[Block, ...]) -> list[Table]:
    return [block for block in blocks if isinstance(block, Table)]


# ---- options


def test_defaults_are_the_references_and_both_sets_of_kernels() -> None:
    found = [cell.settings for cell in cells(device="cpu")]
    assert [(one["size"], one["context"], one["kernels"]) for one in found] == [
        ("small", 128, "reference"),
        ("small", 128, "fast"),
        ("small", 1024, "reference"),
        ("small", 1024, "fast"),
    ]
    assert {(one["batch"], one["precision"], one["loss"]) for one in found} == {(4, "fp32", "logits_sum")}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sizes": ["smal"]}, "did you mean small"),
        ({"precisions": ["bf61"]}, "did you mean bf16"),
        ({"kernels": ["quick"]}, "choose from reference, fast"),
        ({"loss": "logits"}, "did you mean logits_sum"),
        ({"contexts": [0]}, "use at least 1"),
        ({"contexts": [65537]}, "use at most 65536"),
        ({"batch": 0}, "use at least 1"),
        ({"rounds": -1}, "use at least 1"),
        ({"nvtx": True, "trace": Path("x")}, "use --nvtx or --trace"),
    ],
)
def test_impossible_options_are_rejected(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        cells(device="cpu", **options)


# ---- one cell


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    folder = tmp_path_factory.mktemp("kernels")
    (cell,) = cells(
        device="cpu", sizes=["tiny"], contexts=[64], kernels=["reference"], batch=2, rounds=2, trace=folder
    )
    answer = in_worker(PLACE, dict(cell.settings))
    assert answer["outcome"] == "measured", answer
    return measurement(cell, json.loads(json.dumps(answer["result"])))


def test_a_cell_has_three_profiles_and_clocks(tiny: Measurement) -> None:
    result = KernelsResult.from_dict(tiny.result)
    assert list(result.profiles) == list(ProfiledPass)
    _, forward, full = result.profiles.values()
    count = {
        one: sum(e.count for e in p.entries if e.name == "aten::mm") for one, p in result.profiles.items()
    }
    assert count == {ProfiledPass.INFERENCE: 15, ProfiledPass.FORWARD: 15, ProfiledPass.FULL: 45}
    assert full.kind_share(KernelKind.OPTIMIZER) > 0 == forward.kind_share(KernelKind.OPTIMIZER)
    for one, profile in result.profiles.items():
        assert 0 < profile.busy_seconds <= profile.span_seconds <= profile.host_seconds
        assert result.unprofiled_seconds[one] > 0


def test_parts_of_attention_are_distinguished(tiny: Measurement) -> None:
    parts = {part.name: part for part in KernelsResult.from_dict(tiny.result).attention}
    assert list(parts) == ["attention: scores", "attention: softmax", "attention: values", "attention"]
    assert all(part.forward_seconds > 0 and part.backward_seconds > 0 for part in parts.values())
    # batch 2, 4 heads of 16, 64 tokens, 2 layers
    assert parts["attention: scores"].forward_flops == 2 * 2 * 4 * 64 * 64 * 16 * 2
    assert parts["attention: scores"].backward_flops == 2 * parts["attention: values"].forward_flops
    assert parts["attention: softmax"].forward_flops == 5 * 2 * 4 * 64 * 64 * 2
    assert parts["attention"].forward_flops == 0


def test_the_trace_has_passes_and_operations(tiny: Measurement) -> None:
    path = Path(KernelsResult.from_dict(tiny.result).trace or "")
    assert path.parts[-3:] == ("traces", "tiny-64-fp32-reference", "trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"forward", "backward", "optimizer", "operation: mlp.up_proj", "aten::mm"} <= names


def one_cell(**options: Any) -> list[Cell]:
    return cells(device="cpu", sizes=["tiny"], kernels=["fast"], batch=1, **options)


def test_fused_attention_has_no_parts_and_no_trace_is_written_unasked() -> None:
    (cell,) = one_cell(contexts=[32], rounds=1)
    result = KernelsResult.from_dict(measuring.measure(dict(cell.settings)))
    assert result.attention == ()
    assert result.trace is None
    assert result.profiles[ProfiledPass.FORWARD].kind_share(KernelKind.ATTENTION) > 0


def test_nvtx_ranges_take_the_place_of_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    class Double:
        count = 7

        @contextmanager
        def named(self, name: str) -> Iterator[None]:
            names.append(name)
            yield

    @contextmanager
    def ranges(decoder: Any) -> Iterator[Double]:
        yield Double()

    monkeypatch.setattr(measuring, "nvtx_ranges", ranges)
    (cell,) = one_cell(contexts=[16], rounds=2, nvtx=True)
    result = KernelsResult.from_dict(measuring.measure(dict(cell.settings)))
    assert names == [
        *("step 1", "forward", "backward", "optimizer"),
        *("step 2", "forward", "backward", "optimizer"),
    ]
    (section,) = sections([measurement(cell, result.to_dict())])
    assert tables(section.blocks)[0].rows == (("tiny, context 16, fp32, fast", "7"),)


def test_ranges_without_cuda_are_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (cell,) = one_cell(contexts=[16], nvtx=True)
    answer = in_worker(PLACE, dict(cell.settings))
    assert answer["outcome"] == CellOutcome.NOT_SUPPORTED.value
    assert "without --nvtx" in answer["message"]


# ---- reports


def profile(gemm: float, softmax: float, other: float = 0.0) -> Profile:
    entries = [
        Entry.of("nvjet_sm90_tst_256x128", 9, gemm),
        Entry.of("softmax_warp_forward", 3, softmax),
        Entry.of("unnamed", 1, other),
    ]
    return Profile(tuple(entries), gemm + softmax + other, 1.02 * (gemm + softmax + other), "cuda")


def result(**changes: Any) -> KernelsResult:
    profiles = {
        ProfiledPass.INFERENCE: profile(0.9, 0.1),
        ProfiledPass.FORWARD: profile(0.8, 0.2),
        ProfiledPass.FULL: profile(2.0, 0.2, 0.3),
    }
    parts = (
        AttentionPart("attention: scores", 10**9, 2 * 10**9, 0.1, 0.2),
        AttentionPart("attention: softmax", 10**7, 10**7, 0.3, 0.3),
        AttentionPart("attention: values", 10**9, 2 * 10**9, 0.1, 0.2),
        AttentionPart("attention", 0, 0, 0.0, 0.0),
    )
    return KernelsResult(profiles, dict.fromkeys(ProfiledPass, 1.0), parts, **changes)


def reference_cell(context: int = 128, **changes: Any) -> Cell:
    (cell,) = cells(device="cuda", contexts=[context], kernels=["reference"], **changes)
    return cell


def test_the_report_shows_how_shares_move() -> None:
    found = {one.title: one for one in sections([measurement(reference_cell(), result().to_dict())])}
    products = found["Matrix products from forward to full step"]
    (row,) = tables(products.blocks)[0].rows
    assert row[1:6] == ("80.0 %", "80.0 %", "+0.0", "20.0 %", "8.0 %")
    assert row[6:] == ("70–85 %", "0.7 %"), "the reference's figures for these settings"
    assert "falls in 0 and rises in 0 of 1 cells" in text_of(products)
    attention = text_of(found["Softmax and matrix products inside attention"])
    assert "0.3 % of the FLOPs of the two products and takes 100.0 % of their time: 300 times" in attention
    clock = text_of(found["Device time and host clock"])
    assert "agree within 3 % in 3 of 3 rows; the largest difference is 2.0 %" in clock
    assert "CUDA graphs and torch.compile are off while profiling" in text_of(found["What was run"])
    assert "Full step: small, context 128, fp32, reference" in found


def test_reference_figures_appear_only_at_its_settings() -> None:
    cell = reference_cell(precisions=["bf16"])
    products = sections([measurement(cell, result().to_dict())])[2]
    assert len(tables(products.blocks)[0].head) == 6


def test_cells_that_were_not_measured_are_listed() -> None:
    out = measurement(reference_cell(1024), {}, CellOutcome.OUT_OF_MEMORY)
    found = sections([measurement(reference_cell(), result().to_dict()), out])
    (table,) = tables(found[0].blocks)
    assert table.rows == (("small, context 1024, fp32, reference", "out of memory", "because"),)
    (alone,) = sections([out])
    assert tables(alone.blocks)[0].rows == table.rows


def test_a_damaged_result_is_rejected() -> None:
    for damaged in ({}, {**result().to_dict(), "attention": [{"name": "x"}]}, {"profiles": []}):
        with pytest.raises(DataError, match="a result is damaged"):
            sections([measurement(reference_cell(), damaged)])


def test_sections_of_any_profiles() -> None:
    both = kernel_sections({"forward": profile(0.8, 0.2), "full step": profile(2.0, 0.2, 0.3)}, id="mine")
    kinds, kernels, clock = both
    assert "80.0 % of the time of the forward and 80.0 % of that of the full step" in text_of(kinds)
    assert "Among the other kinds the share of other grows most: 0.0 % → 12.0 %" in text_of(kinds)
    assert [row[0] for row in tables(kernels.blocks)[1].rows] == ["softmax_warp_forward", "unnamed"]
    assert "CUDA graphs are off while profiling" in text_of(clock)
    one = kernel_sections({"full step": Profile((Entry.of("aten::mm", 1, 1.0),), 1.0, 1.0)}, id="one")
    assert "Matrix products take 100.0 % of the time of the full step." in text_of(one[0])
    assert "Only matrix products take 1 %" in text_of(one[1])
    assert "CUDA graphs" not in text_of(one[2])
    empty = kernel_sections({"full step": Profile((), 0.0)}, id="none")
    assert "has no operators" in text_of(empty[1])


def test_flops_of_attention() -> None:
    size = {"batch": 4, "heads": 12, "context": 1024}
    product, softmax = product_flops(**size, head_dim=64), softmax_flops(**size)
    assert product.forward == 2 * 4 * 12 * 1024**2 * 64
    assert product.forward / softmax.forward == pytest.approx(2 * 64 / 5)
    assert product_flops(**size, head_dim=64, layers=12).backward == 24 * product.forward
