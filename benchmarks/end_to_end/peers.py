"""The peers, set up as in their documentation: transformers, PEFT, bitsandbytes, Liger, Unsloth.

Adapters in fp32 under bf16 autocast, as in their trainers; bitsandbytes' 8-bit AdamW; the model shifts labels and
averages the loss. `build` returns a training step as a callable that returns the loss.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.end_to_end.jobs import LEARNING_RATE, LORA, TARGETS, Case, Job, model_of
from benchmarks.end_to_end.world import Tokens

Step = Callable[[], torch.Tensor]
PACKAGES = {
    "hf": ("transformers", "peft", "bitsandbytes"),
    "liger": ("liger_kernel",),
    "unsloth": ("unsloth",),
}


def missing(contestant: str) -> str | None:
    """Why a peer cannot run here; None if it can."""
    family = contestant.split()[0]
    names = dict.fromkeys((*PACKAGES["hf"], *PACKAGES[family]))
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if absent:
        return f"{absent[0]} is not installed"
    if family in ("liger", "unsloth") and not torch.cuda.is_available():
        return "it needs a CUDA device"
    return None


def build(
    case: Case, folder: Path, adapter: Path, tokens: Tokens, device: str, kept: dict[str, Any], longest: int
) -> Step:
    """Load a peer's model and return its training step; quantized models are cached, with adapters reset."""
    job, key = case.job, model_of(case)
    if key not in kept:
        kept.clear()
        model = _load(case, folder, adapter, device, longest)
        if job.method == "qlora":
            kept[key] = model
    else:
        model = kept[key]
        _set_back(model, adapter)
    if case.contestant.startswith(("hf", "liger")):
        _recompute(model, job, _recomputes(case))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = _optimizer(trained, LEARNING_RATE[job.method])
    arguments = tokens.for_peers(device, job.packed)
    if job.packed and case.contestant.startswith("unsloth"):
        arguments = tokens.in_one_row(device)
    half = torch.autocast(device, dtype=torch.bfloat16) if device == "cuda" else nullcontext()
    model.train()

    def step() -> torch.Tensor:
        with half:
            loss: torch.Tensor = model(**arguments, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _load(case: Case, folder: Path, adapter: Path, device: str, longest: int) -> torch.nn.Module:
    family = case.contestant.split()[0]
    if family == "unsloth":
        return _unsloth(case.job, folder, adapter, _recomputes(case), longest)
    return _transformers(case.job, folder, adapter, device, liger=family == "liger")


def _recomputes(case: Case) -> bool:
    # As in Liger's examples, activations are recomputed where they are large.
    liger = case.contestant == "liger" and case.job.method == "qlora"
    return liger or case.contestant.endswith(" recompute")


def _recompute(model: torch.nn.Module, job: Job, on: bool) -> None:
    if on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
    # Checkpointed blocks of a frozen model need inputs that require gradients; otherwise these only cost time.
    wanted, there = on and job.method == "qlora", getattr(model, "inputs_have_gradients", False)
    if wanted and not there:
        model.enable_input_require_grads()
    elif there and not wanted:
        model.disable_input_require_grads()
    model.inputs_have_gradients = wanted


def _set_back(model: torch.nn.Module, adapter: Path) -> None:
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    set_peft_model_state_dict(model, load_file(str(adapter / "adapter_model.safetensors")))


def _optimizer(parameters: list[Any], lr: float) -> Any:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(parameters, lr=lr, weight_decay=0.0)


def _transformers(job: Job, folder: Path, adapter: Path, device: str, *, liger: bool) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if liger:
        _apply_liger(job)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa", "device_map": {"": device}}
    if job.method == "qlora":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    if job.method == "qlora":
        from peft import PeftModel

        model.requires_grad_(False)
        model = PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    return model


def _apply_liger(job: Job) -> None:
    from liger_kernel import transformers as liger

    apply = {"qwen3": liger.apply_liger_kernel_to_qwen3, "llama": liger.apply_liger_kernel_to_llama}
    apply["qwen3" if "qwen3" in job.model else "llama"](fused_linear_cross_entropy=True, cross_entropy=False)


def _unsloth(job: Job, folder: Path, adapter: Path, recompute: bool, longest: int) -> torch.nn.Module:
    from unsloth import FastLanguageModel  # import it first: it patches the other libraries

    way: Any = "unsloth" if recompute else False
    full = job.method == "full"
    model, _ = FastLanguageModel.from_pretrained(
        str(folder),
        max_seq_length=longest,
        dtype=torch.bfloat16,
        load_in_4bit=not full,
        full_finetuning=full,
        use_gradient_checkpointing=way,
        fix_tokenizer=False,
    )
    if full:
        return model
    model = FastLanguageModel.get_peft_model(
        model,
        **LORA,
        target_modules=list(TARGETS),
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing=way,
        max_seq_length=longest,
    )
    _set_back(model, adapter)
    return model
