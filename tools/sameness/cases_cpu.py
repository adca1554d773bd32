"""The cases for a CPU. `coverage.py` requires that every key of the recipe occurs here or on the GPU."""

from __future__ import annotations

from typing import Any

from tools.sameness.case import Case
from tools.sameness.world import MODELS

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    "{% if shout is defined %}{{ shout }}{% endif %}"
)
BASE: dict[str, Any] = {
    "model": {"name": "@models/llama"},
    "data": {
        "train": [{"source": "@data/train.jsonl"}],
        "eval": {"domain": [{"source": "@data/heldout.jsonl"}]},
        "eval_windows": 4,
        "num_proc": 1,
    },
    "max_seq_length": 64,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "learning_rate": 5e-3,
    "dtype": "fp32",
    "device": "cpu",
    "recompute": "none",
    "logging_steps": 1,
    "save_steps": None,
    "probe": False,
}
"""What all cases have in common, unless they say otherwise."""

LORA = {"lora.r": 4, "lora.lora_alpha": 8}
NF4 = {**LORA, "load_in_4bit": True}
INT8 = {**LORA, "load_in_8bit": True}
BF16 = {"dtype": "bf16"}
BACKWARD = {"optim_in_backward": True, "max_grad_norm": 0.0, "gradient_accumulation_steps": 1}
STOPPING = {
    "max_steps": 5,
    "save_steps": 2,
    "eval_steps": 2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 1,
}


def source(name: str, **keys: Any) -> dict[str, Any]:
    """The training data of a case: one of the world's files."""
    return {"data.train": [{"source": f"@data/{name}", **keys}]}


def chat(name: str = "chats.jsonl", **keys: Any) -> dict[str, Any]:
    """Conversations or examples, with a chat template."""
    return {"model.chat_template": TEMPLATE, **source(name, **keys)}


def _families() -> list[Case]:
    names = [name for name in MODELS if not name.startswith("gpu-")]
    found = []
    for name in names:
        model = {"model.name": f"@models/{name}"}
        found += [
            Case(f"family/{name}", model, ("generate", "export")),
            Case(f"family/{name}/lora", {**model, **LORA}, ("generate", "merge", "peft")),
            Case(f"family/{name}/unpacked", {**model, "packing": False, "max_steps": 2}),
        ]
    gguf = {"model.name": "@models/gguf.gguf", "model.tokenizer": "@models/qwen2"}
    return [
        *found,
        Case("family/gguf", gguf, ("generate", "export")),
        Case("family/gguf/nf4", {**gguf, **NF4}),
    ]


def _precision() -> list[Case]:
    return [
        Case("dtype/auto", {"dtype": "auto"}),
        Case("dtype/bf16", BF16, ("generate",)),
        Case("dtype/bf16/weights-fp32", {**BF16, "weights_dtype": "fp32"}),
        Case("dtype/bf16/weights-bf16", {**BF16, "weights_dtype": "bf16"}),
        Case("dtype/bf16/gradients-bf16", {**BF16, "gradient_dtype": "bf16"}),
        Case("dtype/bf16/gradients-fp32", {**BF16, "gradient_dtype": "fp32"}),
        Case("dtype/bf16/lora", {**BF16, **LORA}, ("merge",)),
        Case("dtype/fp16", {"dtype": "fp16", "max_steps": 6}),
        Case("dtype/fp16/lora", {"dtype": "fp16", **LORA}),
        Case("dtype/fp16/auto-weights", {"dtype": "fp16", "weights_dtype": "auto", "optim": "adamw_8bit"}),
        Case("deterministic/false", {"deterministic": False}),
        Case("deterministic/true", {"deterministic": True}),
        Case("threads/2", {"num_threads": 2}),
        Case("device/auto", {"device": "auto"}),
    ]


