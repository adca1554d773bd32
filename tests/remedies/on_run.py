"""Runs: what every `auto` comes to, checkpoints by name, adapters on their bases, folders that are there already."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

from cases import World, case, in_turn, settings
from tiny_model import write_tiny_model

import trimtab
from trimtab.facts.devices import DeviceFacts, parse_device
from trimtab.model import read_shape
from trimtab.recipe import loads
from trimtab.run.device import detect
from trimtab.run.resolve import resolve_backends
from trimtab.text import load as load_tokenizer
from trimtab.text.added import with_tokens

OLD_GPU = DeviceFacts("an old GPU", "cuda", 16 * 10**9, capability=(7, 0))


def chosen(w: World, *overrides: str, device: DeviceFacts = OLD_GPU) -> object:
    recipe = loads("model: m\ndata: {train: x}\nmax_seq_length: 64\n", overrides)
    return resolve_backends(recipe, read_shape(w.model), device, threads=1)


case(
    "run/resolve.py:resolve_backends: set max_seq_length to at most {}",
    lambda w: w.plan("max_seq_length=129"),
    lambda w, remedy: w.plan(f"max_seq_length={remedy.split()[-1]}"),
)
A_CPU = DeviceFacts("a CPU", "cpu", 10**10)


def follow_gradients(w: World, remedy: str) -> None:
    gradients, dtype = (alternative[0] for alternative in settings(remedy))
    chosen(w, gradients, device=A_CPU)
    chosen(w, "gradient_dtype=bf16", dtype, device=A_CPU)


case(
    "run/resolve.py:resolve_backends: set gradient_dtype: fp32, or dtype: bf16 if this device should compute in bf16 "
    "regardless",
    lambda w: chosen(w, "gradient_dtype=bf16", device=A_CPU),
    follow_gradients,
)
case(
    "run/resolve.py:_compute_dtype: set dtype: fp16 (with loss scaling) or dtype: fp32",
    lambda w: chosen(w, "dtype=bf16"),
    lambda w, remedy: in_turn(lambda dtype: chosen(w, f"dtype={dtype}"), re.findall(r"dtype: (\w+)", remedy)),
)
case(
    "run/resolve.py:_compile: set torch_compile: auto",
    lambda w: chosen(w, "torch_compile=true", device=dataclasses.replace(OLD_GPU, capability=(6, 1))),
    lambda w, remedy: chosen(w, *settings(remedy)[0], device=dataclasses.replace(OLD_GPU, capability=(6, 1))),
)


# Devices.
NAMES = "use auto, cpu, cuda or cuda:N (cuda:0, cuda:1, …)"


def follow_names(w: World, remedy: str) -> None:
    for name in re.findall(r"auto|cpu|cuda:\d|cuda(?= or)", remedy):
        assert parse_device(name) is not None, name
    detect("auto")
    detect("cpu")


case(f"run/device.py:check_device: {NAMES}", lambda w: detect("tpu"), follow_names)


case(
    "run/device.py:check_device: `trimtab doctor` explains why; device: auto uses the available device",
    lambda w: w.plan("device=cuda"),
    lambda w, remedy: (w.cli(*re.findall("`trimtab (.*?)`", remedy)), w.plan(*settings(remedy)[0])),
)
case(
    "plan/graphs.py:requested_graphs: set cuda_graphs: auto",
    lambda w: w.plan("cuda_graphs=true"),
    lambda w, remedy: w.plan(*settings(remedy)[0]),
)


# Which state of a run.
def run(w: World) -> Path:
    return w.own("run") / "run"


def generate(w: World, *words: object, model: Path | str | None = None) -> str:
    return w.cli("generate", model or run(w), "the cat", "--max-new-tokens", 2, *words)


def follow_states(w: World, remedy: str) -> None:
    """Every state that is offered can be opened."""
    states = re.findall(r"latest|best|\d+", remedy)
    assert states
    for state in states:
        if state != "best" or "best" in remedy.split():
            generate(w, "--checkpoint", state)


case(
    "run/models.py:_find_checkpoint: use latest or {} {}",
    lambda w: generate(w, "--checkpoint", 999),
    follow_states,
)
case(
    "run/models.py:_find_checkpoint: use latest, best or a step number",
    lambda w: generate(w, "--checkpoint", "newest"),
    lambda w, remedy: (generate(w, "--checkpoint", "latest"), generate(w, "--checkpoint", 4)),
)
case(
    "run/models.py:_check_versions: leave the revision out; a run's checkpoint is selected with checkpoint",
    lambda w: trimtab.load(str(run(w)), revision="main"),
    lambda w, remedy: (trimtab.load(str(run(w))), trimtab.load(str(run(w)), checkpoint=4)),
)
case(
    "run/models.py:_check_versions: leave the revision out",
    lambda w: trimtab.load(str(w.model), revision="main"),
    lambda w, remedy: trimtab.load(str(w.model)),
)
case(
    "run/models.py:_check_versions: leave the checkpoint out; a hub model's commit is selected with revision",
    lambda w: generate(w, "--checkpoint", 4, model=w.model),
    lambda w, remedy: generate(w, model=w.model),
)


def damage_all(w: World) -> Path:
    for file in (run(w) / "checkpoints").glob("step-*/*.safetensors"):
        file.write_bytes(b"")
    return run(w)


def restore(w: World) -> None:
    shutil.rmtree(run(w) / "checkpoints")
    shutil.copytree(w.shared("run") / "run" / "checkpoints", run(w) / "checkpoints", symlinks=True)


case(
    "run/models.py:_find_checkpoint: all are damaged: restore one from a copy, or train the run again",
    lambda w: (damage_all(w), generate(w)),
    lambda w, remedy: (restore(w), generate(w), w.train(max_steps=1)),
)


def unsaved(w: World) -> object:
    """A run that was stopped before its first checkpoint."""
    shutil.rmtree(run(w) / "checkpoints")
    (run(w) / "metrics.jsonl").unlink()
    return generate(w)


def follow_command(w: World, remedy: str) -> None:
    words = re.findall("`trimtab (.*?)`", remedy)[0].split()
    w.cli(*words)
    generate(w)


case(
    "run/models.py:_find_checkpoint: resume it until it has saved one: {}",
    unsaved,
    follow_command,
)


def lost(w: World) -> object:
    """A finished run whose checkpoints were removed."""
    shutil.rmtree(run(w) / "checkpoints")
    return generate(w)


def follow_lost(w: World, remedy: str) -> None:
    w.cli(*re.findall("`trimtab (.*?)`", remedy)[0].split())
    generate(w, model=Path(f"{run(w)}-again"))
    (run(w) / "checkpoints").mkdir()
    restore(w)
    generate(w)


case(
    "run/models.py:_find_checkpoint: restore a checkpoint from a copy, or train the recipe again: {}",
    lost,
    follow_lost,
)


def other_config(w: World, **changes: Any) -> object:
    w.edit_json(run(w) / "model" / "config.json", **changes)
    return generate(w)


def config_back(w: World, remedy: str) -> None:
    assert "restore the right one" in remedy
    shutil.copy(w.shared("run") / "run" / "model" / "config.json", run(w) / "model" / "config.json")
    generate(w)


STORED = (
    "run/models.py:_check_stored: the checkpoint or the run folder's model/config.json is from another model; "
    "restore the right one"
)
case(STORED, lambda w: other_config(w, num_hidden_layers=999), config_back)
case(STORED, lambda w: other_config(w, num_hidden_layers=3), config_back)
case(STORED, lambda w: other_config(w, intermediate_size=48), config_back)


# Adapters and their bases.
def lora_run(w: World) -> Path:
    return w.own("lora run") / "run"


def exported(w: World) -> Path:
    folder = w.tmp / "exported"
    if not folder.exists():
        w.cli("export", "peft", w.shared("lora run") / "run", folder)
    return folder


def another(w: World) -> Path:
    folder = w.tmp / "another"
    return folder if folder.exists() else write_tiny_model(folder, seed=9)


def named_in(remedy: str) -> str:
    return remedy.partition("trained on ")[2].partition(";")[0]


case(
    "run/models.py:open_model: give its base model and the adapter",
    lambda w: trimtab.load(str(w.shared("lora run") / "run"), adapter=str(exported(w))),
    lambda w, remedy: trimtab.load(str(w.model), adapter=str(exported(w))),
)
case(
    "run/base_weights.py:check_adapter_base: it was trained on {}; pass that model",
    lambda w: trimtab.load(str(another(w)), adapter=str(exported(w))),
    lambda w, remedy: trimtab.load(named_in(remedy), adapter=str(exported(w))),
)


def other_lora_run(w: World) -> Path:
    """A run with an adapter on another base."""
    folder = w.tmp / "other-run"
    if not folder.exists():
        w.cli("train", w.recipe(model=str(another(w)), lora={"r": 2}, output_dir=str(folder)))
    return folder


case(
    "run/models.py:load_adapter_into: it was trained on {}; load it into that model",
    lambda w: trimtab.load(str(other_lora_run(w))).add_adapter(exported(w), "second"),
    lambda w, remedy: trimtab.load(named_in(remedy)).add_adapter(exported(w), "second"),
)


def moved_base(w: World) -> object:
    """The weights under a run's adapter replaced by others."""
    base = w.own()
    w.cli("train", w.recipe(model=str(base), lora={"r": 2}, output_dir=str(w.tmp / "mine")))
    shutil.copy(another(w) / "model.safetensors", base / "model.safetensors")
    return generate(w, model=w.tmp / "mine")


