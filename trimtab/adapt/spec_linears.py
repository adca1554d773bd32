"""The operations of adapted and quantized linear layers, in a block's declaration of operations. No torch.

They stand where `trimtab.model.spec_block` has plain products. What each saves is what its autograd function saves
(`fused_lora`, `lora_products`, `quantized_ops`).
"""

# N tokens, I input features, O output features, R rank

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.adapt.spec import DROPOUT_CHUNK, KEY_WORDS, WORD_BYTES, LoraSettings
from trimtab.adapt.spec_quantized import Quantization
from trimtab.facts.blocks import Linear
from trimtab.facts.dtypes import BYTES
from trimtab.facts.operations import PARAMETERS, Activation, Gradient, Operation, Pass, Result, Saved
from trimtab.model.spec_operations import (
    Execution,
    Projections,
    cast_input,
    linear_operation,
    product,
    weight_cast,
)


@dataclass(frozen=True)
class AdaptedProjections:
    """Declares the linear layers of a block with adapters, quantized weights, or both.

    A layer is adapted if its factors are among the trained tensors.

    Example:
        >>> from trimtab.facts.blocks import AttentionShape, BlockShape, FeedForwardShape
        >>> from trimtab.model.spec_block import block_operations
        >>> block = BlockShape(AttentionShape(4, 2, 8), FeedForwardShape(32))
        >>> run = Execution(1, 8, "fp32", "sdpa_flash")
        >>> frozen = block_operations(block, 16, run, AdaptedProjections(LoraSettings(r=2)))
        >>> any(operation.gradients for operation in frozen)
        False
    """

    lora: LoraSettings | None = None
    quantization: Quantization | None = None

    def __call__(self, group: Projections, run: Execution) -> list[Operation]:
        """The operations of linear layers that read one input: one for all if every layer joins a group."""
        layers = [_Layer(linear, _factors(linear, run)) for linear in group.linears]
        if len(layers) > 1 and all(self._joins(layer) for layer in layers):
            return [self._grouped(layers, group.outputs, run, group)]
        return [
            self._alone(layer, output, run, group)
            for layer, output in zip(layers, group.outputs, strict=True)
        ]

    def _joins(self, layer: _Layer) -> bool:
        """Whether the layer runs as a part of `fused_lora.lora_group`."""
        return layer.rank > 0 and self.lora is not None and not (self.lora.use_dora or self.lora.lora_dropout)

    def _alone(self, layer: _Layer, y: Activation, run: Execution, group: Projections) -> Operation:
        if not layer.rank:
            return self._frozen(layer.linear, y, run, group)
        assert self.lora is not None
        if self._joins(layer):
            return self._grouped([layer], (y,), run, group)
        return self._apart(layer, y, run, group)

    def _frozen(self, linear: Linear, y: Activation, run: Execution, group: Projections) -> Operation:
        """A layer without an adapter. A packed one saves its packed weight alone, and adds its bias afterwards."""
        if self.quantization is None:
            return linear_operation(linear, group.input, y, run, group)
        bare = product(linear, group.input, y, run, group)
        return dataclasses.replace(
            bare, results=(Result(_unbiased(linear, y)),), gradients=run.gradients(f"{linear.name}.bias")
        )

    def _grouped(
        self, layers: Sequence[_Layer], outputs: tuple[Activation, ...], run: Execution, group: Projections
    ) -> Operation:
        """One operator for all layers: it saves the input once, and A·x of all adapters."""
        N, width = run.num_tokens, BYTES[run.dtype]
        x, name = group.input, layers[0].linear.name
        ranks = sum(layer.rank for layer in layers)
        read = cast_input(layers[0].linear, x, run, group.part)
        h = run.activation(f"{name}.lora_A", ranks, group.part)
        every = frozenset({x.name, PARAMETERS})
        products = [product(layer.linear, x, y, run, group) for layer, y in zip(layers, outputs, strict=True)]
        results = [Result(_unbiased(layer.linear, y)) for layer, y in zip(layers, outputs, strict=True)]
        stacked = ranks * layers[0].linear.in_features * width
        return dataclasses.replace(
            products[0],
            outputs=outputs,
            saved=(Saved(read, every), Saved(h, every)),
            gradients=tuple(gradient for layer in layers for gradient in layer.factors),
            forward=_added(products, layers, run),
            backward=dataclasses.replace(
                _added(products, layers, run),
                scratch=N * ranks * width + stacked + products[0].backward.scratch,
            ),
            parameter_backward=_factors_pass(layers, run),
            # The last product of a block is not computed again: nobody reads its result then.
            recompute=_factors_pass(layers, run) if group.label == "down" else None,
            weights=sum(layer.linear.weights for layer in layers),
            results=(*results, Result(h, "adapter_a")),
            communicates=tuple(one for product in products for one in product.communicates),
        )

    def _apart(self, layer: _Layer, y: Activation, run: Execution, group: Projections) -> Operation:
        """A layer whose adapter is added to its own product: with dropout, or with DoRA."""
        assert self.lora is not None
        width, linear, x = BYTES[run.dtype], layer.linear, group.input
        every = frozenset({x.name, PARAMETERS})
        read = cast_input(linear, x, run, group.part)
        h = run.activation(f"{linear.name}.lora_A", layer.rank, group.part)
        base = run.activation(f"{linear.name}.base", linear.out_features, group.part)
        saved = [Saved(read, every), Saved(h, every)]
        results = [Result(base), Result(h, "adapter_a")]
        bare = product(linear, x, y, run, group)
        plain_product = self.quantization is None and (self.lora.lora_dropout > 0 or not self.lora.use_dora)
        if run.autocast and plain_product:  # torch's own product, apart from the adapter's
            saved.append(Saved(weight_cast(linear, run, group.part), frozenset({x.name})))
        if self.lora.lora_dropout:
            saved.append(Saved(Activation(f"{linear.name}.mask_key", _KEY_BYTES, group.part), every))
        if self.lora.use_dora:
            saved += self._row_scales(linear, run, group)
            products = layer.rank * (linear.out_features * width + layer.rank * 4)
            results.append(
                Result(Activation(f"{linear.name}.row_products", products, group.part), "adapter_a")
            )
        scratch = bare.backward.scratch + self._apart_scratch(linear, run)
        forward = dataclasses.replace(
            _added([bare], [layer], run), scratch=self._forward_scratch(linear, run)
        )
        return dataclasses.replace(
            bare,
            saved=tuple(saved),
            gradients=layer.factors,
            forward=forward,
            backward=dataclasses.replace(forward, scratch=scratch),
            parameter_backward=_factors_pass([layer], run),
            results=tuple(results),
        )

    def _apart_scratch(self, linear: Linear, run: Execution) -> int:
        """Temporary bytes of the backward pass, beyond the gradient of the input."""
        assert self.lora is not None
        N, width = run.num_tokens, BYTES[run.dtype]
        dx, dy = N * linear.in_features * width, N * linear.out_features * width
        apart = 0
        if self.lora.lora_dropout:
            # The adapter's gradient of the input before its mask, beside the words of the mask or the masked one.
            elements = N * linear.in_features
            words = min(elements, DROPOUT_CHUNK) * WORD_BYTES
            apart = max(words, dx) if elements <= DROPOUT_CHUNK else dx + words
        elif self.quantization is not None:
            apart = dx  # the adapter's, beside the packed weight's
        if not self.lora.use_dora:
            return apart
        # The gradient of the unscaled output beside that of the scales, a product as large; or, if the gradient of the
        # output stays (it is the residual stream's), the former beside the gradients of the input.
        stays = dy if linear.split == "row" else 0
        return max(2 * dy - dx, stays + apart, 0)

    def _forward_scratch(self, linear: Linear, run: Execution) -> int:
        """Temporary bytes of the forward pass: the layer's own product, words of a mask or the dropped input; DoRA
        measures the rows of a dequantized weight."""
        assert self.lora is not None
        base = run.num_tokens * linear.out_features * BYTES[run.dtype]
        if self.lora.use_dora and self.quantization is not None:
            return max(base, linear.weights * BYTES[run.dtype])
        elements = run.num_tokens * linear.in_features
        if not self.lora.lora_dropout:
            return base
        return base + max(min(elements, DROPOUT_CHUNK) * WORD_BYTES, elements * BYTES[run.dtype])

    def _row_scales(self, linear: Linear, run: Execution, group: Projections) -> list[Saved]:
        """DoRA: the output before its rows are scaled, their scales, and the lengths that these were divided by."""
        rows = linear.out_features
        unscaled = run.activation(f"{linear.name}.unscaled", rows, group.part)
        scales = Activation(f"{linear.name}.row_scales", rows * BYTES[run.dtype], group.part)
        lengths = Activation(f"{linear.name}.row_lengths", rows * 4, group.part)
        mine = frozenset({PARAMETERS})
        return [Saved(unscaled, mine), Saved(scales, mine), Saved(lengths, mine)]


