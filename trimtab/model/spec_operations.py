"""Declares single operations of a block as `trimtab.facts.operations`. No torch.

`trimtab.model.spec_block` combines them; bytes and FLOPs of kernels come from the kernels' specs.

Legend: N = B · T tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trimtab.facts.blocks import AttentionShape, FeedForwardShape, Linear
from trimtab.facts.dtypes import BYTES, nbytes
from trimtab.facts.operations import (
    PARAMETERS,
    Activation,
    Collective,
    Gradient,
    Kernel,
    MemoryPart,
    Operation,
    OperationKind,
    PassCost,
    SavableResult,
    SavedActivation,
)
from trimtab.kernels.attention import spec as attention_spec
from trimtab.kernels.gated_mlp import spec as gate_spec
from trimtab.kernels.rms_norm import spec as norm_spec
from trimtab.kernels.rope import spec as rope_spec

BACKWARD_KERNELS = {"sdpa_cudnn": 5, "varlen": 3, "sdpa_flash": 3}
"""Number of kernels in attention's backward pass if it is not two: some backends also reduce over rows and heads, and
cast dQ."""


@dataclass(frozen=True)
class Execution:
    """The execution of a block: microbatch sizes, dtypes, kernels and trainable parameters.

    Example:
        >>> Execution(batch=2, tokens=8, dtype="bf16", attention="varlen").num_tokens
        16
    """

    batch: int
    tokens: int
    """Tokens per sequence."""
    dtype: str
    """Compute dtype of matrix products."""
    attention: str
    """The attention backend."""
    weights_dtype: str = ""
    """Dtype of the weights: fp32 under autocast, the same as `dtype` if empty."""
    device: str = "cpu"
    """"cpu" or "cuda"; on CUDA torch's fused norm saves less."""
    pointwise: str = "reference"
    """The implementation of norms, RoPE and gated activations."""
    trained: Mapping[str, Gradient] = field(default_factory=dict)
    """Gradients of the block's trainable parameters, by name within the block."""
    attended_share: float = 1.0
    """Fraction of a causal sequence's query–key pairs that are within one document."""

    @property
    def num_tokens(self) -> int:
        """N, the tokens of the microbatch."""
        return self.batch * self.tokens

    @property
    def autocast(self) -> bool:
        """Whether products run in a narrower dtype than the weights."""
        assert self.weights_dtype in ("", self.dtype, "fp32"), "autocast requires fp32 weights"
        return self.weights_dtype not in ("", self.dtype)

    @property
    def stream_dtype(self) -> str:
        """Dtype of the residual stream: that of the weights under autocast, else the compute dtype."""
        return self.weights_dtype if self.autocast else self.dtype

    def gradients(self, *names: str) -> tuple[Gradient, ...]:
        """The gradients of the named parameters, without the frozen ones."""
        return tuple(self.trained[name] for name in names if name in self.trained)

    def activation(self, name: str, width: int, part: MemoryPart, dtype: str | None = None) -> Activation:
        """An activation [N, width] in `dtype`, by default the compute dtype."""
        return Activation(name, self.num_tokens * width * BYTES[dtype or self.dtype], part)


@dataclass(frozen=True)
class Projections:
    """Linear layers that read the same input."""

    linears: tuple[Linear, ...]
    input: Activation
    outputs: tuple[Activation, ...]
    part: MemoryPart
    label: str
    """"attention", "gate_up" or "down"."""


DeclareProjections = Callable[[Projections, Execution], list[Operation]]
"""Declares the operations of linear layers; `trimtab.adapt.spec_linears` does so for adapters and quantization."""


