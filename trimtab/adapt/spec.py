"""LoRA's settings, and the tensors that adapters add to a model. No torch.

    y = W·x + s · B·(A·x)          A [r, in], B [out, r], s = alpha / r, or alpha / √r with rsLoRA

`trimtab.adapt.spec_linears` declares the operations of adapted layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.adapt import settings_rules, targets
from trimtab.adapt.targets import ALL_LINEAR, Matrix
from trimtab.facts.dtypes import nbytes
from trimtab.facts.errors import RecipeError
from trimtab.facts.shapes import ModelShape

DEFAULT = "default"
"""The default adapter name; peft's."""


DROPOUT_CHUNK = 1 << 22
"""Elements per chunk of a dropout mask: a single mask for [8192, 14336] would allocate three times half a gigabyte."""
KEY_WORDS = 5
"""32-bit words of a mask's key in each layer (`lora_dropout`)."""
WORD_BYTES = 8
"""Bytes per element while a mask is computed: two 32-bit words."""


@dataclass(frozen=True)
class LoraSettings:
    """An adapter's shape and computation; names are peft's.

    Example:
        >>> LoraSettings(r=8, lora_alpha=16).scaling(8, 16.0)
        2.0
    """

    r: int = 16
    lora_alpha: float = 32
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    lora_dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()
    dtype: str = "fp32"
    """dtype of A and B: fp32 or bf16."""
    any_rank: bool = False
    """Whether a rank may exceed the size of its matrix and an alpha may be negative: rejected for new adapters,
    accepted for loaded ones."""

    def __post_init__(self) -> None:
        """Raises RecipeError for values that are invalid for any model; converts lists to tuples."""
        settings_rules.check_settings(vars(self))
        if not isinstance(self.target_modules, str):
            object.__setattr__(self, "target_modules", tuple(self.target_modules))
        object.__setattr__(self, "modules_to_save", tuple(self.modules_to_save))

    def scaling(self, r: int, alpha: float) -> float:
        """The scale s of one module."""
        return alpha / math.sqrt(r) if self.use_rslora else alpha / r

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, for JSON."""
        plain = dataclasses.asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> LoraSettings:
        """The inverse of `to_dict`."""
        return LoraSettings(**data)


@dataclass(frozen=True)
class TargetModule:
    """An adapter on one module."""

    matrix: Matrix
    r: int
    alpha: float
    scaling: float

    @property
    def name(self) -> str:
        """The module's name."""
        return self.matrix.name


def resolve_targets(shape: ModelShape, settings: LoraSettings) -> list[TargetModule]:
    """Resolves the settings to adapters on this model's modules.

    Raises:
        RecipeError: an unknown module, a rank larger than its matrix, a pattern that matches nothing.
    """
    found = []
    unused = {*settings.rank_pattern, *settings.alpha_pattern}
    for key in settings.rank_pattern:
        targets.check_suffix_pattern(key, "lora.rank_pattern")
    for key in settings.alpha_pattern:
        targets.check_suffix_pattern(key, "lora.alpha_pattern")
    for matrix in targets.select(shape, settings.target_modules):
        rank_key = _key_for(settings.rank_pattern, matrix.name)
        alpha_key = _key_for(settings.alpha_pattern, matrix.name)
        unused -= {rank_key, alpha_key}
        r = settings.r if rank_key is None else settings.rank_pattern[rank_key]
        alpha = settings.lora_alpha if alpha_key is None else settings.alpha_pattern[alpha_key]
        rank_said = "lora.r" if rank_key is None else f"lora.rank_pattern: {rank_key}"
        _check_rank(r, matrix, rank_said, any_rank=settings.any_rank)
        found.append(TargetModule(matrix, r, alpha, settings.scaling(r, alpha)))
    if unused:
        raise RecipeError(
            f"lora.rank_pattern or lora.alpha_pattern names {sorted(unused)[0]}, which no adapted module matches",
            f"the adapted modules are {', '.join(targets.short_names(target.name for target in found))}",
        )
    _check_kinds(shape, found, settings)
    return found


def _key_for(patterns: Mapping[str, Any], name: str) -> str | None:
    return next((key for key in patterns if targets.matching(key, name)), None)


