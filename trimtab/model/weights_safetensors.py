"""Reads slices of tensors from a Hugging Face folder's safetensors files, one or several with an index."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from trimtab.facts.errors import ModelError
from trimtab.facts.run_layout import PARAMETERS, is_checkpoint
from trimtab.facts.shapes import ModelShape
from trimtab.facts.slices import Slice
from trimtab.model import weights_packed as packed
from trimtab.model.families import family
from trimtab.model.families.config_json import read_model_json
from trimtab.model.source import PICKLE_SUFFIXES, pickle_error
from trimtab.model.weights_checks import check_dims, check_layers, check_names
from trimtab.model.weights_reader import Provenance, WeightReader

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}


@dataclass(frozen=True)
class _Stored:
    """A tensor as declared in a file's header."""

    file: str
    name: str
    dims: tuple[int, ...]
    format: str
    parts: dict[str, _Stored] = field(default_factory=dict)
    """For a weight quantized by bitsandbytes: its other tensors, by suffix."""


class FolderReader(WeightReader):
    """Reads the tensors of a folder in their stored dtype, packed ones dequantized by default; see `open_weights`."""

    def __init__(self, shape: ModelShape, folder: Path) -> None:
        files = weight_files(folder)
        stored, ignored = survey_folder(shape, folder)
        dims = dict(shape.parameters())
        self._folder, self._stored = folder, stored
        self._closing = ExitStack()
        self._opened: dict[str, Any] = {}
        self.dims = {name: dims[name] for name in sorted(stored, key=lambda n: files.index(stored[n].file))}
        self.provenance = Provenance(
            path=folder,
            kind="hf",
            files={file: (folder / file).stat().st_size for file in files},
            formats=dict(Counter(_format(entry) for entry in stored.values())),
            num_tensors=len(stored),
            ignored=ignored,
        )

    def __enter__(self) -> Self:
        # All files are opened: a quantized weight's tensors may be in several of them.
        with ExitStack() as stack:
            for file in self.provenance.files:
                self._opened[file] = stack.enter_context(_open(self._folder / file))
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._opened.clear()
        self._closing.close()

    def file_of(self, name: str) -> str:
        return str(self._folder / self._stored[name].file)

    def is_packed(self, name: str) -> bool:
        return bool(self._stored[name].parts)

    def read(self, name: str, part: Slice) -> torch.Tensor:
        entry = self._stored[name]
        if entry.parts:
            return packed.read_dequantized(self._tensors(entry), part, f"{self.file_of(name)}: {name}")
        piece = self._opened[entry.file].get_slice(entry.name)
        return piece[part.start : part.stop] if part.dim == 0 else piece[:, part.start : part.stop]

    def read_packed(self, name: str, part: Slice) -> packed.PackedWeight:
        return packed.read(self._tensors(self._stored[name]), part, f"{self.file_of(name)}: {name}")

    def _tensors(self, entry: _Stored) -> dict[str, torch.Tensor]:
        """Returns all tensors of a quantized weight, as views of the mapped files, with names relative to "weight"."""
        found = {"weight": self._opened[entry.file].get_tensor(entry.name)}
        for part, other in entry.parts.items():
            found[packed.part_name(part)] = self._opened[other.file].get_tensor(other.name)
        return found


def stored_quantization(folder: Path) -> packed.StoredQuantization | None:
    """Returns the quantization of the first quantized weight in a folder; None if there is none. Reads a few bytes."""
    if is_checkpoint(folder):
        return None
    for file in weight_files(folder):
        with _open(folder / file) as opened:
            for key in opened.keys():  # noqa: SIM118  (safe_open is no dict)
                owner = packed.owner_of(key)
                if owner is None or owner[1] not in packed.METADATA_PARTS:
                    continue
                if owner[1] == packed.INT8_SCALES:
                    return packed.StoredQuantization("int8", 0, False)
                packed.check_metadata_size(tuple(opened.get_slice(key).get_shape()), key)
                return packed.quantization_of({"weight." + owner[1]: opened.get_tensor(key)})
    return None


def packed_names(folder: Path) -> set[str]:
    """Returns the names of the quantized weights. Reads only headers."""
    found: set[str] = set()
    if is_checkpoint(folder):
        return found
    for file in weight_files(folder):
        with _open(folder / file) as opened:
            owners = map(packed.owner_of, opened.keys())
            found |= {owner[0] for owner in owners if owner is not None}
    return found


def _format(entry: _Stored) -> str:
    if not entry.parts:
        return _FLOATS[entry.format]
    return "int8" if packed.INT8_SCALES in entry.parts else "nf4"


def weight_files(folder: Path) -> list[str]:
    """Returns the names of the folder's safetensors files, in order; raises ModelError if there are none."""
    if is_checkpoint(folder):
        return _checkpoint_files(folder)
    if (folder / INDEX).is_file():
        return _indexed_files(folder)
    if (folder / SINGLE).is_file():
        return [SINGLE]
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    pickles = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICKLE_SUFFIXES)
    if pickles:
        raise pickle_error(pickles[0])
    raise ModelError(
        f"{folder} has no {SINGLE}" + (f" and no {INDEX} for its {len(others)} shards" if others else ""),
        "give a folder with safetensors weights, or set model.init: random to train from scratch",
    )


