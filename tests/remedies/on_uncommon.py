"""Errors that take a file which changes meanwhile, a damaged folder, or a call from Python to meet."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import World, case, in_turn, settings
from on_cli import overflowing
from on_data import GOOD, opened, written
from on_data_loading import MORE, packed
from on_run import A_CPU
from on_text import CHAT, TALK
from safetensors import safe_open
from safetensors.torch import save_file
from shared import decoder_of
from tiny_setup import TinyLoader, TinySGD, tiny_setup

import trimtab
from trimtab import text
from trimtab.adapt import spec_quantized
from trimtab.checkpoint import manifest as manifests
from trimtab.cli.commands import _resource_error
from trimtab.data import make_loader, open_corpus
from trimtab.data.batch import Batch, collate
from trimtab.data.packing import Piece
from trimtab.model import read_shape
from trimtab.parallel import Mesh
from trimtab.recipe import loads
from trimtab.run.build import build_in_backward_optimizer, build_optimizer
from trimtab.run.microbatch import MicrobatchLoss
from trimtab.run.resolve import resolve_backends
from trimtab.text.chat import Limits, render_chats
from trimtab.trainer import TrainState, train
from trimtab.trainer.microstep import MicroStep


# Names.
def report(w: World, name: str) -> str:
    """`trimtab report` as the program runs it: what the file system refuses becomes an error of trimtab's."""
    try:
        if not (w.tmp / name).exists():
            shutil.copytree(w.shared("run") / "run", w.tmp / name)
        return w.cli("report", w.tmp / name)
    except OSError as error:
        told = _resource_error(error)
        assert told is not None
        raise told from error


case(
    "cli/commands.py:_resource_error: give a shorter name",
    lambda w: report(w, "a" * 300),
    lambda w, remedy: report(w, "a" * 100),
)


# Checkpoints of several processes.
def halves(path: Path) -> None:
    """A checkpoint's file as two processes write it: each tensor's rows cut in two, with their offsets."""
    parts: list[dict[str, torch.Tensor]] = [{}, {}]
    offsets: list[dict[str, Any]] = [{}, {}]
    with safe_open(path, "pt") as opened_file:
        metadata = opened_file.metadata()
        for key in opened_file.keys():  # noqa: SIM118  (safe_open is no dict)
            tensor = opened_file.get_tensor(key)
            for rank, part in enumerate(tensor.chunk(2) if tensor.dim() else [tensor]):
                first = 0 if rank == 0 else len(tensor) - len(part)
                parts[rank][key] = part.clone()
                offsets[rank][key] = {"saved_offsets": [first, *[0] * (tensor.dim() - 1)][: tensor.dim()]}
    for rank in (0, 1):
        name = path.name.replace("shard-00001", f"shard-{rank + 1:05d}")
        header = {**metadata, "DCP_SHARDING_INFO": json.dumps(offsets[rank])}
        save_file(parts[rank], path.with_name(name), metadata=header)


def of_two_processes(w: World) -> Path:
    run = w.own("run") / "run"
    for folder in (run / "checkpoints").glob("step-*"):
        before = manifests.read_manifest(folder)
        (shard,) = folder.glob("*.safetensors")
        halves(shard)
        files = manifests.digests([*folder.glob("*.safetensors"), folder / manifests.STATE])
        after = dataclasses.replace(before, files=files)
        (folder / manifests.NAME).write_text(manifests.to_text(after))
    return run


def follow_export(w: World, remedy: str) -> None:
    (command,) = re.findall("`trimtab (.*?)`", remedy)
    w.cli(*command.split(), w.own("run") / "run", w.tmp / "exported")
    w.train(model=str(w.tmp / "exported"), max_steps=1)
    w.cli(*command.split(), w.shared("run") / "run", w.tmp / "of-one-process")
    joined, whole = (w.tmp / name / "model.safetensors" for name in ("exported", "of-one-process"))
    assert joined.read_bytes() == whole.read_bytes()


case(
    "model/weights_safetensors.py:_checkpoint_files: export it (`trimtab export hf`) and name that folder",
    lambda w: w.train(model=str(of_two_processes(w)), max_steps=1),
    follow_export,
)


