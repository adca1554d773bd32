"""Logits and every gradient against transformers, for every family; and saved folders, loaded by it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_cases import CASES, oracle_folder, token_ids

from trimtab.kernels.attention import Layout
from trimtab.model import build, load_weights, read_shape, save_folder
from trimtab.model.decoder import Decoder

pytestmark = pytest.mark.oracle


def load(folder: Path, dtype: str = "fp32", attention: str = "reference") -> Decoder:
    decoder = build(read_shape(folder), dtype=dtype, device="cpu", attention=attention)
    load_weights(decoder, folder)
    return decoder


@pytest.mark.parametrize("attention", ["reference", "sdpa_flash"])
@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_match_transformers(name: str, attention: str, tmp_path: Path) -> None:
    oracle = oracle_folder(name, tmp_path)
    decoder = load(tmp_path, attention=attention)
    ids_BT = token_ids()
    labels_BT = torch.cat([ids_BT[:, 1:], torch.full_like(ids_BT[:, :1], -100)], dim=1)

    expected = oracle(input_ids=ids_BT)
    logits_BTV = decoder.logits(decoder(ids_BT))
    assert (logits_BTV - expected.logits).detach().abs().max() <= 1e-5

    num_targets = int((labels_BT != -100).sum())
    (oracle(input_ids=ids_BT, labels=ids_BT).loss).backward()
    (decoder.loss(ids_BT, labels_BT) / num_targets).backward()
    theirs = dict(oracle.named_parameters())
    ours = dict(decoder.named_parameters())
    assert set(ours) == set(theirs)
    for parameter_name, parameter in ours.items():
        grad, other = parameter.grad, theirs[parameter_name].grad
        assert grad is not None
        assert other is not None
        assert other.abs().max() > 1e-7, f"{parameter_name} is not exercised"
        assert (grad - other).abs().max() <= 1e-5, parameter_name


@pytest.mark.parametrize("name", CASES)
def test_saved_folder_gives_transformers_identical_logits(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    oracle = oracle_folder(name, tmp_path / "theirs")
    save_folder(load(tmp_path / "theirs"), tmp_path / "ours", dtype="fp32", max_shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    assert reloaded.dtype == torch.float32
    with torch.no_grad():
        ids_BT = token_ids()
        assert torch.equal(reloaded(input_ids=ids_BT).logits, oracle(input_ids=ids_BT).logits)
    assert read_shape(tmp_path / "ours") == read_shape(tmp_path / "theirs")


@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen2", "qwen3"])
def test_bf16_is_no_further_from_fp64_than_transformers(name: str, tmp_path: Path) -> None:
    oracle = oracle_folder(name, tmp_path)
    ids_BT = token_ids(batch=8)
    rounded = oracle.to(torch.bfloat16)
    rounded.save_pretrained(tmp_path / "bf16")
    with torch.no_grad():
        truth_BTV = load(tmp_path / "bf16", "fp64").logits(load(tmp_path / "bf16", "fp64")(ids_BT))
        decoder = load(tmp_path / "bf16", "bf16")
        ours = (decoder.logits(decoder(ids_BT)) - truth_BTV).square().mean().sqrt()
        theirs = (rounded(input_ids=ids_BT).logits - truth_BTV).square().mean().sqrt()
    assert ours <= 1.02 * theirs


def test_packed_documents_equal_separate_ones(tmp_path: Path) -> None:
    oracle_folder("qwen2-window", tmp_path)
    decoder = load(tmp_path)
    ids_BT = token_ids(batch=1)
    documents_BT = torch.tensor([[0] * 9 + [1] * 15], dtype=torch.int32)
    positions_BT = torch.cat([torch.arange(9), torch.arange(15)])[None]
    with torch.no_grad():
        packed_BTC = decoder(ids_BT, positions_BT, Layout.packed(documents_BT))
        apart_BTC = torch.cat([decoder(ids_BT[:, :9]), decoder(ids_BT[:, 9:])], dim=1)
        joined_BTC = decoder(ids_BT)
    assert (packed_BTC - apart_BTC).abs().max() < 1e-5
    assert (joined_BTC - apart_BTC).abs().max() > 1e-2


def test_dynamic_scaling_goes_by_the_length_of_each_document(tmp_path: Path) -> None:
    """A document packed with one longer than the pretrained 16 positions has the same angles as alone."""
    oracle = oracle_folder("dynamic", tmp_path)
    lengths = (4, 18, 2)
    ids_BT = token_ids(batch=2)
    documents_BT = torch.tensor([[0] * 4 + [1] * 18 + [2] * 2, [0] * 22 + [-1] * 2], dtype=torch.int32)
    counted_T = torch.cat([torch.arange(n) for n in lengths])
    positions_BT = torch.stack([counted_T, torch.arange(24)])
    labels_BT = torch.full_like(ids_BT, -100)
    labels_BT[:, :22] = ids_BT[:, 1:23]
    labels_BT[0, 3] = labels_BT[0, 21] = labels_BT[1, 21] = -100
    pieces = [*zip([ids_BT[0]] * 3, [0, 4, 22], [4, 22, 24], strict=True), (ids_BT[1], 0, 22)]

    for layout in (
        Layout.packed(documents_BT),
        Layout.packed(documents_BT).as_prepared("reference", "cpu", 24),
    ):
        packed = load(tmp_path)
        hidden_BTC = packed(ids_BT, positions_BT, layout)
        rows = [hidden_BTC[0, :4], hidden_BTC[0, 4:22], hidden_BTC[0, 22:], hidden_BTC[1, :22]]
        packed.loss(ids_BT, labels_BT, positions_BT, layout).backward()
        apart = load(tmp_path)
        for row_TC, (ids_T, start, end) in zip(rows, pieces, strict=True):
            piece_BT = ids_T[None, start:end]
            with torch.no_grad():
                expected = oracle(input_ids=piece_BT).logits
                oracle(input_ids=piece_BT[:, :1])  # transformers resets the longest length
                assert (packed.logits(row_TC) - expected[0]).abs().max() <= 1e-5
            shifted = torch.cat([piece_BT[:, 1:], torch.full((1, 1), -100)], dim=1)
            if end - start > 2:
                apart.loss(piece_BT, shifted).backward()
        for (name, one), other in zip(packed.named_parameters(), apart.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert (one.grad - other.grad).abs().max() <= 1e-5 * other.grad.abs().max(), name


def test_dynamic_scaling_with_a_cache_is_transformers(tmp_path: Path) -> None:
    """Beyond the pretrained length new tokens are rotated by the current length; cached keys are unchanged."""
    oracle = oracle_folder("dynamic", tmp_path)
    decoder, ids_BT, cache = load(tmp_path), token_ids(batch=1), GrowingCache()
    past, parts, expected = None, [], []
    with torch.no_grad():
        for start, end in ((0, 10), (10, 15), (15, 16), (16, 17), (17, 23), (23, 24)):
            parts.append(decoder.logits(decoder(ids_BT[:, start:end], cache=cache)))
            cache.length = end
            found = oracle(input_ids=ids_BT[:, start:end], past_key_values=past, use_cache=True)
            past = found.past_key_values
            expected.append(found.logits)
    assert (torch.cat(parts, 1) - torch.cat(expected, 1)).abs().max() <= 1e-5
    with torch.no_grad():
        whole = decoder.logits(decoder(ids_BT))
    assert (torch.cat(parts, 1) - whole).abs().max() > 1e-3, (
        "the cached keys have other angles than a fresh pass"
    )


class GrowingCache:
    """A minimal cache: the decoder calls `length` and `update`."""

    def __init__(self) -> None:
        self.length = 0
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, layer: int, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer in self.layers:
            k_BTKD = torch.cat([self.layers[layer][0], k_BTKD], dim=1)
            v_BTKD = torch.cat([self.layers[layer][1], v_BTKD], dim=1)
        self.layers[layer] = (k_BTKD, v_BTKD)
        return k_BTKD, v_BTKD


@pytest.mark.parametrize("name", ["llama3", "mistral", "qwen3"])
def test_a_cache_gives_the_same_hidden_states(name: str, tmp_path: Path) -> None:
    oracle_folder(name, tmp_path)
    decoder = load(tmp_path)
    ids_BT, cache, parts = token_ids(), GrowingCache(), []
    with torch.no_grad():
        for start, end in ((0, 10), (10, 11), (11, 12), (12, 24)):
            parts.append(decoder(ids_BT[:, start:end], cache=cache))
            cache.length = end
        assert (torch.cat(parts, dim=1) - decoder(ids_BT)).abs().max() < 1e-5
