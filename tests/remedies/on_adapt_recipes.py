"""Quantized layers, `lora` in a recipe, and adapters on any torch model."""

from __future__ import annotations

import re
import shutil
from typing import Any

import torch
from cases import World, case, in_turn, listed, settings
from on_adapt import (
    CONFIG,
    A,
    config,
    damaged,
    fetched_again,
    follow_merged_with_peft,
    load,
    saved,
    tensors,
)
from shared import adapted_of, decoder_of

import trimtab
from trimtab.adapt import (
    LoraSettings,
    QuantizedLinear,
    add_adapters,
    load_adapter,
    quantize_layout,
    set_dequantized_copies,
    use_adapters,
)
from trimtab.adapt.any_model import add_lora, quantize_linears
from trimtab.adapt.recompute import apply

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
    "adapt/quantized.py:QuantizedLinear.__init__: use one of {}",
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


def narrow(columns: int, **settings: Any) -> QuantizedLinear:
    """A layer whose rows are not always whole blocks, with a weight."""
    made = {"bias": False, "kind": "nf4", "dtype": torch.float32, **settings}
    whole = QuantizedLinear(columns, 8, **made)
    whole.set_weight(torch.ones(8, columns))
    return whole


case(
    "adapt/packed_layout.py:check_rows: quantize to INT8 (load_in_8bit: true), or with quantize_layout(…, block={})",
    lambda w: narrow(96).slice_rows(0, 4),
    lambda w, remedy: (
        narrow(96, kind="int8").slice_rows(0, 4),
        narrow(96, block=int(re.findall(r"block=(\d+)", remedy)[0])).slice_rows(0, 4),
    ),
)
case(
    "adapt/packed_layout.py:check_rows: quantize to INT8 (load_in_8bit: true)",
    lambda w: narrow(40).slice_rows(0, 4),
    lambda w, remedy: narrow(40, kind="int8").slice_rows(0, 4),
)
case(
    "adapt/quantized.py:check_whole_layer: use the full layer, then slice it",
    lambda w: layer().slice_rows(0, 4).set_weight(torch.ones(4, 64)),
    lambda w, remedy: narrow(64).slice_rows(0, 4).dequantized(),
)
case(
    "adapt/quantized_layout.py:_linears: quantize a plain model, then add adapters",
    lambda w: quantize_layout(adapted_of(w.shared("wide")), "nf4"),
    lambda w, remedy: add_adapters(quantize_layout(decoder_of(w.shared("wide")), "nf4"), LoraSettings(r=2)),
)
case(
    "adapt/quantized_layout.py:_linears: the model has {}",
    lambda w: quantized(w, skip=("query",)),
    lambda w, remedy: in_turn(lambda name: quantized(w, skip=(name,)), listed(remedy, "the model has")),
)
case(
    "adapt/recompute.py:apply: give one per layer",
    lambda w: apply(decoder_of(w.model), ["block"]),
    lambda w, remedy: apply(decoder_of(w.model), ["block"] * 2),
)
case(
    "adapt/recompute.py:apply: use one of {}",
    lambda w: apply(decoder_of(w.model), ["everything"] * 2),
    lambda w, remedy: in_turn(lambda name: apply(decoder_of(w.model), [name] * 2), listed(remedy, "one of")),
)
case(
    "adapt/dequantized.py:set_dequantized_copies: give a number from 0 to {}",
    lambda w: set_dequantized_copies(quantized(w), 9),
    lambda w, remedy: (
        set_dequantized_copies(quantized(w), int(remedy.split()[-1])),
        set_dequantized_copies(quantized(w), 0),
    ),
)
case(
    "adapt/dequantized.py:set_dequantized_copies: quantize the model first: quantize_layout",
    lambda w: set_dequantized_copies(decoder_of(w.model), 1),
    lambda w, remedy: set_dequantized_copies(quantized(w), 1),
)


def whole_twice(w: World, *names: str) -> None:
    decoder = decoder_of(w.model)
    for name in ("first", "second"):
        if not (w.tmp / name).exists():
            saved(adapted_of(w.model, modules_to_save=("norm",)), w.tmp / name)
        load_adapter(decoder, w.tmp / name, adapter=name)
    use_adapters(decoder, list(names))


