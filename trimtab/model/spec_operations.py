"""Single operations of a block, in the terms of `trimtab.facts.operations`. No torch.

`trimtab.model.spec_block` puts them together; bytes and FLOPs of kernels come from the kernels' own specs.

Legend: N = B · T tokens, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.facts.blocks import AttentionShape, FeedForwardShape, Linear
from trimtab.facts.dtypes import BYTES, nbytes
from trimtab.facts.operations import (
    PARAMETERS,
    Activation,
    Collective,
    Gradient,
    Kind,
    Operation,
    Part,
    Pass,
    Result,
    Saved,
)
from trimtab.kernels.attention import spec as attention_spec
from trimtab.kernels.gated_mlp import spec as gate_spec
from trimtab.kernels.rms_norm import spec as norm_spec
from trimtab.kernels.rope import spec as rope_spec


@dataclass(frozen=True)
class Execution:
    """How a block is run: sizes of a microbatch, dtypes, kernels and what is trained.

    Example:
        >>> Execution(batch=2, tokens=8, dtype="bf16", attention="varlen").num_tokens
        16
    """

    batch: int
    tokens: int
    """Tokens per sequence."""
    dtype: str
    """In which products are computed."""
    attention: str
    """The attention backend."""
    weights_dtype: str = ""
    """fp32 under autocast; the same as `dtype` if empty."""
    device: str = "cpu"
    """"cpu", or "cuda", where torch's fused norm saves less."""
    pointwise: str = "reference"
    """The implementation of norms, RoPE and gates."""
    trained: Mapping[str, Gradient] = field(default_factory=dict)
    """Gradients of the block's trained tensors, by name within the block."""

    @property
    def num_tokens(self) -> int:
        """N, of the whole microbatch."""
        return self.batch * self.tokens

    @property
    def autocast(self) -> bool:
        """Whether products run in fewer bits than the weights have."""
        assert self.weights_dtype in ("", self.dtype, "fp32"), (
            "autocast computes in fewer bits than fp32 weights"
        )
        return self.weights_dtype not in ("", self.dtype)

    @property
    def stream_dtype(self) -> str:
        """Of the residual stream: under autocast that of the weights."""
        return self.weights_dtype if self.autocast else self.dtype

    def gradients(self, *names: str) -> tuple[Gradient, ...]:
        """Of those of these tensors that are trained."""
        return tuple(self.trained[name] for name in names if name in self.trained)

    def activation(self, name: str, width: int, part: Part, dtype: str | None = None) -> Activation:
        """[N, width] in `dtype`, by default that of the products."""
        return Activation(name, self.num_tokens * width * BYTES[dtype or self.dtype], part)


@dataclass(frozen=True)
class Projections:
    """Linear layers that read the same input."""

    linears: tuple[Linear, ...]
    input: Activation
    outputs: tuple[Activation, ...]
    part: Part
    label: str
    """"attention", "gate_up" or "down"."""


def norm_operation(
    name: str, x: Activation, width: int, rows: int, run: Execution, *, dtype: str, part: Part = Part.NORMS
) -> Operation:
    """An RMS norm of rows · N vectors, x in `dtype`, computed in fp32 where it is composed of torch's operations.

    A fused norm saves its input and 1/rms. On a CPU torch composes it: the input and its normalized form in fp32.
    """
    vectors = run.num_tokens * rows
    size = vectors * width
    gradients = run.gradients(f"{name}.weight")
    y = Activation(name, size * BYTES[dtype], part)
    rms = Activation(f"{name}.rms", vectors * 4, Part.NORMS)
    wide = Activation(f"{name}.fp32", size * 4, Part.NORMS)
    source = x if dtype == "fp32" else wide
    both = frozenset({x.name, PARAMETERS})
    if run.device == "cuda" or run.pointwise == "triton":
        # Weights in fp32 beside heads in 16 bits: torch's norm reads a copy.
        mixed = run.autocast and dtype != "fp32" and run.pointwise != "triton"
        saved: tuple[Saved, ...] = (Saved(source if mixed else x, both), Saved(rms, both))
        scratch = (
            0
            if not gradients or run.pointwise != "triton"
            else norm_spec.scratch_bytes(vectors, width, dtype)
        )
        passes = Pass(scratch=scratch)
    else:
        only_x = frozenset({x.name})
        normalized = Activation(f"{name}.normalized", size * 4, Part.NORMS)
        saved = (
            Saved(source, only_x),
            Saved(rms, only_x),
            Saved(normalized, frozenset({PARAMETERS})),
        )
        # Most is held for the gradient of the mean square: five tensors in fp32, when the output's gradient and the
        # normalized form are freed.
        passes = Pass(scratch=size * 4 * (4 if gradients else 5) - 2 * y.nbytes)
    return Operation(
        name,
        Kind.NORM,
        part,
        (x,),
        (y,),
        saved,
        gradients,
        dtype=dtype,
        forward=Pass(norm_spec.flops(vectors, width), norm_spec.bytes_moved(vectors, width, dtype), 1),
        backward=Pass(
            norm_spec.flops(vectors, width, backward=True),
            norm_spec.bytes_moved(vectors, width, dtype, backward=True),
            1,
            passes.scratch,
        ),
        split="sequence",
    )


