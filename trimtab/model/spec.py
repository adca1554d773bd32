"""What a decoder costs, from its description alone: weights, arithmetic, and what stands around its blocks. No torch.

What a block saves and computes is declared in `trimtab.model.spec_block`. Legend: N = B · T tokens, C hidden size,
F rotary frequencies.
"""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.facts.blocks import BlockShape
from trimtab.facts.dtypes import nbytes
from trimtab.facts.operations import Kind, Operation, Part
from trimtab.facts.shapes import ModelShape
from trimtab.kernels.attention import spec as attention_spec
from trimtab.model.spec_block import block_operations
from trimtab.model.spec_operations import Execution, norm_operation


def parameter_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of all weights in one dtype."""
    return nbytes(dtype, shape.num_parameters)


def final_norm(shape: ModelShape, run: Execution) -> Operation:
    """The norm behind the last block; `run.trained` names it `norm.weight` if it is trained.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> norm = final_norm(tiny, Execution(1, 8, "bf16", "triton", pointwise="triton"))
        >>> [saved.nbytes for saved in norm.saved_for({"x"})]
        [256, 32]
    """
    x = run.activation("x", shape.hidden_size, Part.RESIDUAL, run.stream_dtype)
    return norm_operation("norm", x, shape.hidden_size, 1, run, dtype=run.stream_dtype)


def shared_bytes(
    shape: ModelShape, run: Execution, backends: Sequence[str] = (), *, packed: bool = True
) -> int:
    """What all blocks share during a microbatch: token ids, cosines and sines, attention masks.

    Args:
        shape: the model.
        run: sizes and kernels.
        backends: the attention backend of each layer; that of `run` for all if empty.
        packed: whether sequences hold several documents; some attention backends then need a mask.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> shared_bytes(tiny, Execution(1, 8, "fp32", "sdpa_flash"), packed=False)
        192
    """
    angles = dict.fromkeys(
        (block.attention.rope, block.attention.head_dim) for block in shape.blocks if block.attention.rope
    )
    frequencies = sum((rope.rotary_dim or head_dim) // 2 for rope, head_dim in angles if rope is not None)
    return run.num_tokens * (8 + 2 * frequencies * 4) + _mask_bytes(
        shape, run, backends or [run.attention] * shape.num_layers, packed
    )


def _mask_bytes(shape: ModelShape, run: Execution, backends: Sequence[str], packed: bool) -> int:
    """One prepared layout for each distinct backend and window, shared by the layers that have them."""
    kinds = dict.fromkeys((impl, shape.window(layer)) for layer, impl in enumerate(backends))
    return sum(
        attention_spec.layout_bytes(
            impl,
            run.batch,
            run.tokens,
            packed=packed,
            window=window,
            dtype="fp32" if impl == "reference" else run.dtype,  # the reference adds its mask to fp32 scores
        )
        for impl, window in kinds
    )


def flops_per_token(shape: ModelShape, tokens: int, *, training: bool = True) -> float:
    """Multiplications and additions per token, head and attention included, nothing recomputed.

    Args:
        shape: the model.
        tokens: length of a document; packed sequences attend within documents, so give those.
        training: forward and backward (three times the matrix products), or forward alone.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> flops_per_token(tiny, 1, training=False)
        11392.0
    """
    head = 2.0 * shape.vocab_size * shape.hidden_size
    blocks = sum(
        len(layers) * block_flops(block, shape.hidden_size, tokens, training=training)
        for block, layers in shape.runs()
    )
    return (3 if training else 1) * head + blocks


def block_flops(block: BlockShape, hidden_size: int, tokens: int, *, training: bool = True) -> float:
    """FLOPs per token of one block's matrix products and attention, for documents of so many tokens."""
    total = 0.0
    for one in block_operations(block, hidden_size, Execution(1, tokens, "bf16", "triton")):
        if one.kind in (Kind.PRODUCT, Kind.ATTENTION):
            total += one.forward.flops
            if training:
                total += one.backward.flops + one.parameter_backward.flops
    return total / tokens


def product_flops(shape: ModelShape) -> float:
    """FLOPs per token of all blocks' matrix products, forward."""
    return 2.0 * sum(
        len(layers) * sum(linear.weights for linear in block.linears(shape.hidden_size))
        for block, layers in shape.runs()
    )
