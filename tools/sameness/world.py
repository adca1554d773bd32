"""Tiny random models of every family, texts and conversations: the inputs of the runs. Does not import trimtab."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
VOCABULARY = 4096
"""Vocabulary size of the starter's tokenizer, which all models use."""
CPU_SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GPU_SIZE: dict[str, Any] = {
    **CPU_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPE_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    "llama-multihead": {"model_type": "llama", "num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "llama-rope-llama3": {"model_type": "llama", "rope_theta": 500_000.0, "rope_scaling": ROPE_LLAMA3},
    "llama-rope-yarn": {"model_type": "llama", "rope_scaling": ROPE_YARN},
    "llama-rope-linear": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "llama-rope-dynamic": {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "mistral-window": {"model_type": "mistral", "sliding_window": 20},
    "mistral-full": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-window": {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3-bias": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "gpu-llama": {"model_type": "llama", **GPU_SIZE, "rope_scaling": ROPE_LLAMA3},
    "gpu-mistral": {"model_type": "mistral", **GPU_SIZE, "sliding_window": 96},
    "gpu-qwen2": {"model_type": "qwen2", **GPU_SIZE, "tie_word_embeddings": True},
    "gpu-qwen3": {"model_type": "qwen3", **GPU_SIZE, "head_dim": 128, "tie_word_embeddings": True},
}
"""Name to the keys of its config.json, besides `CPU_SIZE`."""
GGUF = "gguf.gguf"
WORDS = re.findall(
    r"\w+",
    "the a cat dog sees runs red blue house tree and in under over small big it was then seven nine plus is equal "
    "river mountain sings because question answer quickly",
)


def write_world(folder: Path, tokenizer: Path) -> Path:
    """Writes everything into `folder`, unless it is there; `tokenizer` is a folder with the tokenizer's files."""
    if folder.exists():
        return folder
    being_written = folder.with_name(f"{folder.name}.writing-{os.getpid()}")
    shutil.rmtree(being_written, ignore_errors=True)
    for name, config in MODELS.items():
        write_model(being_written / "models" / name, {**CPU_SIZE, **config}, tokenizer)
    write_gguf(being_written / "models" / GGUF, {**CPU_SIZE, **MODELS["qwen2"]})
    write_adapter(being_written / "adapter", {**CPU_SIZE, **MODELS["llama"]})
    write_texts(being_written / "data")
    being_written.rename(folder)
    return folder


def tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random weights by Hugging Face's names; norms and biases are random too, so that each has an effect."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim", hidden // heads)
    family, bias = config["model_type"], config.get("attention_bias", False)
    found: dict[str, np.ndarray] = {}

    def add(name: str, *size: int) -> None:
        chance = np.random.default_rng(zlib.crc32(name.encode()))
        values = chance.standard_normal(size, dtype=np.float32) * np.float32(0.08)
        found[name] = values + np.float32(1.0) if name.endswith("norm.weight") else values

    def linear(name: str, out: int, into: int, biased: bool) -> None:
        add(f"{name}.weight", out, into)
        if biased:
            add(f"{name}.bias", out)

    add("model.embed_tokens.weight", config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for part, size in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            linear(f"{at}.self_attn.{part}", size * head, hidden, bias or family == "qwen2")
        linear(f"{at}.self_attn.o_proj", hidden, heads * head, bias)
        if family == "qwen3":
            add(f"{at}.self_attn.q_norm.weight", head)
            add(f"{at}.self_attn.k_norm.weight", head)
        for part in ("gate_proj", "up_proj"):
            linear(f"{at}.mlp.{part}", inner, hidden, config.get("mlp_bias", False))
        linear(f"{at}.mlp.down_proj", hidden, inner, config.get("mlp_bias", False))
        add(f"{at}.input_layernorm.weight", hidden)
        add(f"{at}.post_attention_layernorm.weight", hidden)
    add("model.norm.weight", hidden)
    if not config.get("tie_word_embeddings", False):
        add("lm_head.weight", config["vocab_size"], hidden)
    return found


def write_model(folder: Path, config: dict[str, Any], tokenizer: Path) -> None:
    """A Hugging Face folder."""
    folder.mkdir(parents=True)
    save_file(tensors(config), folder / "model.safetensors", metadata={"format": "pt"})
    whole = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "eos_token_id": 0, "hidden_act": "silu", **config}
    (folder / "config.json").write_text(json.dumps({**whole, "torch_dtype": "float32"}, indent=1))
    for name in TOKENIZER:
        shutil.copy(tokenizer / name, folder / name)


def write_gguf(path: Path, config: dict[str, Any]) -> None:
    """A GGUF file of a qwen2, matrices in Q8_0; its tokenizer is named in the recipe."""
    import gguf

    kind = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    for name, array in tensors(config).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if array.ndim == 1:
            writer.add_tensor(stored, array)
        else:
            writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_adapter(folder: Path, config: dict[str, Any]) -> None:
    """An adapter as peft writes it, of rank 4 on two projections."""
    folder.mkdir(parents=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1))
    chance, found = np.random.default_rng(5), {}
    for name, weight in tensors(config).items():
        if not name.endswith(("q_proj.weight", "v_proj.weight")):
            continue
        at = f"base_model.model.{name.removesuffix('.weight')}"
        out, into = weight.shape
        found[f"{at}.lora_A.weight"] = chance.standard_normal((4, into), dtype=np.float32) * np.float32(0.1)
        found[f"{at}.lora_B.weight"] = chance.standard_normal((out, 4), dtype=np.float32) * np.float32(0.1)
    save_file(found, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def sentence(chance: random.Random, most: int = 40) -> str:
    """A few words."""
    return " ".join(chance.choices(WORDS, k=chance.randint(4, most))) + "."


def write_texts(folder: Path) -> None:
    """Texts and examples in every format that a source can have."""
    folder.mkdir(parents=True)
    chance = random.Random(7)

    def rows(name: str, found: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in found))

    for name, count in (("train", 80), ("more", 30), ("replay", 40), ("heldout", 12), ("general", 12)):
        rows(f"{name}.jsonl", [{"text": sentence(chance)} for _ in range(count)])
    rows("long.jsonl", [{"text": sentence(chance, 400)} for _ in range(200)])
    pairs = [(sentence(chance, 8), sentence(chance, 14)) for _ in range(40)]
    rows("columns.jsonl", [{"body": question, "n": 1} for question, _ in pairs])
    rows("completion.jsonl", [{"prompt": q, "completion": a} for q, a in pairs])
    rows("alpaca.jsonl", [{"instruction": q, "input": "", "output": a} for q, a in pairs])
    rows("renamed.jsonl", [{"question": q, "reply": a} for q, a in pairs])
    rows("sharegpt.jsonl", [{"conversations": _sharegpt(q, a)} for q, a in pairs])
    chats = [{"messages": _messages(q, a, i % 3 == 0)} for i, (q, a) in enumerate(pairs)]
    rows("chats.jsonl", chats)
    rows("bad-rows.jsonl", [*chats[:10], {"messages": "none"}, *chats[10:]])
    (folder / "notes.txt").write_text(
        "\n".join(q + ("\n" if i % 4 == 0 else "") for i, (q, _) in enumerate(pairs))
    )
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *[[q] for q, _ in pairs]])


def _messages(question: str, answer: str, longer: bool) -> list[dict[str, str]]:
    turns = [("user", question), ("assistant", answer)]
    turns += [("user", "and then?"), ("assistant", "it was a tree")] if longer else []
    return [{"role": role, "content": content} for role, content in turns]


def _sharegpt(question: str, answer: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
