"""Jobs, contestants and the order of the cases. No torch: the runner itself never initializes CUDA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.models import MODELS
from trimtab.plan.memory import BYTES_OUTSIDE_ALLOCATOR

LORA = {"r": 16, "lora_alpha": 16}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LEARNING_RATE = {"full": 1e-5, "qlora": 1e-4}
GB = 10**9
CONTEXT_GB = 0.7
"""Part of a GPU's memory for the CUDA context; the rest is the allocator's cap."""
LONGEST_ATTENTION = "triton"
"""cuDNN's backward needs additional fp32 accumulators, 16 KB per token here; trimtab's needs none, but is slower."""
LONG = 20_000
"""From this sequence length on a step takes seconds."""
DOCUMENT_TOKENS = 400
"""The average document length in packed sequences; lengths are exponentially distributed."""

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
}
# tiny models of the same families for a CPU
CONFIGS = MODELS | {f"tiny-{name}": config | _SMALL for name, config in MODELS.items()}


def config_of(model: str) -> dict[str, Any]:
    """A model's config.json by name; `llama-8b/8` has 8 of its layers."""
    name, _, layers = model.partition("/")
    return CONFIGS[name] | ({"num_hidden_layers": int(layers)} if layers else {})


@dataclass(frozen=True)
class Job:
    """One training step without gradient accumulation: forward, backward and 8-bit AdamW, over `rows` sequences of
    `tokens`."""

    model: str
    method: str
    """"full" or "qlora"."""
    rows: int
    tokens: int
    packed: bool = False
    """Whether sequences contain several documents, none of which attends to another."""

    @property
    def name(self) -> str:
        """For tables and `--only`.

        Example:
            >>> Job("llama-8b", "qlora", 2, 2048, packed=True).name
            'llama-8b qlora 2×2048 packed'
        """
        return f"{self.model} {self.method} {self.rows}×{self.tokens}" + (" packed" if self.packed else "")


@dataclass(frozen=True)
class Case:
    """A job of one contestant, measured in a separate process."""

    job: Job
    contestant: str
    limit_s: int = 90
    cap_gb: float | None = None
    """Longest context: the memory of the emulated GPU; the planner then proposes the job's tokens."""
    start: str = ""
    """"cold" or "warm": the first step only, with an empty or a filled cache of compiled code."""

    @property
    def name(self) -> str:
        """The key of the case's record."""
        if self.cap_gb is not None:
            return f"{self.job.model} longest {self.cap_gb:g} GB/{self.contestant}"
        return f"{self.job.name}/{self.contestant}" + (f" {self.start}" if self.start else "")


OURS = ("trimtab", "trimtab tight", "trimtab eager")
"""trimtab's variants: without a memory limit; limited to the peak of the lowest-memory peer; without CUDA graphs and
torch.compile."""
NEAREST = "trimtab nearest"
"""trimtab with bf16 weights rounded to nearest, as in the peers, which loses small updates; for comparing losses."""
PEERS = ("hf", "hf recompute", "liger", "unsloth", "unsloth recompute")
CAPS_GB = dict.fromkeys((8, 12, 16, 24, 40), "llama-8b") | dict.fromkeys((48, 80), "llama-8b/8")
"""Memory of emulated GPUs to the model that confirms the length: the full model or, where its step would take more than
ten minutes, some of its layers with the same memory plan, under a cap reduced by the memory planned for the others."""

PEER_GIB = {
    "qwen3-0.6b full 4×1024": 3.7,
    "qwen3-0.6b full 4×4096": 4.4,
    "llama-8b qlora 2×2048": 6.8,
    "llama-8b qlora 1×8192": 7.8,
    "llama-8b qlora 1×32768": 14.0,
    "llama-8b qlora 1×65536": 22.0,
}
"""Peak GiB of the lowest-memory peer in an earlier run on an H200: limit of "trimtab tight" until the file has one."""

QWEN_SHORT, QWEN_LONG = (Job("qwen3-0.6b", "full", 4, tokens) for tokens in (1024, 4096))
LLAMA_SHORT = Job("llama-8b", "qlora", 2, 2048)
LLAMA_8K, LLAMA_32K, LLAMA_64K = (Job("llama-8b", "qlora", 1, tokens) for tokens in (8192, 32_768, 65_536))
JOBS = (LLAMA_SHORT, QWEN_SHORT, LLAMA_8K, QWEN_LONG, LLAMA_32K, LLAMA_64K)