def _checkpoint_files(folder: Path) -> list[str]:
    """Returns the files of a run's checkpoint, which contain weights under a prefix, and optimizer states."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names or any(not name.startswith("shard-00001-") for name in names):
        raise ModelError(
            f"{folder} is a sharded checkpoint, whose files contain shards of weights",
            "export it (`trimtab export hf`) and name that folder",
        )
    return names


def _stored_keys(opened: Any, folder: Path) -> list[tuple[str, str]]:
    """Returns (key in the file, name of the weight) of all weights in a file."""
    if not is_checkpoint(folder):
        return [(key, key) for key in opened.keys()]  # noqa: SIM118  (safe_open is no dict)
    return [
        (key, key.removeprefix(PARAMETERS))
        for key in opened.keys()  # noqa: SIM118
        if key.startswith(PARAMETERS)
    ]


def _indexed_files(folder: Path) -> list[str]:
    where = folder / INDEX
    weight_map = read_model_json(where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{where} has no weight_map", "download the index again")
    names = sorted({str(file) for file in weight_map.values()})
    for name in names:
        # Only plain file names: an index must not reference files outside its folder.
        if Path(name).name != name or name in ("", ".", "..") or "\\" in name or "\0" in name:
            raise ModelError(
                f"{where} names a file outside its folder: {name!r}",
                "do not use this copy; download the model from another source",
            )
        if not name.endswith(".safetensors"):
            raise pickle_error(folder / name)
        if not (folder / name).is_file():
            raise ModelError(f"{folder} has no {name}, which its index lists", "complete the download")
    return names


def survey_folder(shape: ModelShape, folder: Path) -> tuple[dict[str, _Stored], list[str]]:
    """Like `_declared`, and validates names, sizes and dtypes against the shape; reads only headers."""
    stored, ignored = _declared(shape, folder)
    check_layers(shape, len(stored), "num_hidden_layers", str(folder))
    wanted = dict(shape.parameters())
    check_names(wanted, {name: entry.name for name, entry in stored.items()}, str(folder))
    for name, dims in wanted.items():
        entry = stored[name]
        where = str(folder / entry.file)
        if entry.parts:
            found = _packed_dims(entry, folder)
            check_dims(name, found, dims, where, shape)
            continue
        check_dims(name, entry.dims, dims, where, shape)
        if entry.format not in _FLOATS:
            raise ModelError(
                f"{where}: {name} is stored as {entry.format}", f"supported are {', '.join(_FLOATS)} weights"
            )
    return stored, ignored


def _packed_dims(entry: _Stored, folder: Path) -> tuple[int, ...]:
    """Reads the dimensions of a quantized weight from its metadata."""
    metadata = next((part for part in entry.parts if part in packed.METADATA_PARTS), None)
    if metadata is None:
        raise ModelError(
            f"{folder / entry.file}: {entry.name} is quantized without quantization metadata",
            "complete the download",
        )
    if metadata == packed.INT8_SCALES:
        return entry.dims
    other = entry.parts[metadata]
    packed.check_metadata_size(other.dims, other.name)
    with _open(folder / other.file) as opened:
        return packed.dims_of({packed.part_name(metadata): opened.get_tensor(other.name)})


def _declared(shape: ModelShape, folder: Path) -> tuple[dict[str, _Stored], list[str]]:
    """Returns all stored tensors by trimtab's names, and the names of ignored tensors."""
    maps = family(shape.family)
    stored: dict[str, _Stored] = {}
    parts: dict[str, dict[str, _Stored]] = {}
    ignored: list[str] = []
    for file in weight_files(folder):
        with _open(folder / file) as opened:
            for key, plain in _stored_keys(opened, folder):
                owner = packed.owner_of(plain)
                if owner is not None:
                    piece = opened.get_slice(key)
                    part = _Stored(file, key, tuple(piece.get_shape()), piece.get_dtype())
                    parts.setdefault(maps.hf_name(owner[0]), {})[owner[1]] = part
                    continue
                name = maps.hf_name(plain)
                if maps.ignores_hf(plain) or (shape.tie_embeddings and name == "lm_head.weight"):
                    ignored.append(key)
                    continue
                if name in stored:
                    raise ModelError(
                        f"{folder}: {name} is in {stored[name].file} and in {file}",
                        "remove the file that does not belong to this model, and its index entries",
                    )
                piece = opened.get_slice(key)
                stored[name] = _Stored(file, key, tuple(piece.get_shape()), piece.get_dtype())
    for name, found in parts.items():
        if name not in stored:
            raise ModelError(
                f"{folder} has {next(iter(found.values())).name} without its weight",
                "complete the download",
            )
        stored[name] = replace(stored[name], parts=found)
    return stored, ignored


def _open(path: Path) -> Any:
    """Opens a file with safetensors, which validates the header's offsets against the file's size."""
    try:
        # safetensors reports every file that it cannot open as missing.
        path.open("rb").close()
    except OSError as err:
        raise ModelError(
            f"{path} cannot be read ({err.strerror})",
            "check the permissions of the file and its folder"
            if isinstance(err, PermissionError)
            else "check the disk",
        ) from err
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as err:
        raise ModelError(
            f"{path} is not a complete safetensors file ({err})",
            "it is damaged or incomplete; download it again",
        ) from err
