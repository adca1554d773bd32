"""Weights from files into a decoder, tensor by tensor, every claim of a file checked before it is used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast, overload

import torch

from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape
from trimtab.facts.slices import Slice, check_parameter_names, check_slices, row_pieces
from trimtab.kernels.int8 import Int8Tensor
from trimtab.kernels.nf4 import NF4Weight
from trimtab.model.decoder import Decoder
from trimtab.model.source import source_kind
from trimtab.model.weights_reader import Provenance, WeightReader, open_weights

if TYPE_CHECKING:
    from trimtab.model.weights_packed import PackedWeight, StoredPacking

Progress = Callable[[int, int, str], None]
"""Called as progress(tensors done, tensors in all, name) after each tensor."""

_CHUNK = 2**20
"""Elements that are checked at once: what that takes beside a small quantized model must be small too."""
_PIECE = 2**22
"""Elements of a parameter that are read at once: 16 MiB in fp32, however large the vocabulary."""


class Taker(Protocol):
    """A layer that keeps its weight in a form of its own: quantized, say. It stands where the plain layer stood."""

    def take(self, weight: torch.Tensor) -> None:
        """Keeps a weight in 16 or 32 bits, on any device; ModelError if it cannot."""

    def take_packed(self, weight: NF4Weight | Int8Tensor) -> None:
        """Keeps a weight that is quantized already, bit for bit; ModelError if this layer is laid out otherwise."""


def check_weights(shape: ModelShape, path: str | Path) -> None:
    """Compare a shape with the tensors that its files declare, from their headers alone.

    Call it before `build`: a config with a slipped digit asks for terabytes, and no allocator says which digit.

    Raises:
        ModelError: a tensor is missing, superfluous, of another size or in a format that cannot be read.
    """
    open_weights(shape, path)


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

    Names, shapes and number formats are checked for the whole model before the first number is copied; then one
    tensor at a time is read, some rows at a time, converted to the parameter's dtype and copied to its device. A layer
    that has no parameter `weight` but a method `take` is handed the whole tensor instead (`Taker`).

    Args:
        decoder: from `build`, on a real device; its shape must be the source's (`read_shape`).
        path: the folder or the file.
        progress: called after each tensor.

    Raises:
        ModelError: the files are missing, damaged, pickled, of another model, or hold NaN or infinity.
    """
    tensors = (*decoder.parameters(), *decoder.buffers())
    assert all(tensor.device.type != "meta" for tensor in tensors), "give the decoder memory first"
    return _load(Places(decoder), decoder.shape, path, progress)


def _load(
    places: Places, shape: ModelShape, path: str | Path, progress: Progress | None = None
) -> Provenance:
    with open_weights(shape, path) as reader:
        for done, name in enumerate(reader.dims, 1):
            places.load(name, reader)
            if progress is not None:
                progress(done, len(reader.dims), name)
    return reader.provenance


@overload
def read_weights(
    shape: ModelShape,
    path: str | Path,
    slices: Mapping[str, Slice] | None = None,
    *,
    names: Collection[str] | None = None,
    keep_packed: Literal[False] = False,
) -> Iterator[tuple[str, torch.Tensor]]: ...


@overload
def read_weights(
    shape: ModelShape,
    path: str | Path,
    slices: Mapping[str, Slice] | None = None,
    *,
    names: Collection[str] | None = None,
    keep_packed: bool,
) -> Iterator[tuple[str, torch.Tensor | PackedWeight]]: ...


def read_weights(
    shape: ModelShape,
    path: str | Path,
    slices: Mapping[str, Slice] | None = None,
    *,
    names: Collection[str] | None = None,
    keep_packed: bool = False,
) -> Iterator[tuple[str, torch.Tensor | PackedWeight]]:
    """Read the weights of a model, or parts of them, without a decoder: one (name, tensor) at a time, on the CPU.

    Names, dimensions and number formats of the whole model, and all slices, are checked before the call returns. Then
    only the bytes of the slices are read, to whole pages of the file. Columns are cut from the blocks that hold them
    (GGUF) or from dequantized rows (NF4). Rows of q and k of a GGUF file come in Hugging Face's order.

    Args:
        shape: the model's (`read_shape`).
        path: a Hugging Face folder (safetensors) or a GGUF file.
        slices: parameter name → the part of it that is wanted; all of it for names that are absent.
        names: the parameters to read; all unless given.
        keep_packed: yield weights that bitsandbytes quantized as `NF4Weight` or `Int8Tensor`, with the stored bytes,
            instead of dequantized to fp32. NF4 can then be sliced by rows that begin with a block only.

    Yields:
        (name, tensor) in the order of the files. The tensor is contiguous and in the stored dtype (fp32 from GGUF). It
        may be a view of the memory-mapped file: copy it if the file may change.

    Raises:
        ModelError: as `load_weights`; also for unknown names, and slices that are out of range or cut an NF4 block.

    Example:
        >>> shape = read_shape("my-model")  # doctest: +SKIP
        >>> half = Slice(0, 0, shape.vocab_size // 2)  # doctest: +SKIP
        >>> for name, tensor in read_weights(shape, "my-model", {"lm_head.weight": half}):  # doctest: +SKIP
        ...     print(name, tensor.shape)
    """
    reader, slices = open_weights(shape, path), slices or {}
    check_slices(slices, reader.dims)
    check_parameter_names(names or (), reader.dims)
    wanted = {name: slices.get(name, Slice.whole(dims)) for name, dims in reader.dims.items()}
    if names is not None:
        wanted = {name: wanted[name] for name in wanted if name in names}
    return _read_parts(reader, wanted, keep_packed)


