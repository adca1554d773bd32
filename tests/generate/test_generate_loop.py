"""Generating with a tiny decoder: cached = uncached, batched = alone, greedy = transformers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from trimtab.facts.errors import ModelError, RecipeError
from trimtab.facts.shapes import uniform_shape
from trimtab.generate import KVCache, PromptCache, SamplingOptions, generate, generate_many, threads
from trimtab.generate.sampling import sample_tokens
from trimtab.model import build, init_weights, save_folder
from trimtab.model.decoder import Decoder
from trimtab.text.tokenizer import Tokenizer

SHAPES = {
    "llama": uniform_shape(
        "llama", 260, 32, 64, 2, 4, 2, 8, max_positions=128, tie_embeddings=True, initializer_range=0.3
    ),
    "mistral": uniform_shape(
        "mistral", 260, 32, 64, 2, 4, 2, 8, max_positions=128, sliding_window=6, initializer_range=0.3
    ),
    "qwen3": uniform_shape(
        "qwen3", 260, 32, 64, 2, 4, 1, 16, max_positions=128, qk_norm=True, initializer_range=0.3
    ),
}
PROMPTS = ["Hello", "A longer prompt here", "é", "x" * 30, "Two words", "Hello", "2+2=", "🙂"]


def make_tokenizer(*, bos: bool = True, stop_ids: frozenset[int] = frozenset()) -> Tokenizer:
    """256 bytes, then <s>, </s> and <|end|>: ids are readable."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<|end|>")])
    return Tokenizer(backend, 256 if bos else None, 257, stop_ids)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


def make_decoder(family: str = "llama", seed: int = 0, dtype: str = "fp32") -> Decoder:
    return init_weights(build(SHAPES[family], dtype=dtype, device="cpu", attention="sdpa_math"), seed)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return make_decoder()


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("chunks", [[20], [1] * 20, [7, 1, 1, 5, 6]])
def test_cached_logits_equal_uncached_logits(family: str, chunks: list[int]) -> None:
    decoder = make_decoder(family, dtype="fp64")
    ids_BT = torch.randint(0, 260, (3, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = decoder.logits(decoder(ids_BT))
        cache = KVCache(2, block=4)
        pieces = [decoder.logits(decoder(part, cache=cache)) for part in ids_BT.split(chunks, dim=1)]
    assert cache.length == 20
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-10)


def greedy_without_cache(decoder: Decoder, ids: list[int], count: int) -> list[int]:
    written = list(ids)
    with torch.no_grad():
        for _ in range(count):
            written.append(int(decoder.logits(decoder(torch.tensor([written])))[0, -1].argmax()))
    return written[len(ids) :]


@pytest.mark.parametrize("family", SHAPES)
def test_greedy_equals_the_uncached_loop(family: str, tokenizer: Tokenizer) -> None:
    decoder = make_decoder(family, seed=3)
    for prompt in PROMPTS[:4]:
        expected = greedy_without_cache(decoder, tokenizer.encode(prompt), 20)
        assert generate(decoder, tokenizer, prompt, SamplingOptions(max_new_tokens=20)).ids == expected
        assert len(set(expected)) > 3, "a model that repeats one token would prove little"


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 7}])
@pytest.mark.parametrize("batch_size", [3, 64])
def test_batched_prompts_match_single_prompts(tokenizer, decoder, options: dict, batch_size: int) -> None:
    many = generate_many(
        decoder, tokenizer, PROMPTS, SamplingOptions(max_new_tokens=16, **options), batch_size=batch_size
    )
    for index, (prompt, done) in enumerate(zip(PROMPTS, many, strict=True)):
        # A prompt's place decides its chances, so alone it has to stand at the same place.
        before = [[1]] * index
        alone = generate_many(
            decoder, tokenizer, [*before, prompt], SamplingOptions(max_new_tokens=16, **options), batch_size=1
        )
        assert done.ids == alone[-1].ids
        assert done.text == alone[-1].text


