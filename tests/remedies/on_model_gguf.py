"""GGUF files that are damaged, incomplete or of another model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cases import World, case, in_turn, listed
from on_model import WEIGHTS, fresh, gguf_file, loaded_gguf, number_in
from safetensors.torch import save_file

from trimtab.facts.gguf_header import read_gguf_header
from trimtab.model import load_weights, read_shape
from trimtab.model.families.gguf_metadata import shape_from_gguf

# GGUF files.


def described(w: World, rope: list[float] | None = None, **changes: Any) -> object:
    """The shape that a GGUF file's metadata, with these changes (`__` for a dot), describe."""
    header = read_gguf_header(gguf_file(w))
    arch = changes.pop("arch", "qwen2")
    metadata = {key.replace("qwen2.", f"{arch}."): value for key, value in header.metadata.items()}
    metadata["general.architecture"] = arch
    for key, value in changes.items():
        key = key.replace("__", ".")
        metadata[key if key.startswith("split") else f"{arch}.{key}"] = value
    metadata = {key: value for key, value in metadata.items() if value is not ...}
    return shape_from_gguf(metadata, header.tensors, vocab_size=64, rope_divisors=rope, where="m.gguf")


def gguf_again(w: World, remedy: str) -> None:
    loaded_gguf(gguf_file(w))


def refused_gguf(key: str, **changes: Any) -> None:
    case(f"model/families/gguf_metadata.py:{key}", lambda w: described(w, **changes), gguf_again)


case(
    "model/families/gguf_metadata.py:shape_from_gguf: supported are {} (Mistral and SmolLM2 files have architecture "
    "llama)",
    lambda w: described(w, arch="mamba9"),
    lambda w, remedy: in_turn(lambda arch: described(w, arch=arch), listed(remedy, "supported are")),
)
refused_gguf("shape_from_gguf: use a dense model", expert_count=8)
case(
    "model/families/gguf_metadata.py:shape_from_gguf: it must be at least 1",
    lambda w: described(w, attention__head_count=0),
    lambda w, remedy: described(w, attention__head_count=2 * number_in(remedy)),
)
refused_gguf("shape_from_gguf: use a model without partial RoPE", rope__dimension_count=4)
refused_gguf("GGUFKeys.integer: download it again", embedding_length=...)
refused_gguf("GGUFKeys.integer: download it again: expected an integer up to {}", block_count="two")
refused_gguf("GGUFKeys.number: download it again: expected a number", rope__freq_base="fast")
case(
    "model/families/gguf_metadata.py:_llama3_scaling: use the model's Hugging Face folder",
    lambda w: described(w, rope=[1.0, 2.0, 9.0, 4.0]),
    lambda w, remedy: read_shape(w.model),
)
case(
    "facts/gguf_header.py:read_gguf_header: check the path",
    lambda w: read_gguf_header(w.tmp / "absent.gguf"),
    lambda w, remedy: read_gguf_header(gguf_file(w)),
)
DAMAGED_GGUF = "the file is damaged or not GGUF; download it again"


def broken_gguf(change: Callable[[bytes], bytes]) -> Callable[[World], object]:
    def provoke(w: World) -> object:
        path = gguf_file(w)
        path.write_bytes(change(path.read_bytes()))
        return loaded_gguf(path)

    return provoke


case(
    f"facts/gguf_header.py:read_gguf_header: {DAMAGED_GGUF}", broken_gguf(lambda data: data[:10]), gguf_again
)
case(f"facts/gguf_header.py:_Reader.fail: {DAMAGED_GGUF}", broken_gguf(lambda data: data[:200]), gguf_again)
case(
    "facts/gguf_header.py:_Reader.header: supported are little-endian files of version 2 and 3",
    broken_gguf(lambda data: data[:4] + (99).to_bytes(4, "little") + data[8:]),
    lambda w, remedy: in_turn(
        lambda version: broken_gguf(lambda data: data[:4] + int(version).to_bytes(4, "little") + data[8:])(w),
        listed(remedy, "version"),
    ),
)
INCOMPLETE_GGUF = "the file is damaged or incomplete; download it again"
case(f"model/weights_gguf.py:_layout: {INCOMPLETE_GGUF}", broken_gguf(lambda data: data[:-64]), gguf_again)


def retyped(kind: int) -> Callable[[World], object]:
    """Another quantization type at a tensor's entry."""

    def provoke(w: World) -> object:
        path = gguf_file(w)
        data = bytearray(path.read_bytes())
        name = b"blk.0.attn_q.weight"
        at = data.index(len(name).to_bytes(8, "little") + name) + 8 + len(name) + 4 + 8 * 2
        data[at : at + 4] = kind.to_bytes(4, "little")
        path.write_bytes(data)
        return loaded_gguf(path)

    return provoke


case(f"model/weights_gguf.py:_layout: {INCOMPLETE_GGUF}", retyped(12), gguf_again)


def follow_gguf_types(w: World, remedy: str) -> None:
    import gguf

    offered = listed(remedy, "supported are")
    for name in ("F32", "F16", "BF16"):
        assert name in offered
        loaded_gguf(gguf_file(w, f"{name}.gguf", kind=gguf.GGMLQuantizationType[name]))


case("model/weights_gguf.py:_layout: supported are {}", retyped(999), follow_gguf_types)


def overlapping(w: World) -> object:
    path = gguf_file(w)
    data = bytearray(path.read_bytes())
    tensors = read_gguf_header(path).tensors.values()
    for tensor in tensors:
        name = tensor.name.encode()
        at = data.index(len(name).to_bytes(8, "little") + name) + 8 + len(name) + 4 + 8 * len(tensor.dims) + 4
        data[at : at + 8] = bytes(8)
    start = min(tensor.offset for tensor in tensors)
    largest = max(4 * int(np.prod(tensor.dims)) for tensor in tensors)
    path.write_bytes(data[: start + largest])
    return loaded_gguf(path)


case(f"model/weights_gguf.py:survey_gguf: {INCOMPLETE_GGUF}", overlapping, gguf_again)
case(
    "model/source.py:shape_of_header: download the file of the complete model",
    lambda w: read_shape(gguf_file(w, drop="token_embd.weight")),
    gguf_again,
)
case(
    "model/source.py:_rope_divisors: download the file again",
    lambda w: read_shape(gguf_file(w, extra={"rope_freqs.weight": np.ones((2, 2), dtype=np.float32)})),
    gguf_again,
)


BIASED = {"family": "qwen2", "qkv_bias": True, "o_bias": True}
"""Biases that no GGUF file of the family has a name for."""


def biased(w: World) -> object:
    return load_weights(fresh(**BIASED), gguf_file(w))


def follow_hf_folder(w: World, remedy: str) -> None:
    assert "Hugging Face folder" in remedy
    decoder = fresh(**BIASED)
    (w.tmp / "biased").mkdir()
    save_file(dict(decoder.state_dict()), w.tmp / "biased" / WEIGHTS)
    (w.tmp / "biased" / "config.json").write_text("{}")
    load_weights(decoder, w.tmp / "biased")


case("model/families/base.py:Family.gguf_name: use its Hugging Face folder", biased, follow_hf_folder)
