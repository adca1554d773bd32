"""Trainable and frozen parameters of a model: bytes of weights, gradients and optimizer states."""

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
    """A trainable parameter."""

    name: str
    dims: tuple[int, ...]
    dtype: str
    """Of its elements."""
    gradient_dtype: str
    """In which its gradient is accumulated."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def gradient(self) -> Gradient:
        """Its gradient: as computed, in the parameter's dtype, and as accumulated."""
        return Gradient(
            self.name, self.dims, nbytes(self.dtype, self.count), nbytes(self.gradient_dtype, self.count)
        )


@dataclass(frozen=True)
class TrainableParameters:
    """Trainable parameters of a model, and the bytes of all its weights.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> part = trainable_parameters(tiny, "bf16", "fp32", LoraSettings(r=2, target_modules=("q_proj",)))
        >>> part.weight_bytes - model_spec.parameter_bytes(tiny, "bf16"), part.gradient_bytes, part.count
        (256, 256, 64)
    """

    parameters: tuple[Parameter, ...]
    weight_bytes: int
    """Bytes of all weights, including frozen weights and adapters."""
    adapters: bool
    """Whether adapters are trained on a frozen model."""
    num_layers: int = 0
    tied: bool = False
    """Whether head and embedding are tied."""

    @cached_property
    def count(self) -> int:
        """Number of trainable elements."""
        return sum(parameter.count for parameter in self.parameters)

    @cached_property
    def trainable_bytes(self) -> int:
        """Bytes of the trainable weights only, as in a checkpoint."""
        return sum(nbytes(p.dtype, p.count) for p in self.parameters)

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of all parameter gradients after a backward pass."""
        return sum(nbytes(p.gradient_dtype, p.count) for p in self.parameters)

    def module_gradient_bytes(self, module: str) -> int:
        """Returns the bytes of the gradient of a fully trained module; 0 if it is frozen."""
        weight = self._by_name.get(f"{module}.weight")
        return 0 if weight is None else nbytes(weight.gradient_dtype, weight.count)

    def module_gradient(self, module: str) -> Gradient | None:
        """Returns the gradient of a fully trained module's weight; None if it is frozen."""
        weight = self._by_name.get(f"{module}.weight")
        return None if weight is None else weight.gradient

    @cached_property
    def head_gradient_bytes(self) -> int:
        """Bytes of the head's gradient, or of the embedding's gradient if tied."""
        return self.module_gradient_bytes(EMBEDDING if self.tied else HEAD)

    @cached_property
    def adapts_head(self) -> bool:
        """Whether the head has an adapter: the loss then reads a second matrix with the adapter merged."""
        return any(parameter.name.startswith(f"{HEAD}.lora_") for parameter in self.parameters)

    @cached_property
    def layers(self) -> tuple[tuple[Parameter, ...], ...]:
        """The trainable parameters of each layer, with their names within the block."""
        by_layer: list[list[Parameter]] = [[] for _ in range(self.num_layers)]
        for parameter in self.parameters:
            if match := _IN_BLOCK.fullmatch(parameter.name):
                by_layer[int(match[1])].append(dataclasses.replace(parameter, name=match[2]))
        return tuple(map(tuple, by_layer))

    @cached_property
    def layer_kinds(self) -> tuple[int, ...]:
        """An id per layer; layers with equal trainable parameters have the same id."""
        ids: dict[object, int] = {}
        return tuple(ids.setdefault(parameters, len(ids)) for parameters in self.layers)

    @cached_property
    def _by_name(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def _sizes(self) -> dict[tuple[str, ...], int]:
        """Bytes of states and updates by their arguments: a search asks for them many times."""
        return {}

    @cached_property
    def final_norm(self) -> Gradient | None:
        """Gradient of the norm after the last layer; None if it is frozen."""
        norm = self._by_name.get("model.norm.weight")
        return None if norm is None else norm.gradient

    @cached_property
    def trains_embedding(self) -> bool:
        """Whether the embedding's output requires grad."""
        return any(parameter.name.startswith(f"{EMBEDDING}.") for parameter in self.parameters)

    def state_bytes(self, optimizer: str) -> int:
        """Returns the bytes of all optimizer states."""
        key = ("states", optimizer)
        if key not in self._sizes:
            self._sizes[key] = sum(
                optim_spec.state_bytes(optimizer, p.dims, p.dtype) for p in self.parameters
            )
        return self._sizes[key]

    def update_scratch(self, optimizer: str, *, device: str, impl: str, in_backward: bool = False) -> int:
        """Returns the peak temporary bytes of an optimizer step, or of one parameter's update (`in_backward`)."""
        key = ("update", optimizer, device, impl, str(in_backward))
        if key not in self._sizes:
            scratch = (
                optim_spec.scratch_bytes(optimizer, p.dims, p.dtype, device=device, impl=impl)
                for p in self.parameters
            )
            copies = (self._gradient_copy(optimizer, p) for p in self.parameters)
            together = copies if in_backward else (sum(self.gradient_copies(optimizer)),)
            self._sizes[key] = max(*scratch, *together)
        return self._sizes[key]

    def gradient_copies(self, optimizer: str) -> list[int]:
        """Returns the bytes of each gradient copy of an optimizer step: those of the largest parameter group, updated
        in one call. Weight decay separates matrices from norms and biases; a separate learning rate of the embedding,
        which would lower the peak, is not considered."""
        groups: dict[tuple[bool, str], list[int]] = {}
        for p in self.parameters:
            groups.setdefault((len(p.dims) >= 2, p.dtype), []).append(self._gradient_copy(optimizer, p))
        return [size for size in max(groups.values(), key=sum) if size]

    @staticmethod
    def _gradient_copy(optimizer: str, parameter: Parameter) -> int:
        return optim_spec.gradient_copy_bytes(
            optimizer, parameter.dims, parameter.dtype, parameter.gradient_dtype
        )


_IN_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")


def trainable_parameters(
    shape: ModelShape,
    weights_dtype: str,
    gradient_dtype: str,
    lora: LoraSettings | None = None,
    quantization: Quantization | None = None,
) -> TrainableParameters:
    """Returns the parameters that a run trains: all of them, or adapters on frozen, possibly quantized weights.

    Args:
        shape: the model's shape.
        weights_dtype: dtype of the model's weights.
        gradient_dtype: dtype in which gradients of bf16 weights are accumulated; fp32 weights use fp32.
        lora: the adapters' settings; None for full training.
        quantization: how frozen weights are quantized; None if they are not.
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
        for name, dims, dtype in adapt_spec.trainable_parameters(shape, lora, weights_dtype)
    ]
    return TrainableParameters(
        tuple(adapters),
        weights + adapt_spec.parameter_bytes(shape, lora),
        True,
        shape.num_layers,
        shape.tie_embeddings,
    )
