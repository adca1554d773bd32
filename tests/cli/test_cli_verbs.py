"""Every command on a tiny model."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_world import Call, World

from trimtab.checkpoint import RunLock
from trimtab.cli.commands import VERBS
from trimtab.cli.demo import _replace_older
from trimtab.facts import errors
from trimtab.facts.errors import CheckpointError, OutOfMemory, ResourceError
from trimtab.generate.completion import Completion
from trimtab.recipe import load, to_dict
from trimtab.run.folder import OURS, RunFolder
from trimtab.starter import recipe_file


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_train_writes_a_complete_run_folder(world: World) -> None:
    names = {path.name for path in world.run.iterdir()}
    wanted = {"recipe.yaml", "plan.json", "choices.json", "environment.json", "metrics.jsonl"}
    assert wanted | {"model", "checkpoints", "report.html"} <= names
    # removed after a failed start; an export of another test may have left its receipt here
    assert names - {"report.html", "receipts"} <= set(OURS)
    assert "plan of this run" in world.output
    assert str(world.run.name) in world.output
    kinds = {record["kind"] for record in records(world.run)}
    assert {"train", "eval", "sample", "memory"} <= kinds
    assert [r["step"] for r in records(world.run) if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]


def test_choices_contain_the_resume_state_and_environment_no_paths(world: World) -> None:
    choices = json.loads((world.run / "choices.json").read_text())
    assert choices["model_commit"] is None
    assert choices["recipe"]["max_steps"] == 6
    assert choices["attention"]["impl"] != "auto"
    assert str(world.folder) not in (world.run / "environment.json").read_text()


def test_resume_continues_with_allowed_changes_and_keeps_them(
    world: World, tmp_path: Path, cli: Call
) -> None:
    run = shutil.copytree(world.run, tmp_path / "run")
    result = cli("train", "--resume", run, "max_steps=8", "eval_steps=4")
    assert result.code == 0, result.err
    assert "continuing from step 6" in result.out
    train = [r["step"] for r in records(run) if r["kind"] == "train"]
    assert train == [1, 2, 3, 4, 5, 6, 7, 8]
    # Changes are saved: a further resume has nothing to do.
    assert cli("train", "--resume", run).code == 0
    assert max(r["step"] for r in records(run) if r["kind"] == "train") == 8


@pytest.mark.parametrize(
    "change", ["learning_rate=0.5", "seed=1", "max_seq_length=32", "data.train.0.first=3"]
)
def test_resume_refuses_other_changes(world: World, cli: Call, change: str) -> None:
    before = (world.run / "recipe.yaml").read_bytes()
    cli("train", "--resume", world.run, change).refused(2, "may not change", change.split("=")[0])
    assert (world.run / "recipe.yaml").read_bytes() == before


def test_resume_detects_a_recipe_edited_in_the_run_folder(world: World, tmp_path: Path, cli: Call) -> None:
    run = shutil.copytree(world.run, tmp_path / "run")
    text = (run / "recipe.yaml").read_text()
    assert "seed: 42" in text
    (run / "recipe.yaml").write_text(text.replace("seed: 42", "seed: 43"))
    cli("train", "--resume", run).refused(2, "may not change", "seed")


def test_resume_with_a_recipe_is_refused(world: World, cli: Call) -> None:
    cli("train", world.recipe, "--resume", world.run).refused(2, "--resume")


def test_quiet_training_prints_the_run_folder(world: World, tmp_path: Path, cli: Call) -> None:
    result = cli("train", world.recipe, f"output_dir={tmp_path / 'run'}", "max_steps=2", "--quiet")
    assert result.code == 0
    assert "run folder" in result.out
    assert "report.html" in result.out.replace("\n", "").replace(" ", "")
    assert not any(word in result.out for word in ("loss", "step 1", "plan of this run", "memory"))


def test_train_without_anything_is_refused(cli: Call) -> None:
    cli("train").refused(2, "no recipe given")


def test_eval_of_text_probe_and_answers(world: World, cli: Call) -> None:
    result = cli("eval", world.run, world.folder / "domain.jsonl", "--answers", 2, "--json")
    assert result.code == 0, result.err
    rows = {row["kind"]: row for row in map(json.loads, result.out.splitlines())}
    assert rows["eval"]["step"] == 6
    logged = [
        r for r in records(world.run) if r["kind"] == "eval" and r["step"] == 6 and r["name"] == "domain"
    ]
    assert rows["eval"]["loss"] == pytest.approx(logged[0]["loss"], abs=0.05)
    assert rows["answers"]["total"] == 2
    assert all(0 <= share <= 1 for share in rows["probe"]["scores"].values())


def test_eval_table_and_other_checkpoints(world: World, cli: Call) -> None:
    text = world.folder / "domain.jsonl"
    shown = cli("eval", world.run, text, "--answers", 3).out
    loss, low, high = map(
        float, re.search(r"([\d.]+) \(perplexity [\d.]+\) +([\d.]+) to ([\d.]+)", shown).groups()
    )
    assert low < loss < high
    assert re.search(r"probe: agreement +\d+ of 18 +\d+% to \d+%", shown)
    assert re.search(r"probe: all +\d+ of 220 ", shown)
    assert re.search(r"exact answers +0 of 3 +0% to 71%", shown)  # 1 − 0.025^(1/3)
    assert cli("eval", world.run, text, "--no-probe", "--checkpoint", "best").code == 0
    cli("eval", world.run, text, "--checkpoint", "worst").refused(2, "worst")
    cli("eval", world.run, text, "--checkpoint", "999").refused(5, "999")


def test_eval_without_anything_to_measure_is_refused(world: World, cli: Call) -> None:
    cli("eval", world.run, "--no-probe").refused(2, "nothing to measure")


def test_generate_streams_and_repeats_with_a_seed(world: World, cli: Call) -> None:
    words = ("generate", world.run, "the cat", "--max-new-tokens", 8, "--temperature", 1.0)
    first, again, other = cli(*words, "--seed", 1), cli(*words, "--seed", 1), cli(*words, "--seed", 2)
    assert first.code == 0
    assert first.out == again.out != other.out
    assert "8 tokens" in first.err


@pytest.mark.parametrize(
    ("ids", "printed"),
    [([1, 2], "[2 tokens, 0.43 tokens/s, ended by length]"), ([], "[0 tokens, ended by length]")],
)
def test_a_slow_machine_still_has_a_rate(
    world: World, cli: Call, monkeypatch: pytest.MonkeyPatch, ids: list[int], printed: str
) -> None:
    slow = Completion("la", ids, "length", 0.43 * len(ids) / 2)
    monkeypatch.setattr("trimtab.api.Model.complete", lambda *_, **__: slow)
    assert printed in cli("generate", world.run, "the cat").err


def test_generate_pieces_arrive_one_by_one(world: World) -> None:
    import trimtab

    pieces: list[str] = []
    completion = trimtab.load(world.run).complete("the cat", max_new_tokens=8, stream=pieces.append)
    assert len(pieces) > 1
    assert "".join(pieces) == completion.text


def test_generate_from_standard_input_and_stop(
    world: World, cli: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat"))
    options = ("--max-new-tokens", 20, "--temperature", 1.0, "--seed", 3)
    piped = cli("generate", world.run, *options)
    assert piped.out == cli("generate", world.run, "the cat", *options).out
    stop = piped.out.strip()[3:5]
    assert len(stop) == 2
    stopped = cli("generate", world.run, "the cat", *options, "--stop", stop)
    assert stop not in stopped.out
    assert "ended by stop" in stopped.err


def test_generate_without_a_prompt_is_refused(
    world: World, cli: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    cli("generate", world.run).refused(2, "no prompt")
    cli("generate", world.run, "").refused(4, "prompt is empty")


def test_chat_needs_a_template(world: World, model_copy: Path, cli: Call) -> None:
    cli("generate", world.run, "--chat", "hello").refused(4, "chat template")
    (model_copy / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    )
    result = cli("generate", model_copy, "--chat", "hello", "--system", "be brief", "--max-new-tokens", 4)
    assert result.code == 0, result.err
    assert "tokens" in result.err
    cli("generate", model_copy, "hello", "--system", "be brief").refused(2, "--chat")


def test_export_writes_a_receipt_into_the_run_folder_and_overwrites_none(
    world: World, tmp_path: Path, cli: Call
) -> None:
    without = shutil.ignore_patterns("receipts")  # from exports of other tests
    run, target = shutil.copytree(world.run, tmp_path / "run", ignore=without), tmp_path / "my-model"
    result = cli("export", "hf", run, target, "--dtype", "fp32")
    assert result.code == 0, result.err
    (path,) = (run / "receipts").iterdir()
    assert path.name.startswith("export-hf-my-model-")
    receipt = json.loads(path.read_text())
    assert receipt["source"]["step"] == 6
    assert len(receipt["checks"]) >= 3
    prompt = ("the cat", "--max-new-tokens", 8)
    assert cli("generate", target, *prompt).out == cli("generate", run, *prompt).out
    before = (target / "model.safetensors").stat().st_mtime_ns
    cli("export", "hf", run, target).refused(4, "my-model")
    assert (target / "model.safetensors").stat().st_mtime_ns == before
    assert cli("export", "hf", run, target, "--overwrite").code == 0
    cli("export", "hf", run, tmp_path / "x", "--dtype", "int8").refused(2, "int8")
    assert not (tmp_path / "x").exists()


def test_export_of_a_model_writes_the_receipt_next_to_it(world: World, tmp_path: Path, cli: Call) -> None:
    assert cli("export", "hf", world.model, tmp_path / "copy").code == 0
    assert (tmp_path / "copy.receipt.json").is_file()


def test_report_is_rebuilt(world: World, tmp_path: Path, cli: Call) -> None:
    result = cli("report", world.run, "--out", tmp_path / "page.html")
    assert result.code == 0
    assert "<html" in (tmp_path / "page.html").read_text()
    cli("report", tmp_path / "nothing").refused(5, "nothing")
    cli("report", world.run, "--out", tmp_path / "no" / "page.html").refused(6, "page.html")


def test_doctor_is_ready_and_lists_missing_packages(
    cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = cli("doctor", "--folder", tmp_path)
    assert result.code == 0
    assert "ready: try `trimtab demo`" in result.out
    assert "will be used" in result.out
    assert cli("doctor", "--folder", tmp_path / "to" / "be" / "made").code == 0
    import trimtab.cli.doctor as doctor

    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "torch" else real(name))
    result = cli("doctor", "--folder", tmp_path)
    assert result.code == 8
    assert "pip install 'trimtab[train]'" in result.out


def test_doctor_shows_threads_load_and_wait_policy(cli: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("os.getloadavg", lambda: (40.0, 1.0, 1.0))
    result = " ".join(cli("doctor").out.split())
    assert "OMP_WAIT_POLICY=PASSIVE, set in the environment" in result
    assert "(OMP_NUM_THREADS=1)" in result
    assert "40.0 runnable processes" in result
    assert "other programs compete for the cores" in result


def test_doctor_does_not_mistake_a_folder_for_a_package(
    cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb writes a folder named wandb, which Python can import as an empty package."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    result = cli("doctor")
    assert result.code == 0
    assert "trimtab[wandb]" in result.out


def test_doctor_writes_a_report_without_secrets(
    cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "wandb-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = cli("doctor", "--folder", tmp_path, "--report", tmp_path / "doctor.txt")
    assert result.code == 0
    text = (tmp_path / "doctor.txt").read_text()
    assert "secret" not in text
    assert str(tmp_path) not in text
    assert str(Path.home()) not in text
    assert "OMP_NUM_THREADS=1" in text
    for part in ("trimtab 0.", "python:", "torch ", "device:", "will be used", "ready"):
        assert part in text
    cli("doctor", "--report", tmp_path / "no" / "such" / "file").refused(6, "--report")


def test_doctor_replaces_its_own_reports_only(
    cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimtab.cli.doctor._attention_rows", list)
    report = tmp_path / "a.txt"
    report.write_text("trimtab is what I want to read about\n")
    cli("doctor", "--report", report).refused(2, "a.txt exists and is not a report of `trimtab doctor`")
    assert report.read_text() == "trimtab is what I want to read about\n"
    for more in (["--overwrite"], []):
        assert cli("doctor", "--report", report, *more).code == 0
        assert report.read_text().startswith("trimtab 0.")


def test_schema_is_json_schema(cli: Call) -> None:
    schema = json.loads(cli("schema").out)
    assert "learning_rate" in schema["properties"]


@pytest.mark.slow
def test_demo_of_a_few_steps(tmp_path: Path, cli: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled recipe with fewer evaluations: generating 90 answers twice is not tested here."""
    shipped = to_dict(load(recipe_file("demo")))
    shipped["data"]["train"][0]["first"] = 100
    shipped["data"]["eval_sequences"] = 2
    smaller = {**shipped, "answers": 2, "probe": False, "per_device_train_batch_size": 2, "prompts": []}
    (tmp_path / "demo.yaml").write_text(json.dumps(smaller))
    monkeypatch.setattr("trimtab.starter.files.recipe_file", lambda name: tmp_path / f"{name}.yaml")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = cli("demo", "--steps", 4, "--folder", tmp_path / "demo")
    assert result.code == 0, result.err
    assert "trimtab train own-text data.train=" in result.out.splitlines()[-1]
    assert len([r for r in records(tmp_path / "demo") if r["kind"] == "train"]) == 4
    with RunFolder(tmp_path / "demo").lock(), pytest.raises(CheckpointError, match="in use"):
        _replace_older(tmp_path / "demo")  # while the first is running
    (tmp_path / "demo" / "mynotes").mkdir()
    with pytest.raises(CheckpointError, match="mynotes"):
        _replace_older(tmp_path / "demo")
    (tmp_path / "demo" / "mynotes").rmdir()
    _replace_older(tmp_path / "demo")  # a second demo starts with this
    assert {path.name for path in (tmp_path / "demo").iterdir()} == {RunLock.NAME, "recipe.yaml"}