def test_finished_rows_do_not_affect_the_others(tokenizer: Tokenizer, decoder: Decoder) -> None:
    free = generate_many(decoder, tokenizer, PROMPTS, SamplingOptions(max_new_tokens=40))
    ends = {done.ids[5 * i % 30] for i, done in enumerate(free[:3])}
    ending = make_tokenizer(stop_ids=frozenset(ends))
    stopped = generate_many(decoder, ending, PROMPTS, SamplingOptions(max_new_tokens=40))
    for a, b in zip(free, stopped, strict=True):
        cut = next((i for i, token in enumerate(a.ids) if token in ends), None)
        assert b.ids == a.ids[:cut]
        assert b.finish_reason == ("length" if cut is None else "eos")
    assert len({len(b.ids) for b in stopped}) > 2, "rows must end at different times"


def test_seeds_are_reproducible(tokenizer: Tokenizer, decoder: Decoder) -> None:
    texts = [
        generate(decoder, tokenizer, "Hi", SamplingOptions(max_new_tokens=24, temperature=1.0, seed=s)).ids
        for s in (0, 1, 0)
    ]
    assert texts[0] == texts[2] != texts[1]


@pytest.mark.oracle
@pytest.mark.parametrize("family", SHAPES)
def test_greedy_equals_transformers(family: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    decoder = make_decoder(family, seed=5)
    save_folder(decoder, tmp_path, dtype="fp32", metadata={})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for prompt in PROMPTS[:4]:
        ids = torch.tensor([tokenizer.encode(prompt)])
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        assert (
            generate(decoder, tokenizer, prompt, SamplingOptions(max_new_tokens=24)).ids
            == out[0, ids.shape[1] :].tolist()
        )


def test_streamed_pieces_add_up_and_are_valid_text(tokenizer: Tokenizer, decoder: Decoder) -> None:
    pieces: list[str] = []
    done = generate(
        decoder,
        tokenizer,
        "Hello",
        SamplingOptions(max_new_tokens=60, temperature=1.5, seed=2),
        stream=pieces.append,
    )
    assert "".join(pieces) == done.text == tokenizer.decode(done.ids)
    assert len(done.ids) == 60
    assert done.finish_reason == "length"
    assert done.tokens_per_second > 0
    assert len(pieces) > 5


def test_stop_strings_end_and_are_not_shown(tokenizer: Tokenizer, decoder: Decoder) -> None:
    free = generate(decoder, tokenizer, "Hello", SamplingOptions(max_new_tokens=60, temperature=1.0, seed=4))
    stop = next(free.text[i : i + 3] for i in range(10, 60) if "�" not in free.text[i : i + 3])
    pieces: list[str] = []
    options = {"max_new_tokens": 60, "temperature": 1.0, "seed": 4, "stop": ["never there", stop]}
    done = generate(decoder, tokenizer, "Hello", SamplingOptions(**options), stream=pieces.append)
    assert done.finish_reason == "stop"
    assert done.text == "".join(pieces) == free.text[: free.text.index(stop)]
    assert len(done.ids) < 60


def test_text_of_a_prompt_of_ids_and_of_text_is_the_same(tokenizer: Tokenizer, decoder: Decoder) -> None:
    ids = tokenizer.encode("Hello")
    assert (
        generate(decoder, tokenizer, ids, SamplingOptions(max_new_tokens=5)).ids
        == generate(decoder, tokenizer, "Hello", SamplingOptions(max_new_tokens=5)).ids
    )


def test_an_empty_prompt_is_bos_or_an_error(tokenizer: Tokenizer, decoder: Decoder) -> None:
    assert generate(decoder, tokenizer, "", SamplingOptions(max_new_tokens=5)).ids == greedy_without_cache(
        decoder, [256], 5
    )
    with pytest.raises(ModelError, match=r"empty.*at least one word"):
        generate(decoder, make_tokenizer(bos=False), "", SamplingOptions(max_new_tokens=5))
    assert generate_many(decoder, tokenizer, []) == []


def test_length_is_bounded_by_the_models_positions(tokenizer: Tokenizer, decoder: Decoder) -> None:
    with pytest.raises(ModelError, match=r"128 positions; shorten"):
        generate(decoder, tokenizer, "x" * 100, SamplingOptions(max_new_tokens=29))
    assert len(generate(decoder, tokenizer, "x" * 100, SamplingOptions(max_new_tokens=28)).ids) == 28
    assert len(generate(decoder, tokenizer, "x" * 100, SamplingOptions(max_new_tokens=None)).ids) == 28
    with pytest.raises(ModelError, match="positions"):
        generate(decoder, tokenizer, "x" * 128, SamplingOptions(max_new_tokens=None))


def test_bad_arguments(tokenizer: Tokenizer, decoder: Decoder) -> None:
    with pytest.raises(RecipeError, match="max_new_tokens"):
        generate(decoder, tokenizer, "x", SamplingOptions(max_new_tokens=0))
    with pytest.raises(RecipeError, match="list"):
        generate_many(decoder, tokenizer, "one text")
    with pytest.raises(RecipeError, match="batch_size"):
        generate_many(decoder, tokenizer, ["x"], batch_size=0)
    with pytest.raises(ModelError, match="token id 260, and the model's vocabulary"):
        generate(decoder, tokenizer, [260])
    with pytest.raises(ModelError, match="token id -1,"):
        generate(decoder, tokenizer, [5, -1])
    with pytest.raises(ModelError, match="prompt 2 has 120 tokens"):
        generate_many(decoder, tokenizer, ["x", [1] * 120], SamplingOptions(max_new_tokens=9))


def test_damaged_weights_are_an_error(tokenizer: Tokenizer) -> None:
    decoder = make_decoder()
    with torch.no_grad():
        decoder.model.norm.weight[0] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        generate(decoder, tokenizer, "x")


def test_training_mode_is_restored(tokenizer: Tokenizer) -> None:
    decoder = make_decoder()
    decoder.train()
    generate(decoder, tokenizer, "x", SamplingOptions(max_new_tokens=2))
    assert decoder.training
    assert all(p.grad is None for p in decoder.parameters())


def test_sixty_problems_take_few_passes(tokenizer: Tokenizer, decoder: Decoder) -> None:
    """60 prompts of 10 to 40 tokens, 30 new ones: one prefill pass and 29 decoding passes."""
    calls = []
    handle = decoder.register_forward_hook(lambda *_: calls.append(time.perf_counter()))
    prompts = ["y" * (10 + i % 31) for i in range(60)]
    done = generate_many(decoder, tokenizer, prompts, SamplingOptions(max_new_tokens=30))
    handle.remove()
    assert sum(len(d.ids) for d in done) == 1800
    assert len(calls) == 30


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("attention", ["reference", "sdpa_flash"])
def test_left_padding_is_masked(family: str, attention: str, tokenizer: Tokenizer) -> None:
    """Prompts of 1 to 90 tokens in one padded batch, prefilled in chunks, with rows that end early."""
    decoder = init_weights(build(SHAPES[family], dtype="fp32", device="cpu", attention=attention), 3)
    prompts = [[7 + 3 * i % 250 for i in range(n)] for n in (1, 90, 40, 70, 60)]
    expected = [greedy_without_cache(decoder, ids, 12) for ids in prompts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trimtab.generate.loop._SPREAD", 128)
        patch.setattr("trimtab.generate.loop._PREFILL_TOKENS", 160)
        sizes: list[tuple[int, ...]] = []
        handle = decoder.register_forward_hook(lambda _, given, __: sizes.append(tuple(given[0].shape)))
        done = generate_many(decoder, tokenizer, prompts, SamplingOptions(max_new_tokens=12))
        handle.remove()
        assert [d.ids for d in done] == expected
        assert sizes[:3] == [(5, 32), (5, 32), (5, 26)]
        assert sizes[3:] == [(5, 1)] * 11
        # The longest rows end first: the padding that the others share is dropped with them.
        ending = make_tokenizer(stop_ids=frozenset({expected[1][2], expected[3][2], expected[4][2]}))
        for alone, batched in zip(
            expected, generate_many(decoder, ending, prompts, SamplingOptions(max_new_tokens=12)), strict=True
        ):
            cut = next((i for i, token in enumerate(alone) if token in ending.stop_ids), None)
            assert batched.ids == alone[:cut]


def test_very_different_lengths_do_not_share_a_batch(tokenizer: Tokenizer, decoder: Decoder) -> None:
    sizes: list[tuple[int, ...]] = []
    handle = decoder.register_forward_hook(lambda _, given, __: sizes.append(tuple(given[0].shape)))
    generate_many(
        decoder, tokenizer, [[1] * 4, [1] * 110, [2] * 3, [3] * 2], SamplingOptions(max_new_tokens=1)
    )
    handle.remove()
    assert sizes == [(3, 4), (1, 110)]


def test_samples_depend_on_the_index_of_the_prompt(tokenizer: Tokenizer, decoder: Decoder) -> None:
    options = {"max_new_tokens": 8, "temperature": 1.0, "seed": 5}
    whole = generate_many(decoder, tokenizer, ["Hi"] * 4, SamplingOptions(**options))
    rest = generate_many(
        decoder, tokenizer, ["Hi"] * 2, SamplingOptions(**options), first_index=2, batch_size=1
    )
    assert [d.ids for d in rest] == [d.ids for d in whole[2:]]
    assert len({tuple(d.ids) for d in whole}) == 4
    assert generate(decoder, tokenizer, "Hi", SamplingOptions(**options), index=3).ids == whole[3].ids


def test_a_prompt_cache_prefills_only_new_tokens(tokenizer: Tokenizer, decoder: Decoder) -> None:
    cache, sizes = PromptCache(), []
    handle = decoder.register_forward_hook(lambda _, given, __: sizes.append(given[0].shape[1]))
    first = [5 + 7 * i % 240 for i in range(30)]
    done = generate(decoder, tokenizer, first, SamplingOptions(max_new_tokens=6), cache=cache)
    second = [*first, *done.ids, 9, 8, 7]
    sizes.clear()
    again = generate(decoder, tokenizer, second, SamplingOptions(max_new_tokens=6), cache=cache)
    # The last token written was never read.
    assert sizes == [4, 1, 1, 1, 1, 1]
    assert again.ids == greedy_without_cache(decoder, second, 6)
    # A prompt that differs early, and the same one twice.
    for prompt, read in (([*first[:10], 1, 2], 2), ([*first[:10], 1, 2], 1), ([1, 2, 3], 3)):
        sizes.clear()
        found = generate(decoder, tokenizer, prompt, SamplingOptions(max_new_tokens=3), cache=cache).ids
        assert sizes[0] == read
        handle.remove()
        assert found == greedy_without_cache(decoder, prompt, 3)
        handle = decoder.register_forward_hook(lambda _, given, __: sizes.append(given[0].shape[1]))
    handle.remove()


def test_a_prompt_cache_survives_an_interrupted_pass(tokenizer: Tokenizer, decoder: Decoder) -> None:
    """Ctrl-C between two layers: only some have cached the token."""
    cache, prompt = PromptCache(), list(range(20))
    passes = []

    def interrupt(*_: object) -> None:
        passes.append(1)
        if len(passes) == 4:
            raise KeyboardInterrupt

    handle = decoder.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(decoder, tokenizer, prompt, SamplingOptions(max_new_tokens=9), cache=cache)
    handle.remove()
    expected = greedy_without_cache(decoder, prompt, 9)
    assert (
        generate(decoder, tokenizer, prompt, SamplingOptions(max_new_tokens=9), cache=cache).ids == expected
    )


def test_small_passes_run_on_one_thread(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    decoder, used = make_decoder(), []
    decoder.register_forward_pre_hook(lambda *_: used.append(torch.get_num_threads()))
    prompt = "a prompt of more tokens than one"
    monkeypatch.setattr(threads, "MAX_SINGLE_THREAD_WORK", 2 * decoder.shape.num_parameters)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        generate(decoder, tokenizer, prompt, SamplingOptions(max_new_tokens=3))
        assert used == [2, 1, 1]
        used.clear()
        generate_many(decoder, tokenizer, [prompt] * 3, SamplingOptions(max_new_tokens=3))
        assert used == [2, 2, 2], "three tokens a pass are not small here"
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_temperature_near_zero_is_greedy() -> None:
    logits_BV = torch.tensor([[1.0, 30.0, 29.9]])
    assert sample_tokens(logits_BV, SamplingOptions(temperature=1e-39), [(0, 0)]).tolist() == [1]
    assert sample_tokens(logits_BV, SamplingOptions(temperature=1e-36), [(0, 0)]).tolist() == [1]
