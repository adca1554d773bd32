"""A deterministic tiny model and texts, for complete runs in a second."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trimtab.facts.shapes import ModelShape, uniform_shape
from trimtab.model import build, init_weights, save_folder

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sees",
    "runs",
    "red",
    "blue",
    "house",
    "tree",
    "and",
    "in",
    "under",
    "over",
    "small",
    "big",
    "it",
    "was",
    "then",
]


def sentences(seed: int, count: int) -> list[str]:
    """Documents of a few words."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(4, 40))) + "." for _ in range(count)]


def tiny_shape(vocab_size: int = 300, **more: object) -> ModelShape:
    """Two layers of 32."""
    fields: dict[str, object] = {
        "family": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_positions": 128,
        "tie_embeddings": True,
    }
    return uniform_shape(**{**fields, **more})  # type: ignore[arg-type]


def write_tiny_model(folder: Path, seed: int = 0, **shape: object) -> Path:
    """A Hugging Face folder with random weights and a byte-level tokenizer."""
    decoder = init_weights(
        build(tiny_shape(**shape), dtype="fp32", device="cpu", attention="reference"), seed
    )  # type: ignore[arg-type]
    save_folder(decoder, folder, dtype="fp32", config_extra={"eos_token_id": 0})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(0, 200), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    return folder


def write_texts(path: Path, seed: int, count: int) -> Path:
    """A JSON lines file of sentences."""
    import json

    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences(seed, count)))
    return path


def write_recipe(folder: Path, **changes: object) -> Path:
    """A full recipe for a tiny model: packing, replay, two evaluation sets, two epochs."""
    from ruamel.yaml import YAML

    model = folder / "model"
    if not model.exists():
        write_tiny_model(model)
    recipe: dict[str, object] = {
        "model": {"name": str(model)},
        "data": {
            "train": [{"source": str(write_texts(folder / "train.jsonl", 1, 60))}],
            "replay": {"share": 0.2, "sources": [str(write_texts(folder / "replay.jsonl", 2, 40))]},
            "eval": {
                "domain": [str(write_texts(folder / "domain.jsonl", 3, 10))],
                "general": [str(write_texts(folder / "general.jsonl", 4, 10))],
            },
            "cache_dir": str(folder / "cache"),
            "num_proc": 1,
        },
        "max_seq_length": 64,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "dtype": "fp32",
        "device": "cpu",
        "logging_steps": 3,
        "eval_steps": 5,
        "save_steps": 2,
        "probe": False,
        "output_dir": str(folder / "run"),
    }
    recipe.update(changes)
    path = folder / "recipe.yaml"
    with path.open("w") as file:
        YAML(typ="safe").dump(recipe, file)
    return path
