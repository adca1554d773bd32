"""Adapters and quantized layers: `lora` in a recipe, files of peft's, and the functions of trimtab.adapt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import World, case, in_turn, listed
from safetensors.torch import load_file, save_file
from shared import adapted_of, decoder_of

from trimtab.adapt import (
    LoraSettings,
    add_adapters,
    create_dropout_masks,
    init_adapters,
    load_adapter,
    merge_adapters,
    save_adapter,
    use_adapters,
)
from trimtab.adapt.lora import check_finite
from trimtab.adapt.peft_files import settings_of

IDS_BT = torch.arange(16).reshape(1, 16)
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def named(w: World, name: str) -> object:
    return add_adapters(adapted_of(w.model, "first"), LoraSettings(r=2), adapter=name)


def two(w: World, **settings: Any) -> Any:
    """A model with the adapters `first` and `second`."""
    decoder = adapted_of(w.model, "first", **settings)
    add_adapters(decoder, LoraSettings(**{"r": 2, **settings}), adapter="second")
    init_adapters(decoder, 0, adapter="second")
    return decoder


case(
    "adapt/lora.py:attach_adapters: use letters, digits, - and _",
    lambda w: named(w, "a b"),
    lambda w, remedy: named(w, "French-2_x"),
)
case(
    "adapt/lora.py:attach_adapters: give it another name",
    lambda w: named(w, "keys"),
    lambda w, remedy: named(w, "keys2"),
)
case(
    "adapt/lora.py:attach_adapters: give this one another name",
    lambda w: named(w, "first"),
    lambda w, remedy: named(w, "another"),
)
case(
    "adapt/lora.py:use_adapters: name each one once",
    lambda w: use_adapters(two(w), ["first", "second", "first"]),
    lambda w, remedy: use_adapters(two(w), ["first", "second"]),
)
case(
    "adapt/lora.py:use_adapters: use one at a time",
    lambda w: use_adapters(two(w, use_dora=True), ["first", "second"]),
    lambda w, remedy: in_turn(lambda name: use_adapters(two(w, use_dora=True), [name]), ["first", "second"]),
)
case(
    "adapt/lora.py:_check_adapter: it has {}",
    lambda w: use_adapters(two(w), "third"),
    lambda w, remedy: in_turn(lambda name: use_adapters(two(w), name), listed(remedy, "it has")),
)


def poisoned(decoder: Any) -> Any:
    with torch.no_grad():
        next(p for n, p in decoder.named_parameters() if "lora_B" in n)[0, 0] = float("nan")
    return decoder


def saved(decoder: Any, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    save_adapter(decoder, folder, base_name="some/base")
    return folder


case(
    "adapt/lora.py:check_finite: use an earlier checkpoint",
    lambda w: check_finite(poisoned(adapted_of(w.model))),
    lambda w, remedy: check_finite(adapted_of(w.model)),
)
case(
    "adapt/peft_files.py:save_adapter: the training diverged; use an earlier checkpoint",
    lambda w: saved(poisoned(adapted_of(w.model)), w.tmp / "a"),
    lambda w, remedy: saved(adapted_of(w.model), w.tmp / "a"),
)


def head_dropout(w: World, *, evaluated: bool = False, **settings: Any) -> Any:
    """An adapter on the head, loaded to be used, trained a step or evaluated."""
    folder = w.own("head adapter")
    w.edit_json(folder / CONFIG, **{"lora_dropout": 0.1, **settings})
    decoder = decoder_of(w.shared("untied"))
    load_adapter(decoder, folder)
    masks = create_dropout_masks(decoder, torch.device("cpu"))
    if masks is not None:
        masks.set(0, 0, 0, 4)
    decoder.train(not evaluated)
    return decoder.loss(IDS_BT, IDS_BT)


def follow_head_dropout(w: World, remedy: str) -> None:
    assert "decoder.eval()" in remedy
    assert "lora_dropout=0" in remedy
    head_dropout(w, evaluated=True)
    head_dropout(w, lora_dropout=0)


case(
    "adapt/lora_layers.py:LoRALinear.effective_weight: call decoder.eval() to use it; to train it, create it with "
    "lora_dropout=0",
    head_dropout,
    follow_head_dropout,
)


def dropping(w: World) -> Any:
    return adapted_of(w.model, lora_dropout=0.1).train()


def follow_masks(w: World, remedy: str) -> None:
    decoder = dropping(w)
    first, then = remedy.removesuffix(" before each microbatch").split(", then ")
    names: dict[str, Any] = {"decoder": decoder, "device": torch.device("cpu"), "seed": 0, "step": 0}
    import trimtab.adapt

    names |= {"trimtab": trimtab, "first_sequence": 0, "tokens": IDS_BT.shape[1]}
    exec(f"{first}\n{then}", names)
    decoder.loss(IDS_BT, IDS_BT).backward()


case(
    "adapt/lora_products.py:add_lora: masks = trimtab.adapt.create_dropout_masks(decoder, device), then "
    "masks.set(seed, step, first_sequence, tokens) before each microbatch",
    lambda w: dropping(w).loss(IDS_BT, IDS_BT),
    follow_masks,
)
case(
    "adapt/merging.py:merge_adapters: give a run trained with `lora`, or an adapter",
    lambda w: w.cli("merge", w.shared("run") / "run", w.tmp / "merged"),
    lambda w, remedy: (
        w.cli("merge", w.shared("lora run") / "run", w.tmp / "merged"),
        merge_adapters(adapted_of(w.model), dtype="bf16"),
    ),
)


def merged(w: World, size: float, dtype: str) -> object:
    decoder = adapted_of(w.model)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "lora_B" in name:
                parameter.mul_(size)
            elif name.endswith("_proj.weight"):
                parameter.fill_(1.0)  # a small change is then below the last digit of every weight
    return merge_adapters(decoder, dtype=dtype)


def dtype_in(remedy: str) -> str:
    return remedy.partition("--dtype ")[2].split()[0]


case(
    "adapt/merging.py:merge_adapters: nothing was written; use an earlier checkpoint, or --dtype fp32",
    lambda w: merged(w, 1e6, "fp16"),
    lambda w, remedy: (merged(w, 1.0, "fp16"), merged(w, 1e6, dtype_in(remedy))),
)
case(
    "adapt/merging.py:merge_adapters: nothing was written; train it further",
    lambda w: merged(w, 0, "fp32"),
    lambda w, remedy: merged(w, 1.0, "fp32"),
)
case(
    "adapt/merging.py:merge_adapters: nothing was written; train it further, or give --dtype fp32",
    lambda w: merged(w, 1e-5, "bf16"),
    lambda w, remedy: (merged(w, 1.0, "bf16"), merged(w, 1e-5, dtype_in(remedy))),
)


# Files of adapters: damaged, then as they were, or with what the remedy asks for.


def load(w: World, model: Path | None = None) -> None:
    load_adapter(decoder_of(model or w.model), w.own("adapter"))


def damaged(change: Callable[[World, Path], object]) -> Callable[[World], None]:
    def provoke(w: World) -> None:
        change(w, w.own("adapter"))
        load(w)

    return provoke


def config(**changes: Any) -> Callable[[World, Path], object]:
    return lambda w, folder: w.edit_json(folder / CONFIG, **changes)


def tensors(
    change: Callable[[dict[str, torch.Tensor]], object], **metadata: str
) -> Callable[[World, Path], None]:
    def damage(w: World, folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS, metadata=metadata or None)

    return damage


def fetched_again(w: World, remedy: str) -> None:
    w.again("adapter")
    load(w)


A = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"

case(
    "adapt/peft_config.py:read_adapter_folder: give the folder of a LoRA adapter",
    damaged(
        tensors(
            lambda found: (
                [found.pop(key) for key in list(found) if "lora_" in key] and found.update(x=torch.ones(1))
            )
        )
    ),
    fetched_again,
)
case(
    "adapt/peft_config.py:fit_to_model: the two files do not belong together; download the adapter again",
    damaged(config(r=3)),
    fetched_again,
)
case(
    "adapt/peft_config.py:_check_complete: download the adapter again",
    damaged(tensors(lambda found: [found.pop(A), found.pop(A.replace("lora_A", "lora_B"))])),
    fetched_again,
)
case(
    "adapt/peft_config.py:other_base_error: load it with its own base model",
    lambda w: load(w, w.shared("wide")),
    lambda w, remedy: load(w),
)


def embedding_adapter(w: World) -> Path:
    """As peft writes one for a model whose embedding is its head."""
    folder = w.own("adapter")
    tensors(lambda found: found.update({
        "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 300),
        "base_model.model.model.embed_tokens.lora_embedding_B": torch.ones(32, 2),
    }))(w, folder)  # fmt: skip
    return folder


def follow_own_base_or_anew(w: World, remedy: str) -> None:
    assert remedy.startswith("load it with its own base model")
    load(w, w.shared("untied"))
    w.plan(
        f"lora.modules_to_save={remedy.partition('lora.modules_to_save: ')[2].split(']')[0]}]", lora={"r": 2}
    )


case(
    "adapt/peft_config.py:fit_to_model: load it with its own base model; if this is its base model, train it again: {}",
    lambda w: (embedding_adapter(w), load(w)),
    follow_own_base_or_anew,
)


def apart(w: World) -> None:
    """An embedding that peft trained apart from the head it is tied to."""
    embedding = {"base_model.model.model.embed_tokens.weight": torch.ones(300, 32)}
    tensors(lambda found: found.update(embedding))(w, w.own("adapter"))
    load(w)


def follow_trained_with_trimtab(w: World, remedy: str) -> None:
    decoder = adapted_of(w.model, modules_to_save=("embed_tokens",))
    load_adapter(decoder_of(w.model), saved(decoder, w.tmp / "trained-here"))
    _trained_by_peft(w)


def _trained_by_peft(w: World) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(w.model)
    config = LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True
    )
    get_peft_model(model, config).save_pretrained(w.tmp / "peft")
    load_adapter(decoder_of(w.model), w.tmp / "peft")


case(
    "adapt/peft_config.py:tied_embedding_error: train it again with peft's ensure_weight_tying=True, or with trimtab",
    apart,
    follow_trained_with_trimtab,
)
case(
    "adapt/peft_files.py:settings_of: train one, or load one",
    lambda w: settings_of(decoder_of(w.model)),
    lambda w, remedy: settings_of(adapted_of(w.model)),
)
case(
    "adapt/peft_files.py:copy_adapter_tensors: download the adapter again",
    damaged(tensors(lambda found: found.pop(A.replace("lora_A", "lora_B")))),
    fetched_again,
)
case(
    "adapt/peft_reading.py:read_config: give a folder that peft or `trimtab export peft` wrote",
    lambda w: load_adapter(decoder_of(w.model), w.model),
    lambda w, remedy: (
        load(w),
        w.cli("export", "peft", w.shared("lora run") / "run", w.tmp / "exported"),
        load_adapter(decoder_of(w.model), w.tmp / "exported"),
    ),
)
case(
    "adapt/peft_reading.py:read_config: download the adapter again",
    damaged(lambda w, folder: (folder / CONFIG).write_text("{")),
    fetched_again,
)
case(
    "adapt/peft_reading.py:read_config: it must be {}",
    damaged(config(lora_dropout=2)),
    lambda w, remedy: (
        config(lora_dropout=float(remedy.split(" from ")[1].split()[0]))(w, w.own("adapter")),
        load(w),
    ),
)


def follow_merged_with_peft(w: World, remedy: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    w.again("adapter")
    model = AutoModelForCausalLM.from_pretrained(w.model)
    PeftModel.from_pretrained(model, w.own("adapter")).merge_and_unload().save_pretrained(w.tmp / "merged")
    decoder_of(w.tmp / "merged")


MERGE = "merge it with peft first"
case(f"adapt/peft_reading.py:_check_meaning: {MERGE}", damaged(config(bias="all")), follow_merged_with_peft)
case(
    f"adapt/peft_reading.py:_check_meaning: {MERGE}", damaged(config(use_other=True)), follow_merged_with_peft
)


def follow_converted_with_peft(w: World, remedy: str) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(w.model)
    moved = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa"))
    initial = w.tmp / "initial"
    moved.peft_config["default"].init_lora_weights = True
    moved.save_pretrained(initial)
    moved.peft_config["default"].init_lora_weights = "pissa"
    option = remedy.partition("save_pretrained(")[2].partition("=")[0]
    moved.save_pretrained(w.tmp / "converted", **{option: str(initial)})
    load_adapter(decoder_of(w.model), w.tmp / "converted")


case(
    "adapt/peft_reading.py:_check_meaning: convert it with peft "
    "(save_pretrained(path_initial_model_for_weight_conversion=…)), or merge it there",
    damaged(config(init_lora_weights="pissa_niter_4")),
    follow_converted_with_peft,
)
case(
    "adapt/peft_reading.py:read_header: complete the download",
    damaged(lambda w, folder: (folder / WEIGHTS).unlink()),
    fetched_again,
)
case(
    "adapt/peft_reading.py:read_header: download the adapter again",
    damaged(lambda w, folder: (folder / WEIGHTS).write_bytes(b"\x10\0\0\0\0\0\0\0{")),
    fetched_again,
)
case(
    "adapt/peft_reading.py:_check_tensor: it must be one of {}; save it again in one of these",
    damaged(tensors(lambda found: found.update({A: torch.ones(2, 32, dtype=torch.int32)}))),
    lambda w, remedy: in_turn(
        lambda name: damaged(tensors(lambda found: found.update({A: torch.ones(2, 32, dtype=SHORT[name])})))(
            w
        ),
        listed(remedy, "one of"),
    ),
)
SHORT = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
case(
    "adapt/peft_reading.py:_check_tensor: it must be a matrix; download the adapter again",
    damaged(tensors(lambda found: found.update({A: torch.ones(2)}))),
    fetched_again,
)
case(
    "adapt/peft_reading.py:_base_record: it must be JSON with the base's source, revision and files, each with size "
    "and sha256; export the adapter again",
    damaged(tensors(lambda found: None, trimtab_base="{")),
    lambda w, remedy: (
        w.cli("export", "peft", w.shared("lora run") / "run", w.tmp / "exported"),
        load_adapter(decoder_of(w.model), w.tmp / "exported"),
    ),
)
