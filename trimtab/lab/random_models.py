"""Hugging Face folders with random weights, for measurements of models without their weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trimtab.facts.randomness import derive
from trimtab.model.families import shape_from_config

SHARD_BYTES = 4 * 2**30
COMPLETE = "complete"
"""An empty file that is written last: a folder without it is incomplete."""


def random_model_folder(folder: Path, config: Mapping[str, Any], device: str) -> Path:
    """The folder of a model, written in the first call: config, weights and a tokenizer of made-up words.

    Weights are drawn on `device`, in bf16 on a GPU and in fp32 on a CPU; fp32 weights are rounded to bf16 values, so
    that casting or quantizing either gives the same values.
    """
    if (folder / COMPLETE).exists():
        return folder
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    config = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    config_folder(folder, config)
    _write_weights(folder, config, device, dtype)
    write_tokenizer(folder, config["vocab_size"])
    (folder / COMPLETE).touch()
    return folder


def config_folder(folder: Path, config: Mapping[str, Any]) -> Path:
    """Writes a folder with only the config: enough to plan and, with a tokenizer, to train from random weights.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     made = config_folder(Path(root) / "model", {"vocab_size": 8})
        ...     json.loads((made / "config.json").read_text())
        {'vocab_size': 8}
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=1))
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a tokenizer of words w2, w3, … up to the vocabulary's size, at most a thousand."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, min(vocab_size, 1000))}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "model_max_length": 2**20,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(words))


def _write_weights(folder: Path, config: Mapping[str, Any], device: str, dtype: torch.dtype) -> None:
    shape = shape_from_config(dict(config), str(folder / "config.json"))
    generator = torch.Generator(device).manual_seed(derive(0, "benchmark weights"))
    index: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(index.values())):05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, size in shape.parameters():
        tensor = torch.empty(size, dtype=dtype, device=device)
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, shape.initializer_range, generator=generator)
        shard[name] = tensor.bfloat16().to(dtype).cpu()
        if sum(t.nbytes for t in shard.values()) > SHARD_BYTES:
            flush()
    if shard:
        flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
