"""Weights read by slices: equal to slices of the whole tensor, from every family and format, reading only the slice."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_model_gguf import random_blocks, random_decoder, write_gguf

from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape, uniform_shape
from trimtab.facts.slices import Slice
from trimtab.model import build, load_weights, read_shape, read_weights, save_folder, weights_gguf
from trimtab.model import weights as weights_module
from trimtab.model.families import config_from_shape, family
from trimtab.model.weights_reader import open_weights

Q = GGMLQuantizationType
SIZES: dict[str, Any] = {"num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
SHAPES = {
    "llama": uniform_shape(
        "llama", 48, 256, 256, head_dim=24, qkv_bias=True, o_bias=True, mlp_bias=True, **SIZES
    ),
    "mistral": uniform_shape("mistral", 48, 256, 256, head_dim=64, sliding_window=5, **SIZES),
    "qwen2": uniform_shape("qwen2", 48, 256, 256, head_dim=64, qkv_bias=True, tie_embeddings=True, **SIZES),
    "qwen3": uniform_shape("qwen3", 48, 256, 256, head_dim=64, qk_norm=True, **SIZES),
}
KINDS = {"llama": (Q.F32, Q.Q4_1), "mistral": (Q.Q8_0, Q.Q6_K), "qwen2": (Q.Q4_K,), "qwen3": (Q.F16, Q.BF16)}
FOLDERS = {
    "llama": ("fp32", 10**9),
    "mistral": ("bf16", 10**9),
    "qwen2": ("fp16", 90_000),
    "qwen3": ("bf16", 90_000),
}
CASES = [
    *(f"{name}-{dtype}" for name, (dtype, _) in FOLDERS.items()),
    *(f"{name}-{kind.name}.gguf" for name, kinds in KINDS.items() for kind in kinds),
]


def write(path: Path) -> Path:
    """The model of a case."""
    name, _, form = path.name.removesuffix(".gguf").partition("-")
    source = random_decoder(SHAPES[name])
    if path.suffix != ".gguf":
        save_folder(source, path, dtype=form, max_shard_bytes=FOLDERS[name][1])
        return path
    kind, raw = Q[form], {}
    for index, (parameter_name, parameter) in enumerate(source.named_parameters()):
        if parameter.ndim == 2:
            stored = family(name).gguf_name(parameter_name)
            try:
                raw[stored] = quantize(parameter.detach().numpy(), kind)
            except NotImplementedError:
                raw[stored] = random_blocks(kind, *parameter.shape, seed=index)
    write_gguf(source, path, kind, raw)
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, torch.Tensor]]]:
    """Path and whole weights of every case."""
    folder, found = tmp_path_factory.mktemp("sources"), {}
    for case in CASES:
        path = write(folder / case)
        decoder = build(read_shape(path), dtype="fp32", device="cpu", attention="reference")
        load_weights(decoder, path)
        found[case] = (path, {name: value.detach() for name, value in decoder.named_parameters()})
    return found


def cut(tensor: torch.Tensor, part: Slice) -> torch.Tensor:
    return tensor.narrow(part.dim, part.start, part.stop - part.start)


@st.composite
def slices_of(draw: st.DrawFn, shape: ModelShape) -> dict[str, Slice]:
    """Random slices of some parameters; empty ones and single rows among them."""
    found = {}
    for name, dims in shape.parameters():
        if draw(st.booleans()):
            dim = draw(st.integers(0, len(dims) - 1))
            start, stop = sorted(draw(st.tuples(*[st.integers(0, dims[dim])] * 2)))
            found[name] = Slice(dim, start, stop)
    return found


@pytest.mark.parametrize("case", CASES)
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_slices_equal_slices_of_the_whole(case: str, sources: Any, data: st.DataObject) -> None:
    path, whole = sources[case]
    shape = read_shape(path)
    slices = data.draw(slices_of(shape))
    seen = {}
    for name, tensor in read_weights(shape, path, slices):
        assert tensor.is_contiguous()
        seen[name] = tensor.float()
    assert seen.keys() == whole.keys()
    for name, tensor in seen.items():
        assert torch.equal(tensor, cut(whole[name], slices.get(name, Slice.whole(tuple(tensor.shape))))), name


@pytest.mark.parametrize("case", ["llama-F32.gguf", "mistral-Q8_0.gguf"])
def test_single_rows_of_interleaved_heads(case: str, sources: Any) -> None:
    path, whole = sources[case]
    with open_weights(read_shape(path), path) as reader:
        for kind in ("q_proj", "k_proj"):
            name = f"model.layers.0.self_attn.{kind}.weight"
            for row in range(whole[name].shape[0]):
                assert torch.equal(reader.read(name, Slice(0, row, row + 1))[0], whole[name][row]), (
                    name,
                    row,
                )


@pytest.mark.parametrize(("piece", "chunk"), [(256 * 7, 256 * 3), (256 * 50, 1)])
def test_results_do_not_depend_on_chunk_sizes(
    sources: Any, piece: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading reads a parameter in pieces of rows, dequantized in chunks."""
    monkeypatch.setattr(weights_module, "_PIECE", piece)
    monkeypatch.setattr(weights_gguf, "_CHUNK", chunk)
    for case in ("llama-fp32", "llama-F32.gguf", "qwen2-Q4_K.gguf"):
        path, whole = sources[case]
        decoder = build(read_shape(path), dtype="fp32", device="cpu", attention="reference")
        load_weights(decoder, path)
        for name, parameter in decoder.named_parameters():
            assert torch.equal(parameter, whole[name]), name
        assert weights_module.find_changed_weight(decoder, path) is None
        with torch.no_grad():
            decoder.model.embed_tokens.weight[-1, -1] += 1
        assert weights_module.find_changed_weight(decoder, path) == "model.embed_tokens.weight"