def _adapters() -> list[Case]:
    tied = {"model.name": "@models/llama-tied"}
    tokens = {"model.added_tokens": ["<|tool|>", "<|answer|>"]}
    saved = {"lora.modules_to_save": ["embed_tokens", "lm_head"]}
    return [
        Case("lora/defaults", {"lora": {}}, ("generate", "merge", "peft", "adapters", "evaluate")),
        Case("lora/dropout", {**LORA, "lora.lora_dropout": 0.2}),
        Case("lora/dropout/block", {**LORA, "lora.lora_dropout": 0.2, "recompute": "block"}),
        Case("lora/rslora", {**LORA, "lora.use_rslora": True}, ("merge",)),
        Case("lora/rslora-off", {**LORA, "lora.use_rslora": False}),
        Case("lora/dora", {**LORA, "lora.use_dora": True}, ("generate", "merge", "peft")),
        Case("lora/dora-off", {**LORA, "lora.use_dora": False}),
        Case("lora/dora/dropout", {**LORA, "lora.use_dora": True, "lora.lora_dropout": 0.1}),
        Case("lora/targets", {**LORA, "lora.target_modules": ["q_proj", "down_proj"]}, ("merge",)),
        Case("lora/targets-regex", {**LORA, "lora.target_modules": r".*layers\.1\..*(k|up)_proj"}),
        Case("lora/targets-all", {**LORA, "lora.target_modules": "all-linear"}, ("rows", "loaded")),
        Case(
            "lora/patterns",
            {**LORA, "lora.rank_pattern": {"down_proj": 2}, "lora.alpha_pattern": {"q_proj": 32.0}},
            ("peft",),
        ),
        Case("lora/bf16", {**LORA, **BF16, "lora.dtype": "bf16"}),
        Case("lora/fp32", {**LORA, **BF16, "lora.dtype": "fp32"}),
        Case("lora/saved-norm", {**LORA, "lora.modules_to_save": ["norm"]}, ("merge",)),
        Case("lora/saved-embeddings", {**LORA, **saved, "embedding_learning_rate": 1e-4}, ("merge", "peft")),
        Case("lora/added-tokens", {**LORA, **tokens, **saved}, ("generate", "merge", "peft")),
        Case(
            "lora/added-tokens/tied",
            {**LORA, **tied, **tokens, "lora.modules_to_save": ["embed_tokens"]},
            ("merge",),
        ),
        Case("lora/from-adapter", {"lora.adapter": "@adapter"}, ("merge", "adapters")),
        Case("full/added-tokens", {**tokens}, ("export",)),
        Case("full/added-tokens/tied", {**tied, **tokens}, ("export",)),
        Case("full/embedding-rate", {"embedding_learning_rate": 1e-4}),
        Case("full/random", {"model.init": "random"}, ("export",)),
        Case(
            "full/pretrained",
            {"model.init": "pretrained"},
            ("continue", "best", "evaluate", "rows", "loaded"),
        ),
        Case("full/starter", {"model.name": "starter", "max_steps": 2}),
    ]


def _quantized() -> list[Case]:
    return [
        Case("nf4", {**NF4, "bnb_4bit_use_double_quant": True}, ("generate", "merge", "peft")),
        Case("nf4/single", {**NF4, "bnb_4bit_use_double_quant": False}, ("generate",)),
        Case("nf4/bf16", {**NF4, **BF16}),
        Case("nf4/fp16", {**NF4, "dtype": "fp16"}),
        Case("nf4/dropout", {**NF4, "lora.lora_dropout": 0.1}),
        Case("nf4/dora", {**NF4, "lora.use_dora": True}, ("merge",)),
        Case("nf4/dequantized-1", {**NF4, "unpacked_layers": 1}),
        Case("nf4/dequantized-auto", {**NF4, "unpacked_layers": "auto"}),
        Case("nf4/block", {**NF4, "recompute": "block"}),
        Case("nf4/qwen3", {**NF4, "model.name": "@models/qwen3"}, ("generate",)),
        Case("nf4/8bit-optimizer", {**NF4, "optim": "adamw_8bit"}),
        Case("nf4/off", {**LORA, "load_in_4bit": False, "load_in_8bit": False}),
        Case("int8", INT8, ("generate", "merge", "peft")),
        Case("int8/bf16", {**INT8, **BF16}),
        Case("int8/dequantized-1", {**INT8, "unpacked_layers": 1}),
        Case("int8/block", {**INT8, "recompute": "block"}),
        Case("int8/dora", {**INT8, "lora.use_dora": True}),
    ]


def _memory() -> list[Case]:
    policies = ["pointwise", "selective", "block", "offload_half", "offload_attention", "offload"]
    found = [Case(f"recompute/{policy}", {"recompute": policy}) for policy in policies]
    found += [Case(f"recompute/{policy}/lora", {**LORA, "recompute": policy}) for policy in policies]
    attention = ["auto", "reference", "sdpa_math", "sdpa_flash"]
    found += [
        Case(f"attention/{name}", {"model.attn_implementation": name}, ("generate",)) for name in attention
    ]
    unpacked = {"packing": False}
    found += [
        Case(f"attention/{name}/unpacked", {"model.attn_implementation": name, **unpacked})
        for name in attention
    ]
    return [
        *found,
        Case("recompute/none", {"recompute": "none"}),
        Case("recompute/auto", {"recompute": "auto"}),
        Case("recompute/list", {"recompute": ["block", "none"]}),
        Case("recompute/counts", {"recompute": {"selective": 1, "pointwise": 1}}),
        Case("recompute/checkpointing", {"recompute": "auto", "gradient_checkpointing": True}),
        Case("recompute/no-checkpointing", {"recompute": "auto", "gradient_checkpointing": False}),
        Case("recompute/limit", {"recompute": "auto", "memory_limit": "50%"}),
        Case("tiles/4", {"mlp_tiles": 4}),
        Case("tiles/4/lora", {**LORA, "mlp_tiles": 4}),
        Case("tiles/auto", {"mlp_tiles": "auto"}),
        Case("compile/false", {"torch_compile": False}),
        Case("compile/true", {"torch_compile": True}),
        Case("compile/auto", {"torch_compile": "auto"}),
        Case("graphs/false", {"cuda_graphs": False}),
        Case("graphs/auto", {"cuda_graphs": "auto"}),
    ]