def norm_operation(
    name: str,
    x: Activation,
    width: int,
    rows: int,
    run: Execution,
    *,
    dtype: str,
    part: MemoryPart = MemoryPart.NORMS,
) -> Operation:
    """Declares an RMSNorm over `rows` vectors per token (1, or the number of heads), in `dtype`.

    A fused norm saves its input and 1/rms. On a CPU torch decomposes the norm into fp32 operators, which save the input
    and the normalized input in fp32.
    """
    vectors = run.num_tokens * rows
    size = vectors * width
    gradients = run.gradients(f"{name}.weight")
    y = Activation(name, size * BYTES[dtype], part)
    rms = Activation(f"{name}.rms", vectors * 4, MemoryPart.NORMS)
    wide = Activation(f"{name}.fp32", size * 4, MemoryPart.NORMS)
    source = x if dtype == "fp32" else wide
    both = frozenset({x.name, PARAMETERS})
    if run.device == "cuda" or run.pointwise == "triton":
        # Under autocast torch's norm casts 16-bit queries and keys to fp32 and saves the copy.
        mixed = run.autocast and dtype != "fp32" and run.pointwise != "triton"
        saved: tuple[SavedActivation, ...] = (
            SavedActivation(source if mixed else x, both),
            SavedActivation(rms, both),
        )
        scratch = (
            0
            if not gradients or run.pointwise != "triton"
            else norm_spec.scratch_bytes(vectors, width, dtype)
        )
        passes = PassCost(scratch=scratch)
    else:
        only_x = frozenset({x.name})
        normalized = Activation(f"{name}.normalized", size * 4, MemoryPart.NORMS)
        saved = (
            SavedActivation(source, only_x),
            SavedActivation(rms, only_x),
            SavedActivation(normalized, frozenset({PARAMETERS})),
        )
        # Memory peaks in the gradient of the mean square: five fp32 tensors, after the output's gradient and the
        # normalized input are freed.
        passes = PassCost(scratch=size * 4 * (4 if gradients else 5) - 2 * y.nbytes)
    return Operation(
        name,
        OperationKind.NORM,
        part,
        (x,),
        (y,),
        saved,
        gradients,
        dtype=dtype,
        forward=PassCost(norm_spec.flops(vectors, width), norm_spec.bytes_moved(vectors, width, dtype), 1),
        backward=PassCost(
            norm_spec.flops(vectors, width, backward=True),
            norm_spec.bytes_moved(vectors, width, dtype, backward=True),
            2 if gradients else 1,
            passes.scratch,
        ),
        split="sequence",
    )


def plain_projections(group: Projections, run: Execution) -> list[Operation]:
    """Declares linear layers as `nn.Linear` runs them, one product each; trained if their weight is."""
    return [
        linear_operation(linear, group.input, output, run, group)
        for linear, output in zip(group.linears, group.outputs, strict=True)
    ]


def linear_operation(
    linear: Linear, x: Activation, y: Activation, run: Execution, group: Projections
) -> Operation:
    """Declares one linear layer. The gradient of its weight reads the input; under autocast it reads the layer's cast
    of the input, and the gradient of the input reads a cast of the weight."""
    reads = frozenset({PARAMETERS})
    saved: tuple[SavedActivation, ...] = (SavedActivation(x, reads),)
    if run.autocast:
        weight = weight_cast(linear, run, group.part)
        saved = (
            SavedActivation(cast_input(linear, x, run, group.part), reads),
            SavedActivation(weight, frozenset({x.name})),
        )
    return dataclasses.replace(
        product(linear, x, y, run, group),
        saved=saved,
        gradients=run.gradients(f"{linear.name}.weight", f"{linear.name}.bias"),
    )


def cast_input(linear: Linear, x: Activation, run: Execution, part: MemoryPart) -> Activation:
    """The input of a product: x, or under autocast a copy in the compute dtype if x has another dtype."""
    cast = run.activation(f"{linear.name}.input", linear.in_features, part)
    return x if x.nbytes == cast.nbytes else cast


def weight_cast(linear: Linear, run: Execution, part: MemoryPart) -> Activation:
    """Autocast's copy of a weight in the compute dtype."""
    return Activation(f"{linear.name}.weight_cast", nbytes(run.dtype, linear.weights), part)


def product(linear: Linear, x: Activation, y: Activation, run: Execution, group: Projections) -> Operation:
    """Declares what all matrix products have in common: FLOPs, bytes moved and sharding; no saved tensors, no
    gradients."""
    N, ins, outs, width = run.num_tokens, linear.in_features, linear.out_features, BYTES[run.dtype]
    # Each row is multiplied by one of the stacked experts, so the number of experts that are read is at most N.
    groups = min(linear.count, N)
    read = cast_input(linear, x, run, group.part)
    return Operation(
        linear.name,
        OperationKind.PRODUCT,
        group.part,
        (x,),
        (y,),
        dtype=run.dtype,
        forward=PassCost.of(Kernel.product(N, outs, ins, width=width, groups=groups)),
        # Workspace: the gradient of a cast input in the compute dtype, before it is cast back.
        backward=PassCost.of(
            Kernel.product(N, ins, outs, width=width, groups=groups), scratch=0 if read is x else read.nbytes
        ),
        parameter_backward=PassCost.of(Kernel.weight_gradient(outs, ins, N, width=width, groups=groups)),
        results=(SavableResult(y),),
        projection=group.label,
        weights=groups * linear.matrix,
        split=linear.split,
        communicates=_collectives(linear, run),
    )


