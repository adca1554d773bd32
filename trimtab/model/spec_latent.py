"""Declares the operations of multi-head latent attention (DeepSeek). No torch.

Keys and values are projected to a latent, normalized, and projected up to all heads. Each head of queries and keys has
a rotated part; that of the keys is shared by all heads. Values have another head size; the declaration assumes a kernel
that supports it without padding. trimtab cannot train such layers yet, so no training step verifies the figures.

Legend: N = B · T tokens, H heads, D head size of queries and keys, V of values.
"""

from __future__ import annotations

from trimtab.facts.blocks import LatentAttentionShape, Linear
from trimtab.facts.dtypes import BYTES
from trimtab.facts.operations import (
    Activation,
    Kernel,
    MemoryPart,
    Operation,
    OperationKind,
    PassCost,
    SavableResult,
    SavedActivation,
)
from trimtab.kernels.attention import spec as attention_spec
from trimtab.model.spec_operations import (
    BACKWARD_KERNELS,
    DeclareProjections,
    Execution,
    Projections,
    norm_operation,
)


def add_latent_attention(
    found: list[Operation],
    mixer: LatentAttentionShape,
    x: Activation,
    hidden_size: int,
    run: Execution,
    declare: DeclareProjections,
) -> Activation:
    """Adds the operations of latent attention with input x, including the output projection; returns its output [N, C].

    Example:
        >>> from trimtab.model.spec_operations import plain_projections
        >>> run, operations = Execution(1, 8, "bf16", "triton", pointwise="triton"), []
        >>> mixer = LatentAttentionShape(4, 8, rope_head_dim=4, nope_head_dim=8, value_head_dim=8, q_rank=16)
        >>> x = run.activation("x", 16, MemoryPart.RESIDUAL)
        >>> _ = add_latent_attention(operations, mixer, x, 16, run, plain_projections)
        >>> [operation.name.removeprefix("self_attn.") for operation in operations][:4]
        ['q_a_proj', 'kv_a_proj_with_mqa', 'q_a_layernorm', 'kv_a_layernorm']
    """
    linears = {linear.short_name: linear for linear in mixer.linears(hidden_size)}
    first = linears["q_proj" if mixer.q_rank is None else "q_a_proj"]
    q, kv = _project(found, declare, (first, linears["kv_a_proj_with_mqa"]), x, run)
    if mixer.q_rank is not None:
        q = _norm(found, "self_attn.q_a_layernorm", q, mixer.q_rank, run)
    latent = _norm(found, "self_attn.kv_a_layernorm", kv, mixer.kv_rank, run)
    if mixer.q_rank is not None:
        (q,) = _project(found, declare, (linears["q_b_proj"],), q, run)
    (heads,) = _project(found, declare, (linears["kv_b_proj"],), latent, run)
    v = _copy_values(found, mixer, heads, run)
    q, k = _add_rope(found, mixer, q, kv, heads, run)
    attended = _attend(found, mixer, q, k, v, run)
    (y,) = _project(found, declare, (linears["o_proj"],), attended, run)
    return y


def _project(
    found: list[Operation],
    declare: DeclareProjections,
    linears: tuple[Linear, ...],
    x: Activation,
    run: Execution,
) -> tuple[Activation, ...]:
    made = tuple(run.activation(linear.name, linear.out_features, MemoryPart.ATTENTION) for linear in linears)
    found += declare(Projections(linears, x, made, MemoryPart.ATTENTION, "attention"), run)
    return made


def _norm(found: list[Operation], name: str, x: Activation, width: int, run: Execution) -> Activation:
    found.append(norm_operation(name, x, width, 1, run, dtype=run.dtype, part=MemoryPart.ATTENTION))
    return found[-1].outputs[0]


