"""Slices of weights: unknown names, ranges out of bounds, packed weights that cannot be cut there."""

from __future__ import annotations

import re
from pathlib import Path

from cases import World, case, listed
from quantized_world import packed_folder
from safetensors.torch import load_file, save_file

from trimtab.facts.shapes import ModelShape, uniform_shape
from trimtab.facts.slices import Slice
from trimtab.model import read_shape, read_weights

NORM, EMBEDDINGS, UP = "model.norm.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"


def sliced(folder: Path, name: str, dim: int, start: int, stop: int, **options: bool) -> None:
    found = dict(read_weights(read_shape(folder), folder, {name: Slice(dim, start, stop)}, **options))  # type: ignore[arg-type]
    assert name in found


def quoted(remedy: str) -> str:
    return remedy.split("'")[1]


case(
    "facts/slices.py:check_parameter_names: did you mean {}?",
    lambda w: sliced(w.model, "model.norms.weight", 0, 0, 1),
    lambda w, remedy: sliced(w.model, quoted(remedy), 0, 0, 1),
)
case(
    "facts/slices.py:check_parameter_names: `ModelShape.parameters()` lists their names",
    lambda w: sliced(w.model, "?", 0, 0, 1),
    lambda w, remedy: [sliced(w.model, name, 0, 0, 1) for name, _ in read_shape(w.model).parameters()],
)
case(
    "facts/slices.py:check_slices: slice dimension 0",
    lambda w: sliced(w.model, NORM, 1, 0, 1),
    lambda w, remedy: sliced(w.model, NORM, int(remedy.split()[-1]), 0, 1),
)
case(
    "facts/slices.py:check_slices: slice dimension 0 or 1",
    lambda w: sliced(w.model, EMBEDDINGS, 2, 0, 1),
    lambda w, remedy: [
        sliced(w.model, EMBEDDINGS, int(dim), 0, 1) for dim in listed(remedy, "slice dimension")
    ],
)
case(
    "facts/slices.py:check_slices: give whole numbers with 0 <= start <= stop <= {}",
    lambda w: sliced(w.model, NORM, 0, 0, 10**9),
    lambda w, remedy: sliced(w.model, NORM, 0, 0, int(remedy.split()[-1])),
)


def poisoned(w: World) -> None:
    file = w.own() / "model.safetensors"
    tensors = load_file(file)
    tensors[NORM][0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    sliced(w.own(), NORM, 0, 0, 1)


case(
    "model/weights.py:_read_parts: download the weights again",
    poisoned,
    lambda w, remedy: sliced(w.again(), NORM, 0, 0, 1),
)


def packed(w: World, intermediate_size: int = 1024) -> Path:
    """Rows of 64 values: a block of scales is 256 of them."""
    shape: ModelShape = uniform_shape(
        "llama", 64, 64, intermediate_size, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16
    )
    folder = w.tmp / f"packed-{intermediate_size}"
    return folder if folder.exists() else packed_folder(folder, shape, "nf4")


def follow_multiples(w: World, remedy: str) -> None:
    step = int(re.findall(r"multiples of (\d+)", remedy)[0])
    sliced(packed(w), UP, 0, step, 3 * step, keep_packed=True)
    sliced(packed(w), UP, 0, 10, 20)


CUT = "model/weights_packed.py:_cut_rows: "
case(
    CUT + "slice at multiples of {} rows, or read the dequantized weight (keep_packed=False)",
    lambda w: sliced(packed(w), UP, 0, 10, 20, keep_packed=True),
    follow_multiples,
)
case(
    CUT + "read all rows, or the dequantized weight (keep_packed=False)",
    lambda w: sliced(packed(w, 128), UP, 0, 10, 20, keep_packed=True),
    lambda w, remedy: (
        sliced(packed(w, 128), UP, 0, 0, 128, keep_packed=True),
        sliced(packed(w, 128), UP, 0, 10, 20, keep_packed=False),
    ),
)
case(
    CUT + "slice dimension 0, or read the dequantized weight (keep_packed=False)",
    lambda w: sliced(packed(w), UP, 1, 0, 32, keep_packed=True),
    lambda w, remedy: (
        sliced(packed(w), UP, 0, 0, 256, keep_packed=True),
        sliced(packed(w), UP, 1, 0, 32, keep_packed=False),
    ),
)
