"""Slices of parameters: the rows that they cover, and errors for invalid ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.facts.errors import ModelError
from trimtab.facts.slices import Slice, check_parameter_names, check_slices, row_chunks

PARAMETERS = {"model.norm.weight": (8,), "lm_head.weight": (64, 8)}


@given(rows=st.integers(1, 300), columns=st.integers(1, 40), limit=st.integers(1, 2000))
def test_row_chunks_cover_every_row_once_within_the_limit(rows: int, columns: int, limit: int) -> None:
    pieces = list(row_chunks((rows, columns), limit))
    assert [row for piece in pieces for row in range(piece.start, piece.stop)] == list(range(rows))
    assert all((piece.stop - piece.start) * columns <= max(limit, columns) for piece in pieces)


def test_valid_slices_are_accepted() -> None:
    check_slices({}, PARAMETERS)
    check_slices({"lm_head.weight": Slice(1, 0, 8), "model.norm.weight": Slice(0, 8, 8)}, PARAMETERS)
    assert Slice.whole((64, 8)).dims_of((64, 8)) == (64, 8)


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("lm_haed.weight", (0, 0, 1), "no parameter 'lm_haed.weight'; did you mean 'lm_head.weight'"),
        ("x", (0, 0, 1), r"no parameter 'x'; `ModelShape.parameters\(\)`"),
        (
            "model.norm.weight",
            (1, 0, 1),
            r"dimensions \[8\] and cannot be sliced along dimension 1; slice dimension 0$",
        ),
        ("lm_head.weight", (2, 0, 1), "cannot be sliced along dimension 2; slice dimension 0 or 1"),
        ("lm_head.weight", (-1, 0, 1), "dimension -1"),
        ("lm_head.weight", (0, 0, 65), "slice 0:65 is out of range for dimension 0 .* stop <= 64"),
        ("lm_head.weight", (1, 5, 9), "slice 5:9 is out of range for dimension 1 .* stop <= 8"),
        ("lm_head.weight", (0, -1, 4), "slice -1:4 is out of range"),
        ("lm_head.weight", (0, 5, 4), "slice 5:4 is out of range"),
        ("lm_head.weight", (0, 2**70, 2**70), "is out of range"),
        ("lm_head.weight", (0, 0.5, 4), "whole numbers"),
        ("lm_head.weight", (0, 0, None), "slice 0:None is out of range"),
    ],
)
def test_invalid_slices_raise_with_a_remedy(name: str, part: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        check_slices({name: Slice(*part)}, PARAMETERS)
    assert caught.value.remedy


def test_names_are_checked() -> None:
    check_parameter_names(["lm_head.weight"], PARAMETERS)
    with pytest.raises(ModelError, match=r"did you mean 'model\.norm\.weight'"):
        check_parameter_names(["lm_head.weight", "model.norm.weigth"], PARAMETERS)
