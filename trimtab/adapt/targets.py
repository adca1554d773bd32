"""Resolves names, lists of names and patterns to modules of a model, with peft's rules. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trimtab.facts.errors import RecipeError
from trimtab.facts.shapes import ModelShape

ALL_LINEAR = "all-linear"
"""Every linear layer of the blocks, without the head, as in peft."""
EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"


@dataclass(frozen=True)
class Matrix:
    """A module that can have an adapter."""

    name: str
    out_features: int
    in_features: int
    count: int = 1
    """Number of stacked expert matrices in the module; each has its own adapter."""

    @property
    def is_embedding(self) -> bool:
        """Whether it is an embedding."""
        return self.name == EMBEDDING

    @property
    def adapter_dims(self) -> tuple[int, int]:
        """(rows of B, columns of A); for an adapter, an embedding [V, C] has C rows and V columns."""
        return (
            (self.in_features, self.out_features)
            if self.is_embedding
            else (self.out_features, self.in_features)
        )


def matrices(shape: ModelShape) -> dict[str, Matrix]:
    """Returns every module with a matrix, by name: the embedding, the blocks' linear layers, the head if it is untied.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> list(matrices(tiny))[-3:]
        ['model.layers.0.mlp.up_proj', 'model.layers.0.mlp.down_proj', 'lm_head']
    """
    found = {EMBEDDING: Matrix(EMBEDDING, shape.vocab_size, shape.hidden_size)}
    for layer, linear in shape.linears():
        if not linear.routes:
            name = f"model.layers.{layer}.{linear.name}"
            found[name] = Matrix(name, linear.out_features, linear.in_features, linear.count)
    if not shape.tie_embeddings:
        found[HEAD] = Matrix(HEAD, shape.vocab_size, shape.hidden_size)
    return found


def modules(shape: ModelShape) -> list[str]:
    """Every module with its own parameters, including norms."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name, _ in shape.parameters()))


def short_names(names: Iterable[str]) -> list[str]:
    """The last component of each name, without duplicates, in order: the names that users write.

    Example:
        >>> short_names(["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "lm_head"])
        ['up_proj', 'lm_head']
    """
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def select(shape: ModelShape, wanted: str | Sequence[str]) -> list[Matrix]:
    """Returns the modules selected by `target_modules`, in the model's order.

    A string is `all-linear` or a regular expression for full names; a list has full names or last components. Raises
    RecipeError with the available names if a name or pattern matches nothing.
    """
    there = matrices(shape)
    tied = shape.tie_embeddings
    choices = short_names(name for name in there if not (tied and name == EMBEDDING))
    if isinstance(wanted, str):
        names = _by_pattern(there, wanted, choices)
    else:
        names = _by_names(list(there), wanted, "lora.target_modules", choices)
    if EMBEDDING in names and tied:
        raise RecipeError(
            "lora.target_modules names embed_tokens, whose matrix is also the model's head",
            "train it fully with lora.modules_to_save: [embed_tokens], or remove it",
        )
    return [there[name] for name in there if name in names]


def select_modules(shape: ModelShape, wanted: Sequence[str]) -> list[str]:
    """Returns the names of the parameters of the modules selected by `modules_to_save`."""
    there = modules(shape)
    names = _by_names(there, wanted, "lora.modules_to_save", short_names(there)) if wanted else set()
    return [name for name, _ in shape.parameters() if name.rpartition(".")[0] in names]


def matching(pattern: str, name: str) -> bool:
    """Whether a key of `rank_pattern` or `alpha_pattern` matches a module: its suffix, or a regular expression."""
    return _suffix_pattern(pattern).match(name) is not None


def _suffix_pattern(pattern: str) -> re.Pattern[str]:
    """A key of `rank_pattern` or `alpha_pattern` as a regular expression for full names."""
    return re.compile(rf"(.*\.)?({pattern})$")


def is_pattern(text: str) -> bool:
    """Whether a text is a regular expression."""
    return _regex_error(re.compile, text) is None


def is_suffix_pattern(text: str) -> bool:
    """Whether a text can be a key of `rank_pattern` or `alpha_pattern`.

    Example:
        >>> is_suffix_pattern("q_proj"), is_suffix_pattern("("), is_suffix_pattern("(?i)q_proj")
        (True, False, False)
    """
    return _regex_error(_suffix_pattern, text) is None


def _regex_error(compiled: Callable[[str], object], text: str) -> Exception | None:
    """The error of an invalid regular expression, or None."""
    try:
        compiled(text)
    except (re.error, OverflowError, RecursionError) as error:
        return error
    return None


def check_pattern(pattern: str, key: str) -> None:
    """Raises RecipeError for an invalid regular expression."""
    regex_error = _regex_error(re.compile, pattern)
    if regex_error is not None:
        raise RecipeError(
            f"{key}: {pattern!r} is not a regular expression ({regex_error})",
            r"write one for full names, such as .*\.q_proj, or a list of names",
        ) from regex_error


def check_suffix_pattern(pattern: str, key: str) -> None:
    """Raises RecipeError for an invalid key of `rank_pattern` or `alpha_pattern`."""
    if not pattern.strip():
        raise RecipeError(f"{key} has an empty string as a key", "name modules there, or remove it")
    regex_error = _regex_error(_suffix_pattern, pattern)
    if regex_error is not None:
        raise RecipeError(
            f"{key}: {pattern!r} is not a regular expression for the end of a name ({regex_error})",
            "limit flags to a group: (?i:…)"
            if "flags" in str(regex_error)
            else "write the end of a module's name, such as q_proj",
        ) from regex_error


def matching_names(there: Iterable[str], wanted: str | Sequence[str]) -> set[str]:
    """Returns the names that `target_modules` selects: all-linear, a regular expression for full names, or a list of
    full names or last components.

    Example:
        >>> sorted(matching_names(["model.a.q_proj", "model.b.q_proj", "lm_head"], ["q_proj", "v_proj"]))
        ['model.a.q_proj', 'model.b.q_proj']
    """
    if wanted == ALL_LINEAR:
        return {name for name in there if name not in (EMBEDDING, HEAD)}
    if isinstance(wanted, str):
        return {name for name in there if re.fullmatch(wanted, name)}
    return {name for name in there if any(name == word or name.endswith(f".{word}") for word in wanted)}


def _by_pattern(there: dict[str, Matrix], pattern: str, choices: Sequence[str]) -> set[str]:
    check_pattern(pattern, "lora.target_modules")
    names = matching_names(there, pattern)
    if not names:
        raise RecipeError(
            f"lora.target_modules: no module's full name matches {pattern!r}",
            "write a pattern for full names such as model.layers.0.self_attn.q_proj; or all-linear; or a list of short "
            f"names: choose from {', '.join(choices)}",
        )
    return names


def _by_names(there: Sequence[str], wanted: Sequence[str], key: str, choices: Sequence[str]) -> set[str]:
    if not all(word.strip() for word in wanted):
        raise RecipeError(f"{key} has an empty string among its names", "remove it, or name a module there")
    unknown = [word for word in wanted if not matching_names(there, [word])]
    if unknown:
        raise RecipeError(
            f"{key}: the model has no {', '.join(unknown)}",
            f"choose from {', '.join(choices)}",
        )
    return matching_names(there, wanted)
