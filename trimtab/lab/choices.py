"""Parses and validates options of studies: names, counts, comma-separated lists. Imports no torch."""

from __future__ import annotations

import difflib
import enum
import math
from collections.abc import Sequence
from typing import TypeVar

from trimtab.facts.errors import RecipeError

Member = TypeVar("Member", bound=enum.Enum)


def choose_members(kind: type[Member], words: Sequence[str], option: str) -> list[Member]:
    """The members of an enum with these values, each once.

    Args:
        kind: the enum; its values are the words that users write.
        words: the words that the user wrote.
        option: the option's name in errors.

    Raises:
        RecipeError: a word is unknown; the error suggests the nearest one.

    Example:
        >>> from trimtab.lab.step_settings import Precision
        >>> [one.name for one in choose_members(Precision, ["bf16", "fp32", "bf16"], "--precisions")]
        ['BF16', 'FP32']
    """
    known = {str(member.value): member for member in kind}
    return [known[word] for word in choose_names(words, list(known), option)]


def choose_names(words: Sequence[str], known: Sequence[str], option: str) -> list[str]:
    """The words without duplicates; raises RecipeError with the nearest known name for an unknown one.

    Example:
        >>> choose_names(["bf16", "fp32", "bf16"], ["fp32", "bf16"], "--precisions")
        ['bf16', 'fp32']
    """
    for word in words:
        if word not in known:
            near = difflib.get_close_matches(str(word), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise RecipeError(f"{option} {word!r} is unknown", f"{hint}choose from {', '.join(known)}")
    return list(dict.fromkeys(words))


def check_counts(values: Sequence[int], option: str, least: int = 1) -> list[int]:
    """The values without duplicates; raises RecipeError for one that is too small.

    Example:
        >>> check_counts([128, 256, 128], "--contexts")
        [128, 256]
    """
    for value in values:
        if value < least:
            raise RecipeError(f"{option} {value} is too small", f"use at least {least}")
    return list(dict.fromkeys(values))


def check_seconds(seconds: float, option: str) -> None:
    """Raises RecipeError unless a time is positive and finite.

    Example:
        >>> check_seconds(0.5, "--budget")
    """
    if not 0 < seconds < math.inf:
        raise RecipeError(
            f"{option} {seconds:g} is not a time to measure", "give a number of seconds above 0"
        )


def parse_counts(text: str, option: str, least: int = 1) -> list[int]:
    """Whole numbers of a comma-separated option.

    Example:
        >>> parse_counts("0,1,5", "--warm-up", least=0)
        [0, 1, 5]
    """
    try:
        values = [int(word) for word in split_words(text)]
    except ValueError:
        raise RecipeError(
            f"{option} {text!r} is not a list of whole numbers", "write it like 128,256"
        ) from None
    return check_counts(values, option, least)


def split_words(text: str | None) -> list[str]:
    """Words of a comma-separated option.

    Example:
        >>> split_words("small, medium,"), split_words(None)
        (['small', 'medium'], [])
    """
    return [word.strip() for word in (text or "").split(",") if word.strip()]
