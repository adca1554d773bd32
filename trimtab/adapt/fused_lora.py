"""One operator for LoRA layers that read the same input: q, k and v; gate and up; or a single layer.

    H = X·[A₁; A₂; …]ᵀ          yᵢ = X·Wᵢᵀ + sᵢ · Hᵢ·Bᵢᵀ

    dH = [s₁·dy₁·B₁, s₂·dy₂·B₂, …]      d[A₁; A₂; …] = dHᵀ·X      dBᵢ = sᵢ · dyᵢᵀ·Hᵢ      dX = Σ dyᵢ·Wᵢ + dH·[A₁; A₂; …]

Compared with separate layers: x is read once for all A and once for their gradients, and dX is accumulated in place
instead of in five tensors. The adapter's output is written first and the large product is added to it. That product
accumulates in fp32 and rounds once, and it reads the previous output while it computes, not in a separate pass. Frozen
weights may be packed; then each is dequantized into the shared workspace, multiplied and discarded (one with a
dequantized copy is passed as a plain weight). Saved for the backward pass: x and H. Products run in x's dtype; A and B,
usually fp32, are cast as they are used, and their gradients are written by the products in their own dtype: on a GPU
never rounded to 16 bits, and without a separate pass.
"""

# N tokens, I input features, O output features, R rank (of all layers together in H)

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.adapt import quantized_ops
from trimtab.adapt.packed_layout import PLAIN, PackedLayout
from trimtab.adapt.quantized_ops import NUM_PACKED, Packed
from trimtab.model.labels import with_factor


@dataclass(frozen=True)
class FusedLayer:
    """One layer of a fused group: its frozen weight and its adapter.

    Example:
        >>> weight, a, b = torch.zeros(3, 4), torch.ones(2, 4), torch.ones(3, 2)
        >>> lora_group(torch.ones(1, 4), [FusedLayer.plain(weight, a, b, 0.5)])
        [tensor([[4., 4., 4.]])]
    """

    packed: Packed
    text: str
    """`PackedLayout.text` of the weight."""
    a_RI: torch.Tensor
    b_OR: torch.Tensor
    scaling: float

    @staticmethod
    def plain(weight_OI: torch.Tensor, a_RI: torch.Tensor, b_OR: torch.Tensor, scaling: float) -> FusedLayer:
        """A layer whose frozen weight is not quantized."""
        return FusedLayer((weight_OI,), PackedLayout.plain(*weight_OI.shape).text, a_RI, b_OR, scaling)


def lora_group(
    x: torch.Tensor, parts: Sequence[FusedLayer], *, outputs_unused: bool = False
) -> list[torch.Tensor]:
    """Returns each layer's output [..., Oᵢ] for one x [..., I], in x's dtype; differentiable in x and all A and B.

    Args:
        x: any shape whose last size is I.
        parts: the layers.
        outputs_unused: whether the call only saves tensors for the backward pass, as in a recomputation: then the
            products with the frozen weights are skipped, and the outputs must not be read.
    """
    packed = [tensor for part in parts for tensor in part.packed if tensor is not None]
    texts = ";".join(part.text for part in parts)
    a, b = [part.a_RI for part in parts], [part.b_OR for part in parts]
    scales = [part.scaling for part in parts]
    # Outside the operator, so that a recomputation can run it without the products of the frozen weights.
    with torch.no_grad(), with_factor("adapter_a"):
        h_NR = x.reshape(-1, x.shape[-1]) @ _stacked(a, x.dtype).t()
    outputs: list[torch.Tensor] = torch.ops.trimtab.lora_group(
        x, h_NR, packed, a, b, scales, texts, outputs_unused
    )
    return outputs


_NAMED = {PLAIN: 1, "int8": 2}


def _weights(packed: list[torch.Tensor], texts: str) -> Iterator[tuple[PackedLayout, Packed]]:
    """The packed tensors of each layer, padded with None to the operators' number of arguments."""
    start = 0
    for text in texts.split(";"):
        layout = PackedLayout.from_text(text)
        count = _NAMED.get(layout.kind, NUM_PACKED if layout.nested_block else 3)
        tensors = packed[start : start + count]
        start += count
        yield layout, (*tensors, *(None,) * (NUM_PACKED - count))


