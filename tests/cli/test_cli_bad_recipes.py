"""Invalid recipes and data: a clear error, the right exit code, and nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_world import Call, World

Job = Callable[..., Path]


def assert_nothing_left_behind(folder: Path) -> None:
    """Asserts that there is no run folder and no partial entry in the token cache."""
    assert not (folder / "run").exists()
    cache = folder / "cache"
    leftovers = [p for p in cache.rglob("*") if "tmp" in p.name.lower()] if cache.exists() else []
    assert leftovers == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learning_rat=1e-4", ("learning_rat", "learning_rate")),
        ("model.nam=x", ("model.nam", "name")),
        ("data.trian=x", ("data.trian", "train")),
        ("learning_rate=fast", ("learning_rate", "fast")),
        ("learning_rate=-1", ("learning_rate",)),
        ("learning_rate=.nan", ("learning_rate",)),
        ("max_steps=1.5", ("max_steps",)),
        ("packing=yes", ("packing",)),
        ("optim=adam_9bit", ("optim", "adamw_8bit")),
        ("data.train.7.first=3", ("data.train", "7")),
        ("seed", ("seed", "key=value")),
        ("model.trust_remote_code=true", ("trust_remote_code",)),
        ("trust_remote_code=true", ("trust_remote_code",)),
        ("load_in_4bit=true", ("load_in_4bit",)),
        ("model.attn_implementation=flash_attention_9", ("attn_implementation",)),
        ("dtype=int8", ("dtype", "int8")),
        ("output_dir=", ("output_dir",)),
    ],
)
def test_keys(job: Job, tmp_path: Path, cli: Call, override: str, words: tuple[str, ...]) -> None:
    for verb in ("train", "plan"):
        cli(verb, job(), override).refused(2, *words)
    assert_nothing_left_behind(tmp_path)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "no recipe"),
        (b"", "empty"),
        (b"- a\n- b\n", "mapping"),
        (b"model: [unclosed", "line"),
        (b"model: a\nmodel: b\ndata: {train: x}\n", "model"),
        (b"\xff\xfe\x00bad", "UTF-8"),
        (b"model: x\n", "data"),
        (b"model: !!python/object/apply:os.system ['true']\ndata: {train: x}", "line"),
    ],
)
def test_files_that_are_not_recipes(tmp_path: Path, cli: Call, content: bytes | None, word: str) -> None:
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content)
    cli("train", path).refused(2, word)
    cli("train", tmp_path).refused(2)


def test_unavailable_device_and_attention(job: Job, cli: Call, tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        cli("train", job(device="cuda")).refused(6, "cuda")
    cli("train", job(), "model.attn_implementation=sdpa_cudnn", "device=cpu").refused(4, "sdpa_cudnn")
    assert_nothing_left_behind(tmp_path)


def test_sequences_longer_than_the_context(job: Job, cli: Call, tmp_path: Path) -> None:
    cli("train", job(max_seq_length=129)).refused(4, "max_seq_length", "128")
    assert_nothing_left_behind(tmp_path)


DATA: list[tuple[str, bytes | None, tuple[str, ...]]] = [
    ("absent.txt", None, ("absent.txt", "not")),
    ("empty.txt", b"", ("empty.txt",)),
    ("blank.txt", b" \n\n \t\n", ("blank.txt",)),
    ("empty.jsonl", b"", ("empty.jsonl",)),
    ("empties.jsonl", b'{"text": ""}\n{"text": "  "}\n', ("empties.jsonl",)),
    ("short.jsonl", b'{"text": ""}\n', ("short.jsonl",)),
    ("binary.txt", bytes(range(256)) * 8, ("binary.txt",)),
    ("picture.bin", b"\x89PNG\r\n\x1a\n" + bytes(64), ("picture.bin",)),
    ("latin.txt", "déjà vu".encode("latin-1") * 10, ("latin.txt", "UTF-8")),
    ("wide.txt", "hello there".encode("utf-16"), ("wide.txt",)),
    ("latin.jsonl", '{"text": "déjà"}\n'.encode("latin-1"), ("latin.jsonl", "UTF-8")),
    ("broken.jsonl", b'{"text": "a b c"}\n{"text": \n', ("broken.jsonl", "2")),
    ("list.jsonl", b"[1, 2]\n", ("list.jsonl",)),
    ("number.jsonl", b'{"text": 5}\n', ("number.jsonl", "text")),
    ("columns.jsonl", b'{"alpha": "a b", "beta": "c d"}\n', ("alpha", "beta", "text_column")),
    ("torn.parquet", b"PAR1" + bytes(32), ("torn.parquet",)),
    ("not.parquet", b"hello", ("not.parquet",)),
    ("data.pkl", b"\x80\x04N.", ("data.pkl",)),
]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("name", "content", "words"), DATA, ids=[entry[0] for entry in DATA])
def test_data_files(
    job: Job,
    cli: Call,
    tmp_path: Path,
    name: str,
    content: bytes | None,
    words: tuple[str, ...],
    streaming: bool,
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    result = cli("train", job(data_train=[str(tmp_path / name)], data_streaming=streaming))
    result.refused(3, *words)
    assert_nothing_left_behind(tmp_path)


def test_empty_folders_and_globs(job: Job, cli: Call, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    cli("train", job(data_train=[str(tmp_path / "nothing")])).refused(3, "nothing")
    cli("train", job(data_train=[str(tmp_path / "*.md")])).refused(3, "*.md")
    cli("train", job(data_train=["starter:poetry"])).refused(3, "starter:math")
    assert_nothing_left_behind(tmp_path)


def test_an_empty_evaluation_set(job: Job, cli: Call, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("")
    cli("train", job(data_eval={"general": [str(tmp_path / "none.jsonl")]})).refused(3, "none.jsonl")
    assert_nothing_left_behind(tmp_path)


def test_empty_and_short_documents_are_skipped_and_counted(job: Job, cli: Call, tmp_path: Path) -> None:
    rows = ["", "the cat sees a dog.", " ", "", "a dog runs."]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    result = cli("train", job(data_train=[str(tmp_path / "some.jsonl")], max_steps=1))
    assert result.code == 0, result.err
    assert "empty and were left out" in result.out


def test_held_out_share_of_a_single_document(job: Job, cli: Call, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("the cat sees a dog under a tree. " * 20)
    path = job(
        data_train=[str(tmp_path / "one.txt")],
        data_eval_share=0.5,
        data_eval={"general": ["starter:general"]},
    )
    result = cli("train", path)
    assert result.code == 0, result.err
    assert "domain loss" in result.out
    (tmp_path / "word.txt").write_text("cat")
    path = job(data_train=[str(tmp_path / "word.txt")], data_eval_share=0.5, output_dir=str(tmp_path / "x"))
    cli("train", path).refused(3, "word.txt")


@pytest.mark.parametrize("packing", [True, False])
def test_every_step_has_trained_tokens(
    world: World, job: Job, cli: Call, tmp_path: Path, packing: bool
) -> None:
    """Documents one token longer than a sequence: the remaining token has no target and must not be a step."""
    from trimtab import text

    tokenizer = text.load(world.model)
    words = "the"
    while len(tokenizer.encode_document(words)) < 65:
        words += " cat"
    assert len(tokenizer.encode_document(words)) == 65
    (tmp_path / "long.jsonl").write_text((json.dumps({"text": words}) + "\n") * 4)
    path = job(
        data_train=[str(tmp_path / "long.jsonl")],
        packing=packing,
        per_device_train_batch_size=1,
        max_steps=6,
    )
    result = cli("train", path)
    assert result.code == 0, result.err


def test_corrected_recipe_starts_in_the_same_folder(job: Job, cli: Call, tmp_path: Path) -> None:
    path = job(data_train=[str(tmp_path / "late.jsonl")], max_steps=1)
    cli("train", path).refused(3, "late.jsonl")
    (tmp_path / "late.jsonl").write_text(json.dumps({"text": "the cat sees a dog."}) + "\n")
    result = cli("train", path)
    assert result.code == 0, result.err


def test_a_tokenizer_larger_than_the_embedding(job: Job, cli: Call, tmp_path: Path, model_copy: Path) -> None:
    content: dict[str, Any] = json.loads((model_copy / "tokenizer.json").read_text())
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"].append({"id": 5000, "content": "<|far|>", **token})
    (model_copy / "tokenizer.json").write_text(json.dumps(content))
    for verb in ("train",):
        cli(verb, job(model=str(model_copy))).refused(4, "tokenizer", "300")
    assert_nothing_left_behind(tmp_path)
    cli("generate", model_copy, "the cat").refused(4, "tokenizer")