def follow_base_back(w: World, remedy: str) -> None:
    shutil.copy(w.model / "model.safetensors", Path(named_in(remedy)) / "model.safetensors")
    generate(w, model=w.tmp / "mine")


case(
    "run/base_weights.py:check_base: it was trained on {}; restore those weights at that path",
    moved_base,
    follow_base_back,
)


# Tokens of adapters.
def with_token(w: World) -> Path:
    """An adapter that was trained with a token of its own."""
    folder = w.tmp / "token-run"
    if not folder.exists():
        model = {"name": str(w.model), "added_tokens": ["<|tool|>"]}
        lora = {"r": 2, "modules_to_save": ["embed_tokens"]}
        w.cli("train", w.recipe(model=model, lora=lora, output_dir=str(folder)))
        w.cli("export", "peft", folder, w.tmp / "token-adapter")
    return w.tmp / "token-adapter"


case(
    "run/adapter_tokens.py:check_known: load it together with the model: trimtab.load(…, adapter=…)",
    lambda w: trimtab.load(str(w.model)).add_adapter(with_token(w), "second"),
    lambda w, remedy: trimtab.load(str(w.model), adapter=str(with_token(w))),
)


def further(w: World, *overrides: str, **model: Any) -> str:
    return w.train(*overrides, model={"name": str(w.model), **model}, lora={"adapter": str(with_token(w))})


