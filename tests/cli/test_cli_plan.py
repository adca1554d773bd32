"""`trimtab plan`: recipes and models, other GPUs, searches, invalid input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_world import Call, World

from trimtab.adapt.spec_recompute import POLICIES
from trimtab.facts.calibration import Calibration
from trimtab.facts.calibration_file import calibration_path, read_calibration
from trimtab.run.device import detect, threads

MODEL = "Qwen/Qwen3-0.6B"
GPU = ("--gpu", "rtx4090")


def test_plan_prints_first_whether_it_fits(world: World, cli: Call) -> None:
    result = cli("plan", world.recipe, "output_dir=elsewhere")
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0].startswith("Fits: needs ")
    assert len(lines) <= 40
    assert "Activations at the peak: " in result.out
    for phase in ("loading", "forward", "backward", "optimizer step", "evaluation", "checkpoint"):
        assert any(line.startswith(phase) for line in lines), phase


def test_plan_as_json(world: World, cli: Call) -> None:
    plan = json.loads(cli("plan", world.recipe, "--json").out)
    assert (plan["version"], plan["fits"], plan["job"]["method"]) == (1, True, "full")
    assert plan["memory"]["peak"]["weights"] == 4 * plan["model"]["parameters"]
    assert plan["phases"]["phases"]


def test_a_model_by_name_needs_no_recipe_and_no_network(cli: Call) -> None:
    result = cli("plan", MODEL, *GPU, "--method", "qlora", "max_steps=100", "--json")
    assert result.code == 0, result.err
    plan = json.loads(result.out)
    assert plan["job"]["method"] == "qlora"
    assert plan["choices"]["precision"].startswith("matrix products in bf16")
    time = plan["time"]
    assert time["step"]["seconds"] > 0
    assert time["seconds"] == pytest.approx(time["training_seconds"] + time["evaluation_seconds"])
    assert "RTX 4090" in time["basis"]
    assert {
        row["phases"].keys() <= {"forward", "backward", "recompute", "update"} for row in plan["operations"]
    } == {True}
    total = sum(row["seconds"] for row in plan["operations"])
    assert total == pytest.approx(sum(time["step"]["by_phase"].values()))


def test_each_auto_is_resolved_for_the_planned_gpu(cli: Call) -> None:
    def choices(gpu: str) -> dict:
        return json.loads(cli("plan", MODEL, "--gpu", gpu, "--json").out)["choices"]

    ampere, turing = choices("rtx4090"), choices("t4")
    assert ampere["device"] == turing["device"] == "cuda"
    assert "everything in fp32" in turing["precision"], "a T4 has no bf16"
    assert "bf16" in ampere["precision"]
    assert ampere["loss"]["impl"] == "triton"


@pytest.mark.parametrize("method", ["full", "lora", "qlora", "int8"])
def test_methods_override_the_recipe(world: World, cli: Call, method: str) -> None:
    for words in (["lora.r=4"], ["load_in_4bit=true", "lora.r=4"], []):
        if not words and method != "full":
            continue
        result = cli("plan", world.recipe, *words, "--method", method, "--json")
        assert result.code == 0, result.err
        assert json.loads(result.out)["job"]["method"] == method


def test_models_in_files(world: World, cli: Call) -> None:
    expected = json.loads(cli("plan", world.recipe, "--json").out)["model"]["parameters"]
    for target in (world.model, world.model / "config.json"):
        result = cli("plan", target, *GPU, "--json", "max_seq_length=32")
        assert result.code == 0, result.err
        assert json.loads(result.out)["model"]["parameters"] == expected
    assert cli("plan", "starter", *GPU).code == 0


def test_torch_is_not_imported_for_another_gpu(world: World) -> None:
    program = (
        "import sys; from trimtab.cli.main import main; "
        f"code = main(['plan', {str(world.model)!r}, '--gpu', 'h200', 'max_seq_length=32']); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Fits: ")


def test_a_run_that_does_not_fit_exits_with_6_and_remedies(cli: Call) -> None:
    result = cli("plan", "Qwen/Qwen3-8B", "--gpu", "12GB")
    result.refused(6, "GPU", "lora: {r: 16}")
    assert result.out.startswith("Does not fit: needs ")
    assert json.loads(cli("plan", "Qwen/Qwen3-8B", "--gpu", "12GB", "--json").out)["fits"] is False


def test_a_limit_below_the_weights_is_named(cli: Call) -> None:
    cli("plan", "Qwen/Qwen3-8B", *GPU, "--method", "qlora", "memory_limit=2GB").refused(
        6, "the weights alone take 5.82 GiB", "memory_limit: 2GB allows"
    )


def test_what_if_lists_savings_and_costs(cli: Call) -> None:
    result = cli("plan", MODEL, *GPU, "--what-if")
    assert result.code == 0
    assert "sorted by time cost per saved GiB" in result.out
    assert "optim: adamw_8bit" in result.out
    rows = json.loads(cli("plan", MODEL, *GPU, "--what-if", "--json").out)["what_if"]
    assert any(row["in_use"] for row in rows)
    assert {row["technique"] for row in rows} >= {"LoRA", "activation checkpointing", "smaller microbatch"}


def test_solve_prints_lines_to_paste(cli: Call) -> None:
    result = cli("plan", MODEL, "--gpu", "8GB", "--method", "lora", "--solve", "max_seq_length")
    assert result.code == 0, result.err
    answer = json.loads(
        cli("plan", MODEL, "--gpu", "8GB", "--method", "lora", "--solve", "max_seq_length", "--json").out
    )
    line = f"max_seq_length: {answer['recipe']['max_seq_length']}"
    assert f"  {line}" in result.out.splitlines()
    words = [f"{key}={value}" for key, value in answer["recipe"].items()]
    assert cli("plan", MODEL, "--gpu", "8GB", "--method", "lora", *words).code == 0
    result = cli("plan", MODEL, *GPU, "--solve", "batch_size")
    assert "  per_device_train_batch_size: 16" in result.out


def test_solve_compares_gpus(cli: Call, tmp_path: Path) -> None:
    answer = json.loads(cli("plan", "starter", "--solve", "smallest_gpu", "--json").out)
    memory = answer["plan"]["memory"]
    assert memory["needed"] <= memory["available"]
    (tmp_path / "prices.yaml").write_text("only_these: true\nrtx4090: 0.01\nh200: 100\n")
    words = ("plan", MODEL, *GPU, "--solve", "cheapest", "--prices", tmp_path / "prices.yaml")
    options = json.loads(cli(*words, "--json").out)["options"]
    assert [option["name"] for option in options] == ["rtx4090", "h200"]
    assert "rtx4090" in cli(*words).out.splitlines()[0]


def test_longest_still_works_with_a_note(world: World, cli: Call) -> None:
    result = cli("plan", world.recipe, "--longest")
    assert result.code == 0
    assert result.err == "note: --longest is now --solve max_seq_length\n"
    assert "max_seq_length: " in result.out


def test_a_table_of_models_methods_and_gpus(cli: Call, tmp_path: Path) -> None:
    words = (
        "plan",
        "--table",
        "--models",
        f"{MODEL},Qwen/Qwen3-8B",
        "--gpus",
        "8GB,rtx4090",
        "--methods",
        "full,qlora",
    )
    result = cli(*words, "--page", tmp_path / "table.html")
    assert result.code == 0, result.err
    assert "✗" in result.out
    assert "Qwen3-8B" in result.out
    assert "Qwen/Qwen3-8B" in (tmp_path / "table.html").read_text()
    cells = json.loads(cli(*words, "--json", "max_seq_length=512").out)["table"]
    assert len(cells) == 8
    fitting = {(cell["model"], cell["method"], cell["gpu"]) for cell in cells if cell["fits"]}
    assert ("Qwen/Qwen3-8B", "qlora", "rtx4090") in fitting
    assert ("Qwen/Qwen3-8B", "full", "rtx4090") not in fitting
    cells = json.loads(cli(*words, "--json", "--solve", "max_seq_length").out)["table"]
    assert all(cell["longest"] >= 0 for cell in cells)


def test_the_reserved_memory_and_the_limit_of_launches_are_shown(cli: Call, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    out = " ".join(cli("plan", MODEL, "--gpu", "rtx4090", "--method", "lora", "--page", page).out.split())
    assert "by torch's allocator, " in out
    assert "limited by kernel launches, " in out, "packed documents: no CUDA graphs"
    assert "because the CPU needs that long to launch the kernels" in page.read_text()
    captured = cli("plan", MODEL, "--gpu", "h200", "--method", "lora", "--page", page).out
    assert "kernel launches" not in captured
    assert "to launch the kernels" not in page.read_text()


def test_a_narrow_terminal_shows_whole_words(cli: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = cli("plan", MODEL, "--gpu", "rtx4090", "--what-if").out
    assert "…" not in out
    assert "8-bit optimizer" in out


def test_a_page_is_written_for_plans_that_fit_and_that_do_not(cli: Call, tmp_path: Path) -> None:
    for gpu, code in (("rtx4090", 0), ("3GB", 6)):
        page = tmp_path / f"{gpu}.html"
        assert cli("plan", MODEL, "--gpu", gpu, "--page", page).code == code
        text = page.read_text()
        assert ("Does not fit" in text) == (code == 6)
        assert "http" not in text.replace("http-equiv", "")


@pytest.mark.parametrize(
    ("words", "code", "cause"),
    [
        ((MODEL, "--gpu", "rtx4009"), 2, "did you mean rtx4090"),
        (("Qwen/Qwen3-0.6", *GPU), 4, "did you mean Qwen/Qwen3-0.6B"),
        (("missing/nothing", *GPU), 4, "config.json"),
        ((MODEL, *GPU, "max_seq_length=0"), 2, "max_seq_length"),
        ((MODEL, *GPU, "max_seq_length=-1"), 2, "max_seq_length"),
        ((MODEL, *GPU, "max_seq_length=10000000"), 4, "is beyond the model's"),
        ((MODEL, *GPU, f"per_device_train_batch_size={10**30}"), 2, "tokens per step"),
        ((MODEL, *GPU, "--method", "quick"), 2, "choose one of full, lora"),
        ((MODEL, *GPU, "--solve", "everything"), 2, "choose one of max_seq_length"),
        ((MODEL, *GPU, "--host-memory", "-1"), 2, "64GB"),
        (("max_steps=5",), 2, "no recipe or model given"),
        ((MODEL, "--models", "a,b"), 2, "--models is an option of --table; add --table"),
        ((MODEL, "--prices", "p.yaml", "--solve", "fastest"), 2, "add --solve cheapest"),
        (("--table", "--what-if"), 2, "--table does not use --what-if"),
        (("--table", "--solve", "fastest"), 2, "--table does not answer --solve fastest"),
        (("--table", "--methods", "lora,quick"), 2, "--method quick is not known"),
    ],
)
def test_bad_input(cli: Call, words: tuple[str, ...], code: int, cause: str) -> None:
    cli("plan", *words).refused(code, cause)


def test_plan_lists_what_each_policy_saves_and_costs(world: World, cli: Call) -> None:
    rows = json.loads(cli("plan", world.recipe, "--json", "--recompute").out)["recompute"]
    assert [row["policy"] for row in rows] == list(POLICIES)
    result = cli("plan", world.recipe, "--recompute").out
    table = result[result.index("Each policy applied to all layers") :].splitlines()
    assert [line.split()[0] for line in table[2 : 2 + len(POLICIES)]] == list(POLICIES)
    block = next(row for row in rows if row["policy"] == "block")
    assert f"+ {block['arithmetic']:.1%}" in next(line for line in table if line.startswith("block"))
    assert "No times are shown" in result


def test_plan_lists_dtypes(world: World, cli: Call) -> None:
    result = cli("plan", world.recipe, "dtype=bf16", "weights_dtype=fp32", "--dtypes")
    rows = {line.split()[0]: line.split()[1:] for line in result.out.splitlines() if line.strip()}
    assert rows["mm"] == ["bf16", "→", "bf16"]
    assert rows["rsqrt"] == ["fp32", "→", "fp32"]
    assert rows["loss:"] == ["fp32"]


def test_plan_of_a_run_that_cannot_fit_lists_remedies(world: World, cli: Call) -> None:
    result = cli("plan", world.recipe, "per_device_train_batch_size=100000000")
    result.refused(6, "per_device_train_batch_size", "free")


def test_calibrate_measures_with_the_threads_of_a_recipe(
    cli: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, int | None]] = []

    def measure(device: str, threads: int | None, progress: object) -> Calibration:
        asked.append((device, threads))
        return Calibration("a CPU", {"fp32": 1e11}, 1e10, 1e-5, threads=threads or 1)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("trimtab.lab.calibrate.calibrate", measure)
    assert cli("plan", "--calibrate").code == 0
    assert cli("plan", "starter", "--calibrate", "device=cpu", "num_threads=3").code == 0
    assert asked == [("auto", None), ("cpu", 3)]
    assert read_calibration("a CPU", 3, folder=tmp_path / "trimtab/calibration") is not None


def test_a_damaged_calibration_is_a_note_of_one_line(
    cli: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = calibration_path(detect("cpu").name, threads())
    path.parent.mkdir(parents=True)
    path.write_text('{"version": 1}')
    result = cli("plan", "starter", "device=cpu")
    assert result.code == 0
    [note] = [line for line in result.err.splitlines() if "calibration" in line]
    assert note.startswith(f"note: the calibration {path} is ignored: ")


def test_a_run_folder_is_planned_as_a_model_with_a_note(world: World, cli: Call) -> None:
    result = cli("plan", world.run)
    assert result.code == 0, result.err
    assert f"`trimtab plan {world.run / 'recipe.yaml'}` plans the run" in result.err
    assert "plans the run" not in cli("plan", world.run / "recipe.yaml").err
