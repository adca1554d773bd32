"""Linear layers with a frozen weight in 4 or 8 bits: the base of QLoRA.

Codes and scales are bitwise identical to bitsandbytes', whether computed on a CPU or a GPU. If memory allows, a layer
may also have a dequantized copy of its weight (`adapt.dequantized`).
"""

# N output features, K input features

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from trimtab.adapt import quantized_ops, spec_quantized
from trimtab.adapt.packed_layout import NAMES, ROW_NAMES, PackedLayout, packed_tensors, tensor_sizes
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.kernels import int8, nf4
from trimtab.kernels.int8 import Int8Tensor
from trimtab.kernels.nf4 import NF4Weight
from trimtab.kernels.nf4 import spec as nf4_spec


class QuantizedLinear(nn.Module):
    """x [..., K] → x · Wᵀ + bias [..., N], with W in NF4 or INT8; differentiable in x (and in the bias).

    W is frozen: it has no gradient, no optimizer state and is not saved in checkpoints. `load_weights` sets it by
    `set_weight` (from 16 or 32 bits) or `set_packed_weight` (from quantized files). Computes in x's dtype, or in
    autocast's if that is enabled.

    Codes and scales are frozen integer parameters with one row per row of W, which FSDP2 shards and `slice_rows`
    slices; tables are buffers. If NF4 blocks span rows, codes and scales are flat buffers.

    Args:
        in_features: K.
        out_features: N.
        bias: whether the layer has a bias, a parameter `bias` that is frozen by default.
        kind: "nf4" or "int8".
        block: NF4: number of elements that share a scale.
        double: NF4: double quantization.
        dtype: dtype of the weight before quantization, and of the bias by default.
        bias_dtype: dtype of the bias.
        impl: "reference" or "triton": `spec_quantized.choose_quantized_kernels`.
        device: device of the (uninitialized) tensors.

    Example:
        >>> layer = QuantizedLinear(64, 8, bias=False, kind="nf4", dtype=torch.float32)
        >>> layer.set_weight(torch.randn(8, 64))
        >>> layer(torch.randn(2, 3, 64)).shape, layer.dequantized().shape
        (torch.Size([2, 3, 8]), torch.Size([8, 64]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        kind: str,
        dtype: torch.dtype,
        block: int = spec_quantized.BLOCK,
        double: bool = True,
        impl: str = "reference",
        device: torch.device | str = "cpu",
        bias_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if kind not in spec_quantized.KINDS:
            known = " or ".join(spec_quantized.KINDS)
            raise RecipeError(f"unknown quantization {kind!r}", f"choose {known}")
        if kind == "nf4" and block not in nf4_spec.BLOCKS:
            raise RecipeError(
                f"NF4 does not support blocks of {block}",
                f"use one of {', '.join(map(str, nf4_spec.BLOCKS))}",
            )
        self.in_features, self.out_features = in_features, out_features
        self.dtype = dtype
        nested = nf4_spec.NESTED_BLOCK if kind == "nf4" and double else 0
        self.is_slice = False
        self._register_packed(
            PackedLayout(kind, out_features, in_features, block if kind == "nf4" else 0, nested, impl), device
        )
        self.plain_text = PackedLayout.plain(out_features, in_features).text
        self.dequantized_copy: torch.Tensor | None
        self.register_buffer("dequantized_copy", None, persistent=False)
        self.register_load_state_dict_post_hook(_refresh)
        self.bias: nn.Parameter | None = None
        if bias:
            values = torch.empty(out_features, dtype=bias_dtype or dtype, device=device)
            self.bias = nn.Parameter(values, requires_grad=False)

    def _register_packed(self, layout: PackedLayout, device: torch.device | str) -> None:
        """Registers uninitialized tensors for a layout."""
        self.packed_layout, self.text = layout, layout.text
        sizes = tensor_sizes(layout)
        for name in NAMES:
            tensor = None
            if name in sizes:
                size, dtype = sizes[name]
                tensor = torch.empty(size, dtype=dtype, device=device)
            if name in ROW_NAMES and layout.by_rows:
                assert tensor is not None
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(name, tensor)

    @property
    def kind(self) -> str:
        """nf4 or int8."""
        return self.packed_layout.kind

    @property
    def impl(self) -> str:
        """The implementation that dequantizes, chosen on construction."""
        return self.packed_layout.impl

    @property
    def packed(self) -> quantized_ops.Packed:
        """The packed tensors in the operators' order; None for absent ones."""
        return (
            self.codes,
            self.scales,
            self.quant_map,
            self.nested_absmax,
            self.nested_quant_map,
            self.offset,
        )  # type: ignore[return-value]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.product(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x · Wᵀ without the bias."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        packed, text = self.operand(x)
        return torch.ops.trimtab.packed_linear(x, *packed, text)

    def operand(self, x: torch.Tensor) -> tuple[quantized_ops.Packed, str]:
        """Returns the tensors that a product with x [..., K] reads, and their layout: the dequantized copy, if there
        is one in x's dtype, or the packed tensors. The fused kernel for few rows always reads the packed ones."""
        copy_NK = self.dequantized_copy
        if copy_NK is None or copy_NK.dtype != x.dtype:
            return self.packed, self.text
        if quantized_ops.is_fused(self.packed_layout, math.prod(x.shape[:-1])):
            return self.packed, self.text
        return (copy_NK, *(None,) * (quantized_ops.NUM_PACKED - 1)), self.plain_text

    @torch.no_grad()
    def dequantized(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns W [N, K] as used in products, in `dtype` (by default the original's). Read-only: it is the
        dequantized copy itself if the layer has one."""
        wanted, copy_NK = dtype or self.dtype, self.dequantized_copy
        if copy_NK is not None and copy_NK.dtype == wanted:
            return copy_NK
        weight_NK: torch.Tensor = torch.ops.trimtab.packed_weight(*self.packed, self.text, wanted)
        return weight_NK

    @torch.no_grad()
    def set_dequantized_copy(self, dtype: torch.dtype | None) -> None:
        """Adds a dequantized copy of W [N, K] in `dtype`, for all later products in that dtype; None removes it.

        It is neither a parameter nor in the state dict, moves with the layer, and is updated when the weight is set.

        Example:
            >>> layer = QuantizedLinear(64, 8, bias=False, kind="nf4", dtype=torch.float32)
            >>> layer.set_weight(torch.randn(8, 64))
            >>> layer.set_dequantized_copy(torch.float32)
            >>> layer.dequantized_copy.shape, "dequantized_copy" in layer.state_dict()
            (torch.Size([8, 64]), False)
        """
        self.dequantized_copy = None  # freed before another is allocated, so that two never exist
        if dtype is not None:
            codes = self.packed[0]
            assert codes is not None
            self.dequantized_copy = codes.new_empty(self.packed_layout.shape, dtype=dtype)
            self.refresh_dequantized_copy()

    @torch.no_grad()
    def refresh_dequantized_copy(self) -> None:
        """Recomputes the dequantized copy, if there is one, from the packed tensors."""
        copy_NK = self.dequantized_copy
        if copy_NK is not None and not copy_NK.is_meta:
            quantized_ops.dequantize(self.packed_layout, self.packed, copy_NK.dtype, copy_NK)

    @torch.no_grad()
    def slice_rows(self, start: int, stop: int) -> QuantizedLinear:
        """Returns a layer of output features `start` to `stop` that shares this layer's memory; its weight is a bitwise
        identical slice of the rows. It can be read, moved and saved like any other; only the weight of a full layer can
        be set.

        Raises:
            RecipeError: NF4 blocks span rows.

        Example:
            >>> layer = QuantizedLinear(64, 8, bias=False, kind="nf4", dtype=torch.float32)
            >>> layer.set_weight(torch.randn(8, 64))
            >>> torch.equal(layer.slice_rows(3, 8).dequantized(), layer.dequantized()[3:8])
            True
        """
        layout = self.packed_layout.rows(start, stop)
        part = QuantizedLinear(
            self.in_features,
            stop - start,
            bias=False,
            kind=layout.kind,
            dtype=self.dtype,
            block=layout.block,
            double=layout.nested_block > 0,
            impl=layout.impl,
            device="meta",
        )
        part.packed_layout, part.text, part.is_slice = layout, layout.text, True
        for name in ROW_NAMES:
            part.register_parameter(name, nn.Parameter(getattr(self, name)[start:stop], requires_grad=False))
        for name in NAMES[len(ROW_NAMES) :]:
            part.register_buffer(name, self._buffers[name])
        if self.dequantized_copy is not None:
            part.dequantized_copy = self.dequantized_copy[start:stop]
        if self.bias is not None:
            part.bias = nn.Parameter(self.bias[start:stop], requires_grad=self.bias.requires_grad)
        return part.train(self.training)

    @torch.no_grad()
    def set_weight(self, weight_NK: torch.Tensor) -> None:
        """Quantizes a weight into this layer. It is rounded to `dtype` on its own device, then moved, then quantized.

        Raises:
            ModelError: NaN or infinity, another shape, or a slice (`slice_rows`).
        """
        check_whole_layer(self)
        if tuple(weight_NK.shape) != self.packed_layout.shape:
            raise ModelError(
                f"a weight of shape {list(weight_NK.shape)} does not fit a layer {list(self.packed_layout.shape)}",
                f"give a weight of the shape {list(self.packed_layout.shape)}",
            )
        codes = self.packed[0]
        assert codes is not None
        assert not codes.is_meta, "materialize the layer first: to_empty"
        weight_NK = weight_NK.detach().to(self.dtype).to(codes.device)
        if self.kind == "int8":
            self.set_packed_weight(int8.quantize(weight_NK, granularity="row", impl=self.impl))
            return
        layout = self.packed_layout
        double = layout.nested_block > 0
        self.set_packed_weight(nf4.quantize(weight_NK, block=layout.block, double=double, impl=self.impl))

    @torch.no_grad()
    def set_packed_weight(self, weight: NF4Weight | Int8Tensor) -> None:
        """Copies an already quantized weight, bit for bit; its layout must be this layer's."""
        check_whole_layer(self)
        if isinstance(weight, Int8Tensor):
            assert not weight.affine
            assert weight.length == self.in_features
        self._check_layout(weight)
        for name, tensor in packed_tensors(weight).items():
            place = getattr(self, name)
            place.copy_(tensor.view(place.shape))
        self.refresh_dequantized_copy()

    # Deprecated names.
    take, take_packed, keep_unpacked = set_weight, set_packed_weight, set_dequantized_copy

    def _check_layout(self, weight: NF4Weight | Int8Tensor) -> None:
        if isinstance(weight, NF4Weight):
            nested = weight.nested_block if weight.double else 0
            found = ("nf4", tuple(weight.shape), weight.block, nested)
        else:
            found = ("int8", tuple(weight.codes.shape), 0, 0)
        own_layout = self.packed_layout
        if found[3] != own_layout.nested_block and found[3] and own_layout.nested_block:
            raise ModelError(
                f"bitsandbytes wrote its 8-bit scales with nested_blocksize {found[3]}; only its default, "
                f"{own_layout.nested_block}, can be loaded packed",
                "quantize the original weights again, or omit load_in_4bit: the weights are then loaded "
                "dequantized",
            )
        if found != (own_layout.kind, own_layout.shape, own_layout.block, own_layout.nested_block):
            raise ModelError(
                f"a weight in {_describe(*found)} does not fit a layer in "
                f"{_describe(own_layout.kind, own_layout.shape, own_layout.block, own_layout.nested_block)}",
                "quantize the original weights again, or quantize the model as in its files",
            )

    def requires_grad_(self, requires_grad: bool = True) -> QuantizedLinear:
        """Raises if `requires_grad`: quantized weights cannot be trained."""
        if requires_grad:
            raise RecipeError(
                f"a weight in {self.kind} cannot be trained directly: updates are smaller than a quantization step",
                "train an adapter on it (lora), or load the model without quantization",
            )
        super().requires_grad_(False)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedLinear:
        """Moves buffers as bytes, so that `decoder.to(torch.bfloat16)` does not round them; parameters are integers."""
        dtypes = {name: tensor.dtype for name, tensor in self._buffers.items() if tensor is not None}
        for name in dtypes:
            self._buffers[name] = self._buffers[name].view(torch.uint8)  # type: ignore[union-attr]
        super()._apply(fn, recurse)
        for name, dtype in dtypes.items():
            self._buffers[name] = self._buffers[name].view(dtype)  # type: ignore[union-attr]
        return self

    def extra_repr(self) -> str:
        what = _describe(
            self.kind, self.packed_layout.shape, self.packed_layout.block, self.packed_layout.nested_block
        )
        return f"{what}, bias={self.bias is not None}, impl={self.impl}"


def _refresh(layer: nn.Module, _keys: Any) -> None:
    """Load-state-dict post-hook; an adapted layer forwards the call to its base."""
    layer.refresh_dequantized_copy()  # type: ignore[operator]


def _describe(kind: str, shape: tuple[int, ...], block: int, nested: int) -> str:
    scales = f" (blocks of {block}, scales in {'8' if nested else '32'} bits)" if kind == "nf4" else ""
    return f"{kind} {list(shape)}{scales}"


def quantized_layers(decoder: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """The quantized layers by name, in order; including those with adapters (`adapt.lora`)."""
    for name, module in decoder.named_modules():
        layer = module.__dict__.get("base", module)
        if isinstance(layer, QuantizedLinear):
            yield name, layer


def check_whole_layer(layer: QuantizedLinear) -> None:
    """Raises ModelError if the layer is a slice of another one, where a full layer is required."""
    if layer.is_slice:
        raise ModelError(
            f"the layer is a slice of {layer.out_features} rows, but only full layers are quantized, loaded and saved",
            "use the full layer, then slice it",
        )


def packed_state(layer: QuantizedLinear, name: str = "weight") -> dict[str, torch.Tensor]:
    """Returns a layer's weight as bitsandbytes' state dict entries (NF4 only), to write files in its format."""
    weight = nf4_weight(layer)
    return weight.to_bitsandbytes(name)


def int8_tensor(layer: QuantizedLinear) -> Int8Tensor:
    """The packed tensors as a `trimtab.kernels.int8` tensor."""
    assert layer.kind == "int8"
    codes, scales = (tensor.detach() for tensor in layer.packed[:2] if tensor is not None)
    scale_N = scales.view(torch.float32).view(-1)
    return Int8Tensor(codes, scale_N, codes.new_empty(0), layer.in_features, layer.dtype)


def nf4_weight(layer: QuantizedLinear) -> NF4Weight:
    """The packed tensors as a `trimtab.kernels.nf4` weight."""
    assert layer.kind == "nf4"
    check_whole_layer(layer)
    fields: dict[str, Any] = dict(zip(NAMES, layer.packed, strict=True))
    scales = fields.pop("scales").detach().view(-1)
    fields["absmax"] = scales if layer.packed_layout.nested_block else scales.view(torch.float32)
    fields["codes"] = fields["codes"].detach().view(-1)
    if fields["offset"] is not None:
        fields["offset"] = fields["offset"].view(())
    shape, block = layer.packed_layout.shape, layer.packed_layout.block
    return NF4Weight(
        **fields,
        shape=shape,
        dtype=layer.dtype,
        block=block,
        nested_block=layer.packed_layout.nested_block or nf4_spec.NESTED_BLOCK,
    )
