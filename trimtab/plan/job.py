"""`Job`: the settings that determine the memory and time of a training step. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trimtab.adapt.spec import LoraSettings
from trimtab.adapt.spec_quantized import Quantization
from trimtab.facts.shapes import ModelShape
from trimtab.plan.trainable import TrainableParameters, trainable_parameters


@dataclass(frozen=True)
class Job:
    """The settings that determine the memory and time of a step: recipe keys with every `auto` resolved."""

    shape: ModelShape
    batch: int
    """Sequences per microbatch."""
    tokens: int
    """Tokens per sequence."""
    accumulation: int
    dtype: str
    weights_dtype: str
    gradient_dtype: str
    optimizer: str
    attention: str
    """The attention backend of all layers, or of the first layer if `layer_attention` is set."""
    device: str
    bf16: bool = False
    """Whether the device supports bf16 in hardware."""
    packed: bool = True
    policies: tuple[str, ...] = ()
    """The recompute policy of each layer (`trimtab.adapt.recompute`); empty if all layers save everything."""
    mlp_tiles: int = 1
    """Number of token chunks (tiles) in which the feed-forward is computed."""
    pointwise: str = "reference"
    optimizer_impl: str = "reference"
    loss_impl: str = "chunked"
    loss_memory: int | None = None
    """Bytes that the loss `triton` may allocate beyond inputs and gradients."""
    in_backward: bool = False
    """Whether the optimizer step is fused into backward, which frees each gradient after its update."""
    compiled: bool = False
    """Whether whole layers are compiled, so that only layer inputs can be offloaded to host memory."""
    lora: LoraSettings | None = None
    """Settings of the adapters if only adapters are trained; None for full training."""
    quantization: Quantization | None = None
    """How frozen weights are quantized; None if they are not."""
    layer_attention: tuple[str, ...] = ()
    """The attention backend of each layer, if they differ."""
    evaluation_attention: tuple[str, ...] = ()
    """The attention backend of each layer in evaluation, probe and generation, if they are not those of training:
    evaluation always packs."""
    attended_share: float = 1.0
    """Share of the query–key pairs of a causal sequence that are within one document: less than 1 for sequences packed
    with several documents."""
    dequantized_layers: int = 0
    """Layers whose quantized weights also have dequantized copies (`trimtab.adapt.dequantized`)."""

    @cached_property
    def trained(self) -> TrainableParameters:
        """The trainable parameters, and the bytes of weights, gradients and optimizer states."""
        return trainable_parameters(
            self.shape, self.weights_dtype, self.gradient_dtype, self.lora, self.quantization
        )

    def changed(self, **changes: Any) -> Job:
        """Returns a copy with another batch, tokens, policies or the like; reuses the cached trainable parameters."""
        assert changes.keys().isdisjoint(("shape", "weights_dtype", "gradient_dtype", "lora", "quantization"))
        copy = dataclasses.replace(self, **changes)
        copy.__dict__["trained"] = self.trained
        return copy

    @property
    def attention_backends(self) -> tuple[str, ...]:
        """The attention backend of each layer."""
        assert not self.layer_attention or len(self.layer_attention) == self.shape.num_layers
        return self.layer_attention or (self.attention,) * self.shape.num_layers

    def for_evaluation(self) -> Job:
        """Returns the job of a forward pass over evaluation batches, which are packed."""
        backends = self.evaluation_attention or self.attention_backends
        return self.changed(packed=True, attention=backends[0], layer_attention=backends)

    @property
    def layer_policies(self) -> tuple[str, ...]:
        """The recompute policy of each layer."""
        assert not self.policies or len(self.policies) == self.shape.num_layers
        return self.policies or ("none",) * self.shape.num_layers
