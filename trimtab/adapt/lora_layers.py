"""A layer with low-rank adapters, linear or embedding.

An adapted layer stands at its layer's place and shares its parameters and buffers, so that no name of the model
changes; its own are `lora_A.<adapter>.weight` and `lora_B.<adapter>.weight` below it, as in peft.
"""

# I input features, O output features, R rank

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from trimtab.adapt.fused_lora import Part, lora_group
from trimtab.adapt.lora_products import add_lora, lora_linear
from trimtab.adapt.quantized import QuantizedLinear
from trimtab.adapt.spec import LoraSettings
from trimtab.facts.errors import RecipeError
from trimtab.facts.randomness import derive
from trimtab.model.building import torch_dtype
from trimtab.model.labels import with_factor


class Adapted(nn.Module):
    """A layer with adapters: shares the layer's own tensors under their own names."""

    def __init__(self, base: nn.Module, name: str) -> None:
        super().__init__()
        assert not list(base.children()), f"{name} has modules below it"
        # The same dictionaries, not copies: whoever moves, fills or shards a tensor here does so there.
        self._parameters = base._parameters
        self._buffers = base._buffers
        self._non_persistent_buffers_set = base._non_persistent_buffers_set
        self._load_state_dict_post_hooks = base._load_state_dict_post_hooks
        # Not a child: a child's name would stand in front of its tensors'.
        object.__setattr__(self, "base", base)
        self.path = name
        self.active: tuple[str, ...] = ()
        self.settings: dict[str, LoraSettings] = {}
        self.scaling: dict[str, float] = {}
        self.mask_key_5: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """What is not here is the layer's: `in_features`, a quantized layer's `take`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "base" not in self.__dict__:
                raise
            return getattr(self.__dict__["base"], name)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`to`, `to_empty` and the like: by the layer's own rules for its tensors, then the adapters."""
        self.__dict__["base"]._apply(fn)
        for child in self.children():
            child._apply(fn, recurse)
        return self

    def remove(self, adapter: str) -> None:
        """Forget an adapter; nothing happens if there is none of this name."""
        for holder in self.children():
            assert isinstance(holder, nn.ModuleDict | nn.ParameterDict)
            if adapter in holder:
                del holder[adapter]
        self.settings.pop(adapter, None)
        self.scaling.pop(adapter, None)

    def own_parameters(self, adapter: str) -> dict[str, nn.Parameter]:
        """An adapter's tensors by their names in this module."""
        ending = (f".{adapter}", f".{adapter}.weight")
        return {n: p for n, p in self.named_parameters() if n.startswith("lora_") and n.endswith(ending)}


