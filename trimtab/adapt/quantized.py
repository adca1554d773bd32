"""Linear layers whose frozen weight is kept in 4 or 8 bits: the base of QLoRA.

The bytes are bitsandbytes' own: the same codes and scales, whether they are made here or there, on a CPU or a GPU.
Where memory is left, a layer may hold its weight unpacked as well (`adapt.unpacked`).
"""

# N output features, K input features

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from trimtab.adapt import quantized_ops, spec_quantized
from trimtab.adapt.packing import NAMES, ROW_NAMES, Packing, packed_tensors, tensor_sizes
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.kernels import int8, nf4
from trimtab.kernels.int8 import Int8Tensor
from trimtab.kernels.nf4 import NF4Weight
from trimtab.kernels.nf4 import spec as nf4_spec


class QuantizedLinear(nn.Module):
    """x [..., K] → x · Wᵀ + bias [..., N], with W in NF4 or INT8; differentiable in x (and in the bias).

    W is frozen: it has no gradient, no optimizer state and no place in a checkpoint. It is filled by `take` (from 16
    or 32 bits) or `take_packed` (from quantized files), tensor by tensor, as `load_weights` does. Computes in x's
    dtype, or in autocast's where that is on.

    Codes and scales are frozen integer parameters with a row for each row of W, which FSDP2 shards as they are and
    `slice_rows` slices; tables are buffers. Where NF4 blocks span rows, codes and scales are flat buffers.

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is one; a parameter under its usual name, frozen until somebody asks.
        kind: "nf4" or "int8".
        block: NF4: values that share a scale.
        double: NF4: scales in 8 bits.
        dtype: of the weight before it is quantized, and of the bias unless that has its own.
        bias_dtype: of the bias.
        impl: "reference" or "triton": `spec_quantized.choose_quantized_kernels`.
        device: of the (uninitialized) tensors.

    Example:
        >>> layer = QuantizedLinear(64, 8, bias=False, kind="nf4", dtype=torch.float32)
        >>> layer.take(torch.randn(8, 64))
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
            raise RecipeError(f"weights cannot be kept as {kind!r}", f"choose {known}")
        if kind == "nf4" and block not in nf4_spec.BLOCKS:
            raise RecipeError(
                f"NF4 has no blocks of {block}", f"one of {', '.join(map(str, nf4_spec.BLOCKS))}"
            )
        self.in_features, self.out_features = in_features, out_features
        self.dtype = dtype
        nested = nf4_spec.NESTED_BLOCK if kind == "nf4" and double else 0
        self.is_slice = False
        self._lay_out(
            Packing(kind, out_features, in_features, block if kind == "nf4" else 0, nested, impl), device
        )
        self.plain_text = Packing.plain(out_features, in_features).text
        self.unpacked: torch.Tensor | None
        self.register_buffer("unpacked", None, persistent=False)
        self.register_load_state_dict_post_hook(_refresh)
        self.bias: nn.Parameter | None = None
        if bias:
            values = torch.empty(out_features, dtype=bias_dtype or dtype, device=device)
            self.bias = nn.Parameter(values, requires_grad=False)

    def _lay_out(self, packing: Packing, device: torch.device | str) -> None:
        """Registers uninitialized tensors for a packing."""
        self.packing, self.text = packing, packing.text
        sizes = tensor_sizes(packing)
        for name in NAMES:
            tensor = None
            if name in sizes:
                size, dtype = sizes[name]
                tensor = torch.empty(size, dtype=dtype, device=device)
            if name in ROW_NAMES and packing.by_rows:
                assert tensor is not None
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(name, tensor)

    @property
    def kind(self) -> str:
        """nf4 or int8."""
        return self.packing.kind

    @property
    def impl(self) -> str:
        """The code that dequantizes, chosen at layout."""
        return self.packing.impl

    @property
    def packed(self) -> quantized_ops.Packed:
        """The packed tensors in the operators' order; None where there is none."""
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
        """What a product with x [..., K] reads, and how it lies: the weight kept unpacked, if it is kept in x's format,
        or the packed tensors. So few rows that they need no dequantized weight read the packed ones always."""
        kept_NK = self.unpacked
        if kept_NK is None or kept_NK.dtype != x.dtype:
            return self.packed, self.text
        if quantized_ops.is_fused(self.packing, math.prod(x.shape[:-1])):
            return self.packed, self.text
        return (kept_NK, *(None,) * (quantized_ops.NUM_PACKED - 1)), self.plain_text

    @torch.no_grad()
    def dequantized(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """W [N, K] as the products see it, in `dtype` (that of the original unless given); not to be written to: where
        the layer keeps it unpacked, it is that very tensor."""
        wanted, kept_NK = dtype or self.dtype, self.unpacked
        if kept_NK is not None and kept_NK.dtype == wanted:
            return kept_NK
        weight_NK: torch.Tensor = torch.ops.trimtab.packed_weight(*self.packed, self.text, wanted)
        return weight_NK

    @torch.no_grad()
    def keep_unpacked(self, dtype: torch.dtype | None) -> None:
        """Holds W [N, K] in `dtype` beside the packed tensors, for all later products in that format; None gives it up.

        It is no parameter and in no state dict, goes where the layer goes, and follows whatever is packed here later.

        Example:
            >>> layer = QuantizedLinear(64, 8, bias=False, kind="nf4", dtype=torch.float32)
            >>> layer.take(torch.randn(8, 64))
            >>> layer.keep_unpacked(torch.float32)
            >>> layer.unpacked.shape, "unpacked" in layer.state_dict()
            (torch.Size([8, 64]), False)
        """
        self.unpacked = None  # before there is another: never two at once
        if dtype is not None:
            codes = self.packed[0]
            assert codes is not None
            self.unpacked = codes.new_empty(self.packing.shape, dtype=dtype)
            self.refresh_unpacked()

    @torch.no_grad()
    def refresh_unpacked(self) -> None:
        """Writes the weight that is kept unpacked, if one is, again from the packed tensors."""
        kept_NK = self.unpacked
        if kept_NK is not None and not kept_NK.is_meta:
            quantized_ops.dequantize(self.packing, self.packed, kept_NK.dtype, kept_NK)

    @torch.no_grad()
    def slice_rows(self, start: int, stop: int) -> QuantizedLinear:
        """A layer of the output features `start` to `stop`, which reads this layer's memory: its weight is those rows
        of this one's, bit for bit. It is read, moved and saved like any other; a weight is taken by the whole alone.

        Raises:
            RecipeError: NF4 blocks span rows.

        Example:
            >>> layer = QuantizedLinear(64, 8, bias=False, kind="nf4", dtype=torch.float32)
            >>> layer.take(torch.randn(8, 64))
            >>> torch.equal(layer.slice_rows(3, 8).dequantized(), layer.dequantized()[3:8])
            True
        """
        packing = self.packing.rows(start, stop)
        part = QuantizedLinear(
            self.in_features,
            stop - start,
            bias=False,
            kind=packing.kind,
            dtype=self.dtype,
            block=packing.block,
            double=packing.nested_block > 0,
            impl=packing.impl,
            device="meta",
        )
        part.packing, part.text, part.is_slice = packing, packing.text, True
        for name in ROW_NAMES:
            part.register_parameter(name, nn.Parameter(getattr(self, name)[start:stop], requires_grad=False))
        for name in NAMES[len(ROW_NAMES) :]:
            part.register_buffer(name, self._buffers[name])
        if self.unpacked is not None:
            part.unpacked = self.unpacked[start:stop]
        if self.bias is not None:
            part.bias = nn.Parameter(self.bias[start:stop], requires_grad=self.bias.requires_grad)
        return part.train(self.training)

    @torch.no_grad()
    def take(self, weight_NK: torch.Tensor) -> None:
        """Quantizes a weight into this layer. It is rounded to `dtype` where it lies, then moved, then packed.

        Raises:
            ModelError: NaN or infinity, another shape, or a slice (`slice_rows`).
        """
        check_whole_layer(self)
        if tuple(weight_NK.shape) != self.packing.shape:
            raise ModelError(
                f"a weight {list(weight_NK.shape)} for a layer {list(self.packing.shape)}",
                f"give a weight of the shape {list(self.packing.shape)}",
            )
        codes = self.packed[0]
        assert codes is not None
        assert not codes.is_meta, "give the layer memory first: to_empty"
        weight_NK = weight_NK.detach().to(self.dtype).to(codes.device)
        if self.kind == "int8":
            self.take_packed(int8.quantize(weight_NK, granularity="row", impl=self.impl))
            return
        packing = self.packing
        double = packing.nested_block > 0
        self.take_packed(nf4.quantize(weight_NK, block=packing.block, double=double, impl=self.impl))

    @torch.no_grad()
    def take_packed(self, weight: NF4Weight | Int8Tensor) -> None:
        """Copies a weight that is quantized already, bit for bit; the packing must be this layer's."""
        check_whole_layer(self)
        if isinstance(weight, Int8Tensor):
            assert not weight.affine
            assert weight.length == self.in_features
        self._check_packing(weight)
        for name, tensor in packed_tensors(weight).items():
            place = getattr(self, name)
            place.copy_(tensor.view(place.shape))
        self.refresh_unpacked()

    def _check_packing(self, weight: NF4Weight | Int8Tensor) -> None:
        if isinstance(weight, NF4Weight):
            nested = weight.nested_block if weight.double else 0
            found = ("nf4", tuple(weight.shape), weight.block, nested)
        else:
            found = ("int8", tuple(weight.codes.shape), 0, 0)
        mine = self.packing
        if found[3] != mine.nested_block and found[3] and mine.nested_block:
            raise ModelError(
                f"bitsandbytes wrote its 8-bit scales with nested_blocksize {found[3]}, and they are taken as they are "
                f"with bitsandbytes' default only, {mine.nested_block}",
                "quantize the original weights again, or leave load_in_4bit out: the weights then load as the numbers "
                "that they stand for",
            )
        if found != (mine.kind, mine.shape, mine.block, mine.nested_block):
            raise ModelError(
                f"a weight in {_words(*found)} for a layer in "
                f"{_words(mine.kind, mine.shape, mine.block, mine.nested_block)}",
                "quantize the original weights again, or lay the model out as its files are",
            )

    def requires_grad_(self, requires_grad: bool = True) -> QuantizedLinear:
        """A quantized weight cannot be trained: there is nothing between two codes."""
        if requires_grad:
            raise RecipeError(
                f"a weight in {self.kind} cannot be trained directly: a step would fall between two codes",
                "train an adapter on it (lora), or load the model without quantization",
            )
        super().requires_grad_(False)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedLinear:
        """Moves buffers as bytes, so that `decoder.to(torch.bfloat16)` does not round them; parameters are bytes."""
        dtypes = {name: tensor.dtype for name, tensor in self._buffers.items() if tensor is not None}
        for name in dtypes:
            self._buffers[name] = self._buffers[name].view(torch.uint8)  # type: ignore[union-attr]
        super()._apply(fn, recurse)
        for name, dtype in dtypes.items():
            self._buffers[name] = self._buffers[name].view(dtype)  # type: ignore[union-attr]
        return self

    def extra_repr(self) -> str:
        what = _words(self.kind, self.packing.shape, self.packing.block, self.packing.nested_block)
        return f"{what}, bias={self.bias is not None}, impl={self.impl}"


def _refresh(layer: nn.Module, _keys: Any) -> None:
    """After a state dict was loaded; the layer may be an adapted one, which hands on what it does not have."""
    layer.refresh_unpacked()  # type: ignore[operator]


def _words(kind: str, shape: tuple[int, ...], block: int, nested: int) -> str:
    scales = f" (blocks of {block}, scales in {'8' if nested else '32'} bits)" if kind == "nf4" else ""
    return f"{kind} {list(shape)}{scales}"


def quantized_layers(decoder: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """The quantized layers by name, in order; one that adapters stand on (`adapt.lora`) too."""
    for name, module in decoder.named_modules():
        layer = module.__dict__.get("base", module)
        if isinstance(layer, QuantizedLinear):
            yield name, layer


def check_whole_layer(layer: QuantizedLinear) -> None:
    """ModelError for a slice of a layer, where only a whole one has what is needed: tables are those of the whole."""
    if layer.is_slice:
        raise ModelError(
            f"the layer is a slice of {layer.out_features} rows, and a weight is quantized, filled and written whole",
            "do so with the whole layer, then slice it",
        )


def packed_state(layer: QuantizedLinear, name: str = "weight") -> dict[str, torch.Tensor]:
    """A layer's weight as bitsandbytes' entries of a state dict, NF4 only, for users who write such files."""
    weight = nf4_weight(layer)
    return weight.to_bitsandbytes(name)


def int8_tensor(layer: QuantizedLinear) -> Int8Tensor:
    """The packed tensors as `trimtab.kernels.int8` has them."""
    assert layer.kind == "int8"
    codes, scales = (tensor.detach() for tensor in layer.packed[:2] if tensor is not None)
    scale_N = scales.view(torch.float32).view(-1)
    return Int8Tensor(codes, scale_N, codes.new_empty(0), layer.in_features, layer.dtype)


def nf4_weight(layer: QuantizedLinear) -> NF4Weight:
    """The packed tensors as `trimtab.kernels.nf4` has them."""
    assert layer.kind == "nf4"
    check_whole_layer(layer)
    fields: dict[str, Any] = dict(zip(NAMES, layer.packed, strict=True))
    scales = fields.pop("scales").detach().view(-1)
    fields["absmax"] = scales if layer.packing.nested_block else scales.view(torch.float32)
    fields["codes"] = fields["codes"].detach().view(-1)
    if fields["offset"] is not None:
        fields["offset"] = fields["offset"].view(())
    shape, block = layer.packing.shape, layer.packing.block
    return NF4Weight(
        **fields,
        shape=shape,
        dtype=layer.dtype,
        block=block,
        nested_block=layer.packing.nested_block or nf4_spec.NESTED_BLOCK,
    )