def _stacked(factors_RI: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """All A of a group concatenated to one matrix, in the compute dtype."""
    if len(factors_RI) == 1:
        return factors_RI[0].to(dtype)
    # Autocast to fp16 refuses to concatenate bf16 tensors.
    if factors_RI[0].dtype != torch.float32:
        factors_RI = [factor_RI.to(dtype) for factor_RI in factors_RI]
    return torch.cat(factors_RI).to(dtype)


def _scaled(tensor: torch.Tensor, scaling: float, dtype: torch.dtype) -> torch.Tensor:
    """scaling · tensor in another dtype, in one pass; rounded to the tensor's own dtype first, as two passes would
    do."""
    return torch.mul(tensor, scaling, out=torch.empty_like(tensor, dtype=dtype))


def _product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """left · right in another dtype; a GPU's fp32 accumulator is written as fp32 without a separate pass."""
    if left.is_cuda and dtype == torch.float32 and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def _forward(
    x: torch.Tensor,
    h_NR: torch.Tensor,
    packed: list[torch.Tensor],
    a: list[torch.Tensor],
    b: list[torch.Tensor],
    scales: list[float],
    texts: str,
    outputs_unused: bool,
) -> list[torch.Tensor]:
    x_NI = x.reshape(-1, x.shape[-1])
    outputs, start = [], 0
    for (layout, tensors), b_OR, scaling in zip(_weights(packed, texts), b, scales, strict=True):
        stop = start + b_OR.shape[1]
        y_NO = h_NR[:, start:stop] @ _scaled(b_OR, scaling, x.dtype).t()
        if outputs_unused:
            pass
        elif quantized_ops.is_fused(layout, x_NI.shape[0]):
            y_NO += quantized_ops.product(x_NI, tensors, layout)
        else:
            with quantized_ops.weight(layout, tensors, x.dtype, x.device) as weight_OI:
                y_NO.addmm_(x_NI, weight_OI.t())
        outputs.append(y_NO.view(*x.shape[:-1], layout.out_features))
        start = stop
    return outputs


def _gradient(
    dy: list[torch.Tensor],
    x: torch.Tensor,
    h_NR: torch.Tensor,
    packed: list[torch.Tensor],
    a: list[torch.Tensor],
    b: list[torch.Tensor],
    scales: list[float],
    texts: str,
    wants_dx: bool,
) -> list[torch.Tensor]:
    """Returns dx (empty if not needed), then all dA in one matrix, then each dB."""
    x_NI = x.reshape(-1, x.shape[-1])
    dy_GNO = [grad.reshape(x_NI.shape[0], -1) for grad in dy]
    dh_NR = torch.empty_like(h_NR)
    db, start = [], 0
    for dy_NO, b_OR, scaling in zip(dy_GNO, b, scales, strict=True):
        stop = start + b_OR.shape[1]
        torch.mm(dy_NO, _scaled(b_OR, scaling, dy_NO.dtype), out=dh_NR[:, start:stop])
        db_OR = _product(dy_NO.t(), h_NR[:, start:stop], b_OR.dtype)
        db.append(db_OR if scaling == 1 else db_OR.mul_(scaling))
        start = stop
    da_RI = _product(dh_NR.t(), x_NI, a[0].dtype)
    if not wants_dx:
        return [x.new_empty(0), da_RI, *db]
    dx_NI = dh_NR @ _stacked(a, x.dtype)
    for dy_NO, (layout, tensors) in zip(dy_GNO, _weights(packed, texts), strict=True):
        with quantized_ops.weight(layout, tensors, dy_NO.dtype, dy_NO.device) as weight_OI:
            dx_NI.addmm_(dy_NO, weight_OI)
    return [dx_NI.view(x.shape), da_RI, *db]


_library = torch.library.Library("trimtab", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_REST = "Tensor x, Tensor h, Tensor[] packed, Tensor[] a, Tensor[] b, float[] scales, str packings"
_library.define(f"lora_group({_REST}, bool outputs_unused) -> Tensor[]", tags=_tags)
_library.define(f"lora_group_gradients(Tensor[] dy, {_REST}, bool wants_dx) -> Tensor[]", tags=_tags)
_library.impl("lora_group", _forward, "CompositeExplicitAutograd")
_library.impl("lora_group_gradients", _gradient, "CompositeExplicitAutograd")


@torch.library.register_fake("trimtab::lora_group")
def _(
    x: torch.Tensor, h: Any, packed: Any, a: Any, b: Any, scales: Any, texts: str, outputs_unused: bool
) -> list[torch.Tensor]:
    sizes = [PackedLayout.from_text(text).out_features for text in texts.split(";")]
    return [x.new_empty((*x.shape[:-1], size)) for size in sizes]


@torch.library.register_fake("trimtab::lora_group_gradients")
def _(
    dy: Any, x: torch.Tensor, h: Any, packed: Any, a: Any, b: Any, scales: Any, texts: str, wants_dx: bool
) -> list[torch.Tensor]:
    da_RI = a[0].new_empty((h.shape[1], x.shape[-1]))
    return [
        x.new_empty(x.shape if wants_dx else (0,)),
        da_RI,
        *(factor.new_empty(factor.shape) for factor in b),
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, h_NR, packed, a, b, ctx.scales, ctx.texts, _ = inputs
    ctx.counts = (len(packed), len(a))
    ctx.save_for_backward(x, h_NR, *packed, *a, *b)


def _backward(ctx: Any, grads: list[torch.Tensor]) -> Any:
    """The complete backward pass, including that of H, which the operator receives without a gradient."""
    x, h_NR, *tensors = ctx.saved_tensors
    num_packed, num = ctx.counts
    packed, a, b = tensors[:num_packed], tensors[num_packed : num_packed + num], tensors[num_packed + num :]
    wants_dx = bool(ctx.needs_input_grad[0])
    dx, da_RI, *db = torch.ops.trimtab.lora_group_gradients(
        list(grads), x, h_NR, packed, a, b, ctx.scales, ctx.texts, wants_dx
    )
    da = list(da_RI.split([factor.shape[0] for factor in a]))  # rows of one matrix, as separate tensors
    frozen = [None] * num_packed
    return dx if wants_dx else None, None, frozen, da, db, None, None, None


torch.library.register_autograd("trimtab::lora_group", _backward, setup_context=_save)