def test_stored_dtypes_and_chosen_names(sources: Any) -> None:
    path, _ = sources["mistral-bf16"]
    shape = read_shape(path)
    names = ["model.norm.weight", "lm_head.weight"]
    found = dict(read_weights(shape, path, {"model.norm.weight": Slice(0, 3, 5)}, names=names))
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()} == {
        "model.norm.weight": (torch.bfloat16, (2,)),
        "lm_head.weight": (torch.bfloat16, (48, 256)),
    }
    assert dict(read_weights(shape, path, names=[])) == {}


def test_arguments_are_validated_before_anything_is_read(sources: Any) -> None:
    for case in ("qwen2-fp16", "qwen2-Q4_K.gguf"):
        path, _ = sources[case]
        shape = read_shape(path)
        with pytest.raises(ModelError, match="out of range for dimension 0"):
            read_weights(shape, path, {"model.norm.weight": Slice(0, 0, 257)})
        with pytest.raises(ModelError, match=r"no parameter 'lm_head\.weight'"):  # tied
            read_weights(shape, path, {"lm_head.weight": Slice(0, 0, 1)})
        with pytest.raises(ModelError, match=r"did you mean 'model\.norm\.weight'"):
            read_weights(shape, path, names=["model.norms.weight"])
        with pytest.raises(ModelError, match=r"\[48, 256\], but the model has \[48, 128\]"):
            read_weights(
                uniform_shape(
                    "qwen2", 48, 128, 256, head_dim=64, qkv_bias=True, tie_embeddings=True, **SIZES
                ),
                path,
            )


def test_only_slices_that_are_read_must_be_finite(tmp_path: Path) -> None:
    shape = SHAPES["qwen3"]
    save_folder(random_decoder(shape), tmp_path / "m", dtype="fp32")
    file = tmp_path / "m/model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][40, 3] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    dict(read_weights(shape, tmp_path / "m", {"lm_head.weight": Slice(0, 0, 40)}))
    with pytest.raises(
        ModelError, match=r"lm_head\.weight contains NaN or infinity; download the weights again"
    ):
        dict(read_weights(shape, tmp_path / "m", {"lm_head.weight": Slice(0, 40, 48)}))


