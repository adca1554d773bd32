"""trimtab's micro-step, put together by the functions that `trimtab train` calls: recipe, choices, plan, model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.end_to_end.jobs import LEARNING_RATE, Case, Job
from benchmarks.end_to_end.peers import Step
from benchmarks.end_to_end.world import Tokens
from trimtab.adapt import trained_parameters
from trimtab.data import Batch
from trimtab.launch.preparing import Prepared, prepare
from trimtab.parallel import Mesh
from trimtab.plan import longest_context
from trimtab.plan.memory import CONTEXT, OUTSIDE
from trimtab.recipe import build as build_recipe
from trimtab.run.assembling import recorded
from trimtab.run.decoders import load_decoder, unpack
from trimtab.run.microbatch import MicrobatchLoss
from trimtab.run.precision import autocast_of
from trimtab.run.torch_setup import set_up_torch
from trimtab.run.updates import make_in_backward, make_optimizer

GB = 10**9
BESIDE_GB = 0.7
"""Of a card's memory, for the CUDA context: what is left is the allocator's cap."""


def recipe_of(job: Job, folder: Path, adapter: Path, device: str, limit_bytes: int | None) -> dict[str, Any]:
    """What a person would write for the job; gradients in the weights' own format, as the peers have them."""
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
        recipe |= {"lora": {"adapter": str(adapter)}, "load_in_4bit": True}
    else:
        recipe["gradient_dtype"] = "bf16" if device == "cuda" else "fp32"
    if limit_bytes is not None:
        recipe["memory_limit"] = f"{limit_bytes}B"
    return recipe


def card_bytes(cap_gb: float, device: str) -> int:
    """What a recipe may name as its limit, so that the allocator gets a card's memory less what is beside it."""
    return round((cap_gb - BESIDE_GB) * GB) + CONTEXT[device]


def prepared_for(
    case: Case,
    folder: Path,
    adapter: Path,
    device: str,
    limit_gib: float | None,
    more: dict[str, Any] | None = None,
) -> Prepared:
    """Every `auto` decided. `limit_gib` is of tensors; what CUDA itself takes comes on top. `more` are keys of the
    recipe."""
    limit = None
    if case.cap_gb is not None:
        limit = card_bytes(case.cap_gb, device)
    elif limit_gib is not None:
        limit = round(limit_gib * 2**30) + OUTSIDE[device]
    recipe = recipe_of(case.job, folder, adapter, device, limit)
    if case.contestant == "trimtab eager":
        recipe |= {"torch_compile": False, "cuda_graphs": False}
    if case.cap_gb is not None and device == "cuda":
        # cuDNN's backward adds up in fp32 beside the gradients, 16 KB a token here; ours does not, and is slower.
        recipe["model"]["attn_implementation"] = "triton"
    prepared = prepare(build_recipe(recipe | (more or {})))
    if limit_gib is None:
        return prepared
    # The peers' memory is what their tensors took, not what their allocator held; so is ours to be.
    memory = {**prepared.choices.memory, "allocator_bytes": None}
    return replace(prepared, choices=replace(prepared.choices, memory=memory))


def build(
    prepared: Prepared, folder: Path, tokens: Tokens, *, nearest: bool = False
) -> tuple[Step, dict[str, Any]]:
    """The micro-step, and what was chosen for it. `nearest` rounds weights in 16 bits to the nearest."""
    recipe, choices = prepared.recipe, prepared.choices
    device = torch.device(choices.device)
    set_up_torch(choices)
    decoder = load_decoder(recipe, choices, prepared.shape, folder, fresh=True)
    load_peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    unpack(decoder, choices)
    parameters = trained_parameters(decoder)
    optimizer = make_optimizer(recipe, choices, parameters)
    optimizer.stochastic_rounding &= not nearest
    loss_of = MicrobatchLoss(decoder, device, autocast_of(choices), packing=recipe.packing)
    graphs = recorded(choices, loss_of, parameters)
    in_backward = make_in_backward(recipe, choices, optimizer, Mesh.world())
    batch = Batch(
        tokens.ids_BT,
        tokens.labels_BT,
        tokens.positions_BT,
        tokens.documents_BT,
        tokens.num_targets,
        [["benchmark"]] * len(tokens.ids_BT),
    )
    lr, one, no = recipe.learning_rate, torch.ones((), device=device), torch.zeros((), device=device).bool()
    decoder.train()

    def step() -> torch.Tensor:
        if graphs is not None:
            loss = graphs.backward(batch, 1 / batch.num_targets) / batch.num_targets
        else:
            loss = loss_of(batch) / batch.num_targets
            if in_backward is not None:
                in_backward.begin(lr=lr, skip=no)
            loss.backward()
        if in_backward is not None:
            return loss.detach()
        optimizer.step(lr=lr, grad_scale=one, skip=no)
        for parameter in parameters.values():
            parameter.grad = None
        return loss.detach()

    chosen = {
        "load_peak_bytes": load_peak,
        "attention": choices.attention["impl"],
        "compile": choices.compile,
        "graphs": choices.graphs,
        "memory": choices.memory.get("sentence"),
        "predicted_bytes": prepared.plan.memory.needed,
        "host_bytes": choices.memory.get("host_bytes"),
        "loss": choices.loss.get("impl"),
        "pointwise": choices.pointwise.get("impl"),
    }
    return step, chosen


def longest(case: Case, folder: Path, adapter: Path, device: str) -> int:
    """Tokens of one row that arithmetic says fit under the case's cap; 0 if none do."""
    assert case.cap_gb is not None
    short = replace(case, job=replace(case.job, tokens=256))
    prepared = prepared_for(short, folder, adapter, device, None)
    return longest_context(prepared.plan.job, prepared.device, card_bytes(case.cap_gb, device)).tokens


def cap_of_part(case: Case, folders: tuple[Path, Path], adapters: tuple[Path, Path], device: str) -> float:
    """The cap, GB, for a model of some of the layers: the whole one's, less what stands for the layers left out."""
    assert case.cap_gb is not None
    standing = []
    for folder, adapter in zip(folders, adapters, strict=True):
        short = replace(case, job=replace(case.job, tokens=256))
        plan = prepared_for(short, folder, adapter, device, None, {"unpacked_layers": 0}).plan
        standing.append(plan.memory.before.total)
    return case.cap_gb - (standing[0] - standing[1]) / GB