@pytest.mark.slow
def test_demo_killed_and_resumed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trimtab", "demo", "--kill", "--steps", "8", "--folder", "d"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ended with signal 9" in done.stdout
    # from step 2 if the kill came before the checkpoint of step 4 was written
    assert re.search(r"resumed from its last checkpoint, step [24]\b", done.stdout)
    assert "all 8 losses are bitwise identical" in done.stdout


def test_plan_mentions_a_missing_text(world: World, cli: Call) -> None:
    assert cli("plan", world.recipe).err == ""
    result = cli("plan", world.recipe, "data.train=./nothere")
    assert (result.code, result.err.count("note: ./nothere does not exist here")) == (0, 1)


def test_eval_refuses_sequences_longer_than_the_context(world: World, cli: Call) -> None:
    result = cli("eval", world.run, world.folder / "domain.jsonl", "--no-probe", "--max-seq-length", 4096)
    result.refused(2, "beyond the model's 128 positions")


def test_ctrl_c_is_reported(cli: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trimtab.recipe.schema", interrupted, raising=False)
    cli("schema").refused(130, "stopped")


def test_a_reader_that_closes_the_pipe() -> None:
    """Several schemas exceed the pipe buffer, so that writing fails with a broken pipe."""
    script = "import sys; from trimtab.cli.main import main; "
    script += "codes = [main(['schema']) for _ in range(9)]; sys.stderr.write(str(141 in codes))"
    piped = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" | head -1', sys.executable, script],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (piped.stdout, piped.stderr) == ("{\n", "True")


def test_demo_replaces_only_a_demo(world: World, tmp_path: Path, cli: Call) -> None:
    demo, mine = ("demo", "--steps", 4, "--folder"), tmp_path / "mine"
    cli(*demo, world.run).refused(5, "not a demo")
    mine.mkdir()
    (mine / "letter.txt").write_text("dear")
    cli(*demo, mine).refused(5, "letter.txt", "; give another --folder")
    assert (mine / "letter.txt").read_text() == "dear"
    cli(*demo, mine / "letter.txt").refused(5, "; give another --folder")
    with RunLock(tmp_path / "starting"):
        cli(*demo, tmp_path / "starting").refused(5, "or give another --folder")


@pytest.mark.parametrize("words", [[], *[[verb] for verb in VERBS], ["export", "hf"], ["export", "peft"]])
def test_help_of_every_verb(cli: Call, words: list[str]) -> None:
    result = cli(*words, "--help")
    assert result.code == 0
    assert "Usage: trimtab" in result.out
    assert " ".join(words) in result.out
    # Markdown keeps examples on separate lines only between paragraphs
    verb = " ".join(["trimtab", *words[:1]])
    assert not any(line.count(f"{verb} ") > 1 for line in result.out.splitlines() if words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["doctor", "--report"],
            "error: option '--report' requires an argument; see `trimtab doctor --help`",
        ),
        (["export", "hf", "x"], "error: missing argument 'folder'; see `trimtab export hf --help`"),
        (
            ["generate", "starter", "x", "--top-p", "2"],
            "error: --top-p must be less than or equal to 1; see `trimtab generate --help`",
        ),
        (
            ["generate", "starter", "x", "--max-new-tokens", "abc"],
            "error: --max-new-tokens must be a valid integer; see `trimtab generate --help`",
        ),
        (["plan", "x", "--fast"], "error: no such option: --fast; see `trimtab plan --help`"),
        (
            ["train", "x", "--max_steps=5"],
            "error: no such option: --max_steps; write recipe keys without dashes: max_steps=5",
        ),
        (
            ["plan", "x", "--output-dir", "a b"],
            "error: no such option: --output-dir; write recipe keys without dashes: output_dir='a b'",
        ),
        (
            ["train", "--lora.r", "--quiet", "x"],
            "error: no such option: --lora.r; write recipe keys without dashes: lora.r=VALUE",
        ),
        (
            ["demo", "--max_steps=5"],
            "error: no such option: --max_steps; did you mean --steps? see `trimtab demo --help`",
        ),
        (["--fast"], "error: no such option: --fast; see `trimtab --help`"),
        (["export"], "error: missing command; see `trimtab export --help`"),
        (["runs", "a", "b"], "error: got unexpected extra argument(s) (b); see `trimtab runs --help`"),
    ],
)
def test_mistakes_in_a_command_have_one_form(cli: Call, words: list[str], message: str) -> None:
    result = cli(*words)
    result.refused(2)
    assert result.err == f"{message}\n"
    assert result.out == ""


