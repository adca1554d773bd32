"""Grouping by length: less padding, the same documents, an order that is random and determined by the seed."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.data import Batch, CachedCorpus, make_loader, open_corpus
from trimtab.data.sampling import StepShape, grouped_order
from trimtab.facts.errors import CheckpointError, DataError

T = 100


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, prose: Any) -> CachedCorpus:
    """Documents of very different lengths; the longest is beyond a sequence."""
    folder = tmp_path_factory.mktemp("lengths")
    texts = [prose(i, 2 + (i * 7) % 97) for i in range(150)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return open_corpus(str(folder / "texts.jsonl"), tokenizer, cache_dir=folder / "cache", num_proc=1)


def loader_of(corpus: CachedCorpus, **changes: Any) -> Any:
    given_: dict[str, Any] = {
        "max_seq_length": T,
        "batch_size": 4,
        "accumulation": 2,
        "packing": False,
        "seed": 3,
    }
    return make_loader([corpus], **{**given_, "group_by_length": True, **changes})


def epoch(loader: Any) -> list[list[Batch]]:
    return [loader.next_step() for _ in range(loader.steps_per_epoch)]


def documents(steps: list[list[Batch]]) -> list[tuple[int, ...]]:
    """The ids of every sequence, padding left out, in training order."""
    return [
        tuple(batch.input_ids_BT[row][batch.documents_BT[row] >= 0].tolist())
        for step in steps
        for batch in step
        for row in range(len(batch.origins))
    ]


def padding(steps: list[list[Batch]]) -> float:
    masks = [batch.documents_BT < 0 for step in steps for batch in step]
    return sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)


def test_every_document_once_with_less_padding(corpus: CachedCorpus) -> None:
    grouped, plain = loader_of(corpus), loader_of(corpus, group_by_length=False)
    ours, theirs = epoch(grouped), epoch(plain)
    assert Counter(documents(ours)) == Counter(documents(theirs))
    assert documents(ours) != documents(theirs)
    assert padding(ours) < padding(theirs) / 2
    assert 1 - grouped.fill == pytest.approx(padding(ours), abs=1e-9), "what is printed is what is trained"
    assert grouped.notes() == [
        f"group_by_length: {padding(ours):.0%} of all tokens are padding, instead of {padding(theirs):.0%}"
    ]
    assert plain.notes()[-1].endswith(f"group_by_length: true would reduce it to {padding(ours):.0%}")


def test_microbatches_are_as_long_as_their_longest_document(corpus: CachedCorpus) -> None:
    widths = set()
    for batch in (batch for step in epoch(loader_of(corpus)) for batch in step):
        longest = int((batch.documents_BT >= 0).sum(1).max())
        width = batch.input_ids_BT.shape[1]
        assert width == min(-(-longest // 8) * 8, T)
        widths.add(width)
    assert len(widths) > 5
    assert T in widths, "the longest is cut at max_seq_length, which need not be a multiple of 8"


def test_sequences_of_ungrouped_runs_are_unchanged(corpus: CachedCorpus) -> None:
    for batch in (batch for step in epoch(loader_of(corpus, group_by_length=False)) for batch in step):
        assert batch.input_ids_BT.shape[1] == T


def test_a_grouped_batch_has_the_labels_and_positions_of_the_padded_one(corpus: CachedCorpus) -> None:
    def rows(steps: list[list[Batch]]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {
            batch.origins[row][0]: (batch.labels_BT[row], batch.positions_BT[row])
            for step in steps
            for batch in step
            for row in range(len(batch.origins))
        }

    ours, theirs = rows(epoch(loader_of(corpus))), rows(epoch(loader_of(corpus, group_by_length=False)))
    assert ours.keys() == theirs.keys()
    for origin, (labels_T, positions_T) in ours.items():
        width = len(labels_T)
        num_targets = int((theirs[origin][0] != -100).sum())
        assert int((labels_T != -100).sum()) == num_targets
        assert torch.equal(labels_T, theirs[origin][0][:width])
        assert torch.equal(positions_T[:num_targets], theirs[origin][1][:num_targets])


def test_the_order_is_random_and_a_function_of_seed_and_epoch(corpus: CachedCorpus) -> None:
    loader = loader_of(corpus)
    first, second = documents(epoch(loader)), documents(epoch(loader))
    assert first == documents(epoch(loader_of(corpus)))
    assert first != second
    assert first != documents(epoch(loader_of(corpus, seed=4)))
    means = [np.mean([len(d) for d in first[i : i + 4]]) for i in range(0, len(first), 4)]
    rises = sum(b > a for a, b in pairwise(means))
    assert 0.25 < rises / (len(means) - 1) < 0.75, "lengths do not rise or fall along the epoch"
    assert max(len(d) for d in first[:4]) == max(map(len, first)), "memory for the longest is allocated first"


@pytest.mark.parametrize("after", [1, 7, 25])
def test_restored_in_the_middle(corpus: CachedCorpus, after: int) -> None:
    whole = loader_of(corpus)
    steps = [whole.next_step() for _ in range(after + 12)]
    stopped = loader_of(corpus)
    for _ in range(after):
        stopped.next_step()
    position = json.loads(json.dumps(stopped.position()))
    again = loader_of(corpus)
    again.restore(position)
    assert documents([again.next_step() for _ in range(12)]) == documents(steps[after:])


def test_a_position_of_other_groups_is_refused(corpus: CachedCorpus) -> None:
    grouped = loader_of(corpus)
    for changes in ({"batch_size": 2}, {"accumulation": 1}):
        with pytest.raises(CheckpointError, match="group_by_length"):
            loader_of(corpus, **changes).restore(grouped.position())
    with pytest.raises(CheckpointError, match="group_by_length"):
        grouped.restore(loader_of(corpus, group_by_length=False).position())


def test_ranks_share_the_sequences_of_an_epoch(corpus: CachedCorpus) -> None:
    parts = [epoch(loader_of(corpus, dp_rank=rank, dp_size=2)) for rank in range(2)]
    assert all(len(a) == len(b) for a, b in zip(*parts, strict=True)), "as many microbatches on every rank"
    both = [document for part in parts for document in documents(part) if document]
    assert Counter(both) == Counter(documents(epoch(loader_of(corpus))))


def test_packed_and_streamed_documents_cannot_be_grouped(
    corpus: CachedCorpus, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="not packed"):
        loader_of(corpus, packing=True)
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n')
    streamed = open_corpus(str(tmp_path / "a.jsonl"), tokenizer, streaming=True)
    with pytest.raises(DataError, match="without streaming"):
        make_loader([streamed], max_seq_length=T, batch_size=2, packing=False, group_by_length=True)


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=300),
    batch=st.integers(1, 7),
    accumulation=st.integers(1, 4),
    ranks=st.integers(1, 3),
)
def test_an_order_is_a_permutation_with_the_longest_first(
    lengths: list[int], batch: int, accumulation: int, ranks: int
) -> None:
    lengths_E = np.array(lengths)
    order = grouped_order(lengths_E, StepShape(batch, accumulation, 0, ranks), 1, 0)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    whole = len(lengths) // batch * batch
    # The longest sequence may be in the last microbatch of the epoch, which is not whole and stays where it is.
    if whole and lengths_E[order[:whole]].max() == max(lengths):
        assert lengths_E[order[:batch]].max() == max(lengths)
