"""Weights from files into a decoder, tensor by tensor, every claim of a file checked before it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch

from trimtab.facts.errors import ModelError
from trimtab.facts.files import sha256_of
from trimtab.facts.shapes import ModelShape, check
from trimtab.kernels import int8, nf4
from trimtab.kernels.int8 import Int8Tensor
from trimtab.kernels.nf4 import NF4Weight
from trimtab.model.decoder import Decoder
from trimtab.model.source import source_kind

if TYPE_CHECKING:
    from trimtab.model.weights_packed import StoredPacking

Progress = Callable[[int, int, str], None]
"""Called as progress(tensors done, tensors in all, name) after each tensor."""

_CHUNK = 2**20
"""Numbers that are looked at at once: what that takes beside a small quantized model must be small too."""


class Taker(Protocol):
    """A layer that keeps its weight in a form of its own: quantized, say. It stands where the plain layer stood."""

    def take(self, weight: torch.Tensor) -> None:
        """Keeps a weight in 16 or 32 bits, on any device; ModelError if it cannot."""

    def take_packed(self, weight: NF4Weight | Int8Tensor) -> None:
        """Keeps a weight that is quantized already, bit for bit; ModelError if this layer is laid out otherwise."""


@dataclass(frozen=True)
class Provenance:
    """Where a model's weights came from.

    Example:
        >>> load_weights(decoder, "SmolLM2.gguf").formats  # doctest: +SKIP
        {'Q4_1': 210, 'F32': 61, 'Q8_0': 1}
    """

    path: Path
    kind: str
    """"hf" or "gguf"."""
    files: dict[str, int]
    """File name to bytes."""
    formats: dict[str, int]
    """Stored number format to number of tensors."""
    num_tensors: int
    ignored: list[str] = field(default_factory=list)
    """Tensors in the files that the decoder computes itself, or that repeat tied embeddings."""

    def checksums(self) -> dict[str, str]:
        """sha256 of every file, read now: a second or two a GB."""
        folder = self.path if self.path.is_dir() else self.path.parent
        return {name: sha256_of(folder / name) for name in self.files}


def check_weights(shape: ModelShape, path: str | Path) -> None:
    """Compare a shape with the tensors that its files declare, from their headers alone.

    Call it before `build`: a config with a slipped digit asks for terabytes, and no allocator says which digit.

    Raises:
        ModelError: a tensor is missing, superfluous, of another size or in a format that cannot be read.
    """
    path = Path(path)
    check(shape)
    if source_kind(path) == "gguf":
        from trimtab.model.weights_gguf import survey_gguf

        survey_gguf(shape, path)
    else:
        from trimtab.model.weights_safetensors import survey_folder

        survey_folder(shape, path)


def stored_packing(path: str | Path) -> StoredPacking | None:
    """How a model's files are quantized by bitsandbytes (kind, block, double), or None; reads a few bytes.

    Lay the decoder out alike (`adapt.quantize_layout`) and `load_weights` keeps the bytes as they are.
    """
    if source_kind(path) == "gguf":
        return None
    from trimtab.model import weights_safetensors

    return weights_safetensors.stored_packing(Path(path))


def packed_names(path: str | Path) -> set[str]:
    """Names of the weights that bitsandbytes quantized before they were saved."""
    if source_kind(path) == "gguf":
        return set()
    from trimtab.model import weights_safetensors

    return weights_safetensors.packed_names(Path(path))


def load_weights(decoder: Decoder, path: str | Path, *, progress: Progress | None = None) -> Provenance:
    """Fill a decoder's parameters from a Hugging Face folder (safetensors) or a GGUF file.

    Names, shapes and number formats are checked for the whole model before the first number is copied; then
    one tensor at a time is read, converted to the parameter's dtype and copied to its device. A layer that has no
    parameter `weight` but a method `take` is handed the tensor instead (`Taker`).

    Args:
        decoder: from `build`, on a real device; its shape must be the source's (`read_shape`).
        path: the folder or the file.
        progress: called after each tensor.

    Raises:
        ModelError: the files are missing, damaged, pickled, of another model, or hold NaN or infinity.
    """
    path = Path(path)
    tensors = (*decoder.parameters(), *decoder.buffers())
    assert all(tensor.device.type != "meta" for tensor in tensors), "give the decoder memory first"
    return _read(decoder, path, progress, Places(decoder))


def _read(decoder: Decoder, path: Path, progress: Progress | None, places: Places) -> Provenance:
    if source_kind(path) == "gguf":
        from trimtab.model.weights_gguf import load_gguf

        return load_gguf(decoder, path, progress, places)
    from trimtab.model.weights_safetensors import load_folder

    return load_folder(decoder, path, progress, places)


def changed_weight(decoder: Decoder, path: str | Path) -> str | None:
    """The first parameter of a decoder that is not what its files hold, converted to its dtype; None where all are.

    One tensor at a time is read; nothing is changed.
    """
    places = _Comparison(decoder)
    _read(decoder, Path(path), None, places)
    return places.changed


def check_layers(shape: ModelShape, num_tensors: int, key: str, where: str) -> None:
    """ModelError for more layers than there are tensors; every later check goes through all layers."""
    if shape.num_layers > num_tensors:
        raise ModelError(
            f"{where} holds {num_tensors} tensors, too few for a model whose {key} is {shape.num_layers}",
            "get the weights and config.json of one model, from the same place",
        )


def check_names(wanted: Iterable[str], found: Mapping[str, str], where: str) -> None:
    """ModelError that names the first missing and the first unexpected tensors.

    `found` maps a tensor's name as `wanted` has it to the name that stands in the file.
    """
    wanted = list(wanted)
    wanted_set = set(wanted)
    missing = [name for name in wanted if name not in found]
    extra = [stored for name, stored in found.items() if name not in wanted_set]
    if missing:
        raise ModelError(
            f"{where} lacks {len(missing)} of {len(wanted)} tensors: {_few(missing)}",
            "complete the download, or get the config.json that belongs to these weights",
        )
    if extra:
        raise ModelError(
            f"{where} holds {len(extra)} tensors that the model has no place for: {_few(extra)}",
            "get the config.json that belongs to these weights, or weights without an adapter or extra head",
        )


def check_dims(
    name: str, found: tuple[int, ...], wanted: tuple[int, ...], where: str, shape: ModelShape
) -> None:
    """ModelError for a tensor of another size than the model's, with the config's values behind that size."""
    if found != wanted:
        raise ModelError(
            f"{where}: {name} is {list(found)} where the model has {list(wanted)}"
            + _origin(found, wanted, shape),
            "get the weights and config.json of one model, from the same place",
        )


class Places:
    """Where a decoder keeps each of its shape's tensors, by name.

    Example:
        >>> Places(decoder).put("model.norm.weight", torch.ones(64), "by hand")  # doctest: +SKIP
    """

    def __init__(self, decoder: Decoder) -> None:
        self._parameters = dict(decoder.named_parameters())
        self._takers: dict[str, Taker] = {}
        for name, _ in decoder.shape.parameters():
            if name not in self._parameters:
                layer = decoder.get_submodule(name.removesuffix(".weight"))
                # Asked by name: an adapted layer hands `take` on, and `isinstance` of newer Pythons does not see that.
                assert hasattr(layer, "take"), f"{name} has neither a parameter nor a layer that takes it"
                self._takers[name] = cast(Taker, layer)

    def put(self, name: str, tensor: torch.Tensor, where: str) -> None:
        """Copies a stored tensor to its parameter, or hands it to its layer; ModelError if it is not finite."""
        if name in self._parameters:
            fill(self._parameters[name], tensor, name, where)
            return
        try:
            self._takers[name].take(tensor)
        except ModelError as err:
            raise ModelError(f"{where}: {name}: {err.cause}", err.remedy) from err

    def put_packed(self, name: str, weight: NF4Weight | Int8Tensor, where: str) -> None:
        """The same for a weight that was quantized before it was saved: a layer that is quantized alike keeps it as
        it is, a plain parameter gets the numbers that it stands for."""
        if name in self._parameters:
            dequantize = nf4.dequantize if isinstance(weight, NF4Weight) else int8.dequantize
            self.put(name, dequantize(weight, dtype=torch.float32), where)  # type: ignore[arg-type]
            return
        try:
            self._takers[name].take_packed(weight)
        except ModelError as err:
            raise ModelError(f"{where}: {name}: {err.cause}", err.remedy) from err


class _Comparison(Places):
    """Compares stored tensors with a decoder's parameters instead of copying them."""

    changed: str | None = None

    def put(self, name: str, tensor: torch.Tensor, where: str) -> None:
        """Notes the first difference."""
        parameter = self._parameters[name].detach()
        if self.changed is None and not torch.equal(parameter, tensor.to(parameter.device, parameter.dtype)):
            self.changed = name


