"""Which modules of a model a name, a list of names or a pattern means; the rules are peft's. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trimtab.facts.errors import RecipeError
from trimtab.facts.shapes import ModelShape

ALL_LINEAR = "all-linear"
"""Every linear layer of the blocks; the head is not among them, as in peft."""
EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"


@dataclass(frozen=True)
class Matrix:
    """A module that an adapter can sit on."""

    name: str
    out_features: int
    in_features: int

    @property
    def is_embedding(self) -> bool:
        """Whether it is looked up by token instead of multiplied with."""
        return self.name == EMBEDDING

    @property
    def adapter_dims(self) -> tuple[int, int]:
        """(rows that B has, columns that A has); an embedding [V, C] is C rows of V columns to an adapter."""
        return (
            (self.in_features, self.out_features)
            if self.is_embedding
            else (self.out_features, self.in_features)
        )


def matrices(shape: ModelShape) -> dict[str, Matrix]:
    """Every module with a matrix, by name: the embedding, the blocks' linear layers, the head where it has its own.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> list(matrices(tiny))[-3:]
        ['model.layers.0.mlp.up_proj', 'model.layers.0.mlp.down_proj', 'lm_head']
    """
    found = {}
    for name, dims in shape.parameters():
        if len(dims) == 2:
            module = name.removesuffix(".weight")
            found[module] = Matrix(module, *dims)
    return found


def modules(shape: ModelShape) -> list[str]:
    """Every module with parameters of its own, norms too."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name, _ in shape.parameters()))


def short_names(names: Iterable[str]) -> list[str]:
    """The last part of each name, once, in order: what people write.

    Example:
        >>> short_names(["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "lm_head"])
        ['up_proj', 'lm_head']
    """
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def select(shape: ModelShape, wanted: str | Sequence[str]) -> list[Matrix]:
    """The modules that `target_modules` means, in the model's order.

    A text is `all-linear` or a regular expression over whole names; a list holds names, whole or their last parts.
    RecipeError for a name or a pattern that means nothing, with what exists.
    """
    there = matrices(shape)
    tied = shape.tie_embeddings
    offered = short_names(name for name in there if not (tied and name == EMBEDDING))
    if isinstance(wanted, str):
        names = _by_pattern(there, wanted, offered)
    else:
        names = _by_names(list(there), wanted, "lora.target_modules", offered)
    if EMBEDDING in names and tied:
        raise RecipeError(
            "lora.target_modules names embed_tokens, whose matrix is also the model's head",
            "train it whole with lora.modules_to_save: [embed_tokens], or leave it out",
        )
    return [there[name] for name in there if name in names]


def select_modules(shape: ModelShape, wanted: Sequence[str]) -> list[str]:
    """Names of the parameters of the modules that `modules_to_save` means."""
    there = modules(shape)
    names = _by_names(there, wanted, "lora.modules_to_save", short_names(there)) if wanted else set()
    return [name for name, _ in shape.parameters() if name.rpartition(".")[0] in names]


def matching(pattern: str, name: str) -> bool:
    """Whether a key of `rank_pattern` or `alpha_pattern` means a module: its end, or a regular expression of it."""
    return _ending(pattern).match(name) is not None


def _ending(pattern: str) -> re.Pattern[str]:
    """A key of `rank_pattern` or `alpha_pattern` over whole names."""
    return re.compile(rf"(.*\.)?({pattern})$")


def is_pattern(text: str) -> bool:
    """Whether a text is a regular expression."""
    return _fault(re.compile, text) is None


def is_ending(text: str) -> bool:
    """Whether a text can be a key of `rank_pattern` or `alpha_pattern`.

    Example:
        >>> is_ending("q_proj"), is_ending("("), is_ending("(?i)q_proj")
        (True, False, False)
    """
    return _fault(_ending, text) is None


def _fault(compiled: Callable[[str], object], text: str) -> Exception | None:
    """What is wrong with a regular expression, if anything."""
    try:
        compiled(text)
    except (re.error, OverflowError, RecursionError) as error:
        return error
    return None


def check_pattern(pattern: str, key: str) -> None:
    """RecipeError for a text that is no regular expression."""
    fault = _fault(re.compile, pattern)
    if fault is not None:
        raise RecipeError(
            f"{key}: {pattern!r} is no regular expression ({fault})",
            r"write one over whole names, such as .*\.q_proj, or a list of names",
        ) from fault


def check_ending(pattern: str, key: str) -> None:
    """RecipeError for a text that can be no key of `rank_pattern` or `alpha_pattern`."""
    if not pattern.strip():
        raise RecipeError(f"{key} has an empty text as a key", "name modules there, or leave it out")
    fault = _fault(_ending, pattern)
    if fault is not None:
        raise RecipeError(
            f"{key}: {pattern!r} is no regular expression for the end of a name ({fault})",
            "write flags around what they are for: (?i:…)"
            if "flags" in str(fault)
            else "write the end of a module's name, such as q_proj",
        ) from fault


def meant(there: Iterable[str], wanted: str | Sequence[str]) -> set[str]:
    """Of the names there are, those that `target_modules` means, if any: all-linear, a regular expression over whole
    names, or names, whole or their last parts.

    Example:
        >>> sorted(meant(["model.a.q_proj", "model.b.q_proj", "lm_head"], ["q_proj", "v_proj"]))
        ['model.a.q_proj', 'model.b.q_proj']
    """
    if wanted == ALL_LINEAR:
        return {name for name in there if name not in (EMBEDDING, HEAD)}
    if isinstance(wanted, str):
        return {name for name in there if re.fullmatch(wanted, name)}
    return {name for name in there if any(name == word or name.endswith(f".{word}") for word in wanted)}


def _by_pattern(there: dict[str, Matrix], pattern: str, offered: Sequence[str]) -> set[str]:
    check_pattern(pattern, "lora.target_modules")
    names = meant(there, pattern)
    if not names:
        raise RecipeError(
            f"lora.target_modules: no module's whole name matches {pattern!r}",
            f"names are like model.layers.0.self_attn.q_proj; there are {', '.join(offered)}; a list "
            "takes these short names, and all-linear every linear layer",
        )
    return names


def _by_names(there: Sequence[str], wanted: Sequence[str], key: str, offered: Sequence[str]) -> set[str]:
    if not all(word.strip() for word in wanted):
        raise RecipeError(f"{key} has an empty text among its names", "leave it out, or name a module there")
    unknown = [word for word in wanted if not meant(there, [word])]
    if unknown:
        raise RecipeError(
            f"{key}: the model has no {', '.join(unknown)}",
            f"there are {', '.join(offered)}",
        )
    return meant(there, wanted)