def memory_limit_bytes(cap_gb: float, device: str) -> int:
    """The recipe's memory limit for which the allocator's cap is the GPU's memory minus the CUDA context."""
    return round((cap_gb - CONTEXT_GB) * GB) + BYTES_OUTSIDE_ALLOCATOR[device]


def recipe_of(
    job: Job, folder: str | Path, adapter: Path | None, device: str, limit_bytes: int | None
) -> dict[str, Any]:
    """The recipe of a job; gradients have the weights' dtype, as in the peers."""
    recipe: dict[str, Any] = {
        "model": {"name": str(folder)},
        "data": {"train": [{"source": "starter:math"}]},
        "max_seq_length": job.tokens,
        "packing": job.packed,
        "per_device_train_batch_size": job.rows,
        "gradient_accumulation_steps": 1,
        "max_steps": 100,
        "learning_rate": LEARNING_RATE[job.method],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "optim": "adamw_8bit",
        "device": device,
    }
    if job.method == "qlora":
        recipe |= {"lora": LORA if adapter is None else {"adapter": str(adapter)}, "load_in_4bit": True}
    else:
        recipe["gradient_dtype"] = "bf16" if device == "cuda" else "fp32"
    if limit_bytes is not None:
        recipe["memory_limit"] = f"{limit_bytes}B"
    return recipe


def model_of(case: Case) -> str:
    """Key of the loaded model that cases share; transformers can switch gradient checkpointing on a loaded model."""
    loaded = "hf" if case.contestant == "hf recompute" else case.contestant
    return f"{loaded} {case.job.model} {case.job.method}"


def cases() -> list[Case]:
    """All cases, the most important first, since a short session does not reach the last ones."""
    found: list[Case] = []
    for job in JOBS[:4]:
        found += [_case(job, name) for name in ("unsloth recompute", "trimtab", "trimtab tight")]
    found += [_case(job, NEAREST) for job in (QWEN_SHORT, QWEN_LONG)]
    found += [Case(LLAMA_SHORT, "trimtab", start=start, limit_s=150) for start in ("cold", "warm")]
    for job in JOBS[4:]:
        found += [_case(job, name) for name in ("unsloth recompute", "trimtab", "trimtab tight")]
    for job in JOBS[:4]:
        packed = replace(job, packed=True)
        found += [_case(packed, name) for name in ("trimtab", "hf recompute")]
        if job.method == "full":
            found.append(_case(packed, NEAREST))
    found += [_longest(cap, model) for cap, model in CAPS_GB.items()]
    for job in JOBS[:4]:
        found += [
            _case(job, name) for name in ("hf recompute", "liger", "hf", "unsloth") if _supports(job, name)
        ]
    found += [_case(job, "trimtab eager") for job in JOBS[:4]]
    for job in JOBS[4:]:
        found += [_case(job, name) for name in ("liger", "hf recompute")]
        found.append(_case(replace(job, packed=True), "trimtab"))
    packed = [replace(job, packed=True) for job in JOBS]
    found += [_case(job, name) for job in packed for name in ("liger", "unsloth recompute")]
    found += [_case(job, "hf recompute") for job in packed[4:]]
    return found


def _supports(job: Job, contestant: str) -> bool:
    """Whether the contestant supports the job: Unsloth trains quantized models only with gradient checkpointing."""
    return not (job.method == "qlora" and contestant == "unsloth")


def _longest(cap_gb: float, model: str) -> Case:
    return Case(Job(model, "qlora", 1, 0), "trimtab", limit_s=900, cap_gb=cap_gb)


def _case(job: Job, contestant: str) -> Case:
    return Case(job, contestant, limit_s=300 if job.tokens > LONG else 180)


def tiny_cases() -> list[Case]:
    """Cases for a CPU, in seconds: all code except the peers' CUDA kernels."""
    full = Job("tiny-qwen3-0.6b", "full", 2, 64)
    qlora = Job("tiny-llama-8b", "qlora", 2, 64)
    found = [Case(job, name) for job in (full, qlora) for name in ("hf", "hf recompute", *OURS[:2])]
    found += [Case(replace(job, packed=True), name) for job in (full, qlora) for name in ("hf", "trimtab")]
    found += [_longest(cap, model) for cap, model in ((3, "tiny-llama-8b"), (2, "tiny-llama-8b/1"))]
    return found
