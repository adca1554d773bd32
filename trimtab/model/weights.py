"""Loads weights from files into a decoder, tensor by tensor, and validates all metadata before use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast, overload

import torch

from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape
from trimtab.facts.slices import Slice, check_parameter_names, check_slices, row_chunks
from trimtab.kernels.int8 import Int8Tensor
from trimtab.kernels.nf4 import NF4Weight
from trimtab.model.decoder import Decoder
from trimtab.model.source import source_kind
from trimtab.model.weights_reader import Provenance, WeightReader, open_weights

if TYPE_CHECKING:
    from trimtab.model.weights_packed import PackedWeight, StoredQuantization

Progress = Callable[[int, int, str], None]
"""Called as progress(tensors done, total tensors, name) after each tensor."""

_CHUNK = 2**20
"""Elements per chunk of the check for NaN and infinity, whose memory must be small even for a small quantized model."""
_PIECE = 2**22
"""Elements per read of a parameter: 16 MiB in fp32, independent of the size of the vocabulary."""


class WeightSetter(Protocol):
    """A layer that stores its weight in another format, such as quantized."""

    def set_weight(self, weight: torch.Tensor) -> None:
        """Stores a weight in 16 or 32 bits, on any device; raises ModelError if it cannot."""

    def set_packed_weight(self, weight: NF4Weight | Int8Tensor) -> None:
        """Stores an already quantized weight, bit for bit; raises ModelError if this layer's quantization differs."""


def check_weights(shape: ModelShape, path: str | Path) -> None:
    """Validates a shape against the tensors of its files; reads only headers.

    Call it before `build`: a config with a wrong digit could allocate terabytes.

    Raises:
        ModelError: a tensor is missing, unexpected, of another size or in an unsupported dtype.
    """
    open_weights(shape, path)


def stored_quantization(path: str | Path) -> StoredQuantization | None:
    """Returns the bitsandbytes quantization of a model's files (kind, block, double), or None; reads a few bytes.

    Quantize the decoder's layout in the same way (`adapt.quantize_layout`), and `load_weights` copies the stored bytes.
    """
    if source_kind(path) == "gguf":
        return None
    from trimtab.model import weights_safetensors

    return weights_safetensors.stored_quantization(Path(path))


def packed_names(path: str | Path) -> set[str]:
    """Names of the weights that were saved quantized by bitsandbytes."""
    if source_kind(path) == "gguf":
        return set()
    from trimtab.model import weights_safetensors

    return weights_safetensors.packed_names(Path(path))


def load_weights(decoder: Decoder, path: str | Path, *, progress: Progress | None = None) -> Provenance:
    """Loads a decoder's parameters from a Hugging Face folder (safetensors) or a GGUF file.

    Names, shapes and dtypes of the whole model are validated before the first tensor is copied; then one tensor at a
    time is read, some rows at a time, converted to the parameter's dtype and copied to its device. A layer with a
    method `set_weight` instead of a parameter `weight` receives the full tensor (`WeightSetter`).

    Args:
        decoder: from `build`, on a real device; its shape must be the source's (`read_shape`).
        path: the folder or the file.
        progress: called after each tensor.

    Raises:
        ModelError: the files are missing, damaged, pickled, of another model, or contain NaN or infinity.
    """
    tensors = (*decoder.parameters(), *decoder.buffers())
    assert all(tensor.device.type != "meta" for tensor in tensors), (
        "materialize the decoder's parameters first"
    )
    return _load(WeightDestinations(decoder), decoder.shape, path, progress)