# Numbers that are not finite.
def follow_finite(w: World, remedy: str) -> None:
    trimtab.load(str(overflowing(w)), dtype=remedy.split()[-1]).loss("the cat sees a dog")
    run = w.shared("run") / "run"
    step = min(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    trimtab.load(str(run), checkpoint=step).loss("the cat sees a dog")


case(
    "evaluate/likelihood.py:mean_losses: weights are not finite, or overflow in this dtype: try an earlier checkpoint "
    "or fp32",
    lambda w: trimtab.load(str(overflowing(w)), dtype="fp16").loss("the cat sees a dog"),
    follow_finite,
)


# Calls from Python.
case(
    "adapt/spec_quantized.py:_known: choose {}",
    lambda w: spec_quantized.packed_bytes((64, 64), "int4"),
    lambda w, remedy: in_turn(
        lambda kind: spec_quantized.weight_bytes(read_shape(w.model), kind, "bf16"),
        remedy.removeprefix("choose ").split(" or "),
    ),
)


def updates(w: World, in_backward: str) -> object:
    """What updates parameters inside the backward pass of the first of two processes."""
    asked = (in_backward, "max_grad_norm=0", "gradient_accumulation_steps=1")
    recipe = loads("model: m\ndata: {train: x}\nmax_seq_length: 64\n", asked)
    resolved = resolve_backends(recipe, read_shape(w.model), A_CPU, threads=1)
    parameters = dict(decoder_of(w.model).named_parameters())
    optimizer = build_optimizer(recipe, resolved, parameters)
    return build_in_backward_optimizer(recipe, resolved, optimizer, Mesh(rank=0, size=2))


case(
    "run/build.py:build_in_backward_optimizer: set optim_in_backward: false",
    lambda w: updates(w, "optim_in_backward=true"),
    lambda w, remedy: updates(w, *settings(remedy)[0]),
)


class GivenBatches:
    """A loader that gives the same microbatch in each step."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def next_step(self) -> list[Batch]:
        return [self.batch]

    def position(self) -> dict[str, Any]:
        return {}


def trained(w: World, *documents: tuple[list[int], list[int] | None]) -> object:
    """Two steps over one sequence of these documents: (ids, which of them are trained on)."""
    pieces = [
        Piece(np.array(ids), f"a.jsonl:{row}", None if mask is None else np.array(mask))
        for row, (ids, mask) in enumerate(documents, 1)
    ]
    decoder = decoder_of(w.model)
    setup = tiny_setup(TinyLoader(), total_steps=2)
    setup.model, setup.parameters = decoder, dict(decoder.named_parameters())
    setup.optimizer = TinySGD(setup.parameters)
    loss = MicrobatchLoss(decoder, setup.device, contextlib.nullcontext, packing=True)
    setup.microstep, setup.loader = MicroStep(loss), GivenBatches(collate([pieces], 8))
    return train(setup, TrainState())


NO_TARGETS = (
    "trainer/loop.py:_Loop.step: check that labels are not all masked and documents have at least two tokens"
)
case(
    NO_TARGETS,
    lambda w: trained(w, ([5, 6, 7], [0, 0, 0])),
    lambda w, remedy: trained(w, ([5, 6, 7], [0, 0, 1])),
)
case(
    NO_TARGETS,
    lambda w: trained(w, ([5], None), ([6], None)),
    lambda w, remedy: trained(w, ([5, 6], None), ([6, 7], None)),
)


def without_documents(w: World) -> object:
    """A loader over a view of a corpus that leaves no document."""
    corpus = opened(w, written(w, "a.jsonl", GOOD))
    nothing = corpus._view(np.zeros(corpus.num_documents, bool), "nothing")
    return make_loader([nothing], max_seq_length=32, batch_size=1)


case(
    "data/selection.py:no_sequences_error: use a source that contains text",
    without_documents,
    lambda w, remedy: packed(w, GOOD, 32),
)


# Templates and tokenizers.
GROWING = (
    "{% set kept = namespace(text='x' * 100000) %}{% for i in range(60) %}{% set kept.text = kept.text ~ kept.text %}"
    "{% endfor %}"
)
case(
    "text/chat_worker.py:describe_error: use another template",
    lambda w: render_chats(GROWING, [TALK], {}, limits=Limits(memory_bytes=1 << 28)),
    lambda w, remedy: render_chats(CHAT, [TALK], {}, limits=Limits(memory_bytes=1 << 28)),
)


def repeating(w: World) -> object:
    """A post-processor that writes a text twice, with a token between."""
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    token = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [sequence, token, sequence],
        "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}},
    }
    w.edit_json(w.own() / "tokenizer.json", post_processor=template)
    return text.load(w.own()).encode_document("the cat")


def follow_affixes(w: World, remedy: str) -> None:
    (file,) = re.findall(r"in (\S+\.json)", remedy)
    for value in (False, True):
        w.edit_json(w.own() / file, **dict.fromkeys(re.findall(r"add_\w+", remedy), value))
        ids = text.load(w.own()).encode_document("the cat")
        assert ids == text.load(w.model).encode_document("the cat")


case(
    "text/tokenizer.py:Tokenizer._affixes: set add_bos_token and add_eos_token in tokenizer_config.json, which replace "
    "it",
    repeating,
    follow_affixes,
)


# Files that change, or go, while they are read.
def read_while_written(w: World, *, complete: bool) -> object:
    path = written(w, "growing.jsonl", GOOD)

    def more(_: object) -> None:
        if not complete:
            with path.open("a") as file:
                file.write(json.dumps(MORE[0]) + "\n")

    return open_corpus(
        str(path), text.load(w.model), cache_dir=w.tmp / "growing-cache", num_proc=1, progress=more
    )


case(
    "data/fingerprints.py:check_unchanged: run again when it is complete",
    lambda w: read_while_written(w, complete=False),
    lambda w, remedy: read_while_written(w, complete=True),
)


def streamed(w: World, *, there: bool) -> object:
    """The first step of a stream whose file is, or is not, there any more once the source was opened."""
    path = written(w, "streamed.jsonl", MORE)
    loader = make_loader([opened(w, path, streaming=True)], max_seq_length=32, batch_size=1)
    with contextlib.closing(loader):
        if not there:
            path.rename(w.tmp / "elsewhere.jsonl")
        return loader.next_step()


case(
    "data/readers_text.py:unreadable: restore it or check its permissions",
    lambda w: streamed(w, there=False),
    lambda w, remedy: streamed(w, there=True),
)
