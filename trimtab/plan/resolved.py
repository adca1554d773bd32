"""The resolved configuration: what every `auto` of a recipe was decided to be, for one model on one machine.

`trimtab.run.resolve` makes it, the planner and `trimtab.run.build` read it, and `resolved_json` writes it into the run
folder, so that a resumed run decides nothing anew. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from trimtab.adapt.spec import LoraSettings
from trimtab.adapt.spec_quantized import Quantization
from trimtab.adapt.spec_recompute import count_policies


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats by trimtab's names: fp32, bf16, fp16."""

    dtype: str
    """Of matrix products and activations."""
    weights_dtype: str
    gradient_dtype: str
    """In which gradients of several microbatches are accumulated."""
    description: str = ""


@dataclass(frozen=True)
class LayerAttention:
    """The attention backends of one layer."""

    packed: str
    """For sequences of several documents."""
    unpacked: str
    """For sequences of one document."""


@dataclass(frozen=True)
class AttentionConfig:
    """The attention backend of each layer, why it was chosen, and why the others were not."""

    layers: tuple[LayerAttention, ...]
    reason: str = ""
    rejected: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def uniform(num_layers: int, packed: str, unpacked: str | None = None) -> AttentionConfig:
        """The same backends in all layers.

        Example:
            >>> AttentionConfig.uniform(2, "varlen").layers[1]
            LayerAttention(packed='varlen', unpacked='varlen')
        """
        return AttentionConfig((LayerAttention(packed, unpacked or packed),) * num_layers)

    def of_layers(self, layers: range) -> AttentionConfig:
        """Of these layers only."""
        return dataclasses.replace(self, layers=tuple(self.layers[i] for i in layers))

    @property
    def packed_backends(self) -> str:
        """The backends for packed sequences, each once, for people to read."""
        return ", ".join(dict.fromkeys(layer.packed for layer in self.layers))


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer's name in the recipe and the implementation that runs it."""

    name: str
    impl: str = "reference"
    reason: str = ""


@dataclass(frozen=True)
class LossConfig:
    """The implementation of the language-model loss, and what training adds to the cross-entropy."""

    impl: str = "chunked"
    memory_bytes: int | None = None
    """The most that logits may take; `MemoryPlan.loss_memory` is what they take."""
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
    """Whether blocks are compiled, and whether one program serves all sequence lengths."""

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
    """Processes along each axis of the mesh; there is one process so far."""

    data: int = 1


@dataclass(frozen=True)
class MemoryPlan:
    """What is recomputed, tiled and dequantized so that a step fits its memory limit."""

    recompute: tuple[str, ...]
    """The recompute policy of each layer."""
    mlp_tiles: int = 1
    """Parts of the tokens that feed-forward layers are computed in."""
    loss_memory: int | None = None
    """Bytes that the loss may hold beyond its inputs and gradients."""
    unpacked_layers: int = 0
    """Layers of which dequantized weights are kept."""
    limit: int = 0
    """Bytes that the run may take on its device."""
    limit_basis: str = ""
    """Where the limit comes from, in words."""
    allocator_bytes: int | None = None
    """The limit set in torch's CUDA allocator; None without `memory_limit`."""
    host_bytes: int = 0
    """Pinned host memory for offloaded activations."""
    reason: str = ""

    @property
    def description(self) -> str:
        """In a few words.

        Example:
            >>> MemoryPlan(("block", "none", "none"), mlp_tiles=4).description
            '1 layer block, 2 none; feed-forward in 4 tiles'
            >>> MemoryPlan(("none",) * 3, unpacked_layers=2).description
            'none in all 3 layers; weights of 2 also dequantized'
        """
        text = _describe_policies(self.recompute)
        if self.mlp_tiles > 1:
            text += f"; feed-forward in {self.mlp_tiles} tiles"
        return text + (
            f"; weights of {self.unpacked_layers} also dequantized" if self.unpacked_layers else ""
        )


@dataclass(frozen=True)
class Resolved:
    """Everything that was decided for a run."""

    device: str
    """cpu, cuda, or one GPU of several (cuda:1)."""
    threads: int
    """CPU threads of torch's operations."""
    deterministic: bool
    precision: PrecisionConfig
    attention: AttentionConfig
    optimizer: OptimizerConfig
    loss: LossConfig = LossConfig()
    pointwise: PointwiseConfig = PointwiseConfig()
    compile: CompileConfig = CompileConfig()
    graphs: CudaGraphsConfig = CudaGraphsConfig()
    """May be decided anew when a run is resumed: the numbers are the same either way."""
    memory: MemoryPlan | None = None
    """None until the planner has chosen it."""
    lora: LoraSettings | None = None
    """None where every weight is trained."""
    quantization: Quantization | None = None
    """Of frozen weights; None where they keep their format."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def of_layers(self, layers: range) -> Resolved:
        """The configuration of a model with only these layers."""
        memory = self.memory
        if memory is not None:
            memory = dataclasses.replace(memory, recompute=tuple(memory.recompute[i] for i in layers))
        return dataclasses.replace(self, attention=self.attention.of_layers(layers), memory=memory)

    @property
    def memory_plan(self) -> MemoryPlan:
        """The memory plan of a configuration that is complete."""
        assert self.memory is not None, "the memory plan was not resolved yet"
        return self.memory


def _describe_policies(policies: tuple[str, ...]) -> str:
    counts = count_policies(policies)
    if len(counts) == 1:
        return f"{next(iter(counts))} in all {len(policies)} layers"
    first, *others = [f"{count} {policy}" for policy, count in counts.items()]
    word = " layer " if first.startswith("1 ") else " layers "
    return ", ".join([first.replace(" ", word, 1), *others])