def plain_projections(group: Projections, run: Execution) -> list[Operation]:
    """Linear layers as torch runs them, one product each; trained where their weight is."""
    return [
        linear_operation(linear, group.input, output, run, group)
        for linear, output in zip(group.linears, group.outputs, strict=True)
    ]


def linear_operation(
    linear: Linear, x: Activation, y: Activation, run: Execution, group: Projections
) -> Operation:
    """One linear layer. Its weight's gradient reads the input, which autocast casts anew for each layer; the input's
    gradient then reads a cast of the weight."""
    reads = frozenset({PARAMETERS})
    saved: tuple[Saved, ...] = (Saved(x, reads),)
    if run.autocast:
        weight = weight_cast(linear, run, group.part)
        saved = (Saved(cast_input(linear, x, run, group.part), reads), Saved(weight, frozenset({x.name})))
    return dataclasses.replace(
        product(linear, x, y, run, group),
        saved=saved,
        gradients=run.gradients(f"{linear.name}.weight", f"{linear.name}.bias"),
    )


def cast_input(linear: Linear, x: Activation, run: Execution, part: Part) -> Activation:
    """What a product reads: x, or under autocast a copy of it in the products' dtype unless x has that already."""
    cast = run.activation(f"{linear.name}.input", linear.in_features, part)
    return x if x.nbytes == cast.nbytes else cast


def weight_cast(linear: Linear, run: Execution, part: Part) -> Activation:
    """The copy of a weight that autocast multiplies with."""
    return Activation(f"{linear.name}.weight_cast", nbytes(run.dtype, linear.weights), part)


def product(linear: Linear, x: Activation, y: Activation, run: Execution, group: Projections) -> Operation:
    """What all products with a matrix share: arithmetic, traffic and how it splits; nothing saved, nothing trained."""
    N, width = run.num_tokens, BYTES[run.dtype]
    flops = 2.0 * N * linear.weights
    moved = float((N * (linear.in_features + linear.out_features) + linear.weights) * width)
    one = Pass(flops, moved, 1)
    read = cast_input(linear, x, run, group.part)
    return Operation(
        linear.name,
        Kind.PRODUCT,
        group.part,
        (x,),
        (y,),
        dtype=run.dtype,
        forward=one,
        # The gradient of a cast input, before it is cast back.
        backward=dataclasses.replace(one, scratch=0 if read is x else read.nbytes),
        parameter_backward=one,
        results=(Result(y),),
        projection=group.label,
        weights=linear.weights,
        split=linear.split,
        communicates=_collectives(linear, run),
    )


def _collectives(linear: Linear, run: Execution) -> tuple[Collective, ...]:
    """Of a product that is split: a row split adds up its outputs, a column split the gradients of its input."""
    size = run.num_tokens * BYTES[run.dtype]
    if linear.split == "row":
        return (Collective("all_reduce", size * linear.out_features),)
    if linear.split == "column":
        return (Collective("all_reduce", size * linear.in_features, backward=True),)
    return ()


def add_residual(
    found: list[Operation], name: str, x: Activation, branch: Activation, width: int, run: Execution
) -> None:
    y = run.activation(name, width, Part.RESIDUAL, run.stream_dtype)
    inputs = tuple(dict.fromkeys((x, branch)))
    moved = float(x.nbytes + branch.nbytes + y.nbytes)
    found.append(
        Operation(
            name,
            Kind.ADD,
            Part.RESIDUAL,
            inputs,
            (y,),
            dtype=run.stream_dtype,
            forward=Pass(run.num_tokens * width, moved, 1),
            shared_gradient=True,
            split="sequence",
        )
    )


def copy_values(found: list[Operation], mixer: AttentionShape, qkv: Activation, run: Execution) -> Activation:
    """Values of a fused projection, copied so that attention does not save queries and keys from before RoPE too."""
    v = run.activation("self_attn.v", mixer.kv_size, Part.ATTENTION)
    one = Pass(moved=2.0 * v.nbytes, launches=1)
    found.append(
        Operation(
            "self_attn.v", Kind.COPY, Part.ATTENTION, (qkv,), (v,), dtype=run.dtype, forward=one, backward=one
        )
    )
    return v


