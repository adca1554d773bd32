"""Names that users give: which are valid paths, and how messages quote invalid ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trimtab.facts.dtypes import dtype_alias
from trimtab.facts.errors import DataError, RecipeError
from trimtab.facts.names import path_of, shortened, unusable_name
from trimtab.facts.units import parse_bytes
from trimtab.recipe import loads


@pytest.mark.parametrize(
    "name", ["a.txt", "a/b/c", "x" * 255, "~/notes", "ö" * 127, "/".join(["abc"] * 1000), "a\nb"]
)
def test_names_of_files(name: str) -> None:
    assert unusable_name(name) is None
    assert isinstance(path_of(name, "the folder"), Path)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("x" * 256, "a text of 256 characters, too long"),
        ("ö" * 128, "too long for a file name"),
        ("/".join(["abc"] * 1100), "too long for a file name"),
        ("a\0b", "NUL"),
        ("~no-such-user-here/x", "this machine has no such user"),
        ("", "is empty"),
        ("  ", "is empty"),
        (None, "is None"),
        (5, "is 5, an int"),
        (["a"], "a list"),
    ],
)
def test_invalid_paths_raise(name: Any, part: str) -> None:
    with pytest.raises(DataError, match=r"^the source ") as caught:
        path_of(name, "the source", DataError)
    assert part in str(caught.value)
    assert str(caught.value).isprintable()
    with pytest.raises(RecipeError):
        path_of(name, "the model")


def test_only_keys_for_text_files_suggest_writing_text_to_a_file() -> None:
    """Not `output_dir`, for which an earlier version suggested it too."""
    advice = "; to use text, write it to a file first"
    base = "model: starter\ndata: {train: x}\n"
    with pytest.raises(RecipeError) as caught:
        loads(base, ["output_dir=" + "x" * 300])
    assert str(caught.value).endswith("give the name of a file or folder")
    with pytest.raises(RecipeError) as caught:
        loads(base, ["data.train=" + "x" * 300])
    assert str(caught.value).endswith(advice)
    assert (unusable_name("x" * 300, is_text_file=True) or ("", ""))[1].endswith(advice)


def test_shortened_text_is_one_printable_line() -> None:
    assert shortened("a\n b\x1b[31m\tc") == "a b [31m c"
    assert shortened("word " * 1000, 20).endswith("…")
    assert len(shortened("word " * 1000, 20)) <= 21


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("24gib", 24 * 2**30),
        ("24gb", 24 * 10**9),
        ("24 GB", 24 * 10**9),
        ("24g", 24 * 10**9),
        ("24G", 24 * 10**9),
        ("24Gi", 24 * 2**30),
        (" 512 MiB ", 512 * 2**20),
        ("100B", 100),
        ("24", None),
        ("24iB", None),
        ("24PB", None),
        ("GB", None),
        ("-1GB", None),
    ],
)
def test_sizes_in_any_case(text: str, size: int | None) -> None:
    assert parse_bytes(text) == size


def test_torchs_dtype_names_are_converted() -> None:
    import torch

    assert [dtype_alias(n) for n in ("float16", "bfloat16", "float32", "fp16", "auto", 5)] == [
        "fp16", "bf16", "fp32", "fp16", "auto", 5,
    ]  # fmt: skip
    assert dtype_alias(torch.bfloat16) == "bf16"
