"""Files are validated against the config before any allocation; permissions of files that are read and written."""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from test_model_gguf import QWEN2, random_decoder, write_gguf

from trimtab.facts.errors import ModelError
from trimtab.facts.gguf_header import read_gguf_header
from trimtab.facts.shapes import uniform_shape
from trimtab.model import build, check_weights, init_weights, read_shape, save_folder

SHAPE = uniform_shape("llama", 64, 32, 48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8)
HUGE = 10**12


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    decoder = init_weights(build(SHAPE, dtype="fp32", device="cpu", attention="reference"), seed=0)
    save_folder(decoder, tmp_path / "model", dtype="fp32")
    return tmp_path / "model"


@contextmanager
def without_root_privileges() -> Iterator[None]:
    """Drops root's privileges inside, since root may read everything."""
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(65534)
        yield
    finally:
        if root:
            os.seteuid(0)


def test_valid_files_pass_the_checks(saved: Path, tmp_path: Path) -> None:
    check_weights(read_shape(saved), saved)
    write_gguf(random_decoder(QWEN2), tmp_path / "m.gguf")
    check_weights(read_shape(tmp_path / "m.gguf"), tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("vocab_size", f"vocab_size is {HUGE}"),
        ("hidden_size", f"hidden_size is {HUGE}"),
        ("intermediate_size", f"intermediate_size is {HUGE}"),
        ("num_hidden_layers", f"num_hidden_layers is {HUGE}"),
        ("head_dim", f"query heads × head_dim is {4 * HUGE}"),
    ],
)
def test_a_config_with_implausible_sizes(saved: Path, key: str, words: str) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, key: HUGE}))
    with pytest.raises(ModelError, match=words) as caught:
        check_weights(read_shape(saved), saved)
    assert str(saved) in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 6_488_096}, "hidden_size is 6488096"),
        ({"num_layers": 10**9}, "block_count is 1000000000"),
        ({"intermediate_size": 2**31}, "intermediate_size is"),
    ],
)
def test_a_gguf_header_with_implausible_sizes(changes: dict[str, int], words: str, tmp_path: Path) -> None:
    """Its metadata and its tensors have different sizes."""
    path = tmp_path / "m.gguf"
    write_gguf(random_decoder(QWEN2), path, claims=changes)
    with pytest.raises(ModelError, match=words) as caught:
        check_weights(read_shape(path), path)
    assert str(path) in str(caught.value)


def test_gguf_tensors_that_share_bytes(tmp_path: Path) -> None:
    """Overlapping tensors would let a small file allocate any amount of memory."""
    path = tmp_path / "m.gguf"
    write_gguf(random_decoder(QWEN2), path)
    check_weights(QWEN2, path)
    data = bytearray(path.read_bytes())
    tensors = read_gguf_header(path).tensors.values()
    for tensor in tensors:
        name = tensor.name.encode()
        # After its name an entry has the number of dimensions, the dimensions, the type and the offset.
        at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 8 * len(tensor.dims) + 4
        data[at : at + 8] = bytes(8)
    start = min(tensor.offset for tensor in tensors)
    largest = max(4 * math.prod(tensor.dims) for tensor in tensors)
    path.write_bytes(data[: start + largest])
    with pytest.raises(ModelError, match="some overlap"):
        check_weights(QWEN2, path)


def test_an_extra_tensor_has_the_name_that_is_in_the_file(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    save_file({**tensors, "foo.bar": tensors["model.norm.weight"].clone()}, saved / "model.safetensors")
    with pytest.raises(ModelError, match=r"unexpected tensors: foo\.bar"):
        check_weights(SHAPE, saved)


@pytest.mark.skipif(os.name == "nt", reason="POSIX rights")
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_weights_have_the_umask_permissions(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        decoder = init_weights(build(SHAPE, dtype="fp32", device="cpu", attention="reference"), seed=0)
        files = save_folder(decoder, tmp_path / "m", dtype="bf16", max_shard_bytes=4000)
    finally:
        os.umask(before)
    assert len(files) > 3
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o666 & ~umask}


@pytest.mark.skipif(os.name == "nt", reason="POSIX rights")
def test_an_unreadable_file_is_not_reported_as_damaged() -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are not readable by others
        os.chmod(place, 0o755)
        decoder = init_weights(build(SHAPE, dtype="fp32", device="cpu", attention="reference"), seed=0)
        save_folder(decoder, Path(place) / "m", dtype="fp32")
        os.chmod(Path(place) / "m", 0o755)
        (Path(place) / "m" / "model.safetensors").chmod(0)
        with (
            without_root_privileges(),
            pytest.raises(ModelError, match=r"cannot be read .*denied.*permissions") as caught,
        ):
            check_weights(SHAPE, Path(place) / "m")
    assert "damaged" not in str(caught.value)
