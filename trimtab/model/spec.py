"""Costs of a decoder, computed from its shape: weights, FLOPs, and the tensors outside its blocks. No torch import.

`trimtab.model.spec_block` declares the operations of a block. Legend: N = B · T tokens, C hidden size, F rotary
frequencies.
"""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.facts.blocks import BlockShape, LatentAttentionShape
from trimtab.facts.dtypes import nbytes
from trimtab.facts.operations import MemoryPart, Operation, OperationKind
from trimtab.facts.shapes import ModelShape
from trimtab.kernels.attention import spec as attention_spec
from trimtab.model.spec_block import block_operations
from trimtab.model.spec_operations import Execution, norm_operation


def parameter_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of all parameters in one dtype."""
    return nbytes(dtype, shape.num_parameters)


def final_norm(shape: ModelShape, run: Execution) -> Operation:
    """Declares the norm after the last block; it is trained if `run.trained` contains `norm.weight`.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> norm = final_norm(tiny, Execution(1, 8, "bf16", "triton", pointwise="triton"))
        >>> [saved.nbytes for saved in norm.saved_for({"x"})]
        [256, 32]
    """
    x = run.activation("x", shape.hidden_size, MemoryPart.RESIDUAL, run.stream_dtype)
    return norm_operation("norm", x, shape.hidden_size, 1, run, dtype=run.stream_dtype)


def embedding_bytes_moved(N: int, C: int, V: int, dtype: str, *, backward: bool = False) -> int:
    """Bytes that the embedding of N tokens reads and writes. The backward pass zero-fills the dense gradient [V, C] and
    adds the tokens' rows to it.

    Example:
        >>> embedding_bytes_moved(8, 4, 100, "bf16"), embedding_bytes_moved(8, 4, 100, "bf16", backward=True)
        (128, 1728)
    """
    rows = nbytes(dtype, N * C)
    return 2 * rows + (2 * nbytes(dtype, V * C) if backward else 0)


def shared_bytes(
    shape: ModelShape, run: Execution, backends: Sequence[str] = (), *, packed: bool = True
) -> int:
    """Bytes that all blocks share during a microbatch: token ids, cosines and sines, attention masks.

    Args:
        shape: the model.
        run: sizes and kernels of the run.
        backends: the attention backend of each layer; if empty, that of `run` for all.
        packed: whether sequences contain several documents; some attention backends then need a mask.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> shared_bytes(tiny, Execution(1, 8, "fp32", "sdpa_flash"), packed=False)
        192
    """
    angles = dict.fromkeys((block.mixer.rope, _rotary_dim(block)) for block, _ in shape.layer_groups())
    frequencies = sum(rotated // 2 for rope, rotated in angles if rope is not None)
    return run.num_tokens * (8 + 2 * frequencies * 4) + _mask_bytes(
        shape, run, backends or [run.attention] * shape.num_layers, packed
    )


def _rotary_dim(block: BlockShape) -> int:
    """Dimensions of a head that are rotated."""
    mixer = block.mixer
    if isinstance(mixer, LatentAttentionShape):
        return mixer.rope_head_dim
    return (mixer.rope.rotary_dim if mixer.rope is not None else None) or mixer.head_dim


def _mask_bytes(shape: ModelShape, run: Execution, backends: Sequence[str], packed: bool) -> int:
    """Bytes of the prepared layouts; layers that read the same form share it."""
    B, T = run.batch, run.tokens
    forms: dict[tuple[str, int | None, str], int] = {}
    for layer, impl in enumerate(backends):
        window = shape.window(layer)
        form = attention_spec.layout_form(impl, T, window, run.dtype)
        size = attention_spec.layout_bytes(
            impl, B, T, packed=packed, window=window, dtype=form[2] or run.dtype
        )
        forms[form] = max(size, forms.get(form, 0))
    return sum(forms.values())


def flops_per_token(shape: ModelShape, tokens: int, *, training: bool = True) -> float:
    """FLOPs per token, including head and attention, without recomputation.

    Args:
        shape: the model.
        tokens: length of a document; packed sequences attend within documents, so pass the document length.
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
        for block, layers in shape.layer_groups()
    )
    return (3 if training else 1) * head + blocks


def block_flops(block: BlockShape, hidden_size: int, tokens: int, *, training: bool = True) -> float:
    """FLOPs per token of one block's matrix products and attention, for documents of `tokens` tokens."""
    total = 0.0
    for operation in block_operations(block, hidden_size, Execution(1, tokens, "bf16", "triton")):
        if operation.kind in (OperationKind.PRODUCT, OperationKind.ATTENTION):
            total += operation.forward.flops
            if training:
                total += operation.backward.flops + operation.parameter_backward.flops
    return total / tokens


def product_flops(shape: ModelShape) -> float:
    """FLOPs per token of all blocks' matrix products in the forward pass."""
    return 2.0 * sum(
        len(layers) * block.active_weights(shape.hidden_size) for block, layers in shape.layer_groups()
    )