case(
    "run/adapter_tokens.py:check_same_tokens: set model.added_tokens: [{}]",
    further,
    lambda w, remedy: further(w, *settings(remedy)[0]),
)


def many_tokens(w: World, **model: Any) -> str:
    """An adapter whose tokenizer is another altogether."""
    folder, roomy = w.tmp / "many", w.tmp / "roomy"
    if not folder.exists():
        write_tiny_model(roomy, vocab_size=500)
        shutil.copytree(roomy, folder)
        with_tokens(load_tokenizer(w.model), [f"<|{i}|>" for i in range(101)]).save(folder)
        lora = {"r": 2, "modules_to_save": ["embed_tokens"]}
        larger = {"name": str(roomy), "tokenizer": str(folder)}
        w.cli("train", w.recipe(model=larger, lora=lora, output_dir=str(w.tmp / "many-run"), max_steps=1))
        w.cli("export", "peft", w.tmp / "many-run", w.tmp / "many-adapter")
    return w.train(model={"name": str(roomy), **model}, lora={"adapter": str(w.tmp / "many-adapter")})


case(
    "run/adapter_tokens.py:check_same_tokens: set model.tokenizer to the tokenizer that it was trained with",
    many_tokens,
    lambda w, remedy: many_tokens(w, tokenizer=str(w.tmp / "many")),
)


def added_without_embedding(w: World, *, tokens: bool) -> str:
    folder = w.tmp / "plain-adapter"
    if not folder.exists():
        shutil.copytree(w.shared("adapter"), folder)
    model = {"name": str(w.model), **({"added_tokens": ["<|x|>"]} if tokens else {})}
    return w.plan(model=model, lora={"adapter": str(folder)})


case(
    "run/resolve.py:_lora: leave the tokens out, or train a fresh adapter with embed_tokens in lora.modules_to_save",
    lambda w: added_without_embedding(w, tokens=True),
    lambda w, remedy: (
        added_without_embedding(w, tokens=False),
        w.plan(
            model={"name": str(w.model), "added_tokens": ["<|x|>"]},
            lora={"r": 2, "modules_to_save": ["embed_tokens"]},
        ),
    ),
)


# Measuring.
case(
    "run/evaluation.py:evaluate_model: give at most {}",
    lambda w: w.cli("eval", w.model, w.shared("run") / "domain.jsonl", "--no-probe", "--max-seq-length", 999),
    lambda w, remedy: w.cli(
        "eval",
        w.model,
        w.shared("run") / "domain.jsonl",
        "--no-probe",
        "--max-seq-length",
        remedy.split()[-1],
    ),
)
case(
    "run/prepare.py:check_embedding_learning_rate: add embed_tokens or lm_head to lora.modules_to_save, or leave "
    "embedding_learning_rate out",
    lambda w: w.plan("embedding_learning_rate=1e-5", lora={"r": 2}),
    lambda w, remedy: (
        w.plan("embedding_learning_rate=1e-5", lora={"r": 2, "modules_to_save": ["embed_tokens"]}),
        w.plan(
            "embedding_learning_rate=1e-5",
            lora={"r": 2, "modules_to_save": ["lm_head"]},
            model=str(w.shared("untied")),
        ),
        w.plan(lora={"r": 2}),
    ),
)


