"""Inputs of every contestant: a Hugging Face folder of random weights, an adapter, random sequences."""

# B rows, T tokens

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.end_to_end.jobs import DOCUMENT_TOKENS, LORA, TARGETS, Job, config_of
from trimtab.facts.randomness import derive
from trimtab.lab import random_models
from trimtab.lab.random_models import random_model_folder
from trimtab.model.families import shape_from_config

IGNORED = -100


def model_folder(root: Path, model: str, device: str) -> Path:
    """The folder of a model, written at the first call: config, safetensors, an unused tokenizer."""
    return random_model_folder(root / model.replace("/", "-"), config_of(model), device)


def config_folder(root: Path, model: str) -> Path:
    """A folder with only config.json, which is enough to plan."""
    return random_models.config_folder(root / f"{model.replace('/', '-')}-config", config_of(model))


def adapter_folder(root: Path, model: str) -> Path:
    """The initial PEFT adapter of all contestants: A random, B zero, on every linear layer of the blocks."""
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
    """One batch as from trimtab's loader: labels already shifted, positions within documents."""

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
        """Packed sequences as Unsloth's collator returns them: one row, and the documents' lengths."""
        flat = {name: tensor.view(1, -1) for name, tensor in self.for_peers(device, packed=True).items()}
        starts_D = torch.nonzero(self.positions_BT.view(-1) == 0).view(-1)
        ends_D = torch.cat([starts_D[1:], torch.tensor([self.positions_BT.numel()])])
        return {**flat, "packed_seq_lengths": (ends_D - starts_D).to(torch.int32)}


def make_tokens(job: Job) -> Tokens:
    """The same sequences for all contestants; packed ones contain documents of exponential lengths."""
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
