"""Validates names that users give for files, folders and models, and formats them for messages."""

from __future__ import annotations

import os
from pathlib import Path

from trimtab.facts.errors import RecipeError, TrimtabError

MAX_NAME_BYTES = 255
"""Maximum length of a file or folder name on common file systems."""
MAX_PATH_BYTES = 4095
"""Maximum length of a path on Linux."""


def shortened(text: str, limit: int = 60) -> str:
    """Returns a text as one printable line of at most `limit` characters, for messages.

    Example:
        >>> shortened("Once upon\\na time\\x00, there was a cat", 20)
        'Once upon a time , …'
    """
    head = "".join(character if character.isprintable() else " " for character in text[: 4 * limit])
    line = " ".join(head.split())
    cut = len(line) > limit or len(text) > 4 * limit
    return f"{line[: limit - 1].rstrip()} …" if cut else line


def unusable_name(name: str, *, is_text_file: bool = False) -> tuple[str, str] | None:
    """Returns (cause, remedy) for a string that cannot be the name of a file or folder; None for a valid one.

    Args:
        name: what the user gave.
        is_text_file: whether the name is that of a text file; then the error adds that text must be written to a file.

    Example:
        >>> unusable_name("notes/a.txt") is None, unusable_name("word " * 80)[0][:60]
        (True, "is a text of 400 characters, too long for a file name ('word")
    """
    if "\0" in name:
        return f"has a NUL character in it ('{shortened(name)}')", "remove it"
    parts = [part.encode("utf-8", "surrogatepass") for part in name.split("/")]
    if max(map(len, parts)) > MAX_NAME_BYTES or sum(map(len, parts)) + len(parts) - 1 > MAX_PATH_BYTES:
        return (
            f"is a text of {len(name):,} characters, too long for a file name ('{shortened(name)}')",
            "give the name of a file or folder"
            + ("; to use text, write it to a file first" if is_text_file else ""),
        )
    if name.startswith("~"):
        try:
            Path(name).expanduser()
        except RuntimeError:
            home = name.split("/")[0]
            return f"begins with {home}, but this machine has no such user", "give the full path"
    return None


def path_of(
    name: object, what: str, error: type[TrimtabError] = RecipeError, *, is_text_file: bool = False
) -> Path:
    """Returns the path that a user gave, with `~` expanded; raises `error` for an invalid one.

    Args:
        name: what the user gave.
        what: the argument, for the message.
        error: the exception type.
        is_text_file: as in `unusable_name`.

    Example:
        >>> path_of("notes/a.txt", "folder").name
        'a.txt'
    """
    if not isinstance(name, str | os.PathLike):
        raise error(f"{what} is {described(name)}", "give a name or a path, as text or a pathlib.Path")
    text = os.fsdecode(name)
    if not text.strip():
        raise error(f"{what} is empty", "give a name or a path")
    wrong = unusable_name(text, is_text_file=is_text_file)
    if wrong is not None:
        raise error(f"{what} {wrong[0]}", wrong[1])
    return Path(text).expanduser()


def described(value: object) -> str:
    """Describes a value of the wrong type, for messages.

    Example:
        >>> described(3.5), described(None)
        ('3.5, a float', 'None')
    """
    return "None" if value is None else f"{shortened(repr(value))}, {with_article(type(value).__name__)}"


def with_article(noun: str) -> str:
    """Returns a noun with its indefinite article.

    Example:
        >>> with_article("int"), with_article("list")
        ('an int', 'a list')
    """
    return f"{'an' if noun[:1] in 'aeiouAEIOU' else 'a'} {noun}"
