"""The loader: the same sequences for any split of a step, and exactly the same sequences after a restore."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from data_rows import assert_numbered
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.data import Batch, CachedCorpus, SourceSpec, collate, eval_batches, make_loader, open_corpus
from trimtab.data.sampling import StepShape, epoch_plan, mix, rank_microbatches, train_source_first
from trimtab.facts.errors import CheckpointError, DataError
from trimtab.recipe.resume import CHANGEABLE_ON_RESUME

T = 64


@pytest.fixture(scope="module")
def corpora(tmp_path_factory, tokenizer, corpus_folder, replay_folder) -> tuple[CachedCorpus, CachedCorpus]:
    cache = tmp_path_factory.mktemp("cache")
    return (
        open_corpus(str(corpus_folder), tokenizer, cache_dir=cache),
        open_corpus(str(replay_folder), tokenizer, cache_dir=cache),
    )


def rows(batches: list[Batch]) -> list[tuple]:
    """Every sequence of a step, whatever microbatch it is in; padding sequences of a rank left out."""
    return [
        tuple(torch.cat([b.input_ids_BT[i], b.labels_BT[i], b.positions_BT[i], b.documents_BT[i]]).tolist())
        for b in batches
        for i in range(len(b.origins))
        if b.origins[i]
    ]


def steps(loader, count: int) -> list[list[tuple]]:
    return [rows(loader.next_step()) for _ in range(count)]


def flat(found: list[list[tuple]]) -> list[tuple]:
    return [row for step in found for row in step]


def loader_of(corpora: tuple[CachedCorpus, CachedCorpus], **changes):
    given = {
        "max_seq_length": T,
        "batch_size": 4,
        "accumulation": 4,
        "replay_share": 0.2,
        "seed": 3,
        **changes,
    }
    return make_loader([corpora[0]], replay=[corpora[1]], **given)


def test_a_step_has_the_same_sequences_for_any_split(corpora) -> None:
    whole = loader_of(corpora)
    count = whole.steps_per_epoch + 3
    expected = steps(whole, count)
    assert len(expected[0]) == 16
    assert 0 < len(expected[whole.steps_per_epoch - 1]) < 16, "the epoch should end in a smaller step"
    for batch, accumulation in ((1, 16), (16, 1), (2, 8)):
        assert steps(loader_of(corpora, batch_size=batch, accumulation=accumulation), count) == expected


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_together_see_the_sequences_of_a_single_rank(size: int, corpora) -> None:
    alone = loader_of(corpora)
    ranks = [
        loader_of(corpora, batch_size=2, accumulation=8 // size, dp_rank=r, dp_size=size) for r in range(size)
    ]
    for _ in range(alone.steps_per_epoch + 2):
        parts = [rank.next_step() for rank in ranks]
        assert len({len(part) for part in parts}) == 1, "ranks must run equally many microbatches"
        assert all(part for part in parts)
        assert [row for part in parts for row in rows(part)] == rows(alone.next_step())
        assert all(b.num_targets == int((b.labels_BT != -100).sum()) for part in parts for b in part)
        assert_numbered(parts)


def test_an_epoch_contains_every_document_token_once(corpora) -> None:
    loader = make_loader([corpora[0]], max_seq_length=T, batch_size=8, seed=1)
    seen: Counter[tuple[int, ...]] = Counter()
    pieces: dict[str, int] = Counter()
    for _ in range(loader.steps_per_epoch):
        for batch in loader.next_step():
            for i, origins in enumerate(batch.origins):
                for number, origin in enumerate(origins):
                    ids = batch.input_ids_BT[i][batch.documents_BT[i] == number]
                    pieces[origin] += len(ids)
                    seen[tuple(ids.tolist())] += 1
    corpus = corpora[0]
    assert pieces == {corpus.origin(i): len(corpus.tokens(i)) for i in range(corpus.num_documents)}
    assert loader.epoch == 1.0
    assert loader.fill >= 0.95
    assert loader.num_tokens == corpus.num_tokens


def test_epochs_and_seeds_have_different_orders(corpora) -> None:
    loader = make_loader([corpora[0]], max_seq_length=T, batch_size=8, seed=1)
    first, second = (flat(steps(loader, loader.steps_per_epoch)) for _ in range(2))
    assert sorted(first) == sorted(second)
    assert first != second
    other = make_loader([corpora[0]], max_seq_length=T, batch_size=8, seed=2)
    assert flat(steps(other, other.steps_per_epoch)) not in (first, second)


def test_restoring_at_every_step_gives_the_same_rest(corpora) -> None:
    loader = loader_of(corpora)
    count = 2 * loader.steps_per_epoch + 3
    positions, seen = [], []
    for _ in range(count):
        positions.append(json.dumps(loader.position()))
        seen.append(rows(loader.next_step()))
    fresh = loader_of(corpora)
    for start, position in enumerate(positions):
        fresh.restore(json.loads(position))
        assert steps(fresh, min(3, count - start)) == seen[start : start + 3]
    fresh.restore(json.loads(positions[5]))
    assert steps(fresh, count - 5) == seen[5:]


def test_a_run_may_continue_on_other_ranks_and_batches(corpora) -> None:
    loader = loader_of(corpora)
    steps(loader, 3)
    position = loader.position()
    rest = flat(steps(loader, loader.steps_per_epoch - 3))
    other = loader_of(corpora, batch_size=3, accumulation=1)
    other.restore(position)
    found = []
    while other.epoch < 1:
        found += rows(other.next_step())
    assert found == rest


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seed": 4}, CheckpointError, "began with seed 3 and now has 4; restore the former seed"),
        ({"max_seq_length": 32}, CheckpointError, "began with max_seq_length 64"),
        ({"packing": False}, CheckpointError, "began with packing True"),
        ({"replay_share": 0.5}, DataError, "has changed since the run began"),
    ],
)
def test_a_position_of_another_run_is_refused(change: dict, error: type, message: str, corpora) -> None:
    position = loader_of(corpora).position()
    with pytest.raises(error, match=message):
        loader_of(corpora, **change).restore(position)


def test_replay_has_its_share_everywhere(corpora) -> None:
    loader = loader_of(corpora, batch_size=5, accumulation=1)
    names = {corpora[1].origin(i) for i in range(corpora[1].num_documents)}
    flags = []
    for _ in range(3 * loader.steps_per_epoch):
        for batch in loader.next_step():
            flags += [origins[0] in names for origins in batch.origins]
    assert abs(np.mean(flags) - 0.2) < 0.01
    running = np.cumsum(flags) - 0.2 * np.arange(1, len(flags) + 1)
    assert np.abs(running).max() <= 4, "any range should have its share to within a sequence or two per epoch"


def test_replay_is_drawn_evenly() -> None:
    mixture = mix([(40, 1.0)], [(7, 1.0)], 0.2)
    drawn = Counter()
    for epoch in range(7):
        source, sequence = epoch_plan(mixture, 5, epoch)
        drawn.update(sequence[source == 1].tolist())
    assert drawn == dict.fromkeys(range(7), 10)  # 10 per epoch, 7 epochs, 7 sequences


@given(
    st.lists(st.tuples(st.integers(1, 200), st.sampled_from([0.5, 1.0, 2.0, 3.25])), min_size=1, max_size=4),
    st.floats(0, 0.9),
    st.integers(0, 5),
)
@settings(deadline=None)
def test_mixtures_are_proportional_in_every_prefix(train: list, share: float, epoch: int) -> None:
    mixture = mix(train, [(11, 1.0), (30, 2.0)], share)
    source, sequence = epoch_plan(mixture, 9, epoch)
    assert len(source) == mixture.num_sequences
    for s, (size, count) in enumerate(zip(mixture.sizes, mixture.counts, strict=True)):
        assert (source == s).sum() == count
        assert ((sequence[source == s] >= 0) & (sequence[source == s] < size)).all()
        running = np.cumsum(source == s) - count * np.arange(1, len(source) + 1) / len(source)
        assert np.abs(running).max(initial=0) <= len(mixture.sizes) + 1
    for s, (size, weight) in enumerate(train):
        assert mixture.counts[s] == max(1, round(size * weight))
    if share > 0.01:
        assert abs(sum(mixture.counts[len(train) :]) - mixture.num_sequences * share) <= 1


def test_weights_of_one_are_exactly_one_pass_and_two_are_two() -> None:
    mixture = mix([(50, 1.0), (20, 2.0), (30, 0.5)])
    source, sequence = epoch_plan(mixture, 0, 0)
    assert Counter(sequence[source == 0].tolist()) == dict.fromkeys(range(50), 1)
    assert Counter(sequence[source == 1].tolist()) == dict.fromkeys(range(20), 2)
    half = sequence[source == 2].tolist()
    next_source, next_sequence = epoch_plan(mixture, 0, 1)
    assert sorted(half + next_sequence[next_source == 2].tolist()) == list(range(30))


@given(st.integers(1, 32), st.integers(1, 4), st.integers(1, 8), st.integers(1, 4))
@settings(deadline=None)
def test_microbatches_contain_each_sequence_once(
    count: int, batch: int, accumulation: int, size: int
) -> None:
    full = StepShape(batch, accumulation, 0, size)
    items = list(range(min(count, full.num_sequences)))
    hands = [rank_microbatches(items, StepShape(batch, accumulation, r, size)) for r in range(size)]
    assert [item for hand in hands for micro in hand for item in micro] == items
    assert len({len(hand) for hand in hands}) == 1
    assert all(len(micro) <= batch for hand in hands for micro in hand)
    assert len(hands[0]) <= accumulation


def test_without_packing_every_document_has_its_sequence(corpora) -> None:
    loader = make_loader([corpora[0]], max_seq_length=T, batch_size=4, packing=False)
    assert loader.num_sequences == corpora[0].num_documents
    batch = loader.next_step()[0]
    assert all(len(origins) == 1 for origins in batch.origins)
    lengths = np.minimum(corpora[0].lengths_N, T)
    assert loader.dropped_tokens == corpora[0].num_tokens - lengths.sum() > 0
    assert loader.fill == pytest.approx(lengths.sum() / (T * len(lengths)), rel=1e-3)


def test_held_out_documents_are_never_trained_on(corpora, tokenizer, tmp_path: Path) -> None:
    corpus = corpora[0]
    train, heldout = corpus.split(share=0.2)
    texts = [{tuple(c.tokens(i).tolist()) for i in range(c.num_documents)} for c in (train, heldout)]
    assert not texts[0] & texts[1]
    assert train.num_documents + heldout.num_documents == corpus.num_documents == 180
    assert 20 <= heldout.num_documents <= 55
    assert corpus.split(count=5)[1].num_documents == 5
    # The same documents in another file, twice and in another order, fall on the same sides.
    rows = [tokenizer.decode(corpus.tokens(i).tolist()) for i in range(180)]
    shuffled = rows[::-1] + rows
    (tmp_path / "other.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in shuffled))
    other = open_corpus(str(tmp_path / "other.jsonl"), tokenizer, cache_dir=tmp_path / "cache").split(
        share=0.2
    )[1]
    assert {tuple(other.tokens(i).tolist()) for i in range(other.num_documents)} == texts[1]
    assert other.num_documents == 2 * heldout.num_documents
    assert corpus.without(heldout).num_documents == train.num_documents
    with pytest.raises(DataError, match=r"every document of .* is also in"):
        corpus.without(other).without(train)


def test_a_single_document_is_held_out_by_its_end(tokenizer, prose, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(prose(0, 1000))
    corpus = open_corpus(str(tmp_path / "a.txt"), tokenizer, cache_dir=tmp_path / "cache")
    train, heldout = corpus.split(share=0.1)
    assert np.concatenate([train.tokens(0), heldout.tokens(0)]).tolist() == corpus.tokens(0).tolist()
    assert heldout.num_tokens == pytest.approx(0.1 * corpus.num_tokens, rel=0.01)


def test_evaluation_sees_the_same_sequences_each_time(corpora) -> None:
    batches = eval_batches(corpora[0], batch_size=4, max_seq_length=T, max_sequences=18)
    again = eval_batches(corpora[0], batch_size=6, max_seq_length=T, max_sequences=18)
    assert (len(batches), len(again)) == (5, 3)
    assert rows(list(batches)) == rows(list(again)) == rows(list(batches))
    everything = eval_batches(corpora[0], batch_size=4, max_seq_length=T)
    assert set(rows(list(batches))) < set(rows(list(everything)))
    assert sum(b.num_targets for b in everything) > corpora[0].num_tokens * 0.9
    with pytest.raises(DataError, match=r"0 sequences is empty"):
        eval_batches(corpora[0], batch_size=4, max_seq_length=T, max_sequences=0)


def test_impossible_loaders_are_refused(corpora) -> None:
    for changes, message in (
        ({"batch_size": 0}, "a step of 0 sequences"),
        ({"replay_share": 1.0}, "replay share of 1.0 is not possible"),
    ):
        with pytest.raises(DataError, match=message):
            loader_of(corpora, **changes)
    with pytest.raises(DataError, match=r"no sources"):
        make_loader([corpora[0]], max_seq_length=T, batch_size=1, replay_share=0.1)
    with pytest.raises(DataError, match=r"no source to train on"):
        make_loader([], max_seq_length=T, batch_size=1)


def test_sources_with_weights_and_first(corpus_folder: Path, tokenizer, tmp_path: Path) -> None:
    spec = SourceSpec(str(corpus_folder), first=70)
    corpus = open_corpus(spec, tokenizer, cache_dir=tmp_path)
    assert corpus.num_documents == 70
    assert corpus.origin(69) == "part1.jsonl:10"
    twice = make_loader([(corpus, 2.0)], max_seq_length=T, batch_size=1)
    once = make_loader([(corpus, 1.0)], max_seq_length=T, batch_size=1)
    assert twice.num_sequences == 2 * once.num_sequences


def test_the_docs_list_what_may_change_on_resume() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    section = page.partition("## Resuming\n")[2].partition("\n## ")[0]
    stays, _, rest = section.partition(" must stay; ")
    changes, found, _ = rest.partition(" may change")
    assert found
    keys = {key for allowed in CHANGEABLE_ON_RESUME for key in (allowed, allowed.removeprefix("data."))}
    named = set(re.findall(r"`(\w+)`", changes))
    assert named
    assert named <= keys
    kept = set(re.findall(r"`(\w+)`", stays))
    assert {"per_device_train_batch_size", "gradient_accumulation_steps", "max_seq_length"} <= kept
    assert not kept & keys


def test_a_position_of_an_earlier_version_keeps_the_order_of_its_run(corpora) -> None:
    """A run of an earlier version, whose first step was replay alone, resumes in its order."""
    for seed in range(300):
        loader = loader_of(corpora, batch_size=1, accumulation=1, seed=seed)
        if epoch_plan(loader.mixture, seed, 0)[0][0] == 1:
            break
    order = [sequence.tolist() for sequence in epoch_plan(loader.mixture, seed, 0)]
    new = [sequence.tolist() for sequence in train_source_first(*epoch_plan(loader.mixture, seed, 0), 1, 1)]
    assert order != new
    expected = [rows([collate([loader.packed[s].sequence(w)], T)])[0] for s, w in zip(*order, strict=True)]
    position = {**loader.position(), "window": 1}
    del position["opening"]
    fresh = loader_of(corpora, batch_size=1, accumulation=1, seed=seed)
    fresh.restore(position)
    assert flat(steps(fresh, 9)) == expected[1:10]
    assert "opening" in loader.position()
    assert fresh.position()["opening"] == 0, "and it stays so"
    began = [rows([collate([loader.packed[s].sequence(w)], T)])[0] for s, w in zip(*new, strict=True)]
    assert flat(steps(loader, 9)) == began[:9]
