"""Evaluation, generation, export and merge: predicted bytes of tensors against measured bytes."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from plan_step import Step  # noqa: E402

from tests.plan.test_plan_traced import ADAPTED, BASE, BF16, FEW, NF4, vary  # noqa: E402
from trimtab import evaluate  # noqa: E402
from trimtab.adapt import LoraSettings, workspace  # noqa: E402
from trimtab.data import Batch  # noqa: E402
from trimtab.evaluate import probe_items  # noqa: E402
from trimtab.export.hf import export_hf  # noqa: E402
from trimtab.export.merged import export_merged  # noqa: E402
from trimtab.generate import SamplingOptions, cache, loop  # noqa: E402
from trimtab.model import weights  # noqa: E402
from trimtab.model.save import MAX_SHARD_BYTES  # noqa: E402
from trimtab.plan import inference, phases, weights_io  # noqa: E402
from trimtab.plan.job import Job  # noqa: E402
from trimtab.plan.layers import dequantize_scratch_bytes, workspace_bytes  # noqa: E402
from trimtab.run import evaluation  # noqa: E402
from trimtab.starter import math_problems  # noqa: E402
from trimtab.trainer.memory import LiveBytes  # noqa: E402

TOLERANCE = 0.02
MATRICES = {"attention": "reference", "batch": 1}
LARGE = {"vocab_size": 40_000, "tie_embeddings": False}
CASES: dict[str, Job] = {
    "fp32": BASE,
    "small vocabulary": vary(FEW),
    "bf16": vary(**BF16),
    "bf16, small vocabulary": vary(FEW, **BF16),
    "autocast": vary(dtype="bf16"),
    "autocast, small vocabulary": vary(FEW, dtype="bf16"),
    "recomputed": vary(FEW, policies=("block",) * 4),
    "in tiles": vary(FEW, mlp_tiles=4, tokens=512),
    "LoRA": vary(FEW, **ADAPTED),
    "DoRA": vary(FEW, lora=LoraSettings(r=4, use_dora=True)),
    "NF4": vary(FEW, **ADAPTED, **NF4),
    "attention matrices": vary(FEW, **MATRICES, tokens=512),
    "large vocabulary": vary(LARGE),
}


class RealBytes(LiveBytes):
    """Ignores tensors on the meta device, which take no memory."""

    def _track(self, storage: Any, inputs: set[int]) -> None:
        if storage.device.type != "meta":
            super()._track(storage, inputs)


def computing_in(job: Job) -> Any:
    if job.dtype == job.weights_dtype:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)


def visible(job: Job, tensors: inference.Tensors) -> int:
    """Bytes without allocations inside operators, which a dispatch mode does not see."""
    return inference.total(tensors) - workspace_bytes(job) - dequantize_scratch_bytes(job)


def text_of(job: Job) -> Batch:
    ids_BT = torch.randint(0, job.shape.vocab_size, (job.batch, job.tokens))
    positions_BT = torch.arange(job.tokens).expand(job.batch, -1).contiguous()
    documents_BT = (positions_BT >= job.tokens // 2).int()
    return Batch(ids_BT, ids_BT.clone(), positions_BT, documents_BT, ids_BT.numel(), [["a", "b"]] * job.batch)


@pytest.mark.parametrize("name", CASES)
def test_the_loss_over_text(name: str) -> None:
    job = CASES[name]
    decoder, text = Step(job).decoder, text_of(job)
    workspace.release()
    with computing_in(job), RealBytes() as live:
        evaluate.loss(decoder, [text])
    tensors = [tensor for tensor in inference.loss_tensors(job) if tensor.name != "batch"]  # allocated before
    assert live.peak == pytest.approx(visible(job, tensors), rel=TOLERANCE)


class Writing:
    """The part of `completion.GenerationState` that the loop needs, without a tokenizer."""

    def __init__(self, index: int, prompt: list[int], max_new_tokens: int) -> None:
        self.index, self.prompt, self.max_new_tokens = index, prompt, max_new_tokens
        self.ids: list[int] = []
        self.finish_reason: str | None = None
        self.text = ""

    def push(self, token_id: int) -> None:
        self.ids.append(token_id)
        if len(self.ids) >= self.max_new_tokens:
            self.finish_reason = "length"


@pytest.mark.parametrize("name", [name for name in CASES if name != "in tiles"])
@pytest.mark.parametrize(("rows", "prompt", "new"), [(4, 40, 8), (1, 300, 8), (3, 250, 20), (1, 20, 4)])
def test_generation(name: str, rows: int, prompt: int, new: int) -> None:
    job = CASES[name]
    decoder = Step(job).decoder
    workspace.release()
    lengths = [prompt - row for row in range(rows)]  # padded
    ids = [torch.randint(0, job.shape.vocab_size, (length,)).tolist() for length in lengths]
    writings: list[Any] = [Writing(row, prompt_ids, new) for row, prompt_ids in enumerate(ids)]
    with computing_in(job), RealBytes() as live:
        loop._complete(decoder, writings, SamplingOptions(), batch_size=64)
    predicted = inference.generation_tensors(job, rows, prompt, new)
    assert live.peak == pytest.approx(visible(job, predicted), rel=TOLERANCE)


@pytest.mark.parametrize(("prompt", "tokens"), [(3, 10), (5, 40), (256, 257), (300, 1500), (1000, 1001)])
@pytest.mark.parametrize("rows", [1, 2])
def test_capacity_of_a_cache(rows: int, prompt: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "PREFILL_TOKENS", 512)
    kv_cache = cache.KVCache(num_layers=1)
    chunk = prompt if rows == 1 else 512 // rows
    sizes = [min(chunk, prompt - start) for start in range(0, prompt, chunk)] + [1] * (tokens - prompt)
    for size in sizes:
        kv_cache.update(0, torch.zeros(rows, size, 1, 1), torch.zeros(rows, size, 1, 1))
    assert kv_cache.nbytes == 2 * 4 * rows * inference.cache_tokens(rows, prompt, tokens)


WIDE = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 4096}
EXPORTS: dict[str, tuple[Job, str]] = {
    "bf16": (vary(WIDE), "bf16"),
    "fp32": (vary(WIDE), "fp32"),
    "merge, bf16": (vary(WIDE, lora=LoraSettings(r=8)), "bf16"),
    "merge, fp32": (vary(WIDE, lora=LoraSettings(r=8)), "fp32"),
    "merge, two layers": (vary(WIDE, lora=LoraSettings(r=8, target_modules=("q_proj", "v_proj"))), "bf16"),
    "merge, NF4": (vary(WIDE, lora=LoraSettings(r=8), **NF4), "bf16"),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_export_and_merge(name: str, tmp_path: Path) -> None:
    """Peak while reading back, after the merge: the base weights, allocated before the trace, are freed by then."""
    job, dtype = EXPORTS[name]
    decoder = Step(job).decoder.eval()
    for parameter_name, parameter in decoder.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter.data, std=0.1)
    with RealBytes() as live:
        (export_hf if job.lora is None else export_merged)(decoder, None, tmp_path / "model", dtype=dtype)
    predicted = weights_io.reloading_bytes(job.shape, dtype)
    if job.lora is not None:
        logits = weights_io.PROBE_TOKENS * job.shape.vocab_size * 4
        predicted += weights_io.merged_bytes(job) + 2 * logits
        assert weights_io.merge_memory(job, dtype).total >= predicted
    else:
        memory = weights_io.export_memory(job.shape, dtype)
        assert memory.model == 4 * job.shape.num_parameters
        assert memory.temporary >= predicted
    assert live.peak == pytest.approx(predicted, rel=TOLERANCE)


def test_the_comparison_can_fail() -> None:
    job = CASES["small vocabulary"]
    wrong = visible(job, inference.loss_tensors(dataclasses.replace(job, tokens=job.tokens + 8)))
    assert wrong != pytest.approx(visible(job, inference.loss_tensors(job)), rel=TOLERANCE)


def test_constants_match_the_code() -> None:
    assert cache.KVCache(1).block == inference.CACHE_BLOCK
    assert inference.PREFILL_TOKENS == loop._PREFILL_TOKENS
    assert (weights_io.READ_ELEMENTS, weights_io.CHECKED_ELEMENTS) == (weights._PIECE, weights._CHUNK)
    assert weights_io.SHARD_BYTES == MAX_SHARD_BYTES
    assert (phases.ANSWER_TOKENS, phases.SAMPLE_TOKENS) == (
        evaluation.ANSWER_TOKENS,
        evaluation.SAMPLE_TOKENS,
    )
    texts = [item.context + alternative for item in probe_items() for alternative in item.alternatives]
    assert max(len(text.encode()) for text in texts) < phases.PROBE_TOKENS
    problems = math_problems(evaluation.ANSWERS_SEED, 300)
    assert max(len(problem.prompt.encode()) for problem in problems) < phases.PROMPT_TOKENS
