"""What every contestant is given: a Hugging Face folder of random weights, an adapter, windows of random tokens."""

# B rows, T tokens

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.end_to_end.jobs import DOCUMENT_TOKENS, LORA, TARGETS, Job, config_of
from trimtab.facts.randomness import derive
from trimtab.model.families import shape_from_config

SHARD_BYTES = 4 * 2**30
IGNORED = -100


def model_folder(root: Path, model: str, device: str) -> Path:
    """The folder of a model, made at the first call: config, safetensors, a tokenizer that nobody uses."""
    folder = root / model.replace("/", "-")
    if (folder / "complete").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(model)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = config | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_weights(folder, config, device, dtype)
    _write_tokenizer(folder, config["vocab_size"])
    (folder / "complete").touch()
    return folder


def config_folder(root: Path, model: str) -> Path:
    """A folder with the config alone: enough to plan."""
    folder = root / f"{model.replace('/', '-')}-config"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(model), indent=1))
    return folder


def _write_weights(folder: Path, config: dict[str, Any], device: str, dtype: torch.dtype) -> None:
    shape = shape_from_config(config, str(folder / "config.json"))
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
        # Rounded for everyone: what is quantized in fp32 by one and in bf16 by another would differ in its codes.
        shard[name] = tensor.bfloat16().to(dtype).cpu()
        if sum(t.nbytes for t in shard.values()) > SHARD_BYTES:
            flush()
    if shard:
        flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
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


def adapter_folder(root: Path, model: str) -> Path:
    """peft's files of one adapter, which all begin with: A random, B zero, on every linear layer of the blocks."""
    folder = root / f"{model.replace('/', '-')}-adapter"
    if (folder / "complete").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shape = shape_from_config(config_of(model), model)
    tensors = {}
    for name, size in shape.parameters():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in TARGETS:
            continue
        bound = 1 / math.sqrt(size[1])
        generator = torch.Generator().manual_seed(derive(0, "benchmark adapter", module))
        a_RI = torch.empty(LORA["r"], size[1]).uniform_(-bound, bound, generator=generator)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a_RI
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.zeros(size[0], LORA["r"])
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    words = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(root / model),
        "target_modules": list(TARGETS),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": False,
        **LORA,
    }
    (folder / "adapter_config.json").write_text(json.dumps(words, indent=1))
    (folder / "complete").touch()
    return folder


@dataclass(frozen=True)
class Tokens:
    """One batch, as our loader makes it: labels already shifted, positions within documents."""

    ids_BT: torch.Tensor
    labels_BT: torch.Tensor
    positions_BT: torch.Tensor
    documents_BT: torch.Tensor

    @property
    def num_targets(self) -> int:
        """Tokens with a label."""
        return int((self.labels_BT != IGNORED).sum())

    def for_peers(self, device: str, packed: bool) -> dict[str, torch.Tensor]:
        """Arguments of a Hugging Face model, which shifts labels itself."""
        labels_BT = self.ids_BT.clone()
        labels_BT[self.positions_BT == 0] = IGNORED
        found = {"input_ids": self.ids_BT, "labels": labels_BT}
        if packed:
            found["position_ids"] = self.positions_BT
        return {name: tensor.to(device) for name, tensor in found.items()}

    def in_one_row(self, device: str) -> dict[str, torch.Tensor]:
        """The same packed windows as Unsloth's collator hands them over: one row, and the documents' lengths."""
        flat = {name: tensor.view(1, -1) for name, tensor in self.for_peers(device, packed=True).items()}
        starts_D = torch.nonzero(self.positions_BT.view(-1) == 0).view(-1)
        ends_D = torch.cat([starts_D[1:], torch.tensor([self.positions_BT.numel()])])
        return {**flat, "packed_seq_lengths": (ends_D - starts_D).to(torch.int32)}


def make_tokens(job: Job) -> Tokens:
    """The same windows for everyone; packed ones hold documents of exponential lengths."""
    generator = torch.Generator().manual_seed(derive(0, "benchmark tokens", job.rows, job.tokens))
    ids_BT = torch.randint(2, config_of(job.model)["vocab_size"], (job.rows, job.tokens), generator=generator)
    documents_BT = torch.zeros_like(ids_BT, dtype=torch.int32)
    if job.packed:
        average = min(DOCUMENT_TOKENS, job.tokens / 4)
        starts_BT = torch.rand(ids_BT.shape, generator=generator) < 1 / average
        documents_BT = starts_BT.cumsum(1).to(torch.int32)
    first_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    first_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    place_T = torch.arange(job.tokens)
    positions_BT = place_T - torch.where(first_BT, place_T, 0).cummax(1).values
    labels_BT = torch.full_like(ids_BT, IGNORED)
    labels_BT[:, :-1] = torch.where(first_BT[:, 1:], IGNORED, ids_BT[:, 1:])
    return Tokens(ids_BT, labels_BT, positions_BT, documents_BT)