_KEY_BYTES = 4 * KEY_WORDS
"""Of a dropout mask's key."""


@dataclass(frozen=True)
class _Layer:
    linear: Linear
    factors: tuple[Gradient, ...]
    """Of its adapter; empty if it has none."""

    @property
    def rank(self) -> int:
        """R, 0 without an adapter."""
        return next((one.dims[0] for one in self.factors if ".lora_A." in one.name), 0)


def _factors(linear: Linear, run: Execution) -> tuple[Gradient, ...]:
    prefix = f"{linear.name}.lora_"
    return tuple(gradient for name, gradient in run.trained.items() if name.startswith(prefix))


def _unbiased(linear: Linear, y: Activation) -> Activation:
    """The product itself, where the bias is added to it afterwards."""
    return dataclasses.replace(y, name=f"{y.name}.unbiased") if linear.bias else y


def _factors_pass(layers: Sequence[_Layer], run: Execution) -> Pass:
    """Gradients of all A and B: as much arithmetic as their forward products."""
    flops = sum(
        2.0 * run.num_tokens * layer.rank * (layer.linear.in_features + layer.linear.out_features)
        for layer in layers
    )
    elements = sum(math.prod(one.dims) for layer in layers for one in layer.factors)
    return Pass(flops, float(elements * BYTES[run.dtype]), 2 * len(layers))


def _added(products: Sequence[Operation], layers: Sequence[_Layer], run: Execution) -> Pass:
    """The frozen products and the adapters' in one pass."""
    adapters = _factors_pass(layers, run)
    return Pass(
        adapters.flops + sum(one.forward.flops for one in products),
        adapters.moved + sum(one.forward.moved for one in products),
        adapters.launches + sum(one.forward.launches for one in products),
    )
