"""Lone surrogates: halves of UTF-16 pairs, which a Python string can hold and UTF-8 text cannot.

They come from "\\ud800" in JSON and from bytes that are not UTF-8 in arguments and standard input.
"""

from __future__ import annotations

import re

_SURROGATE = re.compile("[\ud800-\udfff]")


def replace_surrogates(text: str) -> str:
    """Replace every surrogate by U+FFFD; returns the same object if there is none.

    Example:
        >>> replace_surrogates("a\\ud800b") == "a\\ufffdb"
        True
    """
    if text.isascii() or _SURROGATE.search(text) is None:
        return text
    return _SURROGATE.sub("\ufffd", text)