def _optimizers() -> list[Case]:
    names = ["adamw_torch", "adamw_torch_fused", "adamw_bf16", "adamw_8bit"]
    found = []
    for name in names:
        found += [
            Case(f"optim/{name}", {"optim": name}),
            Case(f"optim/{name}/bf16", {"optim": name, **BF16}),
            Case(f"optim/{name}/lora", {"optim": name, **LORA}),
        ]
        found.append(Case(f"optim/{name}/backward", {"optim": name, **BACKWARD}))
    schedules = ["cosine", "linear", "constant_with_warmup", "warmup_stable_decay"]
    found += [
        Case(f"schedule/{name}", {"lr_scheduler_type": name, "max_steps": 6, "warmup_steps": 2})
        for name in schedules
    ]
    return [
        *found,
        Case("optim/adamw_8bit/auto", {"optim": "adamw_8bit", "optim_implementation": "auto"}),
        Case("optim/adamw_8bit/reference", {"optim": "adamw_8bit", "optim_implementation": "reference"}),
        Case("optim/backward/lora", {**BACKWARD, **LORA}),
        Case("optim/backward/bf16", {**BACKWARD, **BF16, "optim": "adamw_8bit"}),
        Case("optim/backward-off", {"optim_in_backward": False}),
        Case(
            "optim/settings",
            {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-5, "weight_decay": 0.2},
        ),
        Case("optim/no-decay", {"weight_decay": 0.0}),
        Case("optim/decay-all", {"weight_decay": 0.5, "decay_all": True}),
        Case("optim/decay-some", {"weight_decay": 0.5, "decay_all": False}),
        Case("schedule/constant", {"lr_scheduler_type": "constant"}),
        Case("schedule/ratio", {"lr_scheduler_type": "cosine", "warmup_ratio": 0.4, "max_steps": 5}),
        Case("schedule/floor", {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.3, "max_steps": 5}),
        Case("clip/off", {"max_grad_norm": 0.0}),
        Case("clip/tight", {"max_grad_norm": 0.05}),
        Case("clip/bf16", {"max_grad_norm": 0.05, **BF16}),
        Case("loss/smoothing", {"label_smoothing_factor": 0.1}),
        Case("loss/z", {"z_loss": 1e-3}),
        Case("loss/both", {"label_smoothing_factor": 0.1, "z_loss": 1e-3, **BF16}),
        Case("loss/both/lora", {"label_smoothing_factor": 0.1, "z_loss": 1e-3, **LORA}),
    ]


