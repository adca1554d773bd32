"""Opening a model for eval, generate and export: messages on standard error, refused inputs, output of an export."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from cli_world import Call, World

import trimtab

FEW = ("--max-new-tokens", 2)


@pytest.fixture
def run(world: World, tmp_path: Path) -> Path:
    """A copy of the session's run, which the test may damage."""
    return shutil.copytree(world.run, tmp_path / "a-run")


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def damage_latest(run: Path) -> None:
    newest = max((run / "checkpoints").glob("step-*"))
    next(newest.glob("*.safetensors")).write_bytes(b"")


def test_messages_leave_standard_output_to_programs(run: Path, world: World, cli: Call) -> None:
    damage_latest(run)
    result = cli("eval", run, world.folder / "domain.jsonl", "--no-probe", "--json")
    assert result.code == 0, result.err
    assert [json.loads(line)["kind"] for line in result.out.splitlines()] == ["eval"]
    assert "skipping a damaged checkpoint" in result.err
    result = cli("generate", run, "the cat", *FEW)
    assert "skipping" in result.err
    assert "skipping" not in result.out
    result = cli("export", "hf", run, run.parent / "out")
    assert "skipping" in result.err
    assert result.out.startswith("written: ")


def test_a_step_may_be_a_number(run: Path) -> None:
    step = steps(run)[0]
    assert trimtab.load(run, checkpoint=step).opened.step == step
    assert trimtab.RunResult(run, "finished", 6).model(step).opened.step == step
    with pytest.raises(trimtab.TrimtabError, match="'-1' is not known"):
        trimtab.load(run, checkpoint=-1)


def test_a_missing_step_lists_the_existing_ones(run: Path, cli: Call) -> None:
    first, *others = steps(run)
    listed = ", ".join(map(str, (first, *others)))
    cli("generate", run, "x", "--checkpoint", 3).refused(
        5, "no valid checkpoint 3", f"; use latest or one of the steps {listed}"
    )
    for step in others:
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    cli("generate", run, "x", "--checkpoint", 3).refused(
        5, "no valid checkpoint 3", f"; use latest or step {first}\n"
    )
    for path in (run / "checkpoints").glob("step-*"):
        (path / "manifest.json").write_text("{}")
    cli("generate", run, "x").refused(5, "damaged", "restore")
    shutil.rmtree(run / "checkpoints")
    cli("generate", run, "x").refused(5, "restore a checkpoint", f"output_dir={run}-again")


@pytest.mark.parametrize("verb", ["eval", "generate", "export"])
def test_a_revision_of_a_local_model(world: World, tmp_path: Path, cli: Call, verb: str) -> None:
    for model in (world.run, world.model, "starter"):
        words = {
            "eval": ("eval", model),
            "generate": ("generate", model, "x"),
            "export": ("export", "hf", model, tmp_path / "out"),
        }
        cli(*words[verb], "--revision", "main").refused(2, "revision 'main'", "leave the revision out")
    assert not (tmp_path / "out").exists()


def test_sizes_beyond_the_file_are_named_and_not_allocated(
    run: Path, model_copy: Path, cli: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (model_copy, run / "model"):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 10**12}))
    monkeypatch.setattr("trimtab.run.models.build_model", None)  # must not be reached
    cli("generate", model_copy, "x").refused(4, "model.safetensors", "vocab_size is 1000000000000")
    cli("generate", run, "x").refused(5, "step-0000", "config", "1000000000000")


def test_two_targets_of_one_name_have_two_receipts(run: Path, tmp_path: Path, cli: Call) -> None:
    for parent in ("aa", "bb", "bb"):
        assert cli("export", "hf", run, tmp_path / parent / "m", "--overwrite").code == 0
    receipts = [json.loads(path.read_text()) for path in (run / "receipts").glob("export-hf-m-*.json")]
    assert sorted(receipt["folder"] for receipt in receipts) == [
        str(tmp_path / parent / "m") for parent in ("aa", "bb")
    ]


def test_a_receipt_that_cannot_be_written_into_the_run_is_next_to_the_export(
    run: Path, tmp_path: Path, cli: Call
) -> None:
    shutil.rmtree(run / "receipts", ignore_errors=True)  # from earlier exports
    (run / "receipts").write_text("in the way, for root as well")
    result = cli("export", "hf", run, tmp_path / "m")
    assert result.code == 0, result.err
    assert f"{run / 'receipts'} cannot be written" in result.err
    assert f"receipt: {tmp_path / 'm.receipt.json'}" in result.out
    assert json.loads((tmp_path / "m.receipt.json").read_text())["source"]["step"] == 6


def test_an_export_prints_its_dtype_and_whether_it_rounds(run: Path, tmp_path: Path, cli: Call) -> None:
    def first_line(*words: object) -> str:
        result = cli("export", "hf", *words)
        assert result.code == 0, result.err
        return result.out.splitlines()[0]

    bf16, fp16, whole = (tmp_path / name for name in ("bf16", "fp16", "whole"))
    assert first_line(run, bf16).endswith("in bf16, rounded from fp32; --dtype fp32 avoids rounding")
    assert first_line(run, whole, "--dtype", "fp32").endswith("in fp32")
    assert first_line(bf16, tmp_path / "again").endswith("in bf16")
    assert first_line(bf16, tmp_path / "wider", "--dtype", "fp32").endswith("in fp32")
    other = first_line(bf16, fp16, "--dtype", "fp16")
    assert other.endswith("in fp16, rounded from bf16; --dtype bf16 avoids rounding")


def test_a_model_does_not_overwrite_itself(run: Path, model_copy: Path, cli: Call) -> None:
    before = (model_copy / "model.safetensors").read_bytes()
    for source, target in ((model_copy, model_copy), (run, run / "model")):
        cli("export", "hf", source, target, "--overwrite").refused(
            2, "contains the loaded model itself", "name another folder"
        )
    cli("export", "hf", run, run, "--overwrite").refused(4, "is not a model folder")
    cli("export", "hf", run, run.parent / "new", "--dtype", "int8").refused(2, "int8", "bf16")
    assert (model_copy / "model.safetensors").read_bytes() == before


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which even root cannot write")
def test_eval_takes_another_cache(world: World, tmp_path: Path, cli: Call) -> None:
    words = ("eval", world.run, world.folder / "domain.jsonl", "--no-probe", "--cache-dir")
    cli(*words, "/proc/cache").refused(6, "/proc/cache", "--cache-dir of `trimtab eval`")
    assert cli(*words, tmp_path / "cache").code == 0
    assert list((tmp_path / "cache" / "entries").iterdir())


def test_a_resume_without_metrics_reports_it(run: Path, cli: Call) -> None:
    assert "missing or empty" not in cli("train", "--resume", run, "max_steps=7").out
    (run / "metrics.jsonl").unlink()
    result = cli("train", "--resume", run, "max_steps=8")
    assert result.code == 0, result.err
    assert re.search(
        r"metrics\.jsonl is missing or empty: the report will show none of the steps up to 7", result.out
    )


def test_a_folder_with_weights_of_many_dtypes(model_copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(model_copy / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.bfloat16)
    save_file(tensors, model_copy / "model.safetensors")
    assert sorted(trimtab.load(model_copy).opened.formats) == ["bf16", "fp32"]
