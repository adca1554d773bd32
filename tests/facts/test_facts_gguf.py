"""GGUF headers: valid ones are read; damaged or malicious ones raise, without long loops, allocations or crashes."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.facts.errors import ModelError
from trimtab.facts.gguf_header import is_gguf, read_gguf_header
from trimtab.model.families.gguf_metadata import shape_from_gguf

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 10_000.0,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(
    keys: list[bytes], tensors: list[bytes], version: int = 3, counts: tuple[int, int] | None = None
) -> bytes:
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(keys) + b"".join(tensors)


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


KEYS = [
    key("a.text", 8, text("hällo")),
    key("a.number", 4, struct.pack("<I", 7)),
    key("a.flag", 7, b"\x01"),
    key("a.floats", 9, struct.pack("<IQ3f", 6, 3, 1.0, 2.0, 3.0)),
    key("a.words", 9, struct.pack("<IQ", 8, 2) + text("x") + text("yy")),
]
WHOLE = header(KEYS, [tensor("t", (4, 2))]).ljust(256, b"\0") + b"\0" * 64


def write(path: Path, content: bytes) -> Path:
    (path / "m.gguf").write_bytes(content)
    return path / "m.gguf"


def test_a_valid_header(tmp_path: Path) -> None:
    read = read_gguf_header(write(tmp_path, WHOLE))
    assert read.metadata == {
        "a.text": "hällo",
        "a.number": 7,
        "a.flag": True,
        "a.floats": [1.0, 2.0, 3.0],
        "a.words": ["x", "yy"],
    }
    entry = read.tensors["t"]
    assert (entry.dims, entry.type_id, entry.offset % 32) == ((2, 4), 0, 0)
    assert entry.offset >= len(header(KEYS, [tensor("t", (4, 2))]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too short"),
        (b"GGUF", "too short"),
        (b"PK\x03\x04" + WHOLE[4:], "does not begin with GGUF"),
        (header([], [], version=1).ljust(64, b"\0"), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0).ljust(64, b"\0"), "big-endian"),
        (header(KEYS, [], counts=(0, 2**62)), "claims"),
        (header([], [], counts=(2**62, 0)), "claims"),
        (header([text("k" * 8)[:8] + b"k"], [], counts=(0, 1)).ljust(40, b"\0"), "beyond the file"),
        (header([struct.pack("<Q", 2**63)], [], counts=(0, 1)).ljust(64, b"\0"), "beyond the file"),
        (header([key("k", 9, struct.pack("<IQ", 0, 2**60))], []).ljust(64, b"\0"), "beyond the file"),
        (header([key("k", 9, struct.pack("<IQ", 8, 2**60))], []).ljust(64, b"\0"), "beyond the file's end"),
        (header([key("k", 77, b"")], []).ljust(64, b"\0"), "unknown metadata type 77"),
        (header([key("k", 9, struct.pack("<IQ", 9, 1) * 9)], []).ljust(512, b"\0"), "unknown metadata type"),
        (header([KEYS[1], KEYS[1]], []).ljust(256, b"\0"), "appears twice"),
        (header([], [tensor("t", (2,)), tensor("t", (2,))]).ljust(256, b"\0"), "appears twice"),
        (header([], [tensor("t", (2, 2, 2, 2, 2))]).ljust(256, b"\0"), "5 dimensions"),
        (header([], [tensor("t", (2**62,))]).ljust(256, b"\0"), "has dimensions"),
        (header([], [tensor("t", (0,))]).ljust(256, b"\0"), "has dimensions"),
        (header([], [tensor("t", (2,), offset=2**50)]).ljust(256, b"\0"), "begins beyond"),
        (
            header([key("general.alignment", 4, struct.pack("<I", 3))], []).ljust(256, b"\0"),
            r"general\.alignment is 3",
        ),
    ],
)
def test_damaged_headers(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        read_gguf_header(write(tmp_path, content))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_byte_changes_raise_only_model_errors(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    path = write(tmp_path_factory.mktemp("g"), bytes(content[:cut]))
    with contextlib.suppress(ModelError):
        read_gguf_header(path)


def test_gguf_files_are_recognized(tmp_path: Path) -> None:
    assert is_gguf(write(tmp_path, b"anything"))
    (tmp_path / "blob").write_bytes(WHOLE)
    (tmp_path / "other").write_bytes(b"no")
    assert is_gguf(tmp_path / "blob")
    assert not is_gguf(tmp_path / "other")
    assert not is_gguf(tmp_path)
    with pytest.raises(ModelError, match="does not exist"):
        read_gguf_header(tmp_path / "nowhere.gguf")


def shape(changes: dict[str, Any], names: tuple[str, ...] = ("token_embd.weight",), **more: Any) -> Any:
    return shape_from_gguf({**METADATA, **changes}, names, vocab_size=100, **more)


def test_shapes_from_metadata() -> None:
    plain = shape({})
    assert (plain.family, plain.attention.head_dim, plain.block.norm.eps, plain.tie_embeddings) == (
        "llama",
        8,
        1e-5,
        True,
    )
    assert not shape({}, ("output.weight",)).tie_embeddings
    biased = shape({}, ("blk.0.attn_q.bias", "blk.0.attn_q_norm.weight"))
    assert (biased.attention.qkv_bias, biased.attention.qk_norm, biased.attention.o_bias) == (
        True,
        "head",
        False,
    )
    assert (
        shape({"llama.attention.key_length": 16, "llama.rope.dimension_count": 16}).attention.head_dim == 16
    )
    assert shape({"llama.attention.sliding_window": 9}).family == "mistral"
    assert shape({"llama.attention.head_count_kv": [2, 2]}).attention.num_kv_heads == 2


def test_rope_scaling_from_metadata() -> None:
    scaling = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    original = {"llama.rope.scaling.original_context_length": 128}
    yarn = shape({**scaling, **original}).attention.rope.scaling
    assert (yarn.kind, yarn.factor, yarn.original_max_positions, yarn.attention_factor) == (
        "yarn",
        4.0,
        128,
        None,
    )
    # llama.cpp multiplies YaRN's own 1 + 0.1 ln 4 by its attn_factor.
    assert shape(
        {**scaling, **original, "llama.rope.scaling.attn_factor": 0.5}
    ).attention.rope.scaling.attention_factor == (pytest.approx(0.5 * 1.138629, rel=1e-5))
    assert shape({"llama.rope.scaling.type": "none"}).attention.rope.scaling is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma"}, "'gemma'.*supported are llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"llama.block_count": None}, r"no llama\.block_count"),
        ({"llama.block_count": "two"}, "expected an integer"),
        ({"llama.attention.head_count": 0}, "head_count is 0"),
        ({"llama.attention.head_count_kv": [2, 1]}, "expected an integer"),
        ({"llama.rope.dimension_count": 4}, "partial RoPE"),
        ({"llama.rope.freq_base": float("inf")}, "expected a number"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "unknown scaling"),
    ],
)
def test_unsupported_metadata_raises(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        shape(changes)
