"""What decides the memory and the time of a step, in one place. Imports no torch."""

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
    """What decides the memory of a step: the recipe's keys after every `auto` has been resolved."""

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
    """The attention backend of all layers, or of the first where `layer_attention` names each one's."""
    device: str
    bf16: bool = False
    """Whether the device computes bf16 in hardware."""
    packed: bool = True
    policies: tuple[str, ...] = ()
    """The recompute policy of each layer (`trimtab.adapt.recompute`); empty if all save everything."""
    mlp_tiles: int = 1
    """Parts of the tokens that feed-forward halves are computed in."""
    pointwise: str = "reference"
    optimizer_impl: str = "reference"
    loss_impl: str = "chunked"
    loss_memory: int | None = None
    """Bytes that the loss "triton" may allocate beyond inputs and gradients."""
    in_backward: bool = False
    """Whether backward itself updates each weight and frees its gradient."""
    compiled: bool = False
    """Whether whole layers are compiled, so that nothing inside one can be offloaded to host memory."""
    lora: LoraSettings | None = None
    """The adapters' settings, where adapters are trained and all else is frozen."""
    quantization: Quantization | None = None
    """How frozen weights are quantized."""
    layer_attention: tuple[str, ...] = ()
    """Of each layer, where they differ."""
    attended_share: float = 1.0
    """Of the query–key pairs of a causal sequence those that lie within one document: less than 1 where sequences are
    packed with several."""
    unpacked_layers: int = 0
    """Layers whose quantized weights also have dequantized copies (`trimtab.adapt.dequantized`)."""

    @cached_property
    def trained(self) -> TrainableParameters:
        """Which weights are trained, and the bytes that follow from it."""
        return trainable_parameters(
            self.shape, self.weights_dtype, self.gradient_dtype, self.lora, self.quantization
        )

    def changed(self, **changes: Any) -> Job:
        """A copy with other batch, tokens, policies or the like; what is trained stays, and is not worked out again."""
        assert changes.keys().isdisjoint(("shape", "weights_dtype", "gradient_dtype", "lora", "quantization"))
        copy = dataclasses.replace(self, **changes)
        copy.__dict__["trained"] = self.trained
        return copy

    @property
    def attention_backends(self) -> tuple[str, ...]:
        """The attention backend of each layer."""
        assert not self.layer_attention or len(self.layer_attention) == self.shape.num_layers
        return self.layer_attention or (self.attention,) * self.shape.num_layers

    @property
    def layers(self) -> tuple[str, ...]:
        """The policy of each layer."""
        assert not self.policies or len(self.policies) == self.shape.num_layers
        return self.policies or ("none",) * self.shape.num_layers
