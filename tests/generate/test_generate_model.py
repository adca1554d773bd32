"""Generating, scoring and chatting through `trimtab.Model`: batches, conversations, losses, history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import write_tiny_model

import trimtab
from trimtab.api.chat import Chat
from trimtab.facts.errors import DataError, ModelError, RecipeError

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
PROMPTS = ["the cat", "a dog and a red house in the tree", "it", "the big blue house was over the small one"]
HI = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model; `chat` next to it is the same with a chat template."""
    place = tmp_path_factory.mktemp("models")
    for name in ("base", "chat"):
        write_tiny_model(place / name, initializer_range=0.3)
    (place / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    return place


@pytest.fixture(scope="module")
def base(folder: Path) -> trimtab.Model:
    return trimtab.load(folder / "base", dtype="fp32", device="cpu")


@pytest.fixture(scope="module")
def model(folder: Path) -> trimtab.Model:
    return trimtab.load(folder / "chat", dtype="fp32", device="cpu")


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9, "seed": 3}])
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_a_batch_of_texts_matches_single_texts(
    base: trimtab.Model, options: dict[str, Any], batch_size: int
) -> None:
    texts = base.generate(PROMPTS, max_new_tokens=12, batch_size=batch_size, **options)
    for index, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        assert text == base.generate(prompt, max_new_tokens=12, first_index=index, **options)
    done = base.complete(PROMPTS, max_new_tokens=12, batch_size=batch_size, **options)
    assert [one.text for one in done] == texts
    assert base.generate([]) == []


