"""The parts of generating: cache, sampling, stop strings."""

from __future__ import annotations

import collections

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.facts.errors import RecipeError
from trimtab.facts.shapes import uniform_shape
from trimtab.generate import KVCache, SamplingKeywords, SamplingOptions, StopStrings
from trimtab.generate.cache import PromptCache
from trimtab.generate.sampling import sample_tokens, uniform
from trimtab.kernels.attention import Layout
from trimtab.model import Decoder, build, init_weights


def test_cache_returns_all_tokens_and_grows_in_blocks() -> None:
    cache = KVCache(2, block=4)
    k_BSKD, v_BSKD = torch.randn(2, 2, 23, 3, 5).unbind(0)
    start = 0
    for count in (3, 1, 1, 7, 11):
        new = slice(start, start + count)
        assert cache.length == start
        for layer in (0, 1):
            keys, values = cache.update(layer, k_BSKD[:, new] + layer, v_BSKD[:, new] - layer)
            assert torch.equal(keys, k_BSKD[:, : start + count] + layer)
            assert torch.equal(values, v_BSKD[:, : start + count] - layer)
            assert cache.length == (start if layer == 0 else start + count), "the last layer completes a pass"
        start += count
    assert cache.nbytes == 4 * 2 * 24 * 3 * 5 * 4


def test_cache_growth_rarely_copies() -> None:
    cache, places = KVCache(1, block=8), set()
    for _ in range(2000):
        keys, _ = cache.update(0, torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
        places.add(keys.untyped_storage().nbytes())
    assert len(places) < 20


def test_cache_select_keeps_rows_in_order() -> None:
    cache = KVCache(1, block=2)
    k_BTKD = torch.arange(4.0).view(4, 1, 1, 1)
    cache.update(0, k_BTKD, -k_BTKD)
    cache.select([3, 1])
    keys, values = cache.update(0, torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 1, 1))
    assert keys[:, 0, 0, 0].tolist() == [3, 1]
    assert values[:, 0, 0, 0].tolist() == [-3, -1]


def test_cache_select_drops_padding_and_truncate_writes_over() -> None:
    cache = KVCache(1, block=2)
    k_BTKD = torch.arange(8.0).view(2, 4, 1, 1)
    cache.update(0, k_BTKD, -k_BTKD)
    cache.select([1], start=2)
    assert cache.length == 2
    cache.truncate(1)
    keys, values = cache.update(0, torch.full((1, 2, 1, 1), 9.0), torch.full((1, 2, 1, 1), 8.0))
    assert keys.flatten().tolist() == [6, 9, 9]
    assert values.flatten().tolist() == [-6, 8, 8]


def shares(options: SamplingOptions, logits: list[float], count: int = 4000) -> dict[int, float]:
    """Frequency of each token over evenly spaced random numbers."""
    logits_BV = torch.tensor([logits]).expand(count, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trimtab.generate.sampling.uniform", lambda seed, prompt, step: (step + 0.5) / count)
        drawn = sample_tokens(logits_BV, options, [(0, i) for i in range(count)])
    return {k: v / count for k, v in sorted(collections.Counter(drawn.tolist()).items())}


PROBS = [0.1, 0.4, 0.2, 0.3]
LOGITS = torch.tensor(PROBS).log().tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}),
        ({"temperature": 1.0, "top_k": 2}, {1: 4 / 7, 3: 3 / 7}),
        ({"temperature": 1.0, "top_k": 99}, {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}),
        ({"temperature": 1.0, "top_p": 0.65}, {1: 4 / 7, 3: 3 / 7}),
        ({"temperature": 1.0, "top_p": 0.75}, {1: 4 / 9, 2: 2 / 9, 3: 3 / 9}),
        ({"temperature": 1.0, "top_p": 1e-9}, {1: 1.0}),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.5}, {1: 4 / 7, 3: 3 / 7}),
        ({"temperature": 0.5}, {i: p * p / 0.3 for i, p in enumerate(PROBS)}),
        ({"temperature": 0.0}, {1: 1.0}),
    ],
)
def test_sample_frequencies_are_the_probabilities(options: dict, expected: dict[int, float]) -> None:
    assert shares(SamplingOptions(**options), LOGITS) == pytest.approx(expected, abs=1e-3)


