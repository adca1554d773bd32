"""LoRA layers: linear and embedding.

An adapted layer replaces the base layer and shares its parameters and buffers, so that no name of the model changes.
The adapter's parameters are `lora_A.<adapter>.weight` and `lora_B.<adapter>.weight`, as in peft.
"""

# I input features, O output features, R rank

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from trimtab.adapt.fused_lora import FusedLayer, lora_group
from trimtab.adapt.lora_products import add_lora, lora_linear
from trimtab.adapt.quantized import QuantizedLinear
from trimtab.adapt.spec import LoraSettings
from trimtab.facts.errors import RecipeError
from trimtab.facts.randomness import derive
from trimtab.model.building import torch_dtype
from trimtab.model.labels import with_factor


class AdaptedLayer(nn.Module):
    """A layer with adapters: shares the base layer's tensors under their own names."""

    def __init__(self, base: nn.Module, name: str) -> None:
        super().__init__()
        assert not list(base.children()), f"{name} has submodules"
        # The same dictionaries, not copies: moving, loading or sharding a tensor here also changes the base.
        self._parameters = base._parameters
        self._buffers = base._buffers
        self._non_persistent_buffers_set = base._non_persistent_buffers_set
        self._load_state_dict_post_hooks = base._load_state_dict_post_hooks
        # Not a child module: its name would be a prefix of its tensors' names.
        object.__setattr__(self, "base", base)
        self.path = name
        self.active: tuple[str, ...] = ()
        self.settings: dict[str, LoraSettings] = {}
        self.scaling: dict[str, float] = {}
        self.mask_key_5: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """Forwards other attributes to the base layer: `in_features`, a quantized layer's `set_weight`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "base" not in self.__dict__:
                raise
            return getattr(self.__dict__["base"], name)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Called by `to`, `to_empty` etc.: runs the base layer's `_apply`, then that of the adapters."""
        self.__dict__["base"]._apply(fn)
        for child in self.children():
            child._apply(fn, recurse)
        return self

    def remove(self, adapter: str) -> None:
        """Removes an adapter; no-op if there is none of this name."""
        for holder in self.children():
            assert isinstance(holder, nn.ModuleDict | nn.ParameterDict)
            if adapter in holder:
                del holder[adapter]
        self.settings.pop(adapter, None)
        self.scaling.pop(adapter, None)

    def own_parameters(self, adapter: str) -> dict[str, nn.Parameter]:
        """Returns an adapter's parameters by their names in this module."""
        ending = (f".{adapter}", f".{adapter}.weight")
        return {n: p for n, p in self.named_parameters() if n.startswith("lora_") and n.endswith(ending)}


