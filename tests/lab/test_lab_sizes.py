"""Sizes: parts add up to the model that is built, the formula's error is the gate and the norms, no torch needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.facts.errors import DataError, ModelError, RecipeError
from trimtab.lab.studies.sizes.cells import cells
from trimtab.lab.studies.sizes.counts import SizeResult, count_model
from trimtab.lab.studies.sizes.measure import measure
from trimtab.lab.studies.sizes.report import sections
from trimtab.lab.study import Cell, CellOutcome, Machine, Measurement
from trimtab.lab.study_models import STUDY_MODELS, named_shape, study_model
from trimtab.model.building import build
from trimtab.report.document import Document, Table
from trimtab.report.document_markdown import markdown

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def measured(size: str, **changes: object) -> Measurement:
    cell = Cell("sizes", {"size": size})
    made = Measurement(
        cell, CellOutcome.MEASURED, measure({"size": size}), "", 0.1, Machine("a CPU", {}), "abc", "2026"
    )
    return Measurement(**{**vars(made), **changes})  # type: ignore[arg-type]


def test_parts_are_those_of_the_model_that_is_built() -> None:
    shape = study_model("tiny").shape()
    found = count_model(shape).counted
    built = build(shape, dtype="fp32", device="meta")
    assert found.total == sum(p.numel() for p in built.parameters())
    layers = built.model.layers
    assert found.attention == sum(p.numel() for layer in layers for p in layer.self_attn.parameters())
    assert found.feed_forward == sum(p.numel() for layer in layers for p in layer.mlp.parameters())
    assert found.embedding == found.head == 10_000 * 64
    assert found.norms == 5 * 64


@pytest.mark.parametrize("name", STUDY_MODELS)
def test_the_formula_of_study_models_lacks_gate_and_norms(name: str) -> None:
    model, found = STUDY_MODELS[name], count_model(study_model(name).shape())
    gate, norms = model.layers * model.d_model * model.d_ff, (2 * model.layers + 1) * model.d_model
    assert found.counted.total - found.formula.total == gate + norms
    assert found.active == found.counted.total


def test_biases_grouped_heads_and_tied_heads_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    found = count_model(named_shape(str(path)))
    assert found.tied
    assert found.counted.head == 0
    assert found.counted.attention == 3 * (
        16 * 16 * 2 + 2 * 16 * 8 + 16 + 8 + 8
    )  # matrices, then q, k and v biases
    assert found.counted.feed_forward == 3 * 3 * 16 * 24
    assert (found.heads, found.key_value_heads) == (4, 2)


def test_experts_count_and_are_not_all_active() -> None:
    found = count_model(named_shape("Qwen/Qwen3-30B-A3B"))
    assert found.active < found.counted.total / 5
    assert SizeResult.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_a_changed_file_is_another_cell(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    (before,) = cells([str(path)])
    path.write_text(json.dumps({**CONFIG, "num_hidden_layers": 4}))
    (after,) = cells([str(path)])
    assert before.key != after.key
    assert cells(["small", "small"]) == cells(["small"])


def test_the_report_has_every_model_and_outcome() -> None:
    failed = measured("medium", outcome=CellOutcome.FAILED, message="a reason", result={})
    found = sections([measured("small"), failed, measured("Qwen/Qwen3-30B-A3B")])
    text = markdown(Document("Sizes", (), tuple(found), "trimtab bench sizes"))
    assert "medium: failed: a reason" in text
    assert "128,625,408" in text
    assert "+28,311,552" in text
    assert "active per token" in text
    assert "1.92 GiB" in text  # 128,625,408 × 16 bytes
    for section in found:
        for block in section.blocks:
            if isinstance(block, Table):
                assert {len(row) for row in block.rows} == {len(block.head)}
    assert sections([failed])[0].title == "Parameters"
    with pytest.raises(DataError, match="damaged"):
        sections([measured("small", result={"family": "llama"})])


@pytest.mark.parametrize(
    ("name", "kind", "hint"),
    [
        ("smal", RecipeError, "did you mean small"),
        ("thing", RecipeError, "the sizes are small"),
        ("no/such", ModelError, "catalogue"),
        ("./missing.json", ModelError, "check the path"),
        ("./missing.yaml", RecipeError, "check the path"),
    ],
)
def test_unknown_names_get_a_hint(name: str, kind: type[Exception], hint: str) -> None:
    with pytest.raises(kind, match=hint):
        cells([name])


def test_sizes_need_no_torch(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from trimtab.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = ["bench", "sizes", "small", "own-text", "--json", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["settings"]["size"] for one in found] == ["small", "own-text"]
    assert {one["outcome"] for one in found} == {"measured"}
    assert (tmp_path / "report.md").exists()