def test_lists_of_messages_and_lists_of_conversations(model: trimtab.Model) -> None:
    other = [*HI, {"role": "assistant", "content": "sees"}, {"role": "user", "content": "and then?"}]
    one, two = model.generate(HI, max_new_tokens=9), model.generate(other, max_new_tokens=9)
    assert one == model.generate("user: the cat\nassistant:", max_new_tokens=9)
    assert model.generate([HI, other], max_new_tokens=9) == [one, two]
    assert model.generate([HI, "the cat"], max_new_tokens=9)[0] == one


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"role": "user", "content": "a"}, "put it into a list"),
        (["a", 3], "prompt 2 is neither a text nor a list of messages"),
        (["a", {"role": "user", "content": "a"}], "prompt 2 is neither"),
        ([["a"]], "prompt 1 is neither"),
        ([{"content": "a"}], "message 1 of the conversation has no role"),
        ([HI, [{"content": "a"}]], "message 1 of prompt 2 has no role"),
    ],
)
def test_prompts_that_are_neither(model: trimtab.Model, prompt: Any, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        model.generate(prompt)


def test_conflicting_options(base: trimtab.Model) -> None:
    with pytest.raises(RecipeError, match="stream is given with a list"):
        base.generate(["a"], stream=print)
    with pytest.raises(RecipeError, match=r"top_p has no effect at temperature 0.*; give temperature 0\.7"):
        base.generate("a", temperature=0.0, top_p=0.9)
    with pytest.raises(ModelError, match="no chat template"):
        base.generate([HI])
    drawn = {base.generate("the", max_new_tokens=8, top_k=50, seed=seed) for seed in range(4)}
    assert len(drawn) > 1, "top_k without a temperature draws"


@pytest.mark.oracle
def test_loss_equals_transformers(base: trimtab.Model, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
    expected = []
    for text in PROMPTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        expected.append(theirs(ids, labels=ids).loss.item())
    losses = base.loss(PROMPTS)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert [type(loss) for loss in losses] == [float] * 4
    assert base.loss(PROMPTS[1]) == pytest.approx(expected[1], rel=1e-5)
    assert base.loss(PROMPTS, batch_size=1) == pytest.approx(losses, rel=1e-6)


def test_loss_of_a_conversation_counts_only_the_answers(model: trimtab.Model) -> None:
    talk = [
        {"role": "user", "content": "the cat sees?"},
        {"role": "assistant", "content": "the dog."},
        {"role": "user", "content": "under?"},
        {"role": "assistant", "content": "a tree."},
    ]
    tokenizer, decoder = model.opened.tokenizer, model.opened.decoder
    text = tokenizer.render_chat(talk)
    encoded = tokenizer.backend.encode(text, add_special_tokens=False)
    spans = []
    for answer in (" the dog.<|end|>", " a tree.<|end|>"):
        at = text.index(answer)
        spans.append((at, at + len(answer)))
    with torch.no_grad():
        logits_TV = decoder.logits(decoder(torch.tensor([encoded.ids])))[0].log_softmax(-1)
    counted = [
        -float(logits_TV[t - 1, encoded.ids[t]])
        for t, (begin, end) in enumerate(encoded.offsets)
        if any(begin < stop and end > start for start, stop in spans)
    ]
    assert 4 < len(counted) < len(encoded.ids) / 2
    assert model.loss(talk) == pytest.approx(sum(counted) / len(counted), rel=1e-5)
    assert model.loss([talk, talk[:2]])[0] == pytest.approx(model.loss(talk), rel=1e-6)


def test_losses_that_cannot_be_measured(base: trimtab.Model, model: trimtab.Model) -> None:
    with pytest.raises(DataError, match="text 2 has no token to measure"):
        base.loss(["the cat", "a"])
    with pytest.raises(ModelError, match=r"text 1 has \d+ tokens, the model's context 128; shorten it"):
        base.loss("the cat " * 200)
    with pytest.raises(DataError, match="conversation:1 has no assistant message"):
        model.loss(HI)
    with pytest.raises(ModelError, match="no chat template"):
        base.loss(HI)


@pytest.fixture
def chat(model: trimtab.Model) -> Chat:
    return model.chat(max_new_tokens=10, top_k=20, seed=1)


def test_a_chat_prefills_only_new_tokens(model: trimtab.Model) -> None:
    chat, decoder = model.chat(system="be small", max_new_tokens=10), model.opened.decoder
    read: list[int] = []
    handle = decoder.register_forward_hook(lambda _, given, __: read.append(given[0].shape[1]))
    try:
        for text in ("the cat", "and the dog?", "over it?"):
            read.clear()
            done = chat.send(text)
            # As if the whole conversation were read anew.
            fresh = [{"role": "system", "content": "be small"}, *chat.messages[:-1]]
            whole = len(model.opened.tokenizer.encode_chat(fresh))
            if len(chat.messages) > 2:
                assert read[0] < whole - 12, "what was there before is not read again"
            assert chat.messages[-1] == {"role": "assistant", "content": done.text}
            assert done.text == model.generate(fresh, max_new_tokens=10)
    finally:
        handle.remove()
    assert [m["role"] for m in chat.transcript()] == ["system", *["user", "assistant"] * 3]


@pytest.mark.parametrize("change", ["adapters", "weights", "another weight"])
def test_a_chat_discards_its_cache_when_weights_change(folder: Path, change: str) -> None:
    """Cached keys and values belong to the old weights."""
    from trimtab.adapt import add_lora

    model = trimtab.load(folder / "chat", dtype="fp32", device="cpu")
    decoder = model.opened.decoder
    torch.manual_seed(0)
    add_lora(decoder)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "lora" in name:
                parameter.normal_(std=0.5)
    chat = model.chat(max_new_tokens=10)
    with_adapters = chat.send("the cat").text
    if change == "adapters":
        model.use_adapters()
    elif change == "weights":
        with torch.no_grad():
            decoder.get_parameter("model.layers.0.self_attn.v_proj.weight").mul_(-3)
    else:
        layer = decoder.get_submodule("model.layers.0.self_attn.v_proj")
        layer.weight = torch.nn.Parameter(-3 * layer.weight.detach())
    question = {"role": "user", "content": "and the dog?"}
    answer = chat.send(question["content"]).text
    assert answer == model.generate([*chat.messages[:2], question], max_new_tokens=10)
    assert chat.messages[1]["content"] == with_adapters


def test_turns_use_new_samples_and_sessions_are_reproducible(model: trimtab.Model) -> None:
    said = []
    for _ in range(2):
        chat = model.chat(max_new_tokens=10, temperature=1.5, seed=4)
        first = chat.send("the cat").text
        chat.reset()
        said.append((first, chat.send("the cat").text))
    assert said[0] == said[1]
    assert said[0][0] != said[0][1]


def test_the_oldest_turns_are_dropped(chat: Chat) -> None:
    counts = []
    for number in range(6):
        chat.send(f"the cat sees {number} dogs and then a big red house")
        counts.append(chat.left_out)
    assert counts[0] == 0
    assert counts[-1] > 2
    assert all(count % 2 == 0 for count in counts)
    assert len(chat.messages) == 12, "nothing is forgotten by the transcript"
    before = list(chat.messages)
    with pytest.raises(ModelError, match=r"the message has \d+ tokens.*128 tokens; shorten it"):
        chat.send("the cat " * 100)
    assert chat.messages == before
    assert chat.left_out == counts[-1]
    chat.send("it")


def test_an_interrupted_answer_remains_in_the_history(model: trimtab.Model) -> None:
    chat, pieces = model.chat(max_new_tokens=40, top_k=20, seed=1), []

    def stop_after_two(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.send("the cat", stream=stop_after_two)
    assert chat.messages == [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "".join(pieces)},
    ]
    assert chat.send("and then?").ids
    assert len(chat.messages) == 4


def test_a_base_model_cannot_chat(base: trimtab.Model) -> None:
    with pytest.raises(ModelError, match=r"no chat template.*trimtab generate .*base"):
        base.chat()