class LoRALinear(Adapted):
    """y = W·x + b + Σ s·B·(A·x) over the active adapters; with DoRA the sum's rows are scaled to a learned length.

    `base` is an `nn.Linear`, or any module with `in_features`, `out_features`, a differentiable `forward(x)` and
    `dequantized()`: then that forward runs, and the adapter's part is added.

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
        """One more adapter, its numbers still undefined, not yet active."""
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
        """DoRA's length of each row, [O]."""
        return cast(torch.Tensor, self.lora_magnitude_vector[adapter].weight)

    @torch.no_grad()
    def reset(self, adapter: str, seed: int) -> None:
        """A uniform as peft draws it, B zero, so that the layer is what it was; DoRA's lengths those of W's rows."""
        a_RI, b_OR = self.factors(adapter)
        bound = a_RI.shape[1] ** -0.5
        _draw(
            a_RI, seed, f"{self.path}.lora_A.{adapter}", lambda t, g: t.uniform_(-bound, bound, generator=g)
        )
        b_OR.zero_()
        if adapter in self.lora_magnitude_vector:
            self.magnitude(adapter).copy_(self.row_lengths(adapter))

    def dense_weight(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """W [O, I] in its own format, or as the layer multiplies with it in `dtype`."""
        base = self.__dict__["base"]
        if isinstance(base, nn.Linear):
            return base.weight if dtype is None else base.weight.to(dtype)
        weight_OI: torch.Tensor = base.dequantized(dtype)
        return weight_OI

    @torch.no_grad()
    def row_lengths(self, adapter: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """‖W + s·B·A‖ of each row, fp32 [O], without forming the sum; W as products in `dtype` see it.

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
        """s·B·A [O, I] in the adapter's format or wider: what merging adds to W (DoRA scales the sum as well)."""
        a_RI, b_OR = self.factors(adapter)
        wide = torch.promote_types(a_RI.dtype, torch.float32)
        return self.scaling[adapter] * (b_OR.to(wide) @ a_RI.to(wide))

    def effective_weight(self) -> torch.Tensor:
        """W with the active adapters in it, [O, I] in W's format, differentiable in them: for a loss that takes a
        matrix. Holds a second W. RecipeError while training with dropout: there is no input to drop."""
        weight_OI = self.dense_weight()
        for adapter in self.active:
            if self._drop(adapter):
                raise RecipeError(
                    f"adapter {adapter} drops inputs of {self.path}, and the loss uses its matrix as a whole",
                    "call decoder.eval() to use it; to train it, make it with lora_dropout=0",
                )
            a_RI, b_OR = self.factors(adapter)
            factors = b_OR.to(weight_OI.dtype), a_RI.to(weight_OI.dtype)
            weight_OI = torch.addmm(weight_OI, *factors, alpha=self.scaling[adapter])
            if adapter in self.lora_magnitude_vector:
                lengths_O = self.magnitude(adapter) / self.row_lengths(adapter)
                weight_OI = weight_OI * lengths_O.to(weight_OI.dtype)[:, None]
        return weight_OI

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, output_unused=False)

    def save_only(self, x: torch.Tensor) -> torch.Tensor:
        """Saves what the backward pass reads, as `forward` does; the values that it returns must not be read.

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
        p = self._drop(first)
        if self.joins:
            y = self._biased(lora_group(x, [self.part(x)], outputs_unused=output_unused)[0])
        elif isinstance(base, nn.Linear) and not p:
            a_RI, b_OR = self.factors(first)
            y = lora_linear(x, base.weight, base.bias, a_RI, b_OR, self.scaling[first])
        else:
            y = self._add(base(x), x, first)
        for adapter in others:
            y = self._add(y, x, adapter)
        return y

    @property
    def joins(self) -> bool:
        """Whether this layer can be a part of a group; alone go those without an adapter or with several, with dropout
        or DoRA."""
        if len(self.active) != 1:
            return False
        return self.active[0] not in self.lora_magnitude_vector and not self._drop(self.active[0])

    def part(self, x: torch.Tensor) -> Part:
        """This layer and its adapter as a part of a group that reads x, in the format it is read in."""
        base, scaling = self.__dict__["base"], self.scaling[self.active[0]]
        if isinstance(base, QuantizedLinear):
            return Part(*base.operand(x), *self.factors(self.active[0]), scaling)
        return Part.plain(base.weight, *self.factors(self.active[0]), scaling)

    def together(self, x: torch.Tensor, layers: tuple[nn.Module, ...]) -> list[torch.Tensor]:
        """What each of these layers, of which this is the first, makes of x: in one operator where all of them can
        be parts of it."""
        joined = [layer for layer in layers if isinstance(layer, LoRALinear) and layer.joins]
        if len(joined) < len(layers):
            return [layer(x) for layer in layers]
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        outputs = lora_group(x, [layer.part(x) for layer in joined])
        return [layer._biased(y) for layer, y in zip(joined, outputs, strict=True)]

    def _biased(self, y: torch.Tensor) -> torch.Tensor:
        bias_O = self.__dict__["base"].bias
        return y if bias_O is None else y + bias_O.to(y.dtype)

    def _drop(self, adapter: str) -> float:
        return self.settings[adapter].lora_dropout if self.training else 0.0

    def _add(self, y: torch.Tensor, x: torch.Tensor, adapter: str) -> torch.Tensor:
        a_RI, b_OR = self.factors(adapter)
        return add_lora(y, x, a_RI, b_OR, self.scaling[adapter], p=self._drop(adapter), key_5=self.mask_key_5)

    def _dora(self, x: torch.Tensor, adapter: str) -> torch.Tensor:
        """(m / ‖W + s·B·A‖) ⊙ (W·x + s·B·(A·x)) + b; the length is a constant to the backward pass, as in DoRA's
        section 4.3."""
        base = self.__dict__["base"]
        bias_O = base.bias
        if isinstance(base, nn.Linear) and not self._drop(adapter):
            a_RI, b_OR = self.factors(adapter)
            y = lora_linear(x, base.weight, None, a_RI, b_OR, self.scaling[adapter])
        else:
            y = base(x) if bias_O is None else base(x) - bias_O.to(x.dtype)
            y = self._add(y, x, adapter)
        packed = isinstance(base, QuantizedLinear)
        lengths_O = self.magnitude(adapter) / self.row_lengths(adapter, y.dtype if packed else None)
        y = y * lengths_O.to(y.dtype)
        return y if bias_O is None else y + bias_O.to(y.dtype)


class LoRAEmbedding(Adapted):
    """Looked-up rows plus s·B·a, a the token's column of A [R, V], B [C, R]; names are peft's."""

    def __init__(self, base: nn.Module, name: str) -> None:
        super().__init__(base, name)
        self.lora_embedding_A = nn.ParameterDict()
        self.lora_embedding_B = nn.ParameterDict()

    def add(self, adapter: str, settings: LoraSettings, *, r: int, scaling: float) -> None:
        """One more adapter, its numbers still undefined, not yet active."""
        rows, width = self.num_embeddings, self.embedding_dim
        made = {"dtype": torch_dtype(settings.dtype), "device": self.weight.device}
        self.lora_embedding_A[adapter] = nn.Parameter(torch.empty(r, rows, **made))
        self.lora_embedding_B[adapter] = nn.Parameter(torch.empty(width, r, **made))
        self.settings[adapter], self.scaling[adapter] = settings, scaling

    @torch.no_grad()
    def reset(self, adapter: str, seed: int) -> None:
        """A zero, B normal, as peft has it."""
        self.lora_embedding_A[adapter].zero_()
        b_CR = self.lora_embedding_B[adapter]
        _draw(b_CR, seed, f"{self.path}.lora_embedding_B.{adapter}", lambda t, g: t.normal_(generator=g))

    def dense_weight(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The table [V, C] in its own format, or in `dtype`."""
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
    """A weight below a name of its own: `lora_A.default.weight`."""

    def __init__(self, dims: tuple[int, ...], **made: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dims, **made))


def _draw(tensor: torch.Tensor, seed: int, name: str, fill: Any) -> None:
    """Random numbers that depend on (seed, name) alone, drawn in fp32 on the CPU."""
    generator = torch.Generator().manual_seed(derive(seed, "lora", name))
    tensor.copy_(fill(torch.empty(tensor.shape, dtype=torch.float32), generator))
