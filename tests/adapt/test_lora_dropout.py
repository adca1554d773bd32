"""Dropout masks depend on a step's sequence, not on the microbatch, process or tile that computes it."""

from __future__ import annotations

import functools

import pytest
import torch
from lora_cases import IDS_BT, adapted

from trimtab.adapt import LoraSettings, create_dropout_masks, recompute, trained_parameters
from trimtab.adapt.lora_dropout import DropoutMasks, _row_numbers, apply_dropout, keep_mask
from trimtab.adapt.tiled import tiled
from trimtab.data.sampling import StepShape, rank_microbatches
from trimtab.facts.randomness import derive

CPU = torch.device("cpu")
B, T, C = 8, 12, 16


def mask(
    masks: DropoutMasks, first_sequence: int, sequences: int, tokens: int = T, step: int = 3
) -> torch.Tensor:
    """bool [B, T, C] of the second layer."""
    masks.set(0, step, first_sequence, tokens)
    return keep_mask(sequences * tokens, C, masks.words_K5[1], 0.4).view(sequences, tokens, C)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_masks_do_not_depend_on_the_split(batch: int, ranks: int) -> None:
    masks = DropoutMasks(["one", "two"], CPU)
    whole_BTC = mask(masks, 0, B)
    split = [
        micro
        for rank in range(ranks)
        for micro in rank_microbatches(range(B), StepShape(batch, B, rank, ranks))
        if micro
    ]
    found = [mask(masks, micro[0], len(micro)) for micro in split]
    assert torch.equal(torch.cat(found), whole_BTC)
    assert not torch.equal(mask(masks, 0, B, step=4), whole_BTC)
    assert all(not torch.equal(whole_BTC[0], whole_BTC[i]) for i in range(1, B))


def test_masks_do_not_depend_on_padding() -> None:
    """Microbatches may have rows of different lengths (`group_by_length`)."""
    masks = DropoutMasks(["one", "two"], CPU)
    assert torch.equal(mask(masks, 2, 3, tokens=20)[:, :T], mask(masks, 2, 3))


def test_every_token_of_a_step_has_its_own_row_number() -> None:
    masks = DropoutMasks(["one"], CPU)
    for sequences, tokens in ((1000, 1024), (7, 131_072), (100_000, 10)):
        masks.set(0, 0, 0, tokens)
        numbers_N = _row_numbers(sequences * tokens, masks.words_K5[0], 0)
        assert len(numbers_N.unique()) == len(numbers_N)


def test_masks_by_microbatch_equal_those_of_earlier_versions() -> None:
    """Their formula, in Python integers: a run that started with it continues with it."""

    def mix(word: int) -> int:
        word ^= word >> 17
        word = word * 0xED5AD4BB % 2**32
        word ^= word >> 11
        word = word * 0xAC4C1B51 % 2**32
        return word ^ word >> 15

    masks = DropoutMasks(["one"], CPU)
    masks.set(9, 9, 9, 9)  # must leave no trace
    masks.set_by_microbatch(7, step=5, microbatch=3, rank=2)
    key = derive(7, "lora dropout", 5, 3, 2)
    row_key, column_key = (derive(0, "lora dropout", "one", i) ^ key for i in range(2))
    column_key = (column_key + (key >> 31)) % 2**32
    words = [[mix(n ^ row_key % 2**32) + mix(c ^ column_key) for c in range(C)] for n in range(40)]
    expected = torch.tensor(
        [[mix(word % 2**32) % 2**31 >= round(0.4 * 2**31) for word in row] for row in words]
    )
    assert torch.equal(keep_mask(40, C, masks.words_K5[0], 0.4), expected)


@pytest.mark.parametrize("first_sequence", [0, 5])
def test_tiles_have_the_same_masks(first_sequence: int) -> None:
    masks = DropoutMasks(["one"], CPU)
    masks.set(0, 1, first_sequence, T)
    key_5 = masks.words_K5[0]
    run = functools.partial(apply_dropout, key_5=key_5, p=0.3)
    x_BTC = torch.randn(B, T, C)
    whole = run(x_BTC.view(-1, C)).view(B, T, C)
    for tiles in (2, 3, 7):
        assert torch.equal(tiled(run, x_BTC, (), tiles, [key_5]), whole)
    assert torch.equal(run(x_BTC.view(-1, C)).view(B, T, C), whole), "the words are restored"


def test_a_compiled_mask_reads_the_current_words() -> None:
    masks = DropoutMasks(["one", "two"], CPU)
    compiled = torch.compile(functools.partial(keep_mask, 2 * T, C), fullgraph=True, backend="aot_eager")
    for first_sequence in (0, 2, 3):
        expected = mask(masks, first_sequence, 2).view(-1, C)
        assert torch.equal(compiled(masks.words_K5[1], 0.4), expected)


@pytest.mark.parametrize("tiles", [1, 4])
@pytest.mark.parametrize("policy", ["none", "block"])
def test_gradients_of_microbatches_sum_to_those_of_the_batch(policy: str, tiles: int) -> None:
    found = []
    for split in ([slice(0, 4)], [slice(0, 2), slice(2, 4)], [slice(i, i + 1) for i in range(4)]):
        decoder = adapted(LoraSettings(r=4, lora_dropout=0.4)).train()
        recompute.apply(decoder, [policy] * 2, mlp_tiles=tiles)
        masks = create_dropout_masks(decoder, CPU)
        assert masks is not None
        ids_BT, total = torch.cat([IDS_BT, IDS_BT.flip(0)]), 0.0
        for rows in split:
            masks.set(1, 2, rows.start, ids_BT.shape[1])
            loss = decoder.loss(ids_BT[rows], ids_BT[rows].roll(-1, 1))
            loss.backward()
            total += float(loss.detach())
        found.append((total, {name: p.grad for name, p in trained_parameters(decoder).items()}))
    (total, grads), *others = found
    for other, theirs in others:
        assert other == pytest.approx(total, rel=1e-6)
        for name, grad in grads.items():
            assert grad is not None
            assert (theirs[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name
    decoder.eval()
    assert torch.equal(decoder(IDS_BT), adapted(LoraSettings(r=4)).eval()(IDS_BT))
