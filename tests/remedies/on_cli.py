"""Commands and the Python interface: words that are missing, adapters that are in the way, training that diverges."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

from cases import World, case, in_turn, listed
from safetensors.torch import load_file, save_file
from shared import decoder_of

import trimtab
from trimtab.cli.demo import DEMO_MARK, _replace_older
from trimtab.evaluate import loss
from trimtab.hub import resolve_model

# Training.
case(
    "cli/train.py:train: a resumed run uses the recipe in its folder; give only keys to override, as key=value",
    lambda w: w.cli("train", w.recipe(), "--resume", w.own("run") / "run"),
    lambda w, remedy: w.cli("train", "--resume", w.own("run") / "run", "max_steps=5"),
)
case(
    "cli/train.py:train: write `trimtab train recipe.yaml`, or see `trimtab train --help`",
    lambda w: w.cli("train"),
    lambda w, remedy: (
        w.recipe(),
        in_turn(lambda words: w.cli(*words.split()), re.findall("`trimtab (.*?)`", remedy)),
    ),
)


def diverging(w: World, rate: float, folder: str = "diverged", **more: Any) -> str:
    """A run whose first step has a rate of 0, and the next one this one."""
    schedule = {"lr_scheduler_type": "linear", "warmup_steps": 2, "max_steps": 6}
    often = {"save_steps": 1, "save_total_limit": 9, "max_grad_norm": 0}
    recipe = w.recipe(learning_rate=rate, output_dir=str(w.tmp / folder), **schedule, **often, **more)
    return w.cli("train", recipe)


def follow_diverged(w: World, remedy: str) -> None:
    assert "lower learning_rate" in remedy
    diverging(w, 1e-3, "anew")
    kind, key = re.findall(r"`trimtab export (\w+) --checkpoint STEP` writes .* that (\S+) can load", remedy)[
        0
    ]
    first = min(
        int(path.name.removeprefix("step-")) for path in (w.tmp / "diverged/checkpoints").glob("step-*")
    )
    w.cli("export", kind, w.tmp / "diverged", w.tmp / "exported", "--checkpoint", first)
    section, _, inner = key.partition(".")
    diverging(w, 1e-3, "further", **{section: {inner: str(w.tmp / "exported")}})


case("trainer/loop.py:_Loop.stop_before: {}", lambda w: diverging(w, 1e30), follow_diverged)
case("trainer/loop.py:_Loop.stop_before: {}", lambda w: diverging(w, 1e30, lora={"r": 2}), follow_diverged)


# Commands.
case(
    "cli/eval.py:evaluate: name a text, or omit --no-probe",
    lambda w: w.cli("eval", w.model, "--no-probe"),
    lambda w, remedy: (
        w.cli("eval", w.model, w.shared("run") / "domain.jsonl", "--no-probe"),
        w.cli("eval", "starter", "--device", "cpu"),
    ),
)


def piped(w: World, said: str, *words: object) -> str:
    w.patch.setattr("sys.stdin", io.StringIO(said))
    return w.cli("generate", w.own("chat"), *words, "--max-new-tokens", 2)


case(
    "cli/generate.py:generate: write it after the model, or pipe it to standard input",
    lambda w: piped(w, ""),
    lambda w, remedy: (piped(w, "", "the cat"), piped(w, "the cat")),
)
case(
    "cli/generate.py:generate: add --chat, or put it into the prompt",
    lambda w: piped(w, "", "the cat", "--system", "be kind"),
    lambda w, remedy: (
        piped(w, "", "the cat", "--system", "be kind", "--chat"),
        piped(w, "", "be kind. the cat"),
    ),
)


# Python.
def loaded(w: World, **options: Any) -> Any:
    return trimtab.load(str(w.model), **options)


def dtypes(remedy: str) -> list[str]:
    return re.findall(r"auto|fp32|bf16|fp16", remedy)


case(
    "api/model.py:load: use auto, {}",
    lambda w: loaded(w, dtype="int8"),
    lambda w, remedy: in_turn(lambda dtype: loaded(w, dtype=dtype), dtypes(remedy)),
)
case(
    "api/model.py:_check_dtype: use one of {}",
    lambda w: loaded(w).save(w.tmp / "out", dtype="int8"),
    lambda w, remedy: in_turn(
        lambda dtype: loaded(w).save(w.tmp / dtype, dtype=dtype), listed(remedy, "one of")
    ),
)
case(
    "api/model.py:Model._exporting: name another folder",
    lambda w: trimtab.load(str(w.own())).save(w.own(), overwrite=True),
    lambda w, remedy: trimtab.load(str(w.own())).save(w.tmp / "another"),
)


def with_adapters(w: World) -> Any:
    return trimtab.load(str(w.model), adapter=str(w.shared("adapter")), dtype="fp32")


case(
    "api/model.py:Model.save: merge them with model.merge(folder) (`trimtab merge`), or save only the adapter with "
    "model.save_adapter(folder) (`trimtab export peft`)",
    lambda w: with_adapters(w).save(w.tmp / "out"),
    lambda w, remedy: (
        in_turn(
            lambda words: w.cli(
                *words.split(), w.shared("lora run") / "run", w.tmp / words.replace(" ", "-")
            ),
            re.findall("`trimtab (.*?)`", remedy),
        ),
        in_turn(
            lambda name: getattr(with_adapters(w), name)(w.tmp / f"py-{name}"),
            re.findall(r"model\.(\w+)\(", remedy),
        ),
    ),
)
case(
    "api/model.py:Model._used_adapter: train one with a `lora` section in the recipe",
    lambda w: loaded(w).save_adapter(w.tmp / "out"),
    lambda w, remedy: trimtab.load(str(w.shared("lora run") / "run")).save_adapter(w.tmp / "out"),
)


def second(w: World) -> Any:
    model = with_adapters(w)
    model.add_adapter(w.shared("adapter"), "second")
    model.use_adapters()
    return model


case(
    "api/model.py:Model._used_adapter: name the adapter to save: save_adapter(folder, adapter=NAME)",
    lambda w: second(w).save_adapter(w.tmp / "out"),
    lambda w, remedy: second(w).save_adapter(w.tmp / "out", adapter="second"),
)


def measured(w: World, rows: list[str], *words: object, model: Path | None = None) -> str:
    path = w.tmp / f"measured-{len(rows)}.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return w.cli("eval", model or w.model, path, "--no-probe", *words)


def overflowing(w: World) -> Path:
    """Weights that are fine in fp32 and overflow in fp16."""
    folder = w.own()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(60_000.0)
    tensors["model.embed_tokens.weight"].mul_(100.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def follow_overflow(w: World, remedy: str) -> None:
    assert "fp32" in remedy
    measured(w, ["the cat sees a dog"], "--dtype", "fp32", model=overflowing(w))
    run = w.shared("run") / "run"
    step = min(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    measured(w, ["the cat sees a dog"], "--checkpoint", step, model=run)


case(
    "evaluate/perplexity.py:loss: weights are not finite, or overflow in this dtype: try an earlier checkpoint or fp32",
    lambda w: measured(w, ["the cat sees a dog"], "--dtype", "fp16", model=overflowing(w)),
    follow_overflow,
)
case(
    "evaluate/perplexity.py:loss: give evaluation text of at least two tokens per document",
    lambda w: loss(decoder_of(w.model), []),
    lambda w, remedy: measured(w, ["the cat sees a dog"]),
)


# The demo's folder.
def older(w: World, *names: str, folder: str = "demo") -> None:
    target = w.tmp / folder
    if not target.exists() and folder == "demo":
        shutil.copytree(w.shared("run") / "run", target)
    for name in names:
        (target / name).write_text("x")
    _replace_older(target)


case(
    "cli/demo.py:_replace_older: give another --folder, or remove it yourself",
    lambda w: older(w),
    lambda w, remedy: (older(w, folder="another"), shutil.rmtree(w.tmp / "demo"), older(w, folder="absent")),
)


def follow_foreign(w: World, remedy: str) -> None:
    older(w, folder="another")
    (w.tmp / "demo" / "letter.txt").rename(w.tmp / "letter.txt")
    older(w)


case(
    "cli/demo.py:_replace_older: move it away, or give another --folder",
    lambda w: older(w, DEMO_MARK, "letter.txt"),
    follow_foreign,
)
case(
    "cli/doctor.py:_write_report: name another file with --report",
    lambda w: w.cli("doctor", "--report", w.tmp / "absent" / "report.txt"),
    lambda w, remedy: w.cli("doctor", re.findall(r"--\w+", remedy)[0], w.tmp / "report.txt"),
)


def over_letter(w: World, *more: str, name: str = "letter.txt") -> str:
    (w.tmp / "letter.txt").write_text("dear reader")
    return w.cli("doctor", "--report", w.tmp / name, *more)


case(
    "cli/doctor.py:_refuse_foreign: name another file with --report, or overwrite it with --overwrite",
    over_letter,
    lambda w, remedy: (over_letter(w, name="report.txt"), over_letter(w, remedy.split()[-1])),
)


def written_in(w: World, dtype: str, model: Path | None = None) -> str:
    return w.cli("generate", model or overflowing(w), "the cat", "--max-new-tokens", 2, "--dtype", dtype)


case(
    "generate/loop.py:_run_batch: get the weights again, or load the model in fp32",
    lambda w: written_in(w, "fp16"),
    lambda w, remedy: (written_in(w, remedy.split()[-1]), written_in(w, "fp16", w.again())),
)
case(
    "api/model.py:load: give a branch, a tag or a commit as a string",
    lambda w: trimtab.load("owner/name", revision=5),  # type: ignore[arg-type]
    lambda w, remedy: resolve_revisions(w),
)


def resolve_revisions(w: World) -> None:
    """A branch, a tag and a commit, each as text, against a hub on loopback."""
    commit = w.hub.add_model("owner/name", {"config.json": "{}", "model.safetensors": b"x"}, branch="side")
    w.hub.tag("models", "owner/name", "v1", commit)
    for revision in ("side", "v1", commit):
        resolve_model(
            "owner/name", revision=revision, endpoint=w.hub.endpoint, cache_dir=w.tmp / "hub", progress=False
        )


case(
    "api/training.py:build_recipe_from_arguments: give the path of a YAML file, the name of a recipe that ships with "
    "trimtab, or a dict",
    lambda w: trimtab.plan_run(5),  # type: ignore[arg-type]
    lambda w, remedy: (
        trimtab.plan_run(w.recipe()),
        trimtab.plan_run(
            "own-text", model=str(w.model), data={"train": str(w.tmp / "texts.jsonl")}, max_seq_length=64
        ),
        trimtab.plan_run(
            {"model": str(w.model), "data": {"train": str(w.tmp / "texts.jsonl")}, "max_seq_length": 64}
        ),
    ),
)


# Commands that are not complete.
def shown_help(w: World, remedy: str) -> None:
    (command,) = re.findall("`trimtab (.*?)`", remedy)
    assert "Usage: trimtab" in w.cli(*command.split())


case(
    "cli/commands.py:_misused: write recipe keys without dashes: {}",
    lambda w: w.cli("train", w.recipe(), "--max-steps", 1),
    lambda w, remedy: w.cli("train", w.recipe(), remedy.split(": ")[1]),
)
MISUSED = "cli/commands.py:_misused: {}see `{} --help`"
case(MISUSED, lambda w: w.cli("doctor", "--report"), shown_help)
case(MISUSED, lambda w: w.cli("export", "hf"), shown_help)
case(MISUSED, lambda w: w.cli("plan", "--fast"), shown_help)
