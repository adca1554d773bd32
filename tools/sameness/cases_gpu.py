"""The cases for a CUDA GPU with `deterministic: true`: Triton kernels, CUDA graphs, compiled layers, offloading."""

from __future__ import annotations

from typing import Any

from tools.sameness.case import Case
from tools.sameness.cases_cpu import BACKWARD, TEMPLATE

BASE: dict[str, Any] = {
    "model": {"name": "@models/gpu-llama"},
    "data": {
        "train": [{"source": "@data/long.jsonl"}],
        "eval": {"domain": [{"source": "@data/heldout.jsonl"}]},
        "eval_windows": 4,
        "num_proc": 1,
    },
    "max_seq_length": 256,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "learning_rate": 1e-3,
    "dtype": "bf16",
    "device": "cuda",
    "deterministic": True,
    "recompute": "none",
    "logging_steps": 1,
    "save_steps": None,
    "probe": False,
}
LORA = {"lora.r": 16, "lora.lora_alpha": 32}
NF4 = {**LORA, "load_in_4bit": True}
INT8 = {**LORA, "load_in_8bit": True}
POLICIES = ("pointwise", "selective", "block", "offload_half", "offload_attention", "offload")
JOBS: dict[str, dict[str, Any]] = {"full": {}, "lora": LORA, "nf4": NF4}
STOPPING = {"max_steps": 5, "save_steps": 2, "lr_scheduler_type": "cosine"}


def _models() -> list[Case]:
    found = []
    for name in ("llama", "mistral", "qwen2", "qwen3"):
        model = {"model.name": f"@models/gpu-{name}"}
        found += [
            Case(f"family/{name}/full", model, ("generate",)),
            Case(f"family/{name}/lora", {**model, **LORA}),
            Case(f"family/{name}/nf4", {**model, **NF4}),
            Case(f"family/{name}/unpacked", {**model, "packing": False}),
        ]
    return found


def _attention() -> list[Case]:
    packed = ("triton", "varlen", "flex", "sdpa_math", "reference")
    found = [Case(f"attention/{name}/packed", {"model.attn_implementation": name}) for name in packed]
    for name in ("triton", "varlen", "flex"):
        keys = {"model.attn_implementation": name, "packing": False}
        found.append(Case(f"attention/{name}/unpacked", keys))
    window = {"model.name": "@models/gpu-mistral"}
    found += [
        Case(f"attention/{name}/window", {**window, "model.attn_implementation": name})
        for name in ("flex", "varlen")
    ]
    return found


def _memory() -> list[Case]:
    found = []
    for job, keys in JOBS.items():
        found += [Case(f"recompute/{policy}/{job}", {**keys, "recompute": policy}) for policy in POLICIES]
        found.append(Case(f"recompute/mixed/{job}", {**keys, "recompute": ["offload", "selective", "none"]}))
        found.append(Case(f"graphs/true/{job}", {**keys, "cuda_graphs": True}))
        found.append(Case(f"graphs/false/{job}", {**keys, "cuda_graphs": False}))
        found.append(Case(f"compile/{job}", {**keys, "torch_compile": True}))
        found.append(Case(f"tiles/{job}", {**keys, "mlp_tiles": 4}))
    return [
        *found,
        Case("recompute/auto", {"recompute": "auto"}),
        Case("compile/block/no-graphs", {"torch_compile": True, "recompute": "block", "cuda_graphs": False}),
        Case("dequantized/0", {**NF4, "unpacked_layers": 0}),
        Case("dequantized/2", {**NF4, "unpacked_layers": 2}),
        Case("dequantized/int8", {**INT8, "unpacked_layers": 2}),
    ]


def _arithmetic() -> list[Case]:
    optimizers = {
        name: {"optim": name} for name in ("adamw_torch", "adamw_torch_fused", "adamw_bf16", "adamw_8bit")
    }
    found = [Case(f"optim/{name}", keys) for name, keys in optimizers.items()]
    found += [Case(f"optim/{name}/lora", {**keys, **LORA}) for name, keys in optimizers.items()]
    for code in ("reference", "triton", "triton_exact"):
        found.append(Case(f"optim/adamw_8bit/{code}", {"optim": "adamw_8bit", "optim_implementation": code}))
    return [
        *found,
        Case("optim/backward", {**BACKWARD, "optim": "adamw_8bit"}),
        Case("optim/backward/adamw_torch", {**BACKWARD, "optim": "adamw_torch"}),
        Case("optim/backward/adamw_bf16", {**BACKWARD, "optim": "adamw_bf16"}),
        Case("dtype/fp32", {"dtype": "fp32"}),
        Case("dtype/fp16", {"dtype": "fp16", "max_steps": 6}),
        Case("dtype/fp16/lora", {"dtype": "fp16", **LORA}),
        Case("dtype/fp16/nf4", {"dtype": "fp16", **NF4}),
        Case("dtype/weights-fp32", {"weights_dtype": "fp32"}),
        Case("dtype/gradients-bf16", {"gradient_dtype": "bf16"}),
        Case("int8", INT8, ("generate",)),
        Case("nf4/single", {**NF4, "bnb_4bit_use_double_quant": False}, ("generate",)),
        Case("nf4/dropout", {**NF4, "lora.lora_dropout": 0.1}),
        Case("nf4/dora", {**NF4, "lora.use_dora": True}),
        Case("lora/dropout", {**LORA, "lora.lora_dropout": 0.1}),
        Case("lora/dora", {**LORA, "lora.use_dora": True}),
        Case("lora/bf16", {**LORA, "lora.dtype": "bf16"}),
        Case("lora/saved", {**LORA, "lora.modules_to_save": ["embed_tokens", "lm_head"]}),
        Case("loss/smoothing", {"label_smoothing_factor": 0.1, "z_loss": 1e-3}),
        Case("clip/off", {"max_grad_norm": 0.0}),
        Case("clip/tight", {"max_grad_norm": 0.05}),
        Case("data/accumulation-1", {"gradient_accumulation_steps": 1}),
        Case("data/grouped", {"packing": False, "group_by_length": True}),
        Case("data/chat", {"model.chat_template": TEMPLATE, "data.train": [{"source": "@data/chats.jsonl"}]}),
        Case("data/streaming", {"data.streaming": True}),
        Case("full/export", {"max_steps": 2}, ("export", "evaluate")),
        Case("lora/merge", {**LORA, "max_steps": 2}, ("merge", "peft")),
    ]


def _resumed() -> list[Case]:
    runs: dict[str, dict[str, Any]] = {
        "full": {"optim": "adamw_8bit"},
        "lora-dropout": {**LORA, "lora.lora_dropout": 0.1},
        "nf4": NF4,
        "fp16": {"dtype": "fp16"},
        "offload": {"recompute": "offload"},
    }
    found = []
    for name, keys in runs.items():
        whole = {**keys, **STOPPING}
        found.append(Case(f"resume/{name}/unstopped", whole))
        found.append(Case(f"resume/{name}/stopped", whole, stop_at=3, same_as=f"resume/{name}/unstopped"))
    return found


CASES: list[Case] = [*_models(), *_attention(), *_memory(), *_arithmetic(), *_resumed()]
