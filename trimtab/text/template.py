"""`model.chat_template`: a Jinja file, or the template itself."""

from __future__ import annotations

from trimtab.facts.errors import RecipeError
from trimtab.facts.names import path_of

MAX_BYTES = 1 << 20


def is_template(named: str) -> bool:
    """Whether a string is a template and not a file name: it contains Jinja."""
    return "{{" in named or "{%" in named


def read_template(named: str) -> str:
    """The template's text.

    Example:
        >>> read_template("{% for m in messages %}{{ m.content }}{% endfor %}")[:8]
        '{% for m'
    """
    if is_template(named):
        return named
    path = path_of(named, "model.chat_template")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecipeError(
                f"model.chat_template: {path} is larger than 1 MiB",
                "name a Jinja file, which is a text of a few kilobytes",
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise RecipeError(
            f"model.chat_template: there is no file {path}",
            "name a Jinja file, or write the template itself, which has {{ … }} or {% … %} in it",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"model.chat_template: {path} cannot be read ({error})",
            "name a Jinja file, which is a text of a few kilobytes",
        ) from error
    if not text.strip():
        raise RecipeError(
            f"model.chat_template: {path} is empty", "write the template into it, or name another Jinja file"
        )
    return text