def _collectives(linear: Linear, run: Execution) -> tuple[Collective, ...]:
    """The collectives of a sharded product: all-reduce of outputs if row-wise, of input gradients if column-wise."""
    size = run.num_tokens * BYTES[run.dtype]
    if linear.split == "row":
        return (Collective("all_reduce", size * linear.out_features),)
    if linear.split == "column":
        return (Collective("all_reduce", size * linear.in_features, backward=True),)
    return ()


def add_residual(
    found: list[Operation], name: str, x: Activation, branch: Activation, width: int, run: Execution
) -> None:
    """Adds a residual addition: x + branch, named `name`."""
    y = run.activation(name, width, MemoryPart.RESIDUAL, run.stream_dtype)
    inputs = tuple(dict.fromkeys((x, branch)))
    moved = float(x.nbytes + branch.nbytes + y.nbytes)
    found.append(
        Operation(
            name,
            OperationKind.ADD,
            MemoryPart.RESIDUAL,
            inputs,
            (y,),
            dtype=run.stream_dtype,
            forward=PassCost(run.num_tokens * width, moved, 1),
            shared_gradient=True,
            split="sequence",
        )
    )


def copy_values(found: list[Operation], mixer: AttentionShape, qkv: Activation, run: Execution) -> Activation:
    """Adds a copy of the values out of a fused projection. Attention then saves the copy; a view would also keep
    queries and keys before RoPE alive."""
    v = run.activation("self_attn.v", mixer.kv_size, MemoryPart.ATTENTION)
    copy = PassCost(moved=2.0 * v.nbytes, launches=1)
    found.append(
        Operation(
            "self_attn.v",
            OperationKind.COPY,
            MemoryPart.ATTENTION,
            (qkv,),
            (v,),
            dtype=run.dtype,
            forward=copy,
            backward=copy,
        )
    )
    return v


def add_rope(
    found: list[Operation], mixer: AttentionShape, q: Activation, k: Activation, run: Execution
) -> tuple[Activation, Activation]:
    """Adds QK-norm and RoPE: with Triton a single kernel, which saves queries and keys before the norm."""
    H, K, D, N = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, run.num_tokens
    fused = run.pointwise == "triton"
    normed = mixer.qk_norm is not None
    if normed and not fused:
        for name, heads in (("self_attn.q_norm", H), ("self_attn.k_norm", K)):
            x = q if name.endswith("q_norm") else k
            vectors, width = (1, heads * D) if mixer.qk_norm == "full" else (heads, D)
            found.append(
                norm_operation(name, x, width, vectors, run, dtype=run.dtype, part=MemoryPart.ATTENTION)
            )
        q, k = found[-2].outputs[0], found[-1].outputs[0]
    if mixer.rope is None:
        return q, k
    inputs = tuple(dict.fromkeys((q, k)))
    rotated = (
        run.activation("self_attn.q_rotated", H * D, MemoryPart.ATTENTION),
        run.activation("self_attn.k_rotated", K * D, MemoryPart.ATTENTION),
    )
    in_rope = normed and fused
    every = frozenset({x.name for x in inputs} | {PARAMETERS})
    R = mixer.rope.rotary_dim
    moved = [
        rope_spec.bytes_moved(N, H, K, D, run.dtype, R=R, norm=in_rope, backward=backward)
        for backward in (False, True)
    ]
    flops = [rope_spec.flops(N, H, K, D, R=R, norm=in_rope, backward=backward) for backward in (False, True)]
    forward = backward = 0
    if not fused:
        # The reference rotates queries, then keys: an fp32 copy of 16-bit inputs, and products and sums of both halves.
        each = 8 + (4 if BYTES[run.dtype] < 4 else 0)
        outputs = sum(y.nbytes for y in rotated)
        # In addition to the keys' gradient; the upstream gradient is freed as soon as it is cast.
        backward = N * H * D * each - rotated[0].nbytes * (2 if each > 8 else 1)
        forward = max(N * H * D * each, rotated[0].nbytes + N * K * D * each) - outputs
    found.append(
        Operation(
            "rope",
            OperationKind.ROPE,
            MemoryPart.ATTENTION,
            inputs,
            rotated,
            tuple(SavedActivation(x, every) for x in inputs) if in_rope else (),
            run.gradients("self_attn.q_norm.weight", "self_attn.k_norm.weight") if in_rope else (),
            dtype=run.dtype,
            saves_results=in_rope,
            forward=PassCost(flops[0], moved[0], 1, forward),
            backward=PassCost(flops[1], moved[1], 1, backward),
            split="column",
        )
    )
    return rotated


