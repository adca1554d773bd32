"""Model files that are damaged, incomplete or of another model, and folders that are written."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cases import World, case, in_turn, listed
from safetensors.torch import load_file, save_file
from shared import decoder_of
from test_model_gguf import QWEN2, random_decoder, write_gguf
from tiny_model import tiny_shape

from trimtab.model import build, init_weights, load_weights, read_shape, save_folder
from trimtab.model.families import family, shape_for_planning
from trimtab.model.save import check_replaceable

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG_JSON = "model/families/config_json.py"


def config(w: World, **changes: Any) -> object:
    """The shape that the model's config, with these changes, describes; `...` leaves a key out."""
    folder = w.own()
    w.edit_json(folder / "config.json", **changes)
    return read_shape(folder)


def downloaded_again(w: World, remedy: str) -> None:
    assert re.search("download|get ", remedy), remedy
    decoder_of(w.again())


def refused_config(key: str, **changes: Any) -> None:
    case(f"model/families/config_json.py:{key}", lambda w: config(w, **changes), downloaded_again)


def accepted_config(key: str, wrong: dict[str, Any], right: Callable[[str], dict[str, Any]]) -> None:
    """A case whose remedy says what the config may hold."""
    case(key, lambda w: config(w, **wrong), lambda w, remedy: config(w, **right(remedy)))