# Folders.
case(
    "run/folder.py:RunFolder.check_new: resume it with {}, or give another {}",
    lambda w: w.cli("train", w.recipe(output_dir=str(run(w)))),
    lambda w, remedy: (
        w.cli(*re.findall("`trimtab (.*?)`", remedy)[0].split(), "max_steps=5"),
        w.cli("train", w.recipe(output_dir=str(w.tmp / "another"))),
    ),
)


def into(w: World, name: str) -> str:
    (w.tmp / "file").write_text("x")
    (w.tmp / "full").mkdir(exist_ok=True)
    (w.tmp / "full" / "letter.txt").write_text("x")
    return w.cli("train", w.recipe(output_dir=str(w.tmp / name)))


ELSEWHERE = "run/folder.py:RunFolder.check_new: give another {}"
case(ELSEWHERE, lambda w: into(w, "file"), lambda w, remedy: into(w, "another"))
case(ELSEWHERE, lambda w: into(w, "full"), lambda w, remedy: into(w, "another"))
PRINTED = "run/folder.py:RunFolder.open: give the run folder that training printed"


def printed(w: World, remedy: str) -> None:
    said = w.cli("train", w.recipe(output_dir=str(w.tmp / "mine"), lr_scheduler_type="constant"))
    folder = re.findall(r"--resume\s+(\S+)|run folder:?\s+(\S+)|(\S*mine)", said)
    assert any("mine" in part for found in folder for part in found), said
    w.cli("train", "--resume", w.tmp / "mine", "max_steps=3")


case(PRINTED, lambda w: w.cli("train", "--resume", w.tmp / "absent"), printed)
case(PRINTED, lambda w: w.cli("train", "--resume", w.model), printed)


def damaged_choices(content: str | None = None, **changes: Any) -> Any:
    def provoke(w: World) -> object:
        path = run(w) / "choices.json"
        if content is not None:
            path.write_text(content)
        else:
            w.edit_json(path, **changes)
        return w.cli("train", "--resume", run(w), "max_steps=5")

    return provoke


def choices_back(w: World, remedy: str) -> None:
    (command,) = re.findall("`trimtab (.*?)`", remedy)
    w.cli(*shlex.split(command))
    shutil.copy(w.shared("run") / "run" / "choices.json", run(w) / "choices.json")
    w.cli("train", "--resume", run(w), "max_steps=5")


AGAIN = "restore the file from a copy, or train the recipe again: {}"
case(f"run/folder.py:read_json: {AGAIN}", damaged_choices("{"), choices_back)
case(f"run/folder.py:read_json: {AGAIN}", damaged_choices("[]"), choices_back)


def other_model(w: World) -> object:
    """A run that stopped before its first checkpoint, and another model where its own was."""
    base = w.own()
    w.cli("train", w.recipe(model=str(base), output_dir=str(w.tmp / "mine")))
    shutil.rmtree(w.tmp / "mine" / "checkpoints")
    (w.tmp / "mine" / "metrics.jsonl").unlink()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(w.shared("wide") / file, base / file)
    return w.cli("train", "--resume", w.tmp / "mine")


def follow_model_back(w: World, remedy: str) -> None:
    w.train(model=str(w.own()), max_steps=1)  # a new run
    w.again()
    w.cli("train", "--resume", w.tmp / "mine")


case(
    "run/initial_weights.py:_resolve_path: restore that model there, or start a new run",
    other_model,
    follow_model_back,
)


def replayed(w: World, *overrides: str) -> str:
    (w.tmp / "general-text").mkdir(exist_ok=True)
    (w.tmp / "general-text" / "a.txt").write_text("the cat sees a dog. " * 30)
    return w.train(*overrides, data_replay={"share": 0.2, "sources": ["starter:replay"]}, max_steps=1)


case(
    "run/prepare.py:replay_error: set data.replay=null to train without replay, or name general text of your own: "
    "data.replay.sources=[./general-text]",
    replayed,
    lambda w, remedy: [replayed(w, words) for words in re.findall(r"data\.replay\S*=\S+", remedy)],
)
