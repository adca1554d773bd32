"""Adapters and quantized layers: `lora` in a recipe, files of peft's, and the functions of trimtab.adapt."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import World, case, in_turn, listed, settings
from safetensors.torch import load_file, save_file
from shared import adapted_of, decoder_of

import trimtab
from trimtab.adapt import (
    LoraSettings,
    QuantizedLinear,
    add_adapters,
    init_adapters,
    keep_unpacked,
    load_adapter,
    merge_adapters,
    quantize_layout,
    save_adapter,
    set_masks,
    use_adapters,
)
from trimtab.adapt.any_model import add_lora, quantize_linears
from trimtab.adapt.lora import check_finite
from trimtab.adapt.peft_files import settings_of
from trimtab.adapt.recompute import apply

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
    "adapt/lora.py:place_adapters: use letters, digits, - and _",
    lambda w: named(w, "a b"),
    lambda w, remedy: named(w, "French-2_x"),
)
case(
    "adapt/lora.py:place_adapters: give it another name",
    lambda w: named(w, "keys"),
    lambda w, remedy: named(w, "keys2"),
)
case(
    "adapt/lora.py:place_adapters: give this one another name",
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
    "adapt/lora.py:_check_there: there are {}",
    lambda w: use_adapters(two(w), "third"),
    lambda w, remedy: in_turn(lambda name: use_adapters(two(w), name), listed(remedy, "there are")),
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
    "adapt/peft_files.py:save_adapter: the training went wrong; save an earlier checkpoint",
    lambda w: saved(poisoned(adapted_of(w.model)), w.tmp / "a"),
    lambda w, remedy: saved(adapted_of(w.model), w.tmp / "a"),
)


def head_dropout(w: World, *, evaluated: bool = False, **settings: Any) -> Any:
    """An adapter on the head, loaded to be used, trained a step or evaluated."""
    folder = w.own("head adapter")
    w.edit_json(folder / CONFIG, **{"lora_dropout": 0.1, **settings})
    decoder = decoder_of(w.shared("untied"))
    load_adapter(decoder, folder)
    masks = set_masks(decoder, torch.device("cpu"))
    if masks is not None:
        masks.set(0, 0, 0)
    decoder.train(not evaluated)
    return decoder.loss(IDS_BT, IDS_BT)


def follow_head_dropout(w: World, remedy: str) -> None:
    assert "decoder.eval()" in remedy
    assert "lora_dropout=0" in remedy
    head_dropout(w, evaluated=True)
    head_dropout(w, lora_dropout=0)


case(
    "adapt/lora_layers.py:LoRALinear.effective_weight: call decoder.eval() to use it; to train it, make it with "
    "lora_dropout=0",
    head_dropout,
    follow_head_dropout,
)


def dropping(w: World) -> Any:
    return adapted_of(w.model, lora_dropout=0.1).train()


def follow_masks(w: World, remedy: str) -> None:
    decoder = dropping(w)
    first, then = remedy.removesuffix(" before each").split(", then ")
    names: dict[str, Any] = {"decoder": decoder, "device": torch.device("cpu"), "seed": 0, "step": 0}
    import trimtab.adapt

    exec(f"{first}\n{then}", {"trimtab": trimtab, "microbatch": 0, **names})
    decoder.loss(IDS_BT, IDS_BT).backward()


case(
    "adapt/lora_products.py:add_lora: masks = trimtab.adapt.set_masks(decoder, device), then masks.set(seed, step, "
    "microbatch) before each",
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
    "adapt/peft_config.py:fitted: the two files do not belong together; get the adapter again",
    damaged(config(r=3)),
    fetched_again,
)
case(
    "adapt/peft_config.py:_check_complete: get the adapter again",
    damaged(tensors(lambda found: [found.pop(A), found.pop(A.replace("lora_A", "lora_B"))])),
    fetched_again,
)
case(
    "adapt/peft_config.py:other_base: load it with its own base",
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
    assert remedy.startswith("load it with its own base")
    load(w, w.shared("untied"))
    w.plan(
        f"lora.modules_to_save={remedy.partition('lora.modules_to_save: ')[2].split(']')[0]}]", lora={"r": 2}
    )


case(
    "adapt/peft_config.py:fitted: load it with its own base; if this is it, it has to be trained anew: {}",
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
    "adapt/peft_config.py:one_matrix: train it again with peft's ensure_weight_tying=True, or with trimtab",
    apart,
    follow_trained_with_trimtab,
)
case(
    "adapt/peft_files.py:settings_of: train one, or load one",
    lambda w: settings_of(decoder_of(w.model)),
    lambda w, remedy: settings_of(adapted_of(w.model)),
)
case(
    "adapt/peft_files.py:fill_adapter: get the adapter again",
    damaged(tensors(lambda found: found.pop(A.replace("lora_A", "lora_B")))),
    fetched_again,
)
case(
    "adapt/peft_reading.py:read_config: give one that peft or `trimtab export peft` wrote",
    lambda w: load_adapter(decoder_of(w.model), w.model),
    lambda w, remedy: (
        load(w),
        w.cli("export", "peft", w.shared("lora run") / "run", w.tmp / "exported"),
        load_adapter(decoder_of(w.model), w.tmp / "exported"),
    ),
)
case(
    "adapt/peft_reading.py:read_config: get the adapter again",
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
    "adapt/peft_reading.py:read_header: get the adapter again",
    damaged(lambda w, folder: (folder / WEIGHTS).write_bytes(b"\x10\0\0\0\0\0\0\0{")),
    fetched_again,
)
case(
    "adapt/peft_reading.py:_check_tensor: it must be one of {}; save it anew so",
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
    "adapt/peft_reading.py:_check_tensor: it must be a matrix; get the adapter again",
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


# Quantized layers.


def layer(**settings: Any) -> QuantizedLinear:
    return QuantizedLinear(64, 32, **{"bias": False, "kind": "nf4", "dtype": torch.float32, **settings})


def quantized(w: World, **settings: Any) -> Any:
    return quantize_layout(decoder_of(w.shared("wide")), **{"kind": "nf4", **settings})


case(
    "adapt/quantized.py:QuantizedLinear.__init__: choose {}",
    lambda w: layer(kind="fp4"),
    lambda w, remedy: in_turn(lambda kind: layer(kind=kind), listed(remedy, "choose")),
)
case(
    "adapt/quantized.py:QuantizedLinear.__init__: one of {}",
    lambda w: layer(block=48),
    lambda w, remedy: in_turn(lambda block: layer(block=int(block)), listed(remedy, "one of")),
)
case(
    "adapt/quantized.py:QuantizedLinear.requires_grad_: train an adapter on it (lora), or load the model without "
    "quantization",
    lambda w: layer().requires_grad_(True),
    lambda w, remedy: (
        add_adapters(quantized(w), LoraSettings(r=2)),
        decoder_of(w.shared("wide")).requires_grad_(True),
    ),
)
case(
    "adapt/quantized.py:_linears: quantize a plain model, then add adapters",
    lambda w: quantize_layout(adapted_of(w.shared("wide")), "nf4"),
    lambda w, remedy: add_adapters(quantize_layout(decoder_of(w.shared("wide")), "nf4"), LoraSettings(r=2)),
)
case(
    "adapt/quantized.py:_linears: the model has {}",
    lambda w: quantized(w, skip=("query",)),
    lambda w, remedy: in_turn(lambda name: quantized(w, skip=(name,)), listed(remedy, "the model has")),
)
case(
    "adapt/recompute.py:apply: give one for each layer",
    lambda w: apply(decoder_of(w.model), ["block"]),
    lambda w, remedy: apply(decoder_of(w.model), ["block"] * 2),
)
case(
    "adapt/recompute.py:apply: use one of {}",
    lambda w: apply(decoder_of(w.model), ["everything"] * 2),
    lambda w, remedy: in_turn(lambda name: apply(decoder_of(w.model), [name] * 2), listed(remedy, "one of")),
)
case(
    "adapt/unpacked.py:keep_unpacked: give a number from 0 to {}",
    lambda w: keep_unpacked(quantized(w), 9),
    lambda w, remedy: (keep_unpacked(quantized(w), int(remedy.split()[-1])), keep_unpacked(quantized(w), 0)),
)
case(
    "adapt/unpacked.py:keep_unpacked: quantize the model first: quantize_layout",
    lambda w: keep_unpacked(decoder_of(w.model), 1),
    lambda w, remedy: keep_unpacked(quantized(w), 1),
)


def whole_twice(w: World, *names: str) -> None:
    decoder = decoder_of(w.model)
    for name in ("first", "second"):
        if not (w.tmp / name).exists():
            saved(adapted_of(w.model, modules_to_save=("norm",)), w.tmp / name)
        load_adapter(decoder, w.tmp / name, adapter=name)
    use_adapters(decoder, list(names))


case(
    "adapt/whole.py:choose_whole: use one at a time",
    lambda w: whole_twice(w, "first", "second"),
    lambda w, remedy: in_turn(lambda name: whole_twice(w, name), ["first", "second"]),
)


# `lora` in a recipe, through `trimtab plan`.


def plan_lora(w: World, model: str = "model", more: tuple[str, ...] = (), **lora: Any) -> str:
    folder = w.model if model == "model" else w.shared(model)
    return w.plan(*more, model=str(folder), lora={"r": 2, **lora})


case(
    "adapt/settings_rules.py:_check_value: it must be {}",
    lambda w: LoraSettings(r=0),
    lambda w, remedy: in_turn(lambda r: LoraSettings(r=int(r)), [remedy.split()[-3], remedy.split()[-1]]),
)
case(
    "adapt/settings_rules.py:_check_pattern: give modules' names with a number for each",
    lambda w: LoraSettings(r=2, rank_pattern=["q_proj"]),  # type: ignore[arg-type]
    lambda w, remedy: LoraSettings(r=2, rank_pattern={"q_proj": 4}),
)
case(
    "adapt/spec.py:resolve: adapted are {}",
    lambda w: plan_lora(w, rank_pattern={"query": 4}),
    lambda w, remedy: in_turn(
        lambda name: plan_lora(w, rank_pattern={name: 4}), listed(remedy, "adapted are")
    ),
)


def follow_at_most(w: World, remedy: str) -> None:
    most = int(remedy.partition("at most ")[2].split(",")[0])
    plan_lora(w, r=most)
    if "lora.rank_pattern" in remedy:
        plan_lora(w, r=20, rank_pattern={"k_proj": most, "v_proj": most})


case("adapt/spec.py:_check_rank: set it to at most {}{}", lambda w: plan_lora(w, r=20), follow_at_most)
case(
    "adapt/spec.py:_check_kinds: keep it in one of them",
    lambda w: plan_lora(w, target_modules=["q_proj", "v_proj"], modules_to_save=["v_proj"]),
    lambda w, remedy: (
        plan_lora(w, target_modules=["q_proj", "v_proj"]),
        plan_lora(w, target_modules=["q_proj"], modules_to_save=["v_proj"]),
    ),
)
case(
    "adapt/spec.py:check_trainable: set lora_dropout: 0, or leave {} out of lora.target_modules",
    lambda w: plan_lora(w, "untied", lora_dropout=0.1, target_modules=["q_proj", "lm_head"]),
    lambda w, remedy: (
        plan_lora(w, "untied", lora_dropout=0, target_modules=["q_proj", "lm_head"]),
        plan_lora(w, "untied", lora_dropout=0.1, target_modules=["q_proj"]),
    ),
)


def further(w: World, dropout: float) -> None:
    folder = w.own("head adapter")
    w.edit_json(folder / CONFIG, lora_dropout=dropout)
    w.plan(model=str(w.shared("untied")), lora={"adapter": str(folder)})


case(
    "adapt/spec.py:check_trainable: to train it further, set lora_dropout to 0 in its adapter_config.json",
    lambda w: further(w, 0.1),
    lambda w, remedy: further(w, float(remedy.partition("lora_dropout to ")[2].split()[0])),
)
case(
    "adapt/spec_quantized.py:choose: choose {}",
    lambda w: quantized(w, impl="cutlass"),
    lambda w, remedy: quantized(w, impl=listed(remedy, "choose")[0]),
)
case(
    "adapt/spec_quantized.py:choose: leave it at auto",
    lambda w: quantized(w, impl="triton"),
    lambda w, remedy: quantized(w, impl=remedy.split()[-1]),
)
case(
    "adapt/spec_quantized.py:check_whole: leave it out, or load the model without load_in_4bit and load_in_8bit",
    lambda w: plan_lora(
        w, more=("load_in_4bit=true",), target_modules=["q_proj"], modules_to_save=["v_proj"]
    ),
    lambda w, remedy: (
        plan_lora(w, more=("load_in_4bit=true",), target_modules=["q_proj"]),
        plan_lora(w, target_modules=["q_proj"], modules_to_save=["v_proj"]),
    ),
)
case(
    "adapt/targets.py:select: train it whole with lora.modules_to_save: [embed_tokens], or leave it out",
    lambda w: plan_lora(w, target_modules=["q_proj", "embed_tokens"]),
    lambda w, remedy: (
        plan_lora(w, target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
        plan_lora(w, target_modules=["q_proj"]),
    ),
)
case(
    "adapt/targets.py:check_ending: name modules there, or leave it out",
    lambda w: plan_lora(w, rank_pattern={" ": 4}),
    lambda w, remedy: (plan_lora(w, rank_pattern={"q_proj": 4}), plan_lora(w)),
)
case(
    "adapt/targets.py:check_ending: write flags around what they are for: (?i:…)",
    lambda w: plan_lora(w, rank_pattern={"(?i)Q_proj": 4}),
    lambda w, remedy: plan_lora(w, rank_pattern={remedy.partition(": ")[2].replace("…", "Q_proj"): 4}),
)


def follow_names_or_all_linear(w: World, remedy: str) -> None:
    plan_lora(w, target_modules=remedy.partition("like ")[2].split(";")[0])
    for name in listed(remedy, "there are"):
        plan_lora(w, target_modules=[name])
    plan_lora(w, target_modules="all-linear")


case(
    "adapt/targets.py:_by_pattern: names are like model.layers.0.self_attn.q_proj; there are {}; a list takes these "
    "short names, and all-linear every linear layer",
    lambda w: plan_lora(w, target_modules="q_proj"),
    follow_names_or_all_linear,
)
case(
    "adapt/targets.py:_by_names: leave it out, or name a module there",
    lambda w: plan_lora(w, target_modules=["q_proj", " "]),
    lambda w, remedy: (
        plan_lora(w, target_modules=["q_proj"]),
        plan_lora(w, target_modules=["q_proj", "k_proj"]),
    ),
)
case(
    "adapt/targets.py:_by_names: there are {}",
    lambda w: plan_lora(w, target_modules=["query"]),
    lambda w, remedy: in_turn(lambda name: plan_lora(w, target_modules=[name]), listed(remedy, "there are")),
)
case(
    "adapt/peft_files.py:fill_adapter: get the adapter again, or train it anew",
    damaged(tensors(lambda found: found[A].fill_(float("nan")))),
    fetched_again,
)
case(
    "adapt/peft_reading.py:read_config: give a LoRA adapter, or merge this one with peft first",
    damaged(config(peft_type="IA3")),
    lambda w, remedy: (fetched_again(w, remedy), follow_merged_with_peft(w, remedy)),
)
case(
    "adapt/targets.py:check_pattern: write one over whole names, such as .*\\.q_proj, or a list of names",
    lambda w: plan_lora(w, target_modules="(q_proj"),
    lambda w, remedy: (
        plan_lora(w, target_modules=remedy.partition("such as ")[2].split(",")[0]),
        plan_lora(w, target_modules=["q_proj"]),
    ),
)
case(
    "adapt/targets.py:check_ending: write the end of a module's name, such as q_proj",
    lambda w: plan_lora(w, rank_pattern={"(q_proj": 4}),
    lambda w, remedy: plan_lora(w, rank_pattern={remedy.split()[-1]: 4}),
)
case(
    "adapt/spec.py:_check_kinds: leave embed_tokens out of lora.target_modules, or set lora.use_dora: false",
    lambda w: plan_lora(w, "untied", use_dora=True, target_modules=["q_proj", "embed_tokens"]),
    lambda w, remedy: (
        plan_lora(w, "untied", use_dora=True, target_modules=["q_proj"]),
        plan_lora(w, "untied", more=tuple(settings(remedy)[0]), target_modules=["q_proj", "embed_tokens"]),
    ),
)
case(
    "adapt/quantized.py:QuantizedLinear.take: give a weight of the shape {}",
    lambda w: layer().take(torch.ones(4, 64)),
    lambda w, remedy: layer().take(torch.ones(*map(int, re.findall(r"\d+", remedy)))),
)


def pickled(w: World, safe: bool) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    shutil.rmtree(w.own("adapter"))
    model = AutoModelForCausalLM.from_pretrained(w.model)
    made = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    made.save_pretrained(w.tmp / "own-adapter", safe_serialization=safe)
    load(w)


case(
    "adapt/peft_reading.py:read_header: save the adapter with safe_serialization=True",
    lambda w: pickled(w, safe=False),
    lambda w, remedy: pickled(w, safe=remedy.endswith("safe_serialization=True")),
)


# Any torch model.
def plain_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))


case(
    "adapt/any_model.py:quantize_linears: give another skip, or another model",
    lambda w: quantize_linears(plain_model(), skip=("0", "2")),
    lambda w, remedy: (quantize_linears(plain_model(), skip=("0",)), quantize_linears(plain_model())),
)
case(
    "adapt/any_model.py:add_lora: name linear layers of it",
    lambda w: add_lora(plain_model(), LoraSettings(r=2, target_modules=("query",))),
    lambda w, remedy: add_lora(plain_model(), LoraSettings(r=2, target_modules=("0",))),
)
case(
    "adapt/any_model.py:add_lora: leave it out, or use trimtab.load and add_adapters",
    lambda w: add_lora(plain_model(), LoraSettings(r=2, rank_pattern={"0": 4})),
    lambda w, remedy: (
        add_lora(plain_model(), LoraSettings(r=2)),
        add_adapters(
            trimtab.load(str(w.model)).opened.decoder, LoraSettings(r=2, rank_pattern={"q_proj": 4})
        ),
    ),
)
