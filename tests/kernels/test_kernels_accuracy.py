"""The accuracy criterion itself: it accepts rounding and rejects errors."""

import pytest
import torch

from trimtab.facts.dtypes import TORCH_NAMES
from trimtab.kernels.accuracy import TOLERANCE, check_accuracy


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rounding_passes_and_one_percent_fails(dtype):
    truth = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounded = truth.to(getattr(torch, TORCH_NAMES[dtype]))
    assert check_accuracy("x", rounded, truth=truth, reference=rounded, tolerance=TOLERANCE[dtype])
    off = (rounded.double() * 1.01).to(rounded.dtype)
    assert not check_accuracy("x", off, truth=truth, reference=rounded, tolerance=TOLERANCE[dtype])


def test_one_wrong_element_fails_however_many_are_right():
    truth = torch.randn(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wrong = truth.float()
    wrong[77] += 0.001
    assert not check_accuracy("x", wrong, truth=truth, reference=truth.float(), tolerance=TOLERANCE["fp32"])


def test_nan_fails_and_empty_tensors_pass():
    truth = torch.ones(3, dtype=torch.float64)
    nan = torch.tensor([1.0, float("nan"), 1.0])
    assert not check_accuracy("x", nan, truth=truth, reference=truth.float(), tolerance=1.0)
    empty = torch.empty(0)
    assert check_accuracy("x", empty, truth=empty.double(), reference=empty, tolerance=0.0)


def test_floor_allows_rounding_where_truth_cancels():
    zero = torch.zeros(4, dtype=torch.float64)
    got = torch.full((4,), 1e-7)
    assert not check_accuracy("x", got, truth=zero, reference=zero.float(), tolerance=TOLERANCE["fp32"])
    assert check_accuracy(
        "x", got, truth=zero, reference=zero.float(), tolerance=TOLERANCE["fp32"], floor=1.0
    )
    once = torch.tensor([0.0, 0.0, 0.0, 6e-6])
    for peak, fine in ((None, False), (2.0, True)):
        found = check_accuracy(
            "x", once, truth=zero, reference=zero.float(), tolerance=4e-6, floor=1.0, peak_floor=peak
        )
        assert bool(found) is fine, "the largest error is compared with the largest value"
