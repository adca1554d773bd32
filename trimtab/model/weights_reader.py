"""Interface for reading the weights in a model's files, of any format, by slices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from trimtab.facts.files import sha256_of
from trimtab.facts.shapes import ModelShape, check_shape
from trimtab.facts.slices import Dims, Slice
from trimtab.model.source import source_kind

if TYPE_CHECKING:
    from trimtab.model.weights_packed import PackedWeight


@dataclass(frozen=True)
class Provenance:
    """Origin of a model's weights.

    Example:
        >>> load_weights(decoder, "SmolLM2.gguf").formats  # doctest: +SKIP
        {'Q4_1': 210, 'F32': 61, 'Q8_0': 1}
    """

    path: Path
    kind: str
    """"hf" or "gguf"."""
    files: dict[str, int]
    """Maps file names to sizes in bytes."""
    formats: dict[str, int]
    """Maps stored dtypes to numbers of tensors."""
    num_tensors: int
    ignored: list[str] = field(default_factory=list)
    """Ignored tensors: tensors that the decoder computes, and copies of tied embeddings."""

    def checksums(self) -> dict[str, str]:
        """sha256 of every file, computed on call: a second or two per GB."""
        folder = self.path if self.path.is_dir() else self.path.parent
        return {name: sha256_of(folder / name) for name in self.files}


class WeightReader(ABC):
    """The weights of a model, by parameter name. Headers are validated on construction; tensors are read inside `with`.

    Files are memory-mapped, so that a read only touches the pages of its slice.

    Example:
        >>> with open_weights(read_shape("my-model"), "my-model") as reader:  # doctest: +SKIP
        ...     reader.read("model.norm.weight", Slice(0, 0, 8)).shape
        torch.Size([8])
    """

    dims: Mapping[str, Dims]
    """Every parameter's dimensions, in the order of the files."""
    provenance: Provenance

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, *exception: Any) -> None: ...

    @abstractmethod
    def file_of(self, name: str) -> str:
        """The file that contains a parameter, for messages."""

    @abstractmethod
    def read(self, name: str, part: Slice) -> torch.Tensor:
        """Reads a slice of a parameter as floating-point values on the CPU: in the stored dtype, or dequantized to fp32
        if it is packed. The result may be a view of the memory-mapped file, and not contiguous."""

    def is_packed(self, name: str) -> bool:
        """Whether the parameter was saved quantized by bitsandbytes."""
        return False

    def read_packed(self, name: str, part: Slice) -> PackedWeight:
        """Reads a slice of a packed weight without dequantizing it; raises ModelError if it would split a block."""
        raise AssertionError(f"{name} is not packed")


def open_weights(shape: ModelShape, path: str | Path) -> WeightReader:
    """Opens the weights at a path; validates their headers against a shape.

    Raises:
        ModelError: a tensor is missing, unexpected, of another size or in an unsupported dtype.
    """
    path = Path(path)
    check_shape(shape)
    if source_kind(path) == "gguf":
        from trimtab.model.weights_gguf import GGUFReader

        return GGUFReader(shape, path)
    from trimtab.model.weights_safetensors import FolderReader

    return FolderReader(shape, path)