def test_headers_that_claim_more_than_the_file_has(sources: Any, tmp_path: Path) -> None:
    path, _ = sources["llama-fp32"]
    shape, content = read_shape(path), (path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    begin, end = header["model.norm.weight"]["data_offsets"]
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text((path / "config.json").read_text())
    for offsets in ([begin, 2**63], [2**64 - 8, 2**64 - 4], [begin + len(content), end + len(content)]):
        header["model.norm.weight"]["data_offsets"] = offsets
        text = json.dumps(header).encode()
        (tmp_path / "m/model.safetensors").write_bytes(
            len(text).to_bytes(8, "little") + text + content[8 + length :]
        )
        with pytest.raises(ModelError, match="not a complete safetensors file"):
            read_weights(shape, tmp_path / "m", {"model.norm.weight": Slice(0, 0, 1)})
    path, _ = sources["llama-Q4_1.gguf"]
    (tmp_path / "short.gguf").write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ModelError, match=r"beyond the file's"):
        read_weights(shape, tmp_path / "short.gguf", names=["model.embed_tokens.weight"])


LARGE = uniform_shape("llama", 16384, 4096, 4096, num_layers=1, num_heads=32, num_kv_heads=32, head_dim=128)
"""A gigabyte in fp32, a sparse file on disk."""
EMBEDDINGS, DOWN, QUERIES = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.self_attn.q_proj.weight",
)


def sparse_folder(folder: Path) -> Path:
    header, at = {}, 0
    for name, dims in LARGE.parameters():
        stop = at + 4 * math.prod(dims)
        header[name] = {"dtype": "F32", "shape": list(dims), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_from_shape(LARGE, dtype="float32")))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return folder


def sparse_gguf(path: Path, kind: GGMLQuantizationType) -> Path:
    writer, total = gguf.GGUFWriter(path, "llama"), 0
    block, size = GGML_QUANT_SIZES[kind]
    for name, dims in LARGE.parameters():
        stored, num_bytes = family("llama").gguf_name(name), math.prod(dims) // block * size
        writer.add_tensor_info(stored, dims, np.dtype(np.float32), num_bytes, raw_dtype=kind)
        total += num_bytes + 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + total)
    return path


def pages_read(file: Path) -> int:
    """Bytes of a file that this process has touched through its mappings of it."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            inside = line.endswith(str(file))
        elif inside and first == "Rss:":
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc/self/smaps (Linux)")
@pytest.mark.parametrize("form", ["folder", "F32", "Q8_0"])
@pytest.mark.parametrize(
    ("name", "part", "share"),
    [
        (EMBEDDINGS, Slice(0, 5000, 5512), 1 / 32),
        (QUERIES, Slice(0, 512, 1024), 1 / 8),  # four heads, interleaved in a GGUF file
    ],
    ids=["rows", "heads"],
)
def test_only_the_pages_of_rows_are_read(
    form: str, name: str, part: Slice, share: float, tmp_path: Path
) -> None:
    if form == "folder":
        path = sparse_folder(tmp_path / "m")
        file = path / "model.safetensors"
    else:
        path = file = sparse_gguf(tmp_path / "m.gguf", Q[form])
    dims = dict(LARGE.parameters())[name]
    stored = math.prod(dims) * (34 / 32 if form == "Q8_0" else 4)
    with open_weights(LARGE, path) as reader:
        before = pages_read(file)
        tensor = reader.read(name, part)
        assert float(tensor.sum()) == 0.0
        assert tuple(tensor.shape) == part.dims_of(dims)
        read = pages_read(file) - before
    # A page fault maps the pages around it that the page cache has: 64 KiB, or a large page of 2 MiB, at each end.
    assert share * stored - 4096 <= read <= share * stored + 2**22 < stored / 2, (read, stored)


def test_only_the_blocks_of_columns_are_dequantized(sources: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, whole = sources["mistral-Q8_0.gguf"]
    plain, seen = weights_gguf._dequantize, 0

    def counted(blocks_RB: np.ndarray, kind: Any) -> np.ndarray:
        nonlocal seen
        seen += blocks_RB.nbytes
        return plain(blocks_RB, kind)

    monkeypatch.setattr(weights_gguf, "_dequantize", counted)
    part = Slice(1, 40, 90)  # blocks 1 and 2 of 32 columns
    (found,) = read_weights(read_shape(path), path, {DOWN: part}, names=[DOWN])
    assert torch.equal(found[1], cut(whole[DOWN], part))
    assert seen == 256 * 2 * 34