case(
    "adapt/saved_modules.py:resolve_modules: use one at a time",
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
    "adapt/settings_rules.py:_check_pattern: give a mapping of module names to numbers",
    lambda w: LoraSettings(r=2, rank_pattern=["q_proj"]),  # type: ignore[arg-type]
    lambda w, remedy: LoraSettings(r=2, rank_pattern={"q_proj": 4}),
)
case(
    "adapt/spec.py:resolve_targets: the adapted modules are {}",
    lambda w: plan_lora(w, rank_pattern={"query": 4}),
    lambda w, remedy: in_turn(
        lambda name: plan_lora(w, rank_pattern={name: 4}), listed(remedy, "adapted modules are")
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
    "adapt/spec.py:check_trainable: set lora_dropout: 0, or remove {} from lora.target_modules",
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
    "adapt/spec_quantized.py:choose_quantized_kernels: choose {}",
    lambda w: quantized(w, impl="cutlass"),
    lambda w, remedy: quantized(w, impl=listed(remedy, "choose")[0]),
)
case(
    "adapt/spec_quantized.py:choose_quantized_kernels: use auto",
    lambda w: quantized(w, impl="triton"),
    lambda w, remedy: quantized(w, impl=remedy.split()[-1]),
)
case(
    "adapt/spec_quantized.py:check_not_quantized: remove it, or load the model without load_in_4bit and load_in_8bit",
    lambda w: plan_lora(
        w, more=("load_in_4bit=true",), target_modules=["q_proj"], modules_to_save=["v_proj"]
    ),
    lambda w, remedy: (
        plan_lora(w, more=("load_in_4bit=true",), target_modules=["q_proj"]),
        plan_lora(w, target_modules=["q_proj"], modules_to_save=["v_proj"]),
    ),
)
case(
    "adapt/targets.py:select: train it fully with lora.modules_to_save: [embed_tokens], or remove it",
    lambda w: plan_lora(w, target_modules=["q_proj", "embed_tokens"]),
    lambda w, remedy: (
        plan_lora(w, target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
        plan_lora(w, target_modules=["q_proj"]),
    ),
)
case(
    "adapt/targets.py:check_suffix_pattern: name modules there, or remove it",
    lambda w: plan_lora(w, rank_pattern={" ": 4}),
    lambda w, remedy: (plan_lora(w, rank_pattern={"q_proj": 4}), plan_lora(w)),
)
case(
    "adapt/targets.py:check_suffix_pattern: limit flags to a group: (?i:…)",
    lambda w: plan_lora(w, rank_pattern={"(?i)Q_proj": 4}),
    lambda w, remedy: plan_lora(w, rank_pattern={remedy.partition(": ")[2].replace("…", "Q_proj"): 4}),
)


def follow_names_or_all_linear(w: World, remedy: str) -> None:
    plan_lora(w, target_modules=remedy.partition("such as ")[2].split(";")[0])
    for name in listed(remedy, "choose from"):
        plan_lora(w, target_modules=[name])
    plan_lora(w, target_modules="all-linear")


case(
    "adapt/targets.py:_by_pattern: write a pattern for full names such as model.layers.0.self_attn.q_proj; or "
    "all-linear; or a list of short names: choose from {}",
    lambda w: plan_lora(w, target_modules="q_proj"),
    follow_names_or_all_linear,
)
case(
    "adapt/targets.py:_by_names: remove it, or name a module there",
    lambda w: plan_lora(w, target_modules=["q_proj", " "]),
    lambda w, remedy: (
        plan_lora(w, target_modules=["q_proj"]),
        plan_lora(w, target_modules=["q_proj", "k_proj"]),
    ),
)
case(
    "adapt/targets.py:_by_names: choose from {}",
    lambda w: plan_lora(w, target_modules=["query"]),
    lambda w, remedy: in_turn(
        lambda name: plan_lora(w, target_modules=[name]), listed(remedy, "choose from")
    ),
)
case(
    "adapt/peft_files.py:copy_adapter_tensors: download the adapter again, or train it again",
    damaged(tensors(lambda found: found[A].fill_(float("nan")))),
    fetched_again,
)
case(
    "adapt/peft_reading.py:read_config: give a LoRA adapter, or merge this one with peft first",
    damaged(config(peft_type="IA3")),
    lambda w, remedy: (fetched_again(w, remedy), follow_merged_with_peft(w, remedy)),
)
case(
    "adapt/targets.py:check_pattern: write one for full names, such as .*\\.q_proj, or a list of names",
    lambda w: plan_lora(w, target_modules="(q_proj"),
    lambda w, remedy: (
        plan_lora(w, target_modules=remedy.partition("such as ")[2].split(",")[0]),
        plan_lora(w, target_modules=["q_proj"]),
    ),
)
case(
    "adapt/targets.py:check_suffix_pattern: write the end of a module's name, such as q_proj",
    lambda w: plan_lora(w, rank_pattern={"(q_proj": 4}),
    lambda w, remedy: plan_lora(w, rank_pattern={remedy.split()[-1]: 4}),
)
case(
    "adapt/spec.py:_check_kinds: remove embed_tokens from lora.target_modules, or set lora.use_dora: false",
    lambda w: plan_lora(w, "untied", use_dora=True, target_modules=["q_proj", "embed_tokens"]),
    lambda w, remedy: (
        plan_lora(w, "untied", use_dora=True, target_modules=["q_proj"]),
        plan_lora(w, "untied", more=tuple(settings(remedy)[0]), target_modules=["q_proj", "embed_tokens"]),
    ),
)
case(
    "adapt/quantized.py:QuantizedLinear.set_weight: give a weight of the shape {}",
    lambda w: layer().set_weight(torch.ones(4, 64)),
    lambda w, remedy: layer().set_weight(torch.ones(*map(int, re.findall(r"\d+", remedy)))),
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
    "adapt/any_model.py:quantize_linears: change skip, or use another model",
    lambda w: quantize_linears(plain_model(), skip=("0", "2")),
    lambda w, remedy: (quantize_linears(plain_model(), skip=("0",)), quantize_linears(plain_model())),
)
case(
    "adapt/any_model.py:add_lora: name linear layers of the model",
    lambda w: add_lora(plain_model(), LoraSettings(r=2, target_modules=("query",))),
    lambda w, remedy: add_lora(plain_model(), LoraSettings(r=2, target_modules=("0",))),
)
case(
    "adapt/any_model.py:add_lora: omit it, or use trimtab.load and add_adapters",
    lambda w: add_lora(plain_model(), LoraSettings(r=2, rank_pattern={"0": 4})),
    lambda w, remedy: (
        add_lora(plain_model(), LoraSettings(r=2)),
        add_adapters(
            trimtab.load(str(w.model)).opened.decoder, LoraSettings(r=2, rank_pattern={"q_proj": 4})
        ),
    ),
)
