"""Exports, checkpoints and the locks of run folders."""

from __future__ import annotations

from pathlib import Path

import torch
from cases import World, case
from shared import adapted_of, decoder_of

import trimtab
from trimtab import text
from trimtab.adapt import active_adapters, save_adapter
from trimtab.checkpoint import RunLock, Store, layout
from trimtab.checkpoint.lock import FileLock
from trimtab.export import export_hf, export_merged, export_peft
from trimtab.facts.base_weights import BaseWeights
from trimtab.text.added import with_tokens


def grown(w: World) -> text.Tokenizer:
    return with_tokens(text.load(w.model), ["<|tool|>"])


case(
    "export/hf.py:_check_tokenizer_fits: export the model with its own tokenizer",
    lambda w: export_hf(decoder_of(w.model), grown(w), w.tmp / "out", dtype="fp32"),
    lambda w, remedy: export_hf(decoder_of(w.model), text.load(w.model), w.tmp / "out", dtype="fp32"),
)


def adapter_run(w: World) -> Path:
    return w.shared("lora run") / "run"


def dtype_in(remedy: str) -> str:
    return remedy.partition('dtype="')[2].partition('"')[0]


case(
    'export/merged.py:export_merged: load it with dtype="fp32", or use `trimtab merge`',
    lambda w: trimtab.load(str(adapter_run(w)), dtype="bf16").merge(w.tmp / "merged"),
    lambda w, remedy: (
        trimtab.load(str(adapter_run(w)), dtype=dtype_in(remedy)).merge(w.tmp / "merged"),
        w.cli("merge", adapter_run(w), w.tmp / "merged-too"),
    ),
)


def whole(w: World, dtype: str) -> object:
    """An adapter that replaces a module, saved from a model in `dtype`."""
    folder = w.tmp / "whole"
    if not folder.exists():
        decoder = adapted_of(w.model, modules_to_save=("norm",))
        with torch.no_grad():
            decoder.model.norm.weight.add_(1e-4)
        export_peft(decoder, folder, base=BaseWeights(str(w.model)))
    model = trimtab.load(str(w.model), adapter=str(folder), dtype=dtype)
    return model.save_adapter(w.tmp / "again")


def follow_whole(w: World, remedy: str) -> None:
    assert "trimtab export peft" in remedy
    whole(w, dtype_in(remedy))
    w.cli("export", "peft", adapter_run(w), w.tmp / "exported")


case(
    'export/peft.py:export_peft: load the model with dtype="fp32" to write it as it was trained, or use `trimtab '
    "export peft`",
    lambda w: whole(w, "bf16"),
    follow_whole,
)


def overflowing(w: World, size: float) -> object:
    decoder = adapted_of(w.model)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "lora_B" in name:
                parameter.fill_(size)
    return export_peft(decoder, w.tmp / "adapter", base=BaseWeights(str(w.model)))


def follow_earlier(w: World, remedy: str) -> None:
    assert "--checkpoint" in remedy
    assert "learning_rate" in remedy
    step = sorted((adapter_run(w) / "checkpoints").glob("step-*"))[0].name.removeprefix("step-")
    w.cli("export", "peft", adapter_run(w), w.tmp / "earlier", "--checkpoint", int(step))
    w.train("learning_rate=1e-4", lora={"r": 2})


case(
    "export/peft.py:_check_logits: export an earlier checkpoint (--checkpoint), or train again with a lower "
    "learning_rate",
    lambda w: overflowing(w, 1e38),
    follow_earlier,
)


def merged(w: World, factor: float) -> object:
    """A merge of an adapter whose changes are so many times as large as those of a sound one."""
    decoder = adapted_of(w.model)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "lora_B" in name:
                parameter.mul_(factor)
    w.kept["adapter"] = w.tmp / "large"
    w.kept["adapter"].mkdir()
    w.kept["decoder"] = decoder
    save_adapter(decoder, w.kept["adapter"], base_name=str(w.model))
    return export_merged(decoder, text.load(w.model), w.tmp / "merged", dtype="fp32")


def follow_earlier_merge(w: World, remedy: str) -> None:
    assert not (w.tmp / "merged").exists()
    assert "--checkpoint" in remedy
    step = sorted((adapter_run(w) / "checkpoints").glob("step-*"))[0].name.removeprefix("step-")
    w.cli("merge", adapter_run(w), w.tmp / "earlier", "--checkpoint", int(step))
    if "learning_rate" in remedy:
        assert active_adapters(w.kept["decoder"]), "a model that gives NaN is not merged"
        w.train("learning_rate=1e-4", lora={"r": 2})