def test_greedy_breaks_ties_by_the_first_token() -> None:
    assert sample_tokens(torch.tensor([[1.0, 5.0, 5.0]]), SamplingOptions(), [(0, 0)]).tolist() == [1]


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_a_token_with_zero_probability_is_never_sampled(u: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.generate.sampling.uniform", lambda seed, prompt, step: u)
    logits_BV = torch.tensor([[float("-inf"), 0.0, float("-inf")]])
    assert sample_tokens(logits_BV, SamplingOptions(temperature=1.0), [(0, 0)]).tolist() == [1]


def test_randomness_depends_only_on_seed_prompt_and_step() -> None:
    draws = [uniform(s, p, t) for s in range(4) for p in range(4) for t in range(50)]
    assert len(set(draws)) == len(draws)
    assert all(0 <= u < 1 for u in draws)
    assert sum(draws) / len(draws) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"max_new_tokens": 0},
        {"stop": ["ok", ""]},
        {"stop": ["a", 5]},
    ],
)
def test_sampling_options_are_checked(options: dict) -> None:
    with pytest.raises(RecipeError, match=next(iter(options))):
        SamplingOptions(**options)


@pytest.mark.parametrize(
    ("given", "temperature"),
    [
        ({"temperature": None}, 0.0),
        ({"temperature": None, "top_p": 0.9}, 1.0),
        ({"temperature": None, "top_k": 5}, 1.0),
        ({"temperature": 0.3, "top_k": 5}, 0.3),
        ({"temperature": 0.0}, 0.0),
    ],
)
def test_top_p_and_top_k_sample_without_a_temperature(given: dict, temperature: float) -> None:
    assert SamplingOptions(**given).sampling_temperature == temperature


@pytest.mark.parametrize("given", [{"top_p": 0.9}, {"top_k": 5}])
def test_top_p_and_top_k_at_temperature_0_are_an_error(given: dict) -> None:
    with pytest.raises(
        RecipeError, match=rf"{next(iter(given))} has no effect at temperature 0.*; give temperature 0.7"
    ):
        SamplingOptions(temperature=0.0, **given)


def test_the_keywords_are_the_fields() -> None:
    assert set(SamplingKeywords.__annotations__) == set(SamplingOptions().keywords())
    options = SamplingOptions(max_new_tokens=3, top_p=0.5, stop="a", seed=2)
    assert SamplingOptions(**options.keywords()) == options
    assert options.stop == ("a",)