CONFIG_AGAIN = "download the model's config.json again"
refused_config(f"ConfigValues.integer: {CONFIG_AGAIN}", hidden_size=...)
refused_config("ConfigValues.integer: download it again: expected an integer from {} to {}", hidden_size=-4)
refused_config("ConfigValues.number: download it again: expected a number", rms_norm_eps="small")
GEMMA2 = {
    "model_type": "gemma2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
case(
    f"{CONFIG_JSON}:ConfigValues.number: download it again: expected a number above 0",
    lambda w: shape_for_planning({**GEMMA2, "query_pre_attn_scalar": 0}, "config.json"),
    lambda w, remedy: shape_for_planning({**GEMMA2, "query_pre_attn_scalar": 256}, "config.json"),
)
refused_config("ConfigValues.flag: download it again: expected true or false", tie_word_embeddings=1)
WINDOWED = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
case(
    f"model/families/qwen2.py:read_windows: {CONFIG_AGAIN}",
    lambda w: config(w, layer_types=["full_attention"], **WINDOWED),
    downloaded_again,
)
refused_config("read_rope: download it again: expected an object", rope_scaling=[1])
refused_config(f"scaling_from_values: {CONFIG_AGAIN}", rope_scaling={"rope_type": "linear"})


def only_text(content: str) -> Callable[[World], object]:
    def provoke(w: World) -> object:
        (w.own() / "config.json").write_text(content)
        return read_shape(w.own())

    return provoke


READ = "model/families/config_json.py:read_model_json: download or export the model again"
case(READ, only_text("{"), downloaded_again)
case(READ, only_text("[1]"), downloaded_again)
case(
    "model/families/config_json.py:read_model_json: download it again: a model's JSON files are smaller",
    only_text(" " * (65 << 20)),
    downloaded_again,
)


def hollow(w: World) -> object:
    (w.tmp / "hollow").mkdir(exist_ok=True)
    return read_shape(w.tmp / "hollow")


def gguf_file(w: World, name: str = "m.gguf", shape: Any = QWEN2, **options: Any) -> Path:
    write_gguf(random_decoder(shape), w.tmp / name, **options)
    return w.tmp / name


def loaded_gguf(path: Path) -> None:
    shape = read_shape(path)
    load_weights(build(shape, dtype="fp32", device="cpu", attention="reference"), path)


def folder_or_gguf(w: World, remedy: str) -> None:
    assert "folder or a .gguf file" in remedy
    read_shape(w.model)
    read_shape(gguf_file(w))


case(
    "model/families/config_json.py:read_config: give a Hugging Face model folder or a .gguf file",
    hollow,
    folder_or_gguf,
)
case(
    "model/source.py:source_kind: give a Hugging Face model folder or a .gguf file",
    lambda w: read_shape(w.model / "config.json"),
    folder_or_gguf,
)
case(
    "model/families/__init__.py:_described: supported are {} (SmolLM2 models have type llama)",
    lambda w: config(w, model_type="mamba9"),
    lambda w, remedy: in_turn(
        lambda name: config(w, model_type=name),
        [*listed(remedy, "supported are"), remedy.split()[-1].rstrip(")")],
    ),
)


def number_in(remedy: str) -> int:
    return int(re.findall(r"\d+", remedy)[-1])


accepted_config(
    "model/families/config_json.py:decoder_shape: it must be at least 1",
    {"num_attention_heads": 0},
    lambda remedy: {"num_attention_heads": 2 * number_in(remedy), "head_dim": 16},
)
accepted_config(
    "facts/shapes.py:_check_positive: it must be at least 1",
    {"hidden_size": 0},
    lambda remedy: {"hidden_size": number_in(remedy)},
)
accepted_config(
    "facts/shapes.py:_check_heads: num_attention_heads must be a multiple of num_key_value_heads",
    {"num_attention_heads": 3},
    lambda remedy: {"num_attention_heads": 2 * 2, "num_key_value_heads": 2},
)
accepted_config(
    "facts/shapes.py:_check_heads: head_dim must be even", {"head_dim": 7}, lambda remedy: {"head_dim": 8}
)
accepted_config(
    f"{CONFIG_JSON}:check_supported: use a model with hidden_act: silu, the only one that trimtab trains",
    {"hidden_act": "gelu"},
    lambda remedy: {"hidden_act": remedy.partition("hidden_act: ")[2].split(",")[0]},
)
accepted_config(
    f"{CONFIG_JSON}:check_supported: use a model without partial_rotary_factor: trimtab rotates all dimensions of "
    "a head",
    {"partial_rotary_factor": 0.5},
    lambda remedy: {remedy.partition("without ")[2].split(":")[0]: ...},
)
accepted_config(
    "model/families/qwen2.py:read_windows: use a model whose layers are {} or {}, which trimtab trains",
    {**WINDOWED, "layer_types": ["linear_attention", "full_attention"]},
    lambda remedy: {"layer_types": re.findall(r"\w+_attention", remedy)},
)
accepted_config(
    "model/families/qwen2.py:_describe: use a model with use_mrope: false, the only kind that trimtab trains",
    {**WINDOWED, "use_mrope": True},
    lambda remedy: {"use_mrope": "use_mrope: false" not in remedy},
)
accepted_config(
    "model/families/config_json.py:check_supported: use a model without rope_interleaved: trimtab rotates the two "
    "halves of a head",
    {"rope_interleaved": True},
    lambda remedy: {remedy.partition("without ")[2].split(":")[0]: ...},
)
accepted_config(
    "model/families/config_json.py:read_rope: use a model with the same RoPE settings in all layers",
    {"rope_scaling": {"full_attention": {"rope_type": "default"}}},
    lambda remedy: {"rope_scaling": {"rope_type": "default"}},
)
accepted_config(
    "model/families/config_json.py:read_rope: it must be above 1",
    {"rope_theta": 1},
    lambda remedy: {"rope_theta": number_in(remedy) + 0.5},
)
SCALING = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
case(
    "model/families/config_json.py:scaling_from_values: supported are linear, dynamic, yarn and llama3",
    lambda w: config(w, rope_scaling={**SCALING, "rope_type": "longrope"}),
    lambda w, remedy: in_turn(
        lambda name: config(w, rope_scaling={**SCALING, "rope_type": name}), listed(remedy, "supported are")
    ),
)
accepted_config(
    "model/families/config_json.py:scaling_from_values: use a model in which both are positive",
    {"rope_scaling": {**SCALING, "factor": -1.0}},
    lambda remedy: {"rope_scaling": {**SCALING, "factor": 1.0}},
)
accepted_config(
    "model/families/config_json.py:scaling_from_values: use a model with 0 < low_freq_factor < high_freq_factor",
    {"rope_scaling": {**SCALING, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
    lambda remedy: {"rope_scaling": {**SCALING, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
)
OPPOSED = {"rope_type": "yarn", "factor": math.e, "mscale": 1.0, "mscale_all_dim": -10.0}
accepted_config(
    "model/families/config_json.py:scaling_from_values: remove mscale and mscale_all_dim from the RoPE settings",
    {"rope_scaling": OPPOSED},
    lambda remedy: {"rope_scaling": {key: OPPOSED[key] for key in OPPOSED if "mscale" not in key}},
)
refused_config(
    "_check_quantization: download it again: expected an object",
    quantization_config="bitsandbytes",
)
UNQUANTIZED = "give the model's unquantized weights"


def follow_unquantized(w: World, remedy: str) -> None:
    config(w, quantization_config=...)
    if "NF4" in remedy:
        for stored in ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"load_in_8bit": True}):
            config(w, quantization_config={"quant_method": "bitsandbytes", **stored})


case(
    f"{CONFIG_JSON}:_check_quantization: {UNQUANTIZED}, or ones quantized by bitsandbytes (NF4, INT8)",
    lambda w: config(w, quantization_config={"quant_method": "gptq"}),
    follow_unquantized,
)
case(
    f"model/families/config_json.py:_check_quantization: {UNQUANTIZED}",
    lambda w: config(w, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
    follow_unquantized,
)


def fresh(**shape: Any) -> Any:
    return init_weights(build(tiny_shape(**shape), dtype="fp32", device="cpu", attention="reference"), 0)


case(
    "model/families/__init__.py:config_from_shape: build it with the biases, norms and sliding windows of its family",
    lambda w: save_folder(fresh(qk_norm=True), w.tmp / "saved", dtype="fp32"),
    lambda w, remedy: save_folder(fresh(), w.tmp / "saved", dtype="fp32"),
)


def with_activation(activation: str) -> Any:
    tiny = tiny_shape()
    block = replace(tiny.block, feed_forward=replace(tiny.block.dense, activation=activation))
    return build(replace(tiny, blocks=(block,)), dtype="fp32", device="meta")


case(
    "model/building.py:_check_supported: use a model without this feature",
    lambda w: with_activation("gelu"),
    lambda w, remedy: with_activation("silu"),
)
case(
    "model/families/__init__.py:family: supported are {}",
    lambda w: family("mamba9"),
    lambda w, remedy: in_turn(family, listed(remedy, "supported are")),
)


# Safetensors.


def changed(change: Callable[[Path], object]) -> Callable[[World], object]:
    """A model whose folder was changed, loaded as training does."""

    def provoke(w: World) -> object:
        change(w.own())
        return decoder_of(w.own())

    return provoke


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS)

    return damage


def keys(**changes: Any) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def again(w: World, remedy: str) -> None:
    decoder_of(w.again())


def damaged(key: str, change: Callable[[Path], object]) -> None:
    case(f"model/{key}", changed(change), again)


NORM = "model.norm.weight"
ONE_MODEL = "download the weights and config.json of the same model from the same source"
damaged(f"weights_checks.py:check_layers: {ONE_MODEL}", keys(num_hidden_layers=999))
damaged(
    f"weights_checks.py:check_dims: {ONE_MODEL}", tensors(lambda found: found.update({NORM: torch.ones(31)}))
)
damaged(
    "weights_checks.py:check_names: complete the download, or get the config.json that belongs to these weights",
    tensors(lambda found: found.pop(NORM)),
)
damaged(
    "weights_checks.py:check_names: get the config.json that belongs to these weights, or weights without an adapter "
    "or extra head",
    tensors(lambda found: found.update({"value_head.weight": torch.ones(1, 32)})),
)
damaged(
    "weights.py:copy_converted: download the weights again",
    tensors(lambda found: found.update({NORM: torch.full((32,), float("nan"))})),
)
damaged(
    "weights_safetensors.py:_open: it is damaged or incomplete; download it again",
    lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100]),
)
damaged(
    "weights_safetensors.py:_indexed_files: download the index again",
    lambda folder: (folder / INDEX).write_text('{"metadata": {}}'),
)
damaged(
    "weights_safetensors.py:_indexed_files: do not use this copy; download the model from another source",
    lambda folder: (folder / INDEX).write_text(json.dumps({"weight_map": {NORM: f"../{WEIGHTS}"}})),
)
damaged(
    "weights_safetensors.py:_indexed_files: complete the download",
    lambda folder: (folder / INDEX).write_text(json.dumps({"weight_map": {NORM: "model-2.safetensors"}})),
)


def extra_file(folder: Path) -> None:
    found = load_file(folder / WEIGHTS)
    save_file({NORM: found[NORM]}, folder / "extra.safetensors")
    index = {**dict.fromkeys(found, WEIGHTS), "x": "extra.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))


def follow_extra_file(w: World, remedy: str) -> None:
    assert remedy == "remove the file that does not belong to this model, and its index entries"
    (w.own() / "extra.safetensors").unlink()
    index = json.loads((w.own() / INDEX).read_text())["weight_map"]
    kept = {name: file for name, file in index.items() if file != "extra.safetensors"}
    (w.own() / INDEX).write_text(json.dumps({"weight_map": kept}))
    decoder_of(w.own())


case(
    "model/weights_safetensors.py:_declared: remove the file that does not belong to this model, and its index entries",
    changed(extra_file),
    follow_extra_file,
)


def no_weights(w: World) -> object:
    (w.own() / WEIGHTS).unlink(missing_ok=True)
    return w.train(model=str(w.own()), max_steps=1)


def follow_no_weights(w: World, remedy: str) -> None:
    w.train("model.init=random", model=str(w.own()), max_steps=1)
    assert "set model.init: random" in remedy
    w.train(model=str(w.model), max_steps=1)


case(
    "model/weights_safetensors.py:weight_files: give a folder with safetensors weights, or set model.init: random to "
    "train from scratch",
    no_weights,
    follow_no_weights,
)
SHORT = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
case(
    "model/weights_safetensors.py:survey_folder: supported are {} weights",
    changed(tensors(lambda found: found.update({NORM: torch.ones(32, dtype=torch.int32)}))),
    lambda w, remedy: in_turn(
        lambda name: changed(
            tensors(lambda found: found.update({NORM: torch.ones(32, dtype=SHORT[name]) }))
        )(w),
        listed(remedy.removesuffix(" weights"), "supported are"),
    ),
)  # fmt: skip
case(
    "model/weights.py:copy_converted: load it in bf16 or fp32",
    lambda w: (
        tensors(lambda found: found.update({NORM: torch.full((32,), 1e6)}))(w.own()),
        decoder_of(w.own(), "fp16"),
    ),
    lambda w, remedy: in_turn(lambda dtype: decoder_of(w.own(), dtype), listed(remedy, "load it in")),
)


def pickles_only(w: World) -> object:
    torch.save(load_file(w.own() / WEIGHTS), w.own() / "pytorch_model.bin")
    (w.own() / WEIGHTS).unlink()
    return decoder_of(w.own())


def follow_safetensors(w: World, remedy: str) -> None:
    assert "safetensors" in remedy
    save_file(torch.load(w.own() / "pytorch_model.bin", weights_only=True), w.own() / WEIGHTS)
    decoder_of(w.own())


case(
    "model/source.py:pickle_error: use the model's safetensors files (most hubs offer a converted copy)",
    pickles_only,
    follow_safetensors,
)
case(
    "model/source.py:source_kind: name the file, for instance {}",
    lambda w: (gguf_file(w), read_shape(w.tmp)),
    lambda w, remedy: loaded_gguf(Path(remedy.partition("for instance ")[2])),
)
case(
    "model/source.py:source_kind: check the path",
    lambda w: read_shape(w.tmp / "absent"),
    lambda w, remedy: read_shape(w.model),
)
case(
    "model/source.py:source_kind: give the folder, {}",
    lambda w: read_shape(w.model / WEIGHTS),
    lambda w, remedy: decoder_of(Path(remedy.partition("give the folder, ")[2])),
)


# Folders that are written.


def export(w: World, folder: Path, *more: str) -> str:
    return w.cli("export", "hf", w.model, folder, *more)


def full(w: World) -> Path:
    (w.tmp / "full").mkdir(exist_ok=True)
    (w.tmp / "full" / "config.json").write_text("{}")
    return w.tmp / "full"


case(
    "model/save.py:check_replaceable: choose another folder, or replace it with {}",
    lambda w: export(w, full(w)),
    lambda w, remedy: (
        export(w, full(w), re.findall(r"--\w+", remedy)[0]),
        export(w, w.tmp / "another"),
    ),
)


def notes(w: World) -> Path:
    (w.tmp / "notes").mkdir(exist_ok=True)
    (w.tmp / "notes" / "letter.txt").write_text("dear reader")
    return w.tmp / "notes"


case(
    "model/save.py:check_replaceable: choose another folder: only a folder with {} in it is overwritten",
    lambda w: export(w, notes(w), "--overwrite"),
    lambda w, remedy: (
        export(w, w.tmp / "another", "--overwrite"),
        check_replaceable(full(w), True, remedy.partition("with ")[2].split()[0]),
    ),
)


def huge(w: World, dtype: str) -> None:
    decoder = decoder_of(w.model)
    with torch.no_grad():
        decoder.model.norm.weight.fill_(1e6)
    save_folder(decoder, w.tmp / dtype, dtype=dtype)


case(
    "model/save.py:_stored: save as bf16 or fp32",
    lambda w: huge(w, "fp16"),
    lambda w, remedy: in_turn(lambda dtype: huge(w, dtype), listed(remedy, "save as")),
)


def diverged(w: World, value: float) -> None:
    decoder = decoder_of(w.model)
    with torch.no_grad():
        decoder.model.norm.weight[0] = value
    save_folder(decoder, w.tmp / "saved", dtype="fp32")


case(
    "model/save.py:_stored: the training diverged; use an earlier checkpoint",
    lambda w: diverged(w, float("nan")),
    lambda w, remedy: diverged(w, 1.0),
)
case(
    "model/save.py:staged_folder: choose another folder",
    lambda w: (
        (w.tmp / "file").write_text("x"),
        save_folder(decoder_of(w.model), w.tmp / "file" / "saved", dtype="fp32"),
    ),
    lambda w, remedy: save_folder(decoder_of(w.model), w.tmp / "saved", dtype="fp32"),
)
