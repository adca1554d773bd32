"""Declares the operations of adapted and quantized linear layers. No torch.

They replace the plain products of `trimtab.model.spec_block`. Each declares the saved tensors of its autograd function
(`fused_lora`, `lora_products`, `quantized_ops`).
"""

# N tokens, I input features, O output features, R rank

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.adapt.spec import DROPOUT_CHUNK, KEY_WORDS, WORD_BYTES, LoraSettings
from trimtab.adapt.spec_quantized import Quantization
from trimtab.facts.blocks import Linear
from trimtab.facts.dtypes import BYTES
from trimtab.facts.operations import (
    PARAMETERS,
    Activation,
    Gradient,
    Kernel,
    Operation,
    OperationKind,
    PassCost,
    SavableResult,
    SavedActivation,
)
from trimtab.model.spec_operations import (
    Execution,
    Projections,
    cast_input,
    linear_operation,
    product,
    weight_cast,
)

UNBIASED = ".unbiased"
"""Suffix of a product's name before its bias is added."""
SMALL_PRODUCT = 3
"""Kernel launches of a product with an adapter's A or B: the factor is cast and scaled, and partial sums are
reduced."""


@dataclass(frozen=True)
class AdaptedProjections:
    """Declares the linear layers of a block with adapters, quantized weights, or both.

    A layer is adapted if its factors are trainable.

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
        """Returns the operations of linear layers with the same input: a single one if all layers can be fused."""
        layers = [_Layer(linear, _factors(linear, run)) for linear in group.linears]
        if len(layers) > 1 and all(self._can_fuse(layer) for layer in layers):
            return [self._grouped(layers, group.outputs, run, group)]
        return [
            self._single(layer, output, run, group)
            for layer, output in zip(layers, group.outputs, strict=True)
        ]

    def _can_fuse(self, layer: _Layer) -> bool:
        """Whether the layer runs as a part of `fused_lora.lora_group`."""
        return layer.rank > 0 and self.lora is not None and not (self.lora.use_dora or self.lora.lora_dropout)

    def _single(self, layer: _Layer, y: Activation, run: Execution, group: Projections) -> Operation:
        if not layer.rank:
            return self._frozen(layer.linear, y, run, group)
        assert self.lora is not None
        if self._can_fuse(layer):
            return self._grouped([layer], (y,), run, group)
        return self._separate(layer, y, run, group)

    def _frozen(self, linear: Linear, y: Activation, run: Execution, group: Projections) -> Operation:
        """Declares a layer without an adapter. A quantized layer saves no activation, and adds its bias afterwards."""
        if self.quantization is None:
            return linear_operation(linear, group.input, y, run, group)
        linear_product = product(linear, group.input, y, run, group)
        return dataclasses.replace(
            linear_product,
            forward=self._pass([], [linear_product], run),
            backward=dataclasses.replace(
                self._pass([], [linear_product], run, backward=True), scratch=linear_product.backward.scratch
            ),
            results=(SavableResult(_unbiased(linear, y)),),
            gradients=run.gradients(f"{linear.name}.bias"),
        )

    def _pass(
        self,
        first: Sequence[Kernel],
        products: Sequence[Operation],
        run: Execution,
        *,
        backward: bool = False,
    ) -> PassCost:
        """The adapters' kernels and the products with frozen weights, each preceded by the dequantization of its
        weight; experts' weights are dequantized one by one."""
        kernels, launches = list(first), SMALL_PRODUCT * len(first)
        for base in products:
            (own,) = (base.backward if backward else base.forward).kernels
            groups = base.weights // (own.dims[1] * own.dims[2])
            if self.quantization is not None:
                moved = base.weights * (BYTES[run.dtype] + self.quantization.bytes_per_weight)
                kernels.append(Kernel(OperationKind.DEQUANTIZE, 0.0, moved))
                launches += 2 * groups
            else:
                launches += 1
            kernels.append(_accumulated(own, run) if first else own)
        return PassCost.of(*kernels, launches=launches)

    def _elementwise(self, linear: Linear, run: Execution) -> list[Kernel]:
        """Returns the elementwise kernels: dropout reads and writes the input, DoRA scales the output's rows."""
        assert self.lora is not None
        width, found = BYTES[run.dtype], []
        if self.lora.lora_dropout:
            found.append(2.0 * run.num_tokens * linear.in_features * (width + WORD_BYTES))
        if self.lora.use_dora:
            found.append(2.0 * run.num_tokens * linear.out_features * width)
            found.append(2.0 * linear.weights * width)
        return [Kernel(OperationKind.COPY, 0.0, moved) for moved in found]

    def _grouped(
        self, layers: Sequence[_Layer], outputs: tuple[Activation, ...], run: Execution, group: Projections
    ) -> Operation:
        """Declares one operator for all layers: it saves the input once, and A·x of all adapters."""
        N, width = run.num_tokens, BYTES[run.dtype]
        x, name = group.input, layers[0].linear.name
        ranks = sum(layer.rank for layer in layers)
        read = cast_input(layers[0].linear, x, run, group.part)
        h = run.activation(f"{name}.lora_A", ranks, group.part)
        every = frozenset({x.name, PARAMETERS})
        products = [product(layer.linear, x, y, run, group) for layer, y in zip(layers, outputs, strict=True)]
        results = [
            SavableResult(_unbiased(layer.linear, y)) for layer, y in zip(layers, outputs, strict=True)
        ]
        stacked = ranks * layers[0].linear.count * layers[0].linear.in_features * width
        return dataclasses.replace(
            products[0],
            outputs=outputs,
            saved=(SavedActivation(read, every), SavedActivation(h, every)),
            gradients=tuple(gradient for layer in layers for gradient in layer.factors),
            forward=self._pass(_adapter_forward(layers, run), products, run),
            backward=dataclasses.replace(
                self._pass(_adapter_backward(layers, run), products, run, backward=True),
                scratch=N * ranks * width + stacked + products[0].backward.scratch,
            ),
            parameter_backward=_adapter_gradients(layers, run),
            # The last product of a block is not recomputed: its result is unused.
            recompute=PassCost.of(*_adapter_forward(layers, run), launches=SMALL_PRODUCT * (1 + len(layers)))
            if group.label == "down"
            else None,
            weights=sum(product.weights for product in products),
            results=(*results, SavableResult(h, "adapter_a")),
            communicates=tuple(collective for product in products for collective in product.communicates),
        )

    def _separate(self, layer: _Layer, y: Activation, run: Execution, group: Projections) -> Operation:
        """Declares a layer whose adapter runs separately from the base product: with dropout, or with DoRA."""
        assert self.lora is not None
        width, linear, x = BYTES[run.dtype], layer.linear, group.input
        every = frozenset({x.name, PARAMETERS})
        read = cast_input(linear, x, run, group.part)
        h = run.activation(f"{linear.name}.lora_A", layer.rank, group.part)
        base = run.activation(f"{linear.name}.base", linear.out_features, group.part)
        saved = [SavedActivation(read, every), SavedActivation(h, every)]
        results = [SavableResult(base), SavableResult(h, "adapter_a")]
        linear_product = product(linear, x, y, run, group)
        plain_product = self.quantization is None and (self.lora.lora_dropout > 0 or not self.lora.use_dora)
        if run.autocast and plain_product:  # an nn.Linear product, separate from the adapter's
            saved.append(SavedActivation(weight_cast(linear, run, group.part), frozenset({x.name})))
        if self.lora.lora_dropout:
            saved.append(
                SavedActivation(Activation(f"{linear.name}.mask_key", _KEY_BYTES, group.part), every)
            )
        if self.lora.use_dora:
            saved += self._row_scales(linear, run, group)
            products = layer.rank * (linear.out_features * width + layer.rank * 4)
            results.append(
                SavableResult(Activation(f"{linear.name}.row_products", products, group.part), "adapter_a")
            )
        scratch = linear_product.backward.scratch + self._separate_scratch(linear, run)
        extra = self._elementwise(linear, run)
        forward = self._pass([*extra, *_adapter_forward([layer], run)], [linear_product], run)
        backward = self._pass(
            [*extra, *_adapter_backward([layer], run)], [linear_product], run, backward=True
        )
        return dataclasses.replace(
            linear_product,
            saved=tuple(saved),
            gradients=layer.factors,
            forward=dataclasses.replace(forward, scratch=self._forward_scratch(linear, run)),
            backward=dataclasses.replace(backward, scratch=scratch),
            parameter_backward=_adapter_gradients([layer], run),
            results=tuple(results),
        )

    def _separate_scratch(self, linear: Linear, run: Execution) -> int:
        """Bytes of temporary buffers in the backward pass, in addition to the gradient of the input."""
        assert self.lora is not None
        N, width = run.num_tokens, BYTES[run.dtype]
        dx, dy = N * linear.in_features * width, N * linear.out_features * width
        adapter_scratch = 0
        if self.lora.lora_dropout:
            # The adapter's gradient of the input before its mask, plus the words of the mask or the masked gradient.
            elements = N * linear.in_features
            words = min(elements, DROPOUT_CHUNK) * WORD_BYTES
            adapter_scratch = max(words, dx) if elements <= DROPOUT_CHUNK else dx + words
        elif self.quantization is not None:
            adapter_scratch = dx  # of the adapter, in addition to that of the packed weight
        if not self.lora.use_dora:
            return adapter_scratch
        # The gradient of the unscaled output plus that of the scales, a product of the same size; or, if the gradient
        # of the output stays alive (as part of the residual stream's), that gradient plus those of the input.
        residual_gradient = dy if linear.split == "row" else 0
        return max(2 * dy - dx, residual_gradient + adapter_scratch, 0)

    def _forward_scratch(self, linear: Linear, run: Execution) -> int:
        """Bytes of temporary buffers in the forward pass: the base product, hash words of a mask or the dropped input;
        DoRA computes the row norms of a dequantized weight."""
        assert self.lora is not None
        base = run.num_tokens * linear.out_features * BYTES[run.dtype]
        if self.lora.use_dora and self.quantization is not None:
            return max(base, linear.weights * BYTES[run.dtype])
        elements = run.num_tokens * linear.in_features
        if not self.lora.lora_dropout:
            return base
        return base + max(min(elements, DROPOUT_CHUNK) * WORD_BYTES, elements * BYTES[run.dtype])

    def _row_scales(self, linear: Linear, run: Execution, group: Projections) -> list[SavedActivation]:
        """DoRA: the output before its rows are scaled, their scales, and the norms that divide the magnitudes."""
        rows = linear.out_features
        unscaled = run.activation(f"{linear.name}.unscaled", rows, group.part)
        scales = Activation(f"{linear.name}.row_scales", rows * BYTES[run.dtype], group.part)
        lengths = Activation(f"{linear.name}.row_lengths", rows * 4, group.part)
        mine = frozenset({PARAMETERS})
        return [
            SavedActivation(unscaled, mine),
            SavedActivation(scales, mine),
            SavedActivation(lengths, mine),
        ]


