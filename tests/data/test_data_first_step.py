"""The first step of a mixture contains the user's own text, whatever the replay share is."""

from __future__ import annotations

import pytest

from trimtab.data.sampling import epoch_plan, mix, train_source_first


def opened(seed: int, opening: int, train: int = 3, share: float = 0.5) -> tuple[list[int], list[int]]:
    order = epoch_plan(mix([(train, 1.0)], [(1000, 1.0)], share), seed, 0)
    sources, sequences = train_source_first(*order, 1, opening)
    return sources.tolist(), sequences.tolist()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("opening", [1, 2, 16])
def test_the_first_step_contains_a_train_source(share: float, opening: int) -> None:
    before = [opened(seed, 0, share=share)[0][:opening] for seed in range(200)]
    assert any(set(first) == {1} for first in before) == (opening == 1 or (opening == 2 and share == 0.9)), (
        "replay alone filled some"
    )
    for seed in range(200):
        assert 0 in opened(seed, opening, share=share)[0][:opening]


def test_an_order_that_begins_with_a_train_source_is_unchanged() -> None:
    """Losses of runs whose first step contained the user's text remain bitwise identical."""
    changed = 0
    for seed in range(200):
        before, after = opened(seed, 0, 30, 0.3), opened(seed, 1, 30, 0.3)
        if before[0][0] == 0:
            assert before == after
            continue
        changed += 1
        assert sorted(zip(*before, strict=True)) == sorted(zip(*after, strict=True)), "each sequence once"
        assert sum(a != b for a, b in zip(before[0], after[0], strict=True)) == 2
    assert changed > 5
