"""The resolved configuration: the values of every `auto` of a recipe, for one model on one machine.

`trimtab.run.resolve` creates it, the planner and `trimtab.run.build` read it, and `resolved_json` writes it to the run
folder, so that a resumed run uses the same values. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from trimtab.adapt.spec import LoraSettings
from trimtab.adapt.spec_quantized import Quantization
from trimtab.adapt.spec_recompute import count_policies


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes by trimtab's names: fp32, bf16, fp16."""

    dtype: str
    """Of matmuls and activations."""
    weights_dtype: str
    gradient_dtype: str
    """Dtype in which gradients are accumulated over microbatches."""
    description: str = ""


@dataclass(frozen=True)
class LayerAttention:
    """The attention backends of one layer."""

    packed: str
    """For sequences packed with several documents."""
    unpacked: str
    """For sequences of one document."""
    reason: str = ""
    """Why these were chosen."""
    rejected: tuple[tuple[str, str], ...] = ()
    """(other backend, reason against it)."""


@dataclass(frozen=True)
class AttentionConfig:
    """The attention backends of each layer; layers with the same requirements share a choice."""

    layers: tuple[LayerAttention, ...]

    @staticmethod
    def uniform(
        num_layers: int, packed: str, unpacked: str | None = None, reason: str = ""
    ) -> AttentionConfig:
        """Returns a configuration with the same backends in all layers.

        Example:
            >>> AttentionConfig.uniform(2, "varlen", "sdpa_cudnn").layers[1].unpacked
            'sdpa_cudnn'
        """
        return AttentionConfig((LayerAttention(packed, unpacked or packed, reason),) * num_layers)

    def of_layers(self, layers: range) -> AttentionConfig:
        """Returns the configuration of these layers only."""
        return dataclasses.replace(self, layers=tuple(self.layers[i] for i in layers))

    @property
    def packed_backends(self) -> str:
        """The distinct backends for packed sequences, for display."""
        return ", ".join(dict.fromkeys(layer.packed for layer in self.layers))


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer's name in the recipe and the implementation that runs it."""

    name: str
    impl: str = "reference"
    reason: str = ""


@dataclass(frozen=True)
class LossConfig:
    """The implementation of the language-model loss, and its additions to the cross-entropy."""

    impl: str = "chunked"
    memory_bytes: int | None = None
    """Upper bound on the bytes of logits; `MemoryPlan.loss_memory` is the resolved value."""
    reason: str = ""
    label_smoothing: float = 0.0
    z_loss: float = 0.0


@dataclass(frozen=True)
class PointwiseConfig:
    """The implementation of norms, RoPE and gates."""

    impl: str = "reference"
    reason: str = ""


@dataclass(frozen=True)
class CompileConfig:
    """Whether blocks are compiled, and whether with dynamic shapes for all sequence lengths."""

    enabled: bool = False
    dynamic: bool = False
    reason: str = ""


@dataclass(frozen=True)
class CudaGraphsConfig:
    """Whether forward and backward of a microbatch are captured as CUDA graphs."""

    enabled: bool = False
    reason: str = ""


@dataclass(frozen=True)
class ParallelConfig:
    """Processes along each axis of the mesh; only one process is supported so far."""

    data: int = 1


@dataclass(frozen=True)
class MemoryPlan:
    """Recompute policies, tiles, loss memory and dequantized copies with which a step fits its memory limit."""

    recompute: tuple[str, ...]
    """The recompute policy of each layer."""
    mlp_tiles: int = 1
    """Number of token chunks (tiles) in which feed-forward layers are computed."""
    loss_memory: int | None = None
    """Bytes that the loss may allocate beyond its inputs and gradients."""
    dequantized_layers: int = 0
    """Layers whose quantized weights also have dequantized copies."""
    limit: int = 0
    """Bytes that the run may use on its device."""
    limit_basis: str = ""
    """A description of the source of the limit."""
    allocator_bytes: int | None = None
    """The limit set in torch's CUDA allocator; None without `memory_limit`."""
    host_bytes: int = 0
    """Pinned host memory for offloaded activations."""
    reason: str = ""

    @property
    def description(self) -> str:
        """A short description.

        Example:
            >>> MemoryPlan(("block", "none", "none"), mlp_tiles=4).description
            '1 layer block, 2 none; feed-forward in 4 tiles'
            >>> MemoryPlan(("none",) * 3, dequantized_layers=2).description
            'none in all 3 layers; weights of 2 also dequantized'
        """
        text = _describe_policies(self.recompute)
        if self.mlp_tiles > 1:
            text += f"; feed-forward in {self.mlp_tiles} tiles"
        return text + (
            f"; weights of {self.dequantized_layers} also dequantized" if self.dequantized_layers else ""
        )


@dataclass(frozen=True)
class Resolved:
    """The resolved configuration of a run."""

    device: str
    """cpu, cuda, or one GPU of several (cuda:1)."""
    threads: int
    """CPU threads of torch."""
    deterministic: bool
    precision: PrecisionConfig
    attention: AttentionConfig
    optimizer: OptimizerConfig
    loss: LossConfig = LossConfig()
    pointwise: PointwiseConfig = PointwiseConfig()
    compile: CompileConfig = CompileConfig()
    graphs: CudaGraphsConfig = CudaGraphsConfig()
    """May be resolved again when a run is resumed: results are identical either way."""
    memory: MemoryPlan | None = None
    """None until the planner has resolved it."""
    lora: LoraSettings | None = None
    """None for full training."""
    quantization: Quantization | None = None
    """Quantization of frozen weights; None if they are not quantized."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def of_layers(self, layers: range) -> Resolved:
        """Returns the configuration of a model with only these layers."""
        memory = self.memory
        if memory is not None:
            memory = dataclasses.replace(memory, recompute=tuple(memory.recompute[i] for i in layers))
        return dataclasses.replace(self, attention=self.attention.of_layers(layers), memory=memory)

    @property
    def memory_plan(self) -> MemoryPlan:
        """The memory plan, once resolved."""
        assert self.memory is not None, "the memory plan was not resolved yet"
        return self.memory


def _describe_policies(policies: tuple[str, ...]) -> str:
    counts = count_policies(policies)
    if len(counts) == 1:
        return f"{next(iter(counts))} in all {len(policies)} layers"
    first, *others = [f"{count} {policy}" for policy, count in counts.items()]
    word = " layer " if first.startswith("1 ") else " layers "
    return ", ".join([first.replace(" ", word, 1), *others])