_KEY_BYTES = 4 * KEY_WORDS
"""Bytes of a dropout mask's key."""


@dataclass(frozen=True)
class _Layer:
    linear: Linear
    factors: tuple[Gradient, ...]
    """The adapter's factors; empty if it has none."""

    @property
    def rank(self) -> int:
        """R, 0 without an adapter."""
        return next((factor.dims[-2] for factor in self.factors if ".lora_A." in factor.name), 0)


def _factors(linear: Linear, run: Execution) -> tuple[Gradient, ...]:
    prefix = f"{linear.name}.lora_"
    return tuple(gradient for name, gradient in run.trained.items() if name.startswith(prefix))


def _unbiased(linear: Linear, y: Activation) -> Activation:
    """The product before its bias is added, if there is one."""
    return dataclasses.replace(y, name=f"{y.name}{UNBIASED}") if linear.bias else y


def _adapter_forward(layers: Sequence[_Layer], run: Execution) -> list[Kernel]:
    """H = X·[A₁; A₂; …]ᵀ of all layers, then each layer's H·Bᵀ."""
    N, options = run.num_tokens, _options(layers, run)
    ranks = sum(layer.rank for layer in layers)
    return [
        Kernel.product(N, ranks, layers[0].linear.in_features, **options),
        *(Kernel.product(N, layer.linear.out_features, layer.rank, **options) for layer in layers),
    ]