def _copy_values(
    found: list[Operation], mixer: LatentAttentionShape, heads: Activation, run: Execution
) -> Activation:
    """Adds a copy of the values out of the joint projection. Attention then saves the copy; a view would also keep the
    keys' part alive."""
    v = run.activation("self_attn.v", mixer.num_heads * mixer.value_head_dim, MemoryPart.ATTENTION)
    copy = PassCost(moved=2.0 * v.nbytes, launches=1)
    found.append(
        Operation(
            "self_attn.v",
            OperationKind.COPY,
            MemoryPart.ATTENTION,
            (heads,),
            (v,),
            dtype=run.dtype,
            forward=copy,
            backward=copy,
            split="column",
        )
    )
    return v


def _add_rope(
    found: list[Operation],
    mixer: LatentAttentionShape,
    q: Activation,
    kv: Activation,
    heads: Activation,
    run: Execution,
) -> tuple[Activation, Activation]:
    """Applies RoPE to the rotated parts, repeats that of the keys for all heads, and concatenates both parts."""
    N, H, D, R = run.num_tokens, mixer.num_heads, mixer.head_dim, mixer.rope_head_dim
    outputs = (
        run.activation("self_attn.q_rotated", H * D, MemoryPart.ATTENTION),
        run.activation("self_attn.k_rotated", H * D, MemoryPart.ATTENTION),
    )
    read = q.nbytes + N * (R + H * mixer.nope_head_dim) * BYTES[run.dtype]
    rotation = PassCost(3.0 * N * (H + 1) * R, float(read + sum(y.nbytes for y in outputs)), 2)
    found.append(
        Operation(
            "rope",
            OperationKind.ROPE,
            MemoryPart.ATTENTION,
            (q, kv, heads),
            outputs,
            dtype=run.dtype,
            forward=rotation,
            backward=rotation,
            split="column",
        )
    )
    return outputs


def _attend(
    found: list[Operation],
    mixer: LatentAttentionShape,
    q: Activation,
    k: Activation,
    v: Activation,
    run: Execution,
) -> Activation:
    impl, (B, T, N) = run.attention, (run.batch, run.tokens, run.num_tokens)
    H, D, V = mixer.num_heads, mixer.head_dim, mixer.value_head_dim
    o = run.activation("self_attn.attended", H * V, MemoryPart.ATTENTION)
    lse = Activation("attention.lse", N * H * 4, MemoryPart.ATTENTION)
    tiled = impl in attention_spec.TILED
    saved = [q, k, v, o, lse]
    if not tiled:  # assumes values of the keys' head size
        own = attention_spec.saved_activations(impl, B, T, H, H, D, run.dtype)
        saved = [Activation(f"attention.{name}", size, MemoryPart.ATTENTION) for name, size in own]
    pairs = B * attention_spec.visible_pairs(T, T, mixer.window)
    if impl in attention_spec.SKIPS_DOCUMENTS:
        pairs = min(pairs, max(round(run.attended_share * B * attention_spec.visible_pairs(T, T)), N))
    visible = (max(pairs // N, 1), D, N * H)
    scratch = attention_spec.scratch_bytes(impl, B, T, T, H, H, D, run.dtype)
    each = q.nbytes + k.nbytes + v.nbytes + o.nbytes
    reads = frozenset({q.name, k.name, v.name})
    found.append(
        Operation(
            "attention",
            OperationKind.ATTENTION,
            MemoryPart.ATTENTION,
            (q, k, v),
            (o,),
            tuple(SavedActivation(activation, reads) for activation in saved),
            dtype=run.dtype,
            # Products with keys and values; the backward pass recomputes the scores and has two products per gradient.
            forward=PassCost.of(
                Kernel(
                    OperationKind.ATTENTION,
                    2.0 * pairs * H * (D + V),
                    float(each + lse.nbytes),
                    visible,
                    impl,
                ),
                scratch=scratch,
            ),
            backward=PassCost.of(
                Kernel(
                    OperationKind.ATTENTION,
                    2.0 * pairs * H * (3 * D + 2 * V),
                    float(2 * each + lse.nbytes),
                    visible,
                    impl,
                ),
                launches=BACKWARD_KERNELS.get(impl, 2),
                scratch=scratch,
            ),
            results=(SavableResult(o), SavableResult(lse)) if tiled else (),
            split="column",
        )
    )
    return o