def _read_parts(
    reader: WeightReader, wanted: Mapping[str, Slice], keep_packed: bool
) -> Iterator[tuple[str, torch.Tensor | PackedWeight]]:
    with reader:
        for name, part in wanted.items():
            if keep_packed and reader.is_packed(name):
                yield name, reader.read_packed(name, part)
                continue
            tensor = reader.read(name, part).contiguous()
            if not _is_finite(tensor):
                raise ModelError(
                    f"{reader.file_of(name)}: {name} holds NaN or infinity", "get the weights again"
                )
            yield name, tensor


def changed_weight(decoder: Decoder, path: str | Path) -> str | None:
    """The first parameter of a decoder that is not what its files hold, converted to its dtype; None where all are.

    One tensor at a time is read; nothing is changed.
    """
    places = _Comparison(decoder)
    _load(places, decoder.shape, path)
    return places.changed


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

    def load(self, name: str, reader: WeightReader) -> None:
        """Reads a tensor to its parameter, some rows at a time, or all of it for its layer; ModelError if it is not
        finite, or not packed as the layer is."""
        dims, file = reader.dims[name], reader.file_of(name)
        if name in self._parameters:
            assert self._parameters[name].shape == dims, (name, dims)
            for rows in row_pieces(dims, _PIECE):
                self.put_rows(name, rows, reader.read(name, rows), file)
        elif reader.is_packed(name):
            self._put_packed(name, reader.read_packed(name, Slice.whole(dims)), file)
        else:
            self.put(name, reader.read(name, Slice.whole(dims)), file)

    def put(self, name: str, tensor: torch.Tensor, where: str) -> None:
        """Copies a whole tensor to its parameter, or hands it to its layer; ModelError if it is not finite."""
        if name in self._parameters:
            assert self._parameters[name].shape == tensor.shape, (name, tensor.shape)
            self.put_rows(name, Slice.whole(tuple(tensor.shape)), tensor, where)
            return
        try:
            self._takers[name].take(tensor)
        except ModelError as err:
            raise ModelError(f"{where}: {name}: {err.cause}", err.remedy) from err

    def put_rows(self, name: str, rows: Slice, tensor: torch.Tensor, where: str) -> None:
        """Copies these rows of a parameter."""
        fill(self._parameters[name].detach()[rows.start : rows.stop], tensor, name, where)

    def _put_packed(self, name: str, weight: PackedWeight, where: str) -> None:
        """Hands a weight that was quantized before it was saved to a layer that is quantized alike."""
        try:
            self._takers[name].take_packed(weight)
        except ModelError as err:
            raise ModelError(f"{where}: {name}: {err.cause}", err.remedy) from err


class _Comparison(Places):
    """Compares stored tensors with a decoder's parameters instead of copying them."""

    changed: str | None = None

    def put_rows(self, name: str, rows: Slice, tensor: torch.Tensor, where: str) -> None:
        """Notes the first difference."""
        mine = self._parameters[name].detach()[rows.start : rows.stop]
        if self.changed is None and not torch.equal(mine, tensor.to(mine.device, mine.dtype)):
            self.changed = name


@torch.no_grad()
def fill(parameter: torch.Tensor, tensor: torch.Tensor, name: str, where: str) -> None:
    """Copy a stored tensor into a parameter, converting it; ModelError if the result is not finite."""
    parameter.copy_(tensor)
    if not _is_finite(parameter):
        at_source = _is_finite(tensor)
        dtype = str(parameter.dtype).removeprefix("torch.")
        raise ModelError(
            f"{where}: {name} " + (f"overflows in {dtype}" if at_source else "holds NaN or infinity"),
            "load it in bf16 or fp32" if at_source else "get the weights again",
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    return all(bool(torch.isfinite(piece).all()) for piece in tensor.reshape(-1).split(_CHUNK))