def place_heads(
    found: list[Operation], mixer: AttentionShape, q: Activation, k: Activation, run: Execution
) -> tuple[Activation, Activation]:
    """QK-norm and RoPE: one kernel in Triton, which saves queries and keys as they were before the norm."""
    H, K, D, N = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, run.num_tokens
    fused = run.pointwise == "triton"
    normed = mixer.qk_norm is not None
    if normed and not fused:
        for name, heads in (("self_attn.q_norm", H), ("self_attn.k_norm", K)):
            x = q if name.endswith("q_norm") else k
            vectors, width = (1, heads * D) if mixer.qk_norm == "full" else (heads, D)
            found.append(norm_operation(name, x, width, vectors, run, dtype=run.dtype, part=Part.ATTENTION))
        q, k = found[-2].outputs[0], found[-1].outputs[0]
    if mixer.rope is None:
        return q, k
    inputs = tuple(dict.fromkeys((q, k)))
    rotated = (
        run.activation("self_attn.q_rotated", H * D, Part.ATTENTION),
        run.activation("self_attn.k_rotated", K * D, Part.ATTENTION),
    )
    in_rope = normed and fused
    every = frozenset({one.name for one in inputs} | {PARAMETERS})
    R = mixer.rope.rotary_dim
    moved = [
        rope_spec.bytes_moved(N, H, K, D, run.dtype, R=R, norm=in_rope, backward=way) for way in (False, True)
    ]
    flops = [rope_spec.flops(N, H, K, D, R=R, norm=in_rope, backward=way) for way in (False, True)]
    forward = backward = 0
    if not fused:
        # Queries, then keys: a copy in fp32 where there are fewer bits, and sums and products of halves.
        each = 8 + (4 if BYTES[run.dtype] < 4 else 0)
        outputs = sum(one.nbytes for one in rotated)
        # Beside the keys' gradient; the one that came in is freed once it is cast.
        backward = N * H * D * each - rotated[0].nbytes * (2 if each > 8 else 1)
        forward = max(N * H * D * each, rotated[0].nbytes + N * K * D * each) - outputs
    found.append(
        Operation(
            "rope",
            Kind.ROPE,
            Part.ATTENTION,
            inputs,
            rotated,
            tuple(Saved(one, every) for one in inputs) if in_rope else (),
            run.gradients("self_attn.q_norm.weight", "self_attn.k_norm.weight") if in_rope else (),
            dtype=run.dtype,
            saves_results=in_rope,
            forward=Pass(flops[0], moved[0], 1, forward),
            backward=Pass(flops[1], moved[1], 1, backward),
            split="column",
        )
    )
    return rotated


def attend(
    found: list[Operation],
    mixer: AttentionShape,
    q: Activation,
    k: Activation,
    v: Activation,
    run: Execution,
) -> Activation:
    impl, (B, T) = run.attention, (run.batch, run.tokens)
    H, K, D = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    o = run.activation("self_attn.attended", H * D, Part.ATTENTION)
    inputs = tuple(dict.fromkeys((q, k, v)))
    reads = frozenset(one.name for one in inputs)
    results: tuple[Result, ...] = ()
    own = attention_spec.saved_activations(impl, B, T, H, K, D, run.dtype, sinks=mixer.sinks)
    named = {"q": q, "k": k, "v": v, "o": o}
    saved = [named.get(name, Activation(f"attention.{name}", size, Part.ATTENTION)) for name, size in own]
    if impl in attention_spec.TILED:
        results = tuple(Result(one) for one in saved if one is o or one.name == "attention.lse")
    pairs = B * attention_spec.visible_pairs(T, T, mixer.window)
    sizes = (B, T, T, H, K, D)
    scratch = 0
    if run.device == "cuda" or impl == "triton" or impl not in attention_spec.TILED:
        # SDPA's tiled kernel on a CPU has a tile per thread, inside itself.
        scratch = attention_spec.scratch_bytes(impl, *sizes, run.dtype)
    found.append(
        Operation(
            "attention",
            Kind.ATTENTION,
            Part.ATTENTION,
            inputs,
            (o,),
            tuple(Saved(one, reads) for one in saved),
            run.gradients("self_attn.sinks"),
            dtype=run.dtype,
            forward=Pass(
                attention_spec.flops(pairs, H, D), attention_spec.bytes_moved(*sizes, run.dtype), 1, scratch
            ),
            backward=Pass(
                attention_spec.flops(pairs, H, D, backward=True),
                attention_spec.bytes_moved(*sizes, run.dtype, backward=True),
                2,
                scratch,
            ),
            results=results,
            split="column",
        )
    )
    return o


def gate_inputs(
    found: list[Operation], shape: FeedForwardShape, gate: Activation, up: Activation, run: Execution
) -> Activation:
    N, width = run.num_tokens, shape.width
    y = run.activation("mlp.gated", width, Part.FEED_FORWARD)
    inputs = tuple(dict.fromkeys((gate, up)))
    reads = frozenset(one.name for one in inputs)
    saved = [Saved(one, reads) for one in inputs]
    fused = run.pointwise == "triton"
    # The gradients of views into one product are copied into one tensor.
    scratch = gate.nbytes if gate is up else 0
    if not fused:
        activated = run.activation("mlp.activated", width, Part.FEED_FORWARD)
        # act(gate) is read by the gradient of up alone, gate and up by that of gate.
        saved = [Saved(one, frozenset({gate.name})) for one in inputs] + [
            Saved(activated, frozenset({up.name}))
        ]
    found.append(
        Operation(
            "mlp.activation",
            Kind.GATE,
            Part.FEED_FORWARD,
            inputs,
            (y,),
            tuple(saved),
            dtype=run.dtype,
            forward=Pass(
                gate_spec.flops(N, width), gate_spec.bytes_moved(N, width, run.dtype), 1 if fused else 2
            ),
            backward=Pass(
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
