"""Lossless JSON serialization of the scalars of a training state: numbers, strings, lists and dictionaries.

Python writes floats so that they are read back exactly. Values that JSON cannot represent (nan, inf) become
`{"$float": "nan"}`; values that it would change silently (integer keys, numpy scalars, tensors) raise TypeError.
Tuples are loaded as lists.
"""

from __future__ import annotations

import json
import math
from typing import Any

_FLOAT = "$float"


def encode(scalars: dict[str, Any]) -> str:
    """JSON text of `scalars`.

    Example:
        >>> decode(encode({"step": 3, "best": float("inf")}))
        {'step': 3, 'best': inf}
    """
    return json.dumps(_plain(scalars, "scalars"), allow_nan=False, indent=1)


def decode(text: str) -> dict[str, Any]:
    """The inverse of `encode`."""
    value = json.loads(text, object_hook=_restore)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _restore(entry: dict[str, Any]) -> Any:
    return float(entry[_FLOAT]) if set(entry) == {_FLOAT} else entry


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key == _FLOAT:
                raise TypeError(f"{where}: key {key!r} cannot be stored in JSON; use a string key")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(
        f"{where} is a {type(value).__name__}; pass plain numbers as scalars and tensors as tensors"
    )