def _adapter_backward(layers: Sequence[_Layer], run: Execution) -> list[Kernel]:
    """Each layer's dH = dY·B, then dX = dH·[A₁; A₂; …]."""
    N, options = run.num_tokens, _options(layers, run)
    ranks = sum(layer.rank for layer in layers)
    return [
        *(Kernel.product(N, layer.rank, layer.linear.out_features, **options) for layer in layers),
        Kernel.product(N, layers[0].linear.in_features, ranks, **options),
    ]


def _adapter_gradients(layers: Sequence[_Layer], run: Execution) -> PassCost:
    """Each layer's dB = dYᵀ·H, and d[A₁; A₂; …] = dHᵀ·X."""
    N, options = run.num_tokens, _options(layers, run)
    ranks = sum(layer.rank for layer in layers)
    return PassCost.of(
        *(Kernel.weight_gradient(layer.linear.out_features, layer.rank, N, **options) for layer in layers),
        Kernel.weight_gradient(ranks, layers[0].linear.in_features, N, **options),
        launches=SMALL_PRODUCT * (1 + len(layers)),
    )


def _options(layers: Sequence[_Layer], run: Execution) -> dict[str, Any]:
    """Bytes per element, and the number of experts' adapters that the rows are split over."""
    return {"width": BYTES[run.dtype], "groups": min(layers[0].linear.count, run.num_tokens)}


def _accumulated(product: Kernel, run: Execution) -> Kernel:
    """The product accumulating into its output, which it therefore also reads."""
    output = run.num_tokens * product.dims[1] * BYTES[run.dtype]
    return dataclasses.replace(product, moved=product.moved + output)