@torch.no_grad()
def fill(parameter: torch.Tensor, tensor: torch.Tensor, name: str, where: str) -> None:
    """Copy a stored tensor into a parameter, converting it; ModelError if the result is not finite."""
    parameter.copy_(tensor)
    for piece in parameter.detach().view(-1).split(_CHUNK):
        if not bool(torch.isfinite(piece).all()):
            at_source = bool(torch.isfinite(tensor).all())
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise ModelError(
                f"{where}: {name} " + (f"overflows in {dtype}" if at_source else "holds NaN or infinity"),
                "load it in bf16 or fp32" if at_source else "get the weights again",
            )


def _origin(found: tuple[int, ...], wanted: tuple[int, ...], shape: ModelShape) -> str:
    """Which values of the config a size that differs may come from."""
    values = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "head_dim": shape.attention.head_dim,
        "query heads × head_dim": shape.attention.q_size,
        "key/value heads × head_dim": shape.attention.kv_size,
    }
    if shape.attention.fused_qkv:
        values["(query heads + 2 · key/value heads) × head_dim"] = sum(shape.attention.qkv_sizes)
    if shape.block.dense.fused_gate_up:
        values["2 · intermediate_size"] = 2 * shape.intermediate_size
    differing = [dim for index, dim in enumerate(wanted) if found[index : index + 1] != (dim,)]
    named = [f"{key} is {value}" for key, value in values.items() if value in differing]
    return f" ({', '.join(named)})" if named else ""


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
