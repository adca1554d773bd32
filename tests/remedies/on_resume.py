"""Runs that resume: changed keys, devices, lengths, damaged folders; run folders as models of other runs."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

from cases import World, case

import trimtab
from trimtab.facts.devices import DeviceFacts
from trimtab.model import read_shape
from trimtab.plan.resolved import Resolved
from trimtab.plan.resolved_json import resolved_from_dict
from trimtab.recipe import load, loads
from trimtab.run.folder import read_json
from trimtab.run.resolve import resolve_backends
from trimtab.run.resume import resolve_for_device, resume_device


def commands(w: World, remedy: str, *more: str) -> None:
    """Every command that a remedy shows, word by word."""
    shown = re.findall("`trimtab (.*?)`", remedy)
    assert shown, remedy
    for words in shown:
        w.cli(*shlex.split(words), *more)


def run_of(w: World) -> Path:
    """The run that cases must not change."""
    return w.shared("run") / "run"


def lora_run_of(w: World) -> Path:
    return w.shared("lora run") / "run"


def run(w: World) -> Path:
    return w.own("run") / "run"


def lora_run(w: World) -> Path:
    return w.own("lora run") / "run"


def resume(w: World, *overrides: str, folder: Path | None = None) -> str:
    return w.cli("train", "--resume", folder or run(w), *overrides)


# Keys that may not change.
CHANGED = "recipe/resume.py:check_resume: {}, or start a new run from this one's weights: {}"


def follow_changed(w: World, remedy: str, folder: Path) -> None:
    assert remedy.startswith("set it back")
    resume(w, "max_steps=5", folder=folder)
    commands(w, remedy)


case(CHANGED, lambda w: resume(w, "learning_rate=1e-4"), lambda w, remedy: follow_changed(w, remedy, run(w)))
case(
    CHANGED,
    lambda w: resume(w, "learning_rate=1e-4", folder=lora_run(w)),
    lambda w, remedy: follow_changed(w, remedy, lora_run(w)),
)
case(
    CHANGED,
    lambda w: resume(w, "lora.r=2", folder=lora_run(w)),
    lambda w, remedy: follow_changed(w, remedy, lora_run(w)),
)
case(
    "run/planned_steps.py:check_planned_steps: leave it out, or set max_steps={} or more",
    lambda w: resume(w, "max_steps=1"),
    lambda w, remedy: (resume(w), resume(w, re.findall(r"max_steps=\d+", remedy)[0])),
)


# Devices.
def kept(w: World, **changes: Any) -> Resolved:
    found = read_json(run(w) / "choices.json")
    return resolved_from_dict({**found, **changes}, read_shape(w.model).num_layers)


def on_gpu(w: World) -> object:
    """A run that was trained on a GPU, on this machine without one."""
    w.edit_json(run(w) / "choices.json", device="cuda")
    recipe = load(run(w) / "recipe.yaml", ["device=auto"])
    return resume_device(kept(w), recipe, run(w), asked=False)


case(
    "run/resume.py:resume_device: `trimtab doctor` explains why; to resume without a GPU: `trimtab train --resume {} "
    "device=cpu`",
    on_gpu,
    lambda w, remedy: commands(w, remedy),
)
OLD_GPU = DeviceFacts("an old GPU", "cuda", 16 * 10**9, capability=(7, 0))
CPU = DeviceFacts("a CPU", "cpu", 16 * 10**9)
NEW_GPU = DeviceFacts("a GPU", "cuda", 16 * 10**9, capability=(9, 0), bf16=True)


def on_device(w: World, device: DeviceFacts) -> object:
    recipe = loads("model: m\ndata: {train: x}\nmax_seq_length: 64\ndtype: bf16\n")
    shape = read_shape(w.model)
    return resolve_for_device(resolve_backends(recipe, shape, NEW_GPU, threads=1), recipe, shape, device)


case(
    "run/resume.py:resolve_for_device: resume with device=cpu, or on another GPU",
    lambda w: on_device(w, OLD_GPU),
    lambda w, remedy: (on_device(w, CPU), on_device(w, NEW_GPU)),
)


# Folders that lack something.
def without(w: World, *names: str) -> str:
    for name in names:
        (run(w) / name).unlink()
    return resume(w, "max_steps=5")


def back(w: World, *names: str) -> None:
    for name in names:
        shutil.copy(run_of(w) / name, run(w) / name)
    resume(w, "max_steps=5")


def follow_back_or_again(w: World, remedy: str, *names: str) -> None:
    commands(w, remedy)
    back(w, *names)


AGAIN = "restore the file from a copy, or train the recipe again: {}"
case(
    f"run/folder.py:RunFolder._without_choices: {AGAIN}",
    lambda w: without(w, "choices.json"),
    lambda w, remedy: follow_back_or_again(w, remedy, "choices.json"),
)
case(
    "run/folder.py:RunFolder._without_choices: restore both files from a copy",
    lambda w: without(w, "choices.json", "recipe.yaml"),
    lambda w, remedy: back(w, "choices.json", "recipe.yaml"),
)


def incomplete(w: World) -> object:
    w.edit_json(run(w) / "choices.json", dtype=...)
    return resume(w, "max_steps=5")


case(
    f"run/choices.py:_damaged: {AGAIN}",
    incomplete,
    lambda w, remedy: follow_back_or_again(w, remedy, "choices.json"),
)


def empty(w: World) -> object:
    (w.tmp / "empty").mkdir(exist_ok=True)
    return resume(w, folder=w.tmp / "empty")


def follow_start(w: World, remedy: str) -> None:
    shown = re.findall("`trimtab (.*?)`", remedy)[0]
    w.cli(*shlex.split(shown.replace("RECIPE", str(w.recipe()))))


case(
    "run/folder.py:RunFolder.open: start it with `trimtab train RECIPE output_dir={}`",
    empty,
    follow_start,
)


def own_folder(w: World) -> object:
    own = w.tmp / "own"
    own.mkdir(exist_ok=True)
    (own / "recipe.yaml").write_text(w.recipe().read_text())
    return resume(w, folder=own)


case(
    "run/folder.py:RunFolder.open: start the recipe: `trimtab train {}`",
    own_folder,
    follow_start,
)


def without_start(w: World) -> object:
    """A run from a model in memory, killed before its weights were written."""
    half = w.tmp / "half"
    half.mkdir(exist_ok=True)
    (half / ".lock").touch()
    (half / "recipe.yaml").write_text(w.recipe(model={"name": str(half / "start")}).read_text())
    return resume(w, folder=half)


def pass_the_model(w: World, remedy: str) -> None:

    assert repr(str(w.tmp / "half")) in remedy
    model = trimtab.load(w.model, device="cpu", dtype="fp32")
    next(model.opened.decoder.parameters()).data.mul_(0.5)
    trimtab.train(w.recipe(), model=model, output_dir=str(w.tmp / "half"))


case(
    "run/lifecycle.py:_restart: pass the model again: trimtab.train(…, model=model, output_dir={})",
    without_start,
    pass_the_model,
)


def extended_after_early_stop(w: World) -> object:
    early = w.tmp / "early"
    if not early.exists():
        stops = {
            "eval_steps": 1,
            "early_stopping_patience": 1,
            "early_stopping_threshold": 1e9,
            "data_eval_share": 0.2,
        }
        w.cli("train", w.recipe(**stops, max_steps=4, output_dir=str(early)))
    return resume(w, "max_steps=6", folder=early)


case(
    "run/lifecycle.py:_refuse_early_stopped: set early_stopping_patience=null as well, or a larger one",
    extended_after_early_stop,
    lambda w, remedy: resume(
        w,
        "max_steps=6",
        *re.findall(r"\S+=null", remedy),
        "early_stopping_threshold=0",
        folder=w.tmp / "early",
    ),
)


def damaged(w: World) -> Path:
    for file in (run(w) / "checkpoints").glob("step-*/*.safetensors"):
        file.write_bytes(b"")
    return run(w)


def checkpoints_back(w: World) -> None:
    shutil.rmtree(run(w) / "checkpoints", ignore_errors=True)
    shutil.copytree(run_of(w) / "checkpoints", run(w) / "checkpoints", symlinks=True)


def follow_checkpoints(w: World, remedy: str) -> None:
    commands(w, remedy)
    checkpoints_back(w)
    resume(w, "max_steps=5")


RESTORE = "restore a checkpoint from a copy, or train the recipe again: {}"
case(
    f"run/resume.py:find_checkpoint: {RESTORE}",
    lambda w: resume(w, "max_steps=5", folder=damaged(w)),
    follow_checkpoints,
)


def gone(w: World) -> str:
    shutil.rmtree(run(w) / "checkpoints")
    return resume(w, "max_steps=5")


def follow_gone(w: World, remedy: str) -> None:
    follow_checkpoints(w, remedy)
    shutil.rmtree(run(w) / "checkpoints")
    Path(re.findall(r"or remove (\S+) to start", remedy)[0]).unlink()
    resume(w)


case(
    "run/resume.py:find_checkpoint: {}; or remove {} to start at step 0 in this folder",
    gone,
    follow_gone,
)
case(
    'run/listing.py:runs: give the path of a folder with runs in it, such as "runs"',
    lambda w: trimtab.runs(None),
    lambda w, remedy: trimtab.runs(w.own("run")),
)
case(
    "run/listing.py:runs: give a folder with run folders in it, or a run folder",
    lambda w: trimtab.runs(w.tmp / "absent"),
    lambda w, remedy: (trimtab.runs(w.own("run")), trimtab.runs(run(w))),
)


# Run folders as models.
def begun_from(w: World, model: object, **more: Any) -> str:
    return w.train(model=str(model), max_steps=1, **more)


def follow_adapters(w: World, remedy: str) -> None:
    merge, export = re.findall("`trimtab (.*?)`", remedy)
    w.cli(*shlex.split(merge.replace("MODEL", str(w.tmp / "merged"))))
    begun_from(w, w.tmp / "merged")
    w.cli(*shlex.split(export.replace("ADAPTER", str(w.tmp / "adapter"))))
    begun_from(w, w.model, lora={"adapter": str(w.tmp / "adapter")})


case(
    "run/locate.py:_adapters_error: merge them with `trimtab merge {} MODEL` and set model.name=MODEL; or continue "
    "training the adapter: `trimtab export peft {} ADAPTER`, then set lora.adapter=ADAPTER and the model that it "
    "was trained on",
    lambda w: begun_from(w, lora_run_of(w)),
    follow_adapters,
)


def latest(w: World) -> Path:
    return max((run(w) / "checkpoints").glob("step-*"))


def damage_latest(w: World) -> Path:
    next(latest(w).glob("*.safetensors")).write_bytes(b"")
    return latest(w)


case(
    "run/locate.py:_verify: name another checkpoint of that run, or another model",
    lambda w: begun_from(w, damage_latest(w)),
    lambda w, remedy: (begun_from(w, min((run(w) / "checkpoints").glob("step-*"))), begun_from(w, w.model)),
)


def pointer(w: World) -> Path:
    path = run(w) / "checkpoints" / "best"
    path.unlink(missing_ok=True)
    path.write_text("step-99999999\n")
    return path


case(
    "run/locate.py:_resolve_pointer: name the checkpoint's folder, or the run folder",
    lambda w: begun_from(w, pointer(w)),
    lambda w, remedy: (begun_from(w, latest(w)), begun_from(w, run(w))),
)


def unsaved(w: World) -> str:
    """A run that never saved a checkpoint."""
    shutil.rmtree(run(w) / "checkpoints")
    (run(w) / "metrics.jsonl").unlink()
    return begun_from(w, run(w))


def follow_unsaved(w: World, remedy: str) -> None:
    begun_from(w, w.model)
    commands(w, remedy)
    begun_from(w, run(w))


case(
    "run/locate.py:_latest_good: resume it until it has saved one ({}), or name another model",
    unsaved,
    follow_unsaved,
)


def lost(w: World) -> str:
    """A finished run whose checkpoints were removed."""
    shutil.rmtree(run(w) / "checkpoints")
    return begun_from(w, run(w))


def follow_lost(w: World, remedy: str) -> None:
    begun_from(w, w.model)
    commands(w, remedy)
    begun_from(w, Path(f"{run(w)}-again"))
    shutil.copytree(run_of(w) / "checkpoints", run(w) / "checkpoints", symlinks=True)
    begun_from(w, run(w))


case(
    "run/locate.py:_latest_good: restore one from a copy, train its recipe again ({}), or name another model",
    lost,
    follow_lost,
)


def blocked(w: World, name: str) -> str:
    """A place that cannot be written, and one that can."""
    (w.tmp / "file").write_text("x")
    return w.cli("train", w.recipe(output_dir=str(w.tmp / name)))


case(
    "run/folder.py:RunFolder._publish: choose a writable output_dir",
    lambda w: blocked(w, "file/run"),
    lambda w, remedy: blocked(w, "run-here"),
)