def follow_unmerged(w: World, remedy: str) -> None:
    """The adapter that cannot be merged is generated with, and written by the command that is named."""
    follow_earlier_merge(w, remedy)
    assert "`trimtab export peft`" in remedy
    trimtab.load(str(w.model), adapter=str(w.kept["adapter"])).save_adapter(w.tmp / "unmerged")
    w.cli("generate", w.model, "the cat", "--adapter", w.tmp / "unmerged", "--max-new-tokens", 2)
    w.cli("export", "peft", adapter_run(w), w.tmp / "exported")


case(
    "export/merged.py:export_merged: nothing was written; merge an earlier checkpoint (--checkpoint), or train again "
    "with a lower learning_rate",
    lambda w: merged(w, 1e20),
    follow_earlier_merge,
)
case(
    "export/merged.py:export_merged: nothing was written; use the adapter unmerged (`trimtab export peft` writes a "
    "run's), or merge an earlier checkpoint (--checkpoint)",
    lambda w: merged(w, 100.0),
    follow_unmerged,
)


# Checkpoints.


def state(size: int = 3) -> dict[str, torch.Tensor]:
    return {"weight": torch.ones(size)}


def saved(folder: Path) -> None:
    with Store(folder, on_event=lambda _: None) as store:
        store.save(1, state(), {})


def loaded(folder: Path, size: int) -> None:
    with Store(folder, on_event=lambda _: None) as store:
        found = store.latest()
        assert found is not None
        store.load(found, state(size))


case(
    "checkpoint/store.py:_compare: resume with the recipe that wrote it, or set another output_dir",
    lambda w: (saved(w.tmp / "c"), loaded(w.tmp / "c", 4)),
    lambda w, remedy: (loaded(w.tmp / "c", 3), saved(w.tmp / "another")),
)


def blocked(w: World) -> None:
    (w.tmp / "file").write_text("x")
    saved(w.tmp / "file" / "checkpoints")


case(
    "checkpoint/store.py:_explain: check that the folder exists and can be written; the earlier checkpoints were not "
    "touched",
    blocked,
    lambda w, remedy: (
        (w.tmp / "file").unlink(),
        (w.tmp / "file").mkdir(),
        saved(w.tmp / "file" / "checkpoints"),
    ),
)


def written_by_another(w: World) -> None:
    folder = w.tmp / "checkpoints"
    folder.mkdir()
    w.kept["lock"] = FileLock(folder / layout.WRITER_LOCK)
    assert w.kept["lock"].try_acquire()
    saved(folder)


def follow_one_at_a_time(w: World, remedy: str) -> None:
    w.kept["lock"].release()
    saved(w.tmp / "checkpoints")


case(
    "checkpoint/store.py:Store._begin: let one run at a time use the folder",
    written_by_another,
    follow_one_at_a_time,
)


def in_use(w: World) -> None:
    w.kept["lock"] = RunLock(w.tmp / "run")
    w.kept["lock"].acquire()
    RunLock(w.tmp / "run").acquire()


def follow_in_use(w: World, remedy: str) -> None:
    with RunLock(w.tmp / "another"):
        pass
    w.kept["lock"].release()  # it ended, or was stopped
    with RunLock(w.tmp / "run"):
        pass


def resumed_in_use(w: World) -> None:
    w.kept["lock"] = RunLock(w.tmp / "run")
    w.kept["lock"].acquire()
    RunLock(w.tmp / "run", folder_key=None).acquire()


def follow_released(w: World, remedy: str) -> None:
    w.kept["lock"].release()  # it ended, or was stopped
    with RunLock(w.tmp / "run", folder_key=None):
        pass


case(
    "checkpoint/lock.py:RunLock._in_use: wait for it to end, stop it, or give another {}",
    in_use,
    follow_in_use,
)
case(
    "checkpoint/lock.py:RunLock._in_use: wait for it to end, or stop it",
    resumed_in_use,
    follow_released,
)
case(
    "checkpoint/lock.py:RunLock._unwritable: give another {}, in a folder that can be written",
    lambda w: ((w.tmp / "file").write_text("x"), RunLock(w.tmp / "file" / "run").acquire()),
    lambda w, remedy: RunLock(w.tmp / "run").acquire(),
)
