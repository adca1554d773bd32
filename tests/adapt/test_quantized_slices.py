"""Slices of weights quantized by bitsandbytes: equal to slices of the whole weight, packed or dequantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_world import packed_folder
from safetensors.torch import load_file, save_file
from test_model_slices import pages_read

from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import uniform_shape
from trimtab.facts.slices import Slice
from trimtab.kernels import int8, nf4
from trimtab.kernels.nf4 import NF4Weight
from trimtab.model import build, load_weights, read_weights, weights_packed
from trimtab.model import weights as weights_module

SIZES: dict[str, Any] = {"num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
ODD = uniform_shape("qwen2", 64, 48, 71, qkv_bias=True, **SIZES)
"""Rows of 48, 32 and 71 values, none of which is a multiple of a block of 64."""
EVEN = uniform_shape("llama", 64, 128, 1024, **SIZES)
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
FORMS: dict[str, tuple[Any, str, dict[str, int]]] = {
    "nf4": (EVEN, "nf4", {"nested": 0}),
    "nf4-double": (EVEN, "nf4", {"nested": 16}),  # many blocks of scales in a small weight
    "nf4-double-default": (EVEN, "nf4", {}),
    "nf4-odd": (ODD, "nf4", {"nested": 0}),
    "nf4-odd-double": (ODD, "nf4", {"nested": 4}),
    "nf4-odd-32": (ODD, "nf4", {"block": 32, "nested": 2}),
    "int8": (ODD, "int8", {}),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, torch.Tensor]]]:
    """The folder of every form, and its weights, each dequantized as a whole."""
    folder, found = tmp_path_factory.mktemp("packed"), {}
    for form, (shape, kind, options) in FORMS.items():
        path, whole = packed_folder(folder / form, shape, kind, **options), {}
        for name, weight in read_weights(shape, path, keep_packed=True):
            if isinstance(weight, torch.Tensor):
                whole[name] = weight.float()
            elif isinstance(weight, NF4Weight):
                whole[name] = nf4.dequantize(weight, dtype=torch.float32)
            else:
                whole[name] = int8.dequantize(weight, dtype=torch.float32)
        found[form] = (path, whole)
    return found


@st.composite
def slices_of(draw: st.DrawFn, whole: dict[str, torch.Tensor]) -> dict[str, Slice]:
    found = {}
    for name, tensor in whole.items():
        dim = draw(st.integers(0, tensor.ndim - 1))
        start, stop = sorted(draw(st.tuples(*[st.integers(0, tensor.shape[dim])] * 2)))
        found[name] = Slice(dim, start, stop)
    return found


def cut(tensor: torch.Tensor, part: Slice) -> torch.Tensor:
    return tensor.narrow(part.dim, part.start, part.stop - part.start)


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_dequantized_slices_equal_slices_of_the_whole(form: str, sources: Any, data: st.DataObject) -> None:
    path, whole = sources[form]
    slices = data.draw(slices_of(whole))
    for name, tensor in read_weights(FORMS[form][0], path, slices):
        assert torch.equal(tensor.float(), cut(whole[name], slices[name])), name


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_packed_slices_equal_slices_of_the_whole_or_raise(
    form: str, sources: Any, data: st.DataObject
) -> None:
    path, whole = sources[form]
    shape, _, options = FORMS[form]
    block, nested = options.get("block", 64), options.get("nested", 256) or 1
    for name, part in data.draw(slices_of(whole)).items():
        rows, columns = whole[name].shape if whole[name].ndim == 2 else (1, 1)
        packed_nf4 = form != "int8" and "_proj.weight" in name
        begins = part.start * columns % (block * nested) == 0
        ends = part.stop == rows or part.stop * columns % block == 0
        whole_blocks = part.dim == 0 and (part.start == part.stop or (begins and ends))
        read = read_weights(shape, path, {name: part}, names=[name], keep_packed=True)
        if packed_nf4 and not whole_blocks:
            with pytest.raises(ModelError, match=r"keep_packed=False"):
                next(read)
            continue
        ((_, weight),) = read
        if isinstance(weight, torch.Tensor):
            assert "_proj.weight" not in name
            continue
        dequantize: Any = nf4.dequantize if isinstance(weight, NF4Weight) else int8.dequantize
        assert torch.equal(dequantize(weight, dtype=torch.float32), cut(whole[name], part)), name


def test_the_rows_that_an_error_suggests_can_be_read(sources: Any) -> None:
    path, whole = sources["nf4-double-default"]
    with pytest.raises(ModelError, match=r"blocks of 64 whose scales are .* of 256; .*multiples of 128 rows"):
        dict(read_weights(EVEN, path, {UP: Slice(0, 64, 128)}, keep_packed=True))
    halves = [Slice(0, 0, 512), Slice(0, 512, 1024)]
    found = [dict(read_weights(EVEN, path, {UP: half}, keep_packed=True))[UP] for half in halves]
    numbers = [nf4.dequantize(weight, dtype=torch.float32) for weight in found]  # type: ignore[arg-type]
    assert torch.equal(torch.cat(numbers), whole[UP])
    stored = load_file(path / "model.safetensors")
    codes = torch.cat([weight.codes for weight in found])  # type: ignore[union-attr]
    assert torch.equal(codes, stored[UP].view(-1))
    with pytest.raises(ModelError, match="packed row by row and cannot be sliced by columns 0:64"):
        dict(read_weights(EVEN, path, {DOWN: Slice(1, 0, 64)}, keep_packed=True))


@pytest.mark.parametrize("form", FORMS)
def test_a_plain_model_is_loaded_in_chunks(form: str, sources: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, whole = sources[form]
    monkeypatch.setattr(weights_module, "_PIECE", 1000)
    monkeypatch.setattr(weights_packed, "_CHUNK", 500)
    decoder = build(FORMS[form][0], dtype="fp32", device="cpu", attention="reference")
    load_weights(decoder, path)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, whole[name]), name


def test_sizes_are_validated_for_the_whole_and_values_for_the_slice(tmp_path: Path) -> None:
    path = packed_folder(tmp_path / "m", EVEN, "nf4", nested=0)
    file, first = path / "model.safetensors", {UP: Slice(0, 0, 8)}
    whole = load_file(file)
    short = {**whole, f"{UP}.absmax": whole[f"{UP}.absmax"][:-1].clone()}
    save_file(short, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="absmax has 2047 of float32"):
        dict(read_weights(EVEN, path, first))
    whole[f"{UP}.absmax"][-1] = -1.0
    save_file(whole, file, metadata={"format": "pt"})
    for keep_packed in (False, True):
        dict(read_weights(EVEN, path, first, keep_packed=keep_packed))
        with pytest.raises(ModelError, match="negative scales"):
            dict(read_weights(EVEN, path, {UP: Slice(0, 1000, 1024)}, keep_packed=keep_packed))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc/self/smaps (Linux)")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_only_the_pages_of_rows_are_read(kind: str, tmp_path: Path) -> None:
    shape = uniform_shape("llama", 64, 1024, 16384, **SIZES)
    path = packed_folder(tmp_path / "m", shape, kind)
    file = path / "model.safetensors"
    part = Slice(0, 4096, 6144)
    read = read_weights(shape, path, {UP: part}, names=[UP])
    _, tensor = next(read)
    touched = pages_read(file)  # the reader is still open
    read.close()  # type: ignore[attr-defined]
    stored = 16384 * 1024 / (2 if kind == "nf4" else 1)
    assert tuple(tensor.shape) == (2048, 1024)
    # In addition to the codes some pages of the header, the scales and the tables, 64 KiB or more at a time.
    assert stored / 8 <= touched <= stored / 8 + 5 * 2**19 < stored / 2, (touched, stored)
