"""Tokenizers from Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from text_fixtures import CORPUS, byte_level_backend, write_folder
from tokenizers import processors

from trimtab import text
from trimtab.facts.errors import ModelError


def with_bos_processor():
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def test_document_has_bos_only_by_the_post_processor(tmp_path: Path) -> None:
    plain = text.load(write_folder(tmp_path / "plain"))
    ids = plain.encode("Hello")
    assert plain.encode_document("Hello") == [*ids, plain.eos_id]
    assert (plain.adds_bos, plain.bos_id, plain.eos_id) == (False, 0, 1)
    llama = text.load(write_folder(tmp_path / "llama", with_bos_processor()))
    assert (llama.adds_bos, llama.prefix_ids) == (True, [0])
    assert llama.encode("Hello") == ids
    assert llama.encode_document("Hello") == [0, *ids, 1]
    assert llama.encode_document("") == [0, 1]


def test_eos_of_the_post_processor_is_not_doubled(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = text.load(write_folder(tmp_path, backend))
    assert tokenizer.encode_document("Hi") == [*tokenizer.encode("Hi"), 1]


@pytest.mark.parametrize("flag", [True, False])
def test_add_bos_token_in_the_config_replaces_the_post_processor(tmp_path: Path, flag: bool) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": flag}
    backend = byte_level_backend() if flag else with_bos_processor()
    assert text.load(write_folder(tmp_path, backend, tokenizer_config=config)).adds_bos is flag


def test_prompt_has_bos_once(tmp_path: Path) -> None:
    tokenizer = text.load(write_folder(tmp_path, with_bos_processor()))
    assert tokenizer.encode_prompt("Hi") == [0, *tokenizer.encode("Hi")]
    assert tokenizer.encode_prompt("<s>Hi") == [0, *tokenizer.encode("Hi")]


def test_tokens_written_as_objects_and_in_the_special_tokens_map(tmp_path: Path) -> None:
    tokenizer = text.load(
        write_folder(
            tmp_path,
            tokenizer_config={"bos_token": {"content": "<s>", "lstrip": False}},
            special_tokens_map={"eos_token": {"content": "</s>"}},
        )
    )
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


def test_eos_from_generation_config_and_stop_ids(tmp_path: Path) -> None:
    files = {"tokenizer_config": {}, "config": {"bos_token_id": 0, "eos_token_id": 1}}
    tokenizer = text.load(write_folder(tmp_path, **files, generation_config={"eos_token_id": [2, 1]}))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.stop_ids) == (0, 1, {1, 2})
    assert tokenizer.special_tokens["eos_token"] == "</s>"
    only = write_folder(tmp_path / "only", tokenizer_config={}, generation_config={"eos_token_id": [2, 1]})
    assert text.load(only).eos_id == 2


def test_no_eos_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    tokenizer = text.load(write_folder(tmp_path, tokenizer_config={}))
    assert tokenizer.encode("ok")
    with pytest.raises(ModelError, match="eos_token"):
        tokenizer.encode_document("ok")


def test_saved_truncation_is_not_applied(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    tokenizer = text.load(write_folder(tmp_path, backend))
    assert len(tokenizer.encode("one two three four five six")) > 9
    assert len(tokenizer.encode("a")) == 1


def test_save_and_load_again(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", with_bos_processor())
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    first = text.load(folder)
    names = {path.name for path in first.save(tmp_path / "b")}
    second = text.load(tmp_path / "b")
    assert names == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert second.fingerprint == first.fingerprint
    assert second.chat_template == first.chat_template
    assert [second.encode_document(t) for t in CORPUS] == [first.encode_document(t) for t in CORPUS]


def test_fingerprint_depends_on_conventions_and_template(tmp_path: Path) -> None:
    plain = text.load(write_folder(tmp_path / "a"))
    assert plain.fingerprint == text.load(write_folder(tmp_path / "b")).fingerprint
    assert plain.fingerprint != text.load(write_folder(tmp_path / "c", with_bos_processor())).fingerprint
    (tmp_path / "b" / "chat_template.jinja").write_text("x")
    assert plain.fingerprint != text.load(tmp_path / "b").fingerprint
    bigger = write_folder(tmp_path / "d", byte_level_backend(420))
    assert plain.fingerprint != text.load(bigger).fingerprint


def test_check_vocabulary(tmp_path: Path) -> None:
    tokenizer = text.load(write_folder(tmp_path))
    text.check_vocabulary(tokenizer, tokenizer.vocab_size)
    with pytest.raises(ModelError, match="embedding only"):
        text.check_vocabulary(tokenizer, tokenizer.vocab_size - 1)


def test_vocab_size_is_the_largest_id_plus_one(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.add_tokens(["<extra>"])
    tokenizer = text.load(write_folder(tmp_path, backend))
    assert tokenizer.vocab_size == tokenizer.encode("<extra>")[0] + 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "not a JSON object"),
        (lambda f: (f / "tokenizer.json").write_text("[]"), "not a JSON object"),
        (lambda f: (f / "tokenizer.json").write_text('{"model": 3}'), "not a tokenizer"),
        (lambda f: (f / "tokenizer.json").write_bytes(b"\xff\xfe\x00"), "not a JSON object"),
        (lambda f: (f / "tokenizer_config.json").write_text("nope"), "not a JSON object"),
        (lambda f: (f / "tokenizer_config.json").write_text('{"eos_token": "<gone>"}'), "<gone>"),
    ],
)
def test_bad_folders(tmp_path: Path, spoil, message: str) -> None:
    folder = write_folder(tmp_path)
    spoil(folder)
    with pytest.raises(ModelError, match=message):
        text.load(folder)


def test_sentencepiece_only_folder_names_the_conversion(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x00")
    with pytest.raises(ModelError, match=r"SentencePiece.*save_pretrained"):
        text.load(tmp_path)


def test_missing_and_wrong_paths(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        text.load(tmp_path / "nothing")
    (tmp_path / "weights.bin").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ModelError, match="neither a folder nor a GGUF"):
        text.load(tmp_path / "weights.bin")


@pytest.mark.oracle
def test_saved_folder_reads_the_same_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = text.load(write_folder(tmp_path / "a", with_bos_processor()))
    ours.save(tmp_path / "b")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    for sample in CORPUS:
        assert theirs(sample)["input_ids"] == ours.encode_prompt(sample)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    assert json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())["eos_token"] == "</s>"


def test_lone_surrogates_become_the_replacement_character(tmp_path: Path) -> None:
    tokenizer = text.load(write_folder(tmp_path))
    broken, valid = "a\ud800b \udcff", "a\ufffdb \ufffd"
    assert tokenizer.encode(broken) == tokenizer.encode(valid)
    assert tokenizer.encode_batch([broken, "c"]) == tokenizer.encode_batch([valid, "c"])
    long = "word " * 20_000
    assert tokenizer.encode(broken + long) == tokenizer.encode(valid + long)