def add_attention(
    found: list[Operation],
    mixer: AttentionShape,
    q: Activation,
    k: Activation,
    v: Activation,
    run: Execution,
) -> Activation:
    """Adds softmax attention; returns its output before the output projection."""
    impl, (B, T) = run.attention, (run.batch, run.tokens)
    H, K, D = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    o = run.activation("self_attn.attended", H * D, MemoryPart.ATTENTION)
    inputs = tuple(dict.fromkeys((q, k, v)))
    reads = frozenset(x.name for x in inputs)
    saved = _saved_by_attention(mixer, run, q, k, v, o)
    results: tuple[SavableResult, ...] = ()
    if impl in attention_spec.TILED:
        results = tuple(SavableResult(x) for x in saved if x is o or x.name == "attention.lse")
    pairs = B * attention_spec.visible_pairs(T, T, mixer.window)
    if impl in attention_spec.SKIPS_DOCUMENTS:
        pairs = min(pairs, max(round(run.attended_share * B * attention_spec.visible_pairs(T, T)), B * T))
    visible = (max(pairs // (B * T), 1), D, B * T * H)
    sizes = (B, T, T, H, K, D)

    def scratch(backward: bool) -> int:
        if run.device != "cuda" and impl != "triton" and impl in attention_spec.TILED:
            return 0  # SDPA's tiled kernel on a CPU allocates one tile per thread
        return attention_spec.scratch_bytes(impl, *sizes, run.dtype, sinks=mixer.sinks, backward=backward)

    def kernel(backward: bool) -> Kernel:
        return Kernel(
            OperationKind.ATTENTION,
            attention_spec.flops(pairs, H, D, backward=backward),
            attention_spec.bytes_moved(*sizes, run.dtype, backward=backward),
            visible,
            impl,
        )

    found.append(
        Operation(
            "attention",
            OperationKind.ATTENTION,
            MemoryPart.ATTENTION,
            inputs,
            (o,),
            tuple(SavedActivation(activation, reads) for activation in saved),
            run.gradients("self_attn.sinks"),
            dtype=run.dtype,
            forward=PassCost.of(kernel(backward=False), scratch=scratch(backward=False)),
            backward=PassCost.of(
                kernel(backward=True), launches=BACKWARD_KERNELS.get(impl, 2), scratch=scratch(backward=True)
            ),
            results=results,
            split="column",
        )
    )
    return o


def _saved_by_attention(
    mixer: AttentionShape, run: Execution, q: Activation, k: Activation, v: Activation, o: Activation
) -> list[Activation]:
    """The tensors that a backend saves for the backward pass: inputs, output and its own."""
    own = attention_spec.saved_activations(
        run.attention,
        run.batch,
        run.tokens,
        mixer.num_heads,
        mixer.num_kv_heads,
        mixer.head_dim,
        run.dtype,
        sinks=mixer.sinks,
    )
    named = {"q": q, "k": k, "v": v, "o": o}
    return [
        named.get(name, Activation(f"attention.{name}", size, MemoryPart.ATTENTION)) for name, size in own
    ]


def add_gated_activation(
    found: list[Operation],
    shape: FeedForwardShape,
    gate: Activation,
    up: Activation,
    run: Execution,
    prefix: str = "mlp",
) -> Activation:
    """Adds act(gate) · up; returns its output."""
    N, width = run.num_tokens, shape.width
    y = run.activation(f"{prefix}.gated", width, MemoryPart.FEED_FORWARD)
    inputs = tuple(dict.fromkeys((gate, up)))
    reads = frozenset(x.name for x in inputs)
    saved = [SavedActivation(x, reads) for x in inputs]
    fused = run.pointwise == "triton"
    # The gradients of views of one output are copied into one tensor.
    scratch = gate.nbytes if gate is up else 0
    if not fused:
        activated = run.activation(f"{prefix}.activated", width, MemoryPart.FEED_FORWARD)
        # act(gate) is read only by the gradient of up, gate and up by that of gate.
        saved = [SavedActivation(x, frozenset({gate.name})) for x in inputs] + [
            SavedActivation(activated, frozenset({up.name}))
        ]
    found.append(
        Operation(
            f"{prefix}.activation",
            OperationKind.GATE,
            MemoryPart.FEED_FORWARD,
            inputs,
            (y,),
            tuple(saved),
            dtype=run.dtype,
            forward=PassCost(
                gate_spec.flops(N, width), gate_spec.bytes_moved(N, width, run.dtype), 1 if fused else 2
            ),
            backward=PassCost(
                gate_spec.flops(N, width, backward=True),
                gate_spec.bytes_moved(N, width, run.dtype, backward=True),
                1 if fused else 3,
                scratch,
            ),
            in_place=reads if fused and len(inputs) == 2 else frozenset(),
            saves_results=fused,
            split="column",
        )
    )
    return y