def test_help_is_a_verb_too(cli: Call) -> None:
    assert cli("help") == cli("--help")
    assert cli("help", "train") == cli("train", "--help")
    assert cli("help").code == 0


def test_an_unknown_option_suggests_similar_ones(cli: Call) -> None:
    cli("doctor", "--reprt", "x").refused(2, "no such option: --reprt; did you mean", "--report", "--help`")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_standard_output_is_named(tmp_path: Path, unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "trimtab", "runs", str(tmp_path)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 6
    assert done.stderr == (
        "error: standard output: No space left on device; free some space, or redirect the output elsewhere\n"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="closes descriptors as a shell does")
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_error(tmp_path: Path, closed: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m trimtab runs {shlex.quote(str(tmp_path))} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_version_and_unknown_words(cli: Call) -> None:
    assert cli("--version").out.startswith("trimtab ")
    for words in (["fly"], ["train", "--fast"], ["generate", "x", "--temperature", "-1"], ["plan"]):
        result = cli(*words)
        assert result.code == 2
        assert "Traceback" not in result.err
        assert result.err


def all_errors(base: type = errors.TrimtabError) -> list[type]:
    return [base, *(e for child in base.__subclasses__() for e in all_errors(child))]


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_exit_codes_are_documented(kind: type[errors.TrimtabError]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "exit-codes.md").read_text()
    assert any(f"| {kind.exit_code} | `{name.__name__}` |" in page for name in kind.__mro__)


def test_each_kind_of_error_has_its_own_exit_code() -> None:
    kinds = [kind for kind in all_errors() if kind.__module__.startswith("trimtab.facts")]
    kinds.remove(OutOfMemory)  # a lack of resources like others, and explained
    assert OutOfMemory.exit_code == ResourceError.exit_code
    assert len({kind.exit_code for kind in kinds}) == len(kinds)


def test_a_run_of_one_step_uses_the_singular(job: Callable[..., Path], cli: Call, tmp_path: Path) -> None:
    result = cli("train", job(max_steps=1))
    assert result.code == 0, result.err
    assert "1 step " in result.out
    assert "1 steps" not in result.out
    assert ("Measured on a CPU" in result.out) == ("At the peak" in result.out), result.out
    log = tmp_path / "run" / "metrics.jsonl"
    log.write_text("".join(row for row in log.open() if '"kind": "train"' not in row))
    assert "metrics.jsonl lacks step 1 of 1: it is not shown" in cli("report", tmp_path / "run").out