class LoRALinear(AdaptedLayer):
    """y = W·x + b + Σ s·B·(A·x) over the active adapters; with DoRA the sum's rows are scaled to a learned magnitude.

    `base` is an `nn.Linear`, or any module with `in_features`, `out_features`, a differentiable `forward(x)` and
    `dequantized()`: then that forward runs, and the adapter's output is added.

    Example:
        >>> layer = LoRALinear(nn.Linear(8, 4, bias=False), "up")
        >>> layer.add("default", LoraSettings(), r=2, scaling=1.0)
        >>> sorted(name for name, _ in layer.named_parameters())
        ['lora_A.default.weight', 'lora_B.default.weight', 'weight']
    """

    def __init__(self, base: nn.Module, name: str) -> None:
        super().__init__(base, name)
        self.lora_A = nn.ModuleDict()
        self.lora_B = nn.ModuleDict()
        self.lora_magnitude_vector = nn.ModuleDict()

    def add(self, adapter: str, settings: LoraSettings, *, r: int, scaling: float) -> None:
        """Adds an adapter, uninitialized and not active."""
        device = next(iter([*self._parameters.values(), *self._buffers.values()])).device  # type: ignore[union-attr]
        made = {"dtype": torch_dtype(settings.dtype), "device": device}
        self.lora_A[adapter] = _Factor((r, self.in_features), **made)
        self.lora_B[adapter] = _Factor((self.out_features, r), **made)
        if settings.use_dora:
            self.lora_magnitude_vector[adapter] = _Factor((self.out_features,), **made)
        self.settings[adapter], self.scaling[adapter] = settings, scaling

    def factors(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(A [R, I], B [O, R]) of one adapter."""
        return cast(torch.Tensor, self.lora_A[adapter].weight), cast(
            torch.Tensor, self.lora_B[adapter].weight
        )

    def magnitude(self, adapter: str) -> torch.Tensor:
        """DoRA's magnitude vector, [O]."""
        return cast(torch.Tensor, self.lora_magnitude_vector[adapter].weight)

    @torch.no_grad()
    def reset(self, adapter: str, seed: int) -> None:
        """Initializes A as peft does, B to zero (the output is unchanged), DoRA's magnitudes to W's row norms."""
        a_RI, b_OR = self.factors(adapter)
        bound = a_RI.shape[1] ** -0.5
        _draw(
            a_RI, seed, f"{self.path}.lora_A.{adapter}", lambda t, g: t.uniform_(-bound, bound, generator=g)
        )
        b_OR.zero_()
        if adapter in self.lora_magnitude_vector:
            self.magnitude(adapter).copy_(self.row_norms(adapter))

    def dense_weight(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """W [O, I] in its own dtype, or as used in products in `dtype`."""
        base = self.__dict__["base"]
        if isinstance(base, nn.Linear):
            return base.weight if dtype is None else base.weight.to(dtype)
        weight_OI: torch.Tensor = base.dequantized(dtype)
        return weight_OI

    @torch.no_grad()
    def row_norms(self, adapter: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """‖W + s·B·A‖ of each row, fp32 [O], without materializing the sum; W as used in products in `dtype`.

        ‖w + s·b·A‖² = ‖w‖² + 2s · b·(A·w) + s² · b·(A·Aᵀ)·b
        """
        weight_OI, s = self.dense_weight(dtype), self.scaling[adapter]
        wide = torch.promote_types(weight_OI.dtype, torch.float32)
        a_RI, b_OR = (factor.to(wide) for factor in self.factors(adapter))
        squares_O = torch.linalg.vector_norm(weight_OI, dim=1, dtype=wide).square()
        with with_factor("adapter_a"):
            cross_OR = (weight_OI @ a_RI.to(weight_OI.dtype).t()).to(wide)
            own_RR = a_RI @ a_RI.t()
        with with_factor("adapter_b"):
            own_OR = b_OR @ own_RR
        del own_RR
        return (squares_O + (2 * s * cross_OR + s * s * own_OR).mul(b_OR).sum(1)).clamp(min=0).sqrt()

    def delta(self, adapter: str) -> torch.Tensor:
        """s·B·A [O, I] in the adapter's dtype or wider: what merging adds to W (DoRA also scales the sum)."""
        a_RI, b_OR = self.factors(adapter)
        wide = torch.promote_types(a_RI.dtype, torch.float32)
        return self.scaling[adapter] * (b_OR.to(wide) @ a_RI.to(wide))

    def effective_weight(self) -> torch.Tensor:
        """W merged with the active adapters, [O, I] in W's dtype, differentiable in the adapters: for a loss that reads
        the matrix. Allocates a second W. Raises RecipeError in training with dropout, since there is no input to
        drop."""
        weight_OI = self.dense_weight()
        for adapter in self.active:
            if self._dropout(adapter):
                raise RecipeError(
                    f"adapter {adapter} has dropout on the inputs of {self.path}, but the loss uses the merged matrix",
                    "call decoder.eval() to use it; to train it, create it with lora_dropout=0",
                )
            a_RI, b_OR = self.factors(adapter)
            factors = b_OR.to(weight_OI.dtype), a_RI.to(weight_OI.dtype)
            weight_OI = torch.addmm(weight_OI, *factors, alpha=self.scaling[adapter])
            if adapter in self.lora_magnitude_vector:
                scales_O = self.magnitude(adapter) / self.row_norms(adapter)
                weight_OI = weight_OI * scales_O.to(weight_OI.dtype)[:, None]
        return weight_OI

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, output_unused=False)

    def save_only(self, x: torch.Tensor) -> torch.Tensor:
        """Saves the same tensors for the backward pass as `forward`; the returned values must not be read.

        For recomputation: where the layer runs as one operator, the product with the frozen weight is skipped.
        """
        return self._run(x, output_unused=True)

    def _run(self, x: torch.Tensor, *, output_unused: bool) -> torch.Tensor:
        base = self.__dict__["base"]
        if not self.active:
            return base(x)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if len(self.active) == 1 and self.active[0] in self.lora_magnitude_vector:
            return self._dora(x, self.active[0])
        first, *others = self.active
        p = self._dropout(first)
        if self.can_fuse:
            y = self._add_bias(lora_group(x, [self.as_fused_layer(x)], outputs_unused=output_unused)[0])
        elif isinstance(base, nn.Linear) and not p:
            a_RI, b_OR = self.factors(first)
            y = lora_linear(x, base.weight, base.bias, a_RI, b_OR, self.scaling[first])
        else:
            y = self._add(base(x), x, first)
        for adapter in others:
            y = self._add(y, x, adapter)
        return y

    @property
    def can_fuse(self) -> bool:
        """Whether this layer can be part of a fused group: it has exactly one active adapter, without dropout and
        DoRA."""
        if len(self.active) != 1:
            return False
        return self.active[0] not in self.lora_magnitude_vector and not self._dropout(self.active[0])

    def as_fused_layer(self, x: torch.Tensor) -> FusedLayer:
        """This layer and its adapter as a part of a fused group with input x."""
        base, scaling = self.__dict__["base"], self.scaling[self.active[0]]
        if isinstance(base, QuantizedLinear):
            return FusedLayer(*base.operand(x), *self.factors(self.active[0]), scaling)
        return FusedLayer.plain(base.weight, *self.factors(self.active[0]), scaling)

    def forward_group(self, x: torch.Tensor, layers: tuple[nn.Module, ...]) -> list[torch.Tensor]:
        """Returns the outputs of these layers for x; this is the first of them. Runs one operator if all can be
        fused."""
        joined = [layer for layer in layers if isinstance(layer, LoRALinear) and layer.can_fuse]
        if len(joined) < len(layers):
            return [layer(x) for layer in layers]
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        outputs = lora_group(x, [layer.as_fused_layer(x) for layer in joined])
        return [layer._add_bias(y) for layer, y in zip(joined, outputs, strict=True)]

    def _add_bias(self, y: torch.Tensor) -> torch.Tensor:
        bias_O = self.__dict__["base"].bias
        return y if bias_O is None else y + bias_O.to(y.dtype)

    def _dropout(self, adapter: str) -> float:
        return self.settings[adapter].lora_dropout if self.training else 0.0

    def _add(self, y: torch.Tensor, x: torch.Tensor, adapter: str) -> torch.Tensor:
        a_RI, b_OR = self.factors(adapter)
        return add_lora(
            y, x, a_RI, b_OR, self.scaling[adapter], p=self._dropout(adapter), key_5=self.mask_key_5
        )

    def _dora(self, x: torch.Tensor, adapter: str) -> torch.Tensor:
        """(m / ‖W + s·B·A‖) ⊙ (W·x + s·B·(A·x)) + b; the norm is a constant in the backward pass, as in DoRA's
        section 4.3."""
        base = self.__dict__["base"]
        bias_O = base.bias
        if isinstance(base, nn.Linear) and not self._dropout(adapter):
            a_RI, b_OR = self.factors(adapter)
            y = lora_linear(x, base.weight, None, a_RI, b_OR, self.scaling[adapter])
        else:
            y = base(x) if bias_O is None else base(x) - bias_O.to(x.dtype)
            y = self._add(y, x, adapter)
        packed = isinstance(base, QuantizedLinear)
        scales_O = self.magnitude(adapter) / self.row_norms(adapter, y.dtype if packed else None)
        y = y * scales_O.to(y.dtype)
        return y if bias_O is None else y + bias_O.to(y.dtype)


class LoRAEmbedding(AdaptedLayer):
    """Embedding rows plus s·B·a, with a the token's column of A [R, V], B [C, R]; names are peft's."""

    def __init__(self, base: nn.Module, name: str) -> None:
        super().__init__(base, name)
        self.lora_embedding_A = nn.ParameterDict()
        self.lora_embedding_B = nn.ParameterDict()

    def add(self, adapter: str, settings: LoraSettings, *, r: int, scaling: float) -> None:
        """Adds an adapter, uninitialized and not active."""
        rows, width = self.num_embeddings, self.embedding_dim
        made = {"dtype": torch_dtype(settings.dtype), "device": self.weight.device}
        self.lora_embedding_A[adapter] = nn.Parameter(torch.empty(r, rows, **made))
        self.lora_embedding_B[adapter] = nn.Parameter(torch.empty(width, r, **made))
        self.settings[adapter], self.scaling[adapter] = settings, scaling

    @torch.no_grad()
    def reset(self, adapter: str, seed: int) -> None:
        """Initializes A to zero and B normally, as peft does."""
        self.lora_embedding_A[adapter].zero_()
        b_CR = self.lora_embedding_B[adapter]
        _draw(b_CR, seed, f"{self.path}.lora_embedding_B.{adapter}", lambda t, g: t.normal_(generator=g))

    def dense_weight(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The embedding [V, C] in its own dtype, or in `dtype`."""
        return self.weight if dtype is None else self.weight.to(dtype)

    def delta(self, adapter: str) -> torch.Tensor:
        """s·(B·A)ᵀ [V, C]."""
        a_RV, b_CR = self.lora_embedding_A[adapter], self.lora_embedding_B[adapter]
        wide = torch.promote_types(a_RV.dtype, torch.float32)
        return self.scaling[adapter] * (b_CR.to(wide) @ a_RV.to(wide)).t()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y = self.__dict__["base"](ids)
        for adapter in self.active:
            a_R = F.embedding(ids, self.lora_embedding_A[adapter].t()).to(y.dtype)
            y = y + (a_R @ self.lora_embedding_B[adapter].t().to(y.dtype)) * self.scaling[adapter]
        return y


class _Factor(nn.Module):
    """A module with one weight, for the name `lora_A.default.weight`."""

    def __init__(self, dims: tuple[int, ...], **made: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dims, **made))


def _draw(tensor: torch.Tensor, seed: int, name: str, fill: Any) -> None:
    """Initializes a tensor with random values that depend only on (seed, name), drawn in fp32 on the CPU."""
    generator = torch.Generator().manual_seed(derive(seed, "lora", name))
    tensor.copy_(fill(torch.empty(tensor.shape, dtype=torch.float32), generator))