def _check_rank(r: int, matrix: Matrix, key: str, *, any_rank: bool) -> None:
    most = min(matrix.out_features, matrix.in_features)
    if r > most and not any_rank:
        size = f"a {matrix.out_features} × {matrix.in_features} matrix with a maximum rank of {most}"
        own = ", or give this module its own with lora.rank_pattern" if key == "lora.r" else ""
        raise RecipeError(f"{key} is {r}, but {matrix.name} is {size}", f"set it to at most {most}{own}")


def _check_kinds(shape: ModelShape, found: list[TargetModule], settings: LoraSettings) -> None:
    if settings.use_dora and any(target.matrix.is_embedding for target in found):
        raise RecipeError(
            "lora.use_dora: true does not support embed_tokens in lora.target_modules",
            "remove embed_tokens from lora.target_modules, or set lora.use_dora: false",
        )
    whole = targets.matching_names(targets.modules(shape), settings.modules_to_save)
    both = [target.name for target in found if target.name in whole]
    if both:
        raise RecipeError(
            f"{both[0]} is both in lora.target_modules and in lora.modules_to_save", "keep it in one of them"
        )


def check_trainable(shape: ModelShape, settings: LoraSettings, adapter: str | None = None) -> None:
    """Raises RecipeError for adapters that can be used (for generation or merging) but not trained.

    Args:
        shape: shape of the model.
        settings: settings of the adapter.
        adapter: the folder that it was loaded from, if any.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> check_trainable(tiny, LoraSettings(r=2, lora_dropout=0.1))
    """
    if not settings.lora_dropout or all(
        target.name != targets.HEAD for target in resolve_targets(shape, settings)
    ):
        return
    cause = f"drops inputs of a layer, but the loss uses {targets.HEAD}'s merged matrix"
    if adapter is None:
        raise RecipeError(
            f"lora.lora_dropout {cause}",
            f"set lora_dropout: 0, or remove {targets.HEAD} from lora.target_modules",
        )
    raise RecipeError(
        f"lora.adapter: {adapter} adapts {targets.HEAD} with a lora_dropout of {settings.lora_dropout}, which {cause}",
        "to train it further, set lora_dropout to 0 in its adapter_config.json",
    )


def adapter_parameters(
    shape: ModelShape, settings: LoraSettings, adapter: str = DEFAULT
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields (name, dims) of every adapter tensor, in the model's order."""
    for target in resolve_targets(shape, settings):
        rows, columns = target.matrix.adapter_dims
        if target.matrix.is_embedding:
            yield f"{target.name}.lora_embedding_A.{adapter}", (target.r, columns)
            yield f"{target.name}.lora_embedding_B.{adapter}", (rows, target.r)
            continue
        stacked = (target.matrix.count,) if target.matrix.count > 1 else ()
        yield f"{target.name}.lora_A.{adapter}.weight", (*stacked, target.r, columns)
        yield f"{target.name}.lora_B.{adapter}.weight", (*stacked, rows, target.r)
        if settings.use_dora:
            yield f"{target.name}.lora_magnitude_vector.{adapter}.weight", (*stacked, rows)


def trainable_parameters(
    shape: ModelShape, settings: LoraSettings, weights_dtype: str
) -> list[tuple[str, tuple[int, ...], str]]:
    """Returns (name, dims, dtype) of all trainable parameters: adapters, and fully trained modules.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> found = trainable_parameters(tiny, LoraSettings(r=2, target_modules=("q_proj",)), "bf16")
        >>> [(name.rpartition("q_proj.")[2], dims, dtype) for name, dims, dtype in found]
        [('lora_A.default.weight', (2, 16), 'fp32'), ('lora_B.default.weight', (16, 2), 'fp32')]
    """
    own = [(name, dims, settings.dtype) for name, dims in adapter_parameters(shape, settings)]
    saved = set(targets.select_modules(shape, settings.modules_to_save))
    return [*own, *((name, dims, weights_dtype) for name, dims in shape.parameters() if name in saved)]


def parameter_bytes(shape: ModelShape, settings: LoraSettings) -> int:
    """Bytes of an adapter's parameters."""
    return nbytes(settings.dtype, sum(math.prod(dims) for _, dims in adapter_parameters(shape, settings)))
