"""What of a model is trained and what stands frozen beside it: bytes of weights, gradients and optimizer states."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from functools import cached_property

from trimtab.adapt import spec as adapt_spec
from trimtab.adapt import spec_quantized
from trimtab.adapt.spec import LoraSettings
from trimtab.adapt.spec_quantized import Quantization
from trimtab.adapt.targets import EMBEDDING, HEAD
from trimtab.facts.dtypes import nbytes
from trimtab.facts.operations import Gradient
from trimtab.facts.shapes import ModelShape
from trimtab.model import spec as model_spec
from trimtab.optim import spec as optim_spec


@dataclass(frozen=True)
class Parameter:
    """A trained tensor."""

    name: str
    dims: tuple[int, ...]
    dtype: str
    """Of the numbers themselves."""
    gradient_dtype: str
    """In which its gradient is added up."""

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.dims)

    @property
    def gradient(self) -> Gradient:
        """Its gradient: as backward makes it, in the parameter's dtype, and as it is kept."""
        return Gradient(
            self.name, self.dims, nbytes(self.dtype, self.count), nbytes(self.gradient_dtype, self.count)
        )


@dataclass(frozen=True)
class TrainableParameters:
    """Trained and frozen parts of a model.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> part = trainable_parameters(tiny, "bf16", "fp32", LoraSettings(r=2, target_modules=("q_proj",)))
        >>> part.weight_bytes - model_spec.parameter_bytes(tiny, "bf16"), part.gradient_bytes, part.count
        (256, 256, 64)
    """

    parameters: tuple[Parameter, ...]
    weight_bytes: int
    """Of all weights, frozen ones and adapters included."""
    adapters: bool
    """Whether most of the model is frozen below adapters."""
    num_layers: int = 0
    tied: bool = False
    """Whether the head is the embedding."""

    @property
    def count(self) -> int:
        """TrainableParameters numbers."""
        return sum(parameter.count for parameter in self.parameters)

    @property
    def trainable_bytes(self) -> int:
        """Of the trained weights alone: what a checkpoint holds of them."""
        return sum(nbytes(p.dtype, p.count) for p in self.parameters)

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients that a backward pass leaves."""
        return sum(nbytes(p.gradient_dtype, p.count) for p in self.parameters)

    def named(self, module: str) -> int:
        """Bytes of the gradient of a module that is trained as a whole; 0 where it is frozen."""
        return sum(nbytes(p.gradient_dtype, p.count) for p in self.parameters if p.name == f"{module}.weight")

    @property
    def head(self) -> int:
        """Bytes of the head's gradient: its own, or that of the embedding it is tied to."""
        return self.named(EMBEDDING if self.tied else HEAD)

    @property
    def adapts_head(self) -> bool:
        """Whether the head has an adapter on it: the loss then reads a second matrix, with the adapter in it."""
        return any(parameter.name.startswith(f"{HEAD}.lora_") for parameter in self.parameters)

    @cached_property
    def layers(self) -> tuple[tuple[Parameter, ...], ...]:
        """The trained tensors of each layer, by their names within the block."""
        by_layer: list[list[Parameter]] = [[] for _ in range(self.num_layers)]
        for parameter in self.parameters:
            if match := _IN_BLOCK.fullmatch(parameter.name):
                by_layer[int(match[1])].append(dataclasses.replace(parameter, name=match[2]))
        return tuple(map(tuple, by_layer))

    @property
    def final_norm(self) -> Gradient | None:
        """Of the norm behind the last layer; None where it is frozen."""
        return next((p.gradient for p in self.parameters if p.name == "model.norm.weight"), None)

    @property
    def trains_embedding(self) -> bool:
        """Whether the embedding's output has a gradient."""
        return any(parameter.name.startswith(f"{EMBEDDING}.") for parameter in self.parameters)

    def state_bytes(self, optimizer: str) -> int:
        """Bytes of all optimizer states."""
        return sum(optim_spec.state_bytes(optimizer, p.dims, p.dtype) for p in self.parameters)

    def update_scratch(self, optimizer: str, *, device: str, impl: str) -> int:
        """Most bytes held for a moment while one parameter is updated."""
        return max(
            optim_spec.scratch_bytes(optimizer, p.dims, p.dtype, device=device, impl=impl)
            for p in self.parameters
        )


_IN_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")


def trainable_parameters(
    shape: ModelShape,
    weights_dtype: str,
    gradient_dtype: str,
    lora: LoraSettings | None = None,
    quantization: Quantization | None = None,
) -> TrainableParameters:
    """The parts of a model that a run trains: all of it, or adapters on frozen weights, packed or not.

    Args:
        shape: the model.
        weights_dtype: of its own weights.
        gradient_dtype: in which gradients of bf16 weights are added up; those of fp32 weights are fp32.
        lora: the adapters' settings, or None where everything is trained.
        quantization: how frozen weights are quantized, or None.
    """
    if lora is None:
        parameters = [
            Parameter(name, dims, weights_dtype, gradient_dtype) for name, dims in shape.parameters()
        ]
        return TrainableParameters(
            tuple(parameters),
            model_spec.parameter_bytes(shape, weights_dtype),
            False,
            shape.num_layers,
            shape.tie_embeddings,
        )
    weights = model_spec.parameter_bytes(shape, weights_dtype)
    if quantization is not None:
        weights = spec_quantized.weight_bytes(
            shape,
            quantization.kind,
            weights_dtype,
            block=quantization.block_size,
            double=quantization.double,
        )
    adapters = [
        Parameter(name, dims, dtype, "fp32" if dtype == "fp32" else gradient_dtype)
        for name, dims, dtype in adapt_spec.trained(shape, lora, weights_dtype)
    ]
    return TrainableParameters(
        tuple(adapters),
        weights + adapt_spec.parameter_bytes(shape, lora),
        True,
        shape.num_layers,
        shape.tie_embeddings,
    )