def _load(
    destinations: WeightDestinations, shape: ModelShape, path: str | Path, progress: Progress | None = None
) -> Provenance:
    with open_weights(shape, path) as reader:
        for done, name in enumerate(reader.dims, 1):
            destinations.load(name, reader)
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
    """Reads the weights of a model, or slices of them, without a decoder: one (name, tensor) at a time, on the CPU.

    Names, dimensions and dtypes of the whole model, and all slices, are validated before the call returns. Then only
    the slices are read, rounded to pages of the file. Columns are cut from the blocks that contain them (GGUF) or
    from dequantized rows (NF4). Rows of q and k of a GGUF file are returned in Hugging Face's order.

    Args:
        shape: the model's (`read_shape`).
        path: a Hugging Face folder (safetensors) or a GGUF file.
        slices: parameter name → the slice to read; other parameters are read in full.
        names: the parameters to read; all by default.
        keep_packed: yield weights quantized by bitsandbytes as `NF4Weight` or `Int8Tensor`, with the stored bytes,
            instead of dequantized to fp32. NF4 can then only be sliced by rows that begin with a block.

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
                    f"{reader.file_of(name)}: {name} contains NaN or infinity", "download the weights again"
                )
            yield name, tensor


def find_changed_weight(decoder: Decoder, path: str | Path) -> str | None:
    """Returns the first parameter of a decoder that differs from its files, converted to its dtype, or None.

    Reads one tensor at a time; does not change the decoder.
    """
    destinations = _Comparison(decoder)
    _load(destinations, decoder.shape, path)
    return destinations.changed


class WeightDestinations:
    """The destination of each tensor of a decoder's shape, by name: a parameter, or a layer with its own format.

    Example:
        >>> WeightDestinations(decoder).copy("model.norm.weight", torch.ones(64), "by hand")  # doctest: +SKIP
    """

    def __init__(self, decoder: Decoder) -> None:
        self._parameters = dict(decoder.named_parameters())
        self._setters: dict[str, WeightSetter] = {}
        for name, _ in decoder.shape.parameters():
            if name not in self._parameters:
                layer = decoder.get_submodule(name.removesuffix(".weight"))
                # Not isinstance: from Python 3.12 on it ignores methods that an adapted layer forwards (__getattr__).
                assert hasattr(layer, "set_weight"), (
                    f"{name} has neither a parameter nor a layer that stores it"
                )
                self._setters[name] = cast(WeightSetter, layer)

    def load(self, name: str, reader: WeightReader) -> None:
        """Reads a tensor into its parameter, some rows at a time, or in full into its layer; raises ModelError if it is
        not finite, or not packed as the layer requires."""
        dims, file = reader.dims[name], reader.file_of(name)
        if name in self._parameters:
            assert self._parameters[name].shape == dims, (name, dims)
            for rows in row_chunks(dims, _PIECE):
                self.copy_rows(name, rows, reader.read(name, rows), file)
        elif reader.is_packed(name):
            self._copy_packed(name, reader.read_packed(name, Slice.whole(dims)), file)
        else:
            self.copy(name, reader.read(name, Slice.whole(dims)), file)

    def copy(self, name: str, tensor: torch.Tensor, where: str) -> None:
        """Copies a full tensor into its parameter or layer; raises ModelError if it is not finite."""
        if name in self._parameters:
            assert self._parameters[name].shape == tensor.shape, (name, tensor.shape)
            self.copy_rows(name, Slice.whole(tuple(tensor.shape)), tensor, where)
            return
        try:
            self._setters[name].set_weight(tensor)
        except ModelError as err:
            raise ModelError(f"{where}: {name}: {err.cause}", err.remedy) from err

    def copy_rows(self, name: str, rows: Slice, tensor: torch.Tensor, where: str) -> None:
        """Copies rows of a parameter."""
        copy_converted(self._parameters[name].detach()[rows.start : rows.stop], tensor, name, where)

    def _copy_packed(self, name: str, weight: PackedWeight, where: str) -> None:
        """Copies a weight that was saved quantized into a layer of the same quantization."""
        try:
            self._setters[name].set_packed_weight(weight)
        except ModelError as err:
            raise ModelError(f"{where}: {name}: {err.cause}", err.remedy) from err


class _Comparison(WeightDestinations):
    """Compares stored tensors with a decoder's parameters instead of copying them."""

    changed: str | None = None

    def copy_rows(self, name: str, rows: Slice, tensor: torch.Tensor, where: str) -> None:
        """Records the first difference."""
        mine = self._parameters[name].detach()[rows.start : rows.stop]
        if self.changed is None and not torch.equal(mine, tensor.to(mine.device, mine.dtype)):
            self.changed = name


@torch.no_grad()
def copy_converted(parameter: torch.Tensor, tensor: torch.Tensor, name: str, where: str) -> None:
    """Copies a stored tensor into a parameter, converting it; raises ModelError if the result is not finite."""
    parameter.copy_(tensor)
    if not _is_finite(parameter):
        at_source = _is_finite(tensor)
        dtype = str(parameter.dtype).removeprefix("torch.")
        raise ModelError(
            f"{where}: {name} " + (f"overflows in {dtype}" if at_source else "contains NaN or infinity"),
            "load it in bf16 or fp32" if at_source else "download the weights again",
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    return all(bool(torch.isfinite(piece).all()) for piece in tensor.reshape(-1).split(_CHUNK))