def run_stops(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    finder, shown = StopStrings(stops), ""
    for piece in pieces:
        text, stopped = finder.push(piece)
        shown += text
        assert not any(stop in shown for stop in stops)
        if stopped:
            return shown, True
    return shown + finder.finish(), False


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab\n", max_size=4), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_streamed_stop_strings_match_the_full_text(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    ends = [(whole.find(s) + len(s), whole.find(s)) for s in stops if s in whole]
    shown, stopped = run_stops(stops, pieces)
    assert stopped == bool(ends)
    if not ends:
        assert shown == whole
    else:
        # Pieces arrive one by one, so the stop string that is complete first decides.
        assert whole.startswith(shown)
        assert shown in {whole[:at] for _, at in ends}


def test_partial_stop_strings_are_buffered() -> None:
    finder = StopStrings(["END"])
    assert [finder.push(p) for p in ("x E", "N", "X")] == [("x ", False), ("", False), ("ENX", False)]


def windowed(
    window: int | None, layers: int = 2, attention: str = "sdpa_flash", num_full: int = 0
) -> Decoder:
    """A decoder whose first layers, `num_full` of them, have no window."""
    shape = uniform_shape(
        "mistral",
        50,
        32,
        48,
        layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        sliding_window=window,
        num_full_layers=num_full,
        max_positions=4096,
    )
    return init_weights(build(shape, dtype="fp32", device="cpu", attention=attention), seed=3).eval()


@pytest.mark.parametrize("attention", ["reference", "sdpa_flash"])
@pytest.mark.parametrize("chunks", [[1] * 40, [17, 1, 1, 9, 12], [40], [3] + [1] * 37])
@pytest.mark.parametrize("num_full", [0, 1])
def test_tokens_outside_the_sliding_window_are_dropped(
    attention: str, chunks: list[int], num_full: int
) -> None:
    """Hidden states equal those of one uncached pass, whatever tokens are dropped, in whichever layers."""
    decoder = windowed(5, attention=attention, num_full=num_full)
    ids_BT = torch.randint(0, 50, (2, sum(chunks)), generator=torch.Generator().manual_seed(1))
    cache = KVCache(2, windows=[decoder.shape.window(layer) for layer in range(2)], block=2)
    with torch.no_grad():
        whole_BTC = decoder(ids_BT)
        parts = [decoder(part_BT, None, None, cache) for part_BT in ids_BT.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole_BTC, rtol=1e-5, atol=1e-5)
    assert cache.length == 40


def test_memory_with_a_sliding_window_is_constant() -> None:
    new = torch.zeros(1, 1, 2, 8)
    cache, unlimited = KVCache(1, windows=[16], block=8), KVCache(1, block=8)
    sizes = []
    for _ in range(500):
        k_BSKD, _ = cache.update(0, new, new)
        unlimited.update(0, new, new)
        sizes.append(cache.nbytes)
        assert k_BSKD.shape[1] <= 16
    assert max(sizes) == max(sizes[:60]) < unlimited.nbytes / 8
    assert cache.length == 500


@pytest.mark.parametrize(("window", "num_full"), [(3, 0), (6, 0), (3, 1), (None, 0)])
def test_padded_rows_match_single_rows_with_a_window(window: int | None, num_full: int) -> None:
    decoder = windowed(window, num_full=num_full)
    rows, padding = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 0, 0, 0, 0, 0, 0, 4, 5]], [0, 7]
    more = torch.randint(0, 50, (2, 30), generator=torch.Generator().manual_seed(2))
    ids_BT = torch.cat([torch.tensor(rows), more], dim=1)
    cache = KVCache(2, windows=[decoder.shape.window(layer) for layer in range(2)], block=2)
    last = []
    with torch.no_grad():
        for part_BT in ids_BT.split([9] + [1] * 30, dim=1):
            end = cache.length + part_BT.shape[1]
            places_BT = torch.arange(cache.length, end) - torch.tensor(padding)[:, None]
            layout = Layout.left_padded(padding, end)
            last.append(decoder(part_BT, places_BT.clamp(min=0), layout, cache)[:, -1])
        for row, count in enumerate(padding):
            alone_TC = decoder(ids_BT[row : row + 1, count:])[0, -31:]
            together_TC = torch.stack([hidden_BC[row] for hidden_BC in last])
            torch.testing.assert_close(together_TC, alone_TC, rtol=1e-5, atol=1e-5)


def test_a_prompt_that_needs_dropped_tokens_is_prefilled_again() -> None:
    kept, long = PromptCache(), list(range(1, 41))
    cache = kept.begin(1, long, windows=[4])
    cache.block = 2
    new = torch.zeros(1, 1, 2, 8)
    for _ in long:
        cache.update(0, new, new)
    kept.ids = list(long)
    assert cache.can_truncate(40)
    assert not cache.can_truncate(10)
    assert kept.begin(1, [*long, 41], windows=[4]).length == 40
    assert kept.begin(1, [*long[:10], 99], windows=[4]).length == 0
    assert kept.ids == []