def _data() -> list[Case]:
    plain = {"data.eval": {}, "data.eval_share": 0.1}
    streaming = {"data.streaming": True}
    return [
        Case("data/packed", {"packing": True}),
        Case("data/unpacked", {"packing": False}),
        Case("data/grouped", {"packing": False, "group_by_length": True, **source("long.jsonl")}),
        Case("data/ungrouped", {"packing": False, "group_by_length": False}),
        Case("data/epochs", {"max_steps": -1, "num_train_epochs": 1.5, **source("more.jsonl")}),
        Case("data/accumulation-1", {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}),
        Case("data/accumulation-4", {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}),
        Case("data/length", {"max_seq_length": 48}),
        Case("data/seed", {"seed": 7}),
        Case("data/streaming", streaming),
        Case("data/streaming/chat", {**streaming, **chat()}),
        Case("data/cached", {"data.streaming": False}),
        Case("data/held-out", plain),
        Case("data/no-evaluation", {"data.eval": {}, "data.eval_share": 0.0}),
        Case(
            "data/general", {"data.eval.general": [{"source": "@data/general.jsonl"}], "data.eval_windows": 2}
        ),
        Case("data/replay", {"data.replay": {"share": 0.3, "sources": [{"source": "@data/replay.jsonl"}]}}),
        Case(
            "data/mixture",
            {
                "data.train": [
                    {"source": "@data/train.jsonl", "weight": 0.5},
                    {"source": "@data/more.jsonl", "weight": 2.0},
                ]
            },
        ),
        Case(
            "data/mixture/streaming",
            {**streaming, "data.train": [{"source": "@data/train.jsonl"}, {"source": "@data/more.jsonl"}]},
        ),
        Case("data/first", source("train.jsonl", first=30)),
        Case("data/column", source("columns.jsonl", text_column="body")),
        Case("data/csv", source("table.csv")),
        Case("data/lines", source("notes.txt", documents="lines")),
        Case("data/blank-lines", source("notes.txt", documents="blank-lines")),
        Case("data/file", {**source("notes.txt", documents="file"), "max_steps": 2}),
        Case("data/format-text", source("train.jsonl", format="text")),
        Case(
            "data/starter",
            {"data.train": [{"source": "starter:math", "first": 60}], "answers": 2, "probe": True},
        ),
        Case("chat/completions", chat(train_on="completions"), ("generate", "evaluate")),
        Case("chat/last", chat(train_on="last")),
        Case("chat/all", chat(train_on="all")),
        Case("chat/unpacked", {**chat(), "packing": False}),
        Case("chat/lora", {**chat(), **LORA}),
        Case("chat/auto", chat(format="auto")),
        Case("chat/messages", chat(format="messages")),
        Case("chat/sharegpt", chat("sharegpt.jsonl", format="sharegpt")),
        Case("chat/alpaca", chat("alpaca.jsonl", format="alpaca")),
        Case("chat/completion", chat("completion.jsonl", format="prompt-completion")),
        Case(
            "chat/columns",
            chat("renamed.jsonl", format="alpaca", columns={"instruction": "question", "output": "reply"}),
        ),
        Case("chat/bad-rows", chat("bad-rows.jsonl", bad_rows="skip")),
        Case("chat/stop-at-bad-rows", chat(bad_rows="stop")),
        Case("chat/template-arguments", {**chat(), "data.chat_template_kwargs": {"shout": "loud"}}),
    ]


def _loop() -> list[Case]:
    patience = {"eval_steps": 1, "early_stopping_patience": 1, "max_steps": 6}
    found = [
        Case("loop/early-stopping", {**patience, "early_stopping_threshold": 10.0}),
        Case("loop/no-early-stopping", {**patience, "early_stopping_patience": 3}, ("best",)),
        Case("loop/evaluation", {"eval_steps": 1, "eval_on_start": False}),
        Case(
            "loop/evaluation-on-start",
            {"eval_steps": 2, "eval_on_start": True, "save_total_limit": 1, "save_steps": 1},
        ),
        Case("loop/probe", {"probe": True, "prompts": ["the cat", "seven plus nine is"]}),
        Case("loop/no-probe", {"probe": False}),
    ]
    found += [
        Case(
            f"loop/answers-{name}",
            {"model.name": "starter", "answers": 1, "answers_field": name, "max_steps": 1},
        )
        for name in ("math", "arithmetic", "algebra", "calculus")
    ]
    runs: dict[str, dict[str, Any]] = {
        "full": {},
        "bf16-8bit": {**BF16, "optim": "adamw_8bit"},
        "bf16-states": {**BF16, "optim": "adamw_bf16"},
        "fused": {"optim": "adamw_torch_fused"},
        "fp16": {"dtype": "fp16"},
        "lora-dropout": {**LORA, "lora.lora_dropout": 0.2},
        "dora": {**LORA, "lora.use_dora": True},
        "nf4": NF4,
        "int8": INT8,
        "backward": BACKWARD,
        "streaming": {"data.streaming": True},
        "chat": chat(),
        "grouped": {"packing": False, "group_by_length": True, **source("long.jsonl")},
        "added-tokens": {
            **LORA,
            "model.added_tokens": ["<|tool|>"],
            "lora.modules_to_save": ["embed_tokens"],
        },
        "replay": {"data.replay": {"share": 0.3, "sources": [{"source": "@data/replay.jsonl"}]}},
        "random": {"model.init": "random"},
    }
    for name, keys in runs.items():
        whole = {**keys, **STOPPING}
        found.append(Case(f"resume/{name}/unstopped", whole))
        found.append(Case(f"resume/{name}/stopped", whole, stop_at=3, same_as=f"resume/{name}/unstopped"))
    return found


CASES: list[Case] = [
    *_families(),
    *_precision(),
    *_adapters(),
    *_quantized(),
    *_memory(),
    *_optimizers(),
    *_data(),
    *_loop(),
]
