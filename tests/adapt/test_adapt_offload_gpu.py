"""Activation offloading on a GPU: the same gradients, less memory, copies overlapped with computation."""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from typing import Any

import pytest
import torch
from plan_jobs import LLAMA_8B, QLORA

from trimtab.adapt import (
    add_adapters,
    compile_regions,
    init_adapters,
    quantize_layout,
    recompute,
    trained_parameters,
)
from trimtab.adapt.offloaded_activations import MIN_ELEMENTS
from trimtab.facts.shapes import uniform_shape
from trimtab.model import build, init_weights
from trimtab.model.decoder import Decoder
from trimtab.plan.job import Job
from trimtab.plan.layers import Layers, workspace_bytes
from trimtab.plan.memory import Phase, predict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE = uniform_shape("llama", 4096, 1024, 2816, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=128)
QUARTER = LLAMA_8B.of_layers(range(8))


def decoder_of(policy: str, tiles: int = 1, compiled: bool = False) -> Decoder:
    decoder = build(SHAPE, dtype="bf16", device="cuda", attention="triton", pointwise="triton")
    recompute.apply(init_weights(decoder, seed=0), [policy] * SHAPE.num_layers, mlp_tiles=tiles)
    return compile_regions(decoder) if compiled else decoder


def step(decoder: Decoder, tokens: int, seed: int = 0) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(seed)
    ids_BT = torch.randint(0, SHAPE.vocab_size, (1, tokens), device="cuda", generator=generator)
    loss = decoder.loss(ids_BT, ids_BT.roll(-1, 1))
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in decoder.parameters())]


@pytest.mark.parametrize("tiles", [1, 4])
@pytest.mark.parametrize("compiled", [False, True])
def test_offloading_gives_the_same_gradients_step_after_step(compiled: bool, tiles: int) -> None:
    kept, sent = decoder_of("block", tiles, compiled), decoder_of("offload", tiles, compiled)
    for seed, tokens in enumerate((4096, 4096, 1024, 4096)):
        want, got = step(kept, tokens, seed), step(sent, tokens, seed)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=1e-3, atol=1e-3 * float(b.abs().max()))
        for decoder in (kept, sent):
            decoder.zero_grad(set_to_none=True)
    # One buffer per layer, reused in every step.
    assert sent.layer_context.store.host_bytes == SHAPE.num_layers * 4096 * SHAPE.hidden_size * 2


@pytest.mark.parametrize("policy", ["offload_half", "offload_attention"])
@pytest.mark.parametrize("tiles", [1, 4])
def test_expensive_results_are_restored_bitwise(tiles: int, policy: str) -> None:
    kept, sent = decoder_of("block", tiles), decoder_of(policy, tiles)
    for seed, tokens in enumerate((4096, 4096, 1024, 4096)):
        want, got = step(kept, tokens, seed), step(sent, tokens, seed)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), tokens
        for decoder in (kept, sent):
            decoder.zero_grad(set_to_none=True)
    # The input, attention's output and, in fp32, one value per row and head.
    attention = SHAPE.attention
    H, K, D = attention.num_heads, attention.num_kv_heads, attention.head_dim
    width = 2 * SHAPE.hidden_size * 2 + (H * 4 if 1024 * H >= MIN_ELEMENTS else 0)
    if policy == "offload_half":
        width += 2 * ((H + 2 * K) * D + SHAPE.hidden_size)
    assert sent.layer_context.store.host_bytes >= SHAPE.num_layers * 4096 * width
    gc.collect()
    torch.cuda.synchronize()
    free = sum(buffer.num_bytes for buffer, _ in sent.layer_context.store._free)
    assert free == sent.layer_context.store.host_bytes, "every buffer is free again"


def allocated_after_forward(policy: str, tokens: int) -> int:
    decoder = decoder_of(policy)
    step(decoder, tokens)
    decoder.zero_grad(set_to_none=True)
    gc.collect()
    before = torch.cuda.memory_allocated()
    loss = decoder.loss(*(torch.zeros(1, tokens, dtype=torch.int64, device="cuda") for _ in range(2)))
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated() - before
    del loss
    return allocated


def test_inputs_leave_the_device() -> None:
    tokens = 8192
    stream = tokens * SHAPE.hidden_size * 2
    saved = allocated_after_forward("block", tokens) - allocated_after_forward("offload", tokens)
    # All but the last offloaded one, which is read from the device.
    assert saved == pytest.approx((SHAPE.num_layers - 1) * stream, rel=0.02)


def seconds(decoder: Decoder, tokens: int, count: int = 5) -> float:
    for _ in range(2):
        step(decoder, tokens)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step(decoder, tokens)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


@pytest.mark.alone
def test_copies_overlap_with_computation() -> None:
    tokens = 32_768
    kept, sent = seconds(decoder_of("block"), tokens), seconds(decoder_of("offload"), tokens)
    copied = 2 * SHAPE.num_layers * tokens * SHAPE.hidden_size * 2
    alone = copied / 55e9
    print(
        f"\nblock {kept * 1e3:.1f} ms, offload {sent * 1e3:.1f} ms, copies alone {alone * 1e3:.1f} ms at 55 GB/s"
    )
    assert sent - kept < max(0.5 * alone, 0.05 * kept)


@functools.cache
def quantized_job(policy: str, tiles: int, tokens: int) -> Job:
    return dataclasses.replace(
        QLORA,
        shape=QUARTER,
        tokens=tokens,
        packed=False,
        loss_memory=2**29,
        policies=(policy,) * QUARTER.num_layers,
        mlp_tiles=tiles,
    )


CASES = [("none", 1, 8192), ("pointwise", 1, 8192), ("selective", 1, 16_384), ("block", 1, 16_384)]
CASES += [
    ("offload", 1, 32_768),
    ("block", 8, 32_768),
    ("offload", 16, 65_536),
    ("offload_attention", 1, 32_768),
    ("offload_half", 1, 32_768),
]


@pytest.mark.parametrize(("policy", "tiles", "tokens"), CASES)
def test_the_peak_memory_of_a_quantized_step_matches_the_prediction(
    policy: str, tiles: int, tokens: int
) -> None:
    job = quantized_job(policy, tiles, tokens)
    gc.collect()
    torch.cuda.empty_cache()
    decoder = build(
        job.shape,
        dtype="bf16",
        device="meta",
        attention=job.attention,
        pointwise=job.pointwise,
        loss_impl=job.loss_impl,
        loss_memory=job.loss_memory,
    )
    quantize_layout(decoder, "nf4", device="cuda")
    assert job.lora is not None
    add_adapters(decoder, job.lora)
    recompute.apply(decoder, job.layer_policies, mlp_tiles=tiles)
    decoder.to_empty(device="cuda")
    init_weights(decoder, 0)
    init_adapters(decoder, seed=0)

    def once() -> None:
        ids_BT = torch.zeros(1, tokens, dtype=torch.int64, device="cuda")
        decoder.loss(ids_BT, ids_BT.clone(), torch.arange(tokens, device="cuda")[None]).backward()

    once()
    for parameter in trained_parameters(decoder).values():
        parameter.grad = None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated_before = torch.cuda.memory_allocated()
    once()
    measured = torch.cuda.max_memory_allocated() - allocated_before
    memory = predict(job)
    moments = {k: v for k, v in memory.moments.items() if k.phase is not Phase.OPTIMIZER_STEP}
    # The workspace is persistent from the first step.
    predicted = max(moments.values()) - workspace_bytes(job)
    unit = Layers(job).stream
    print(
        f"\n{policy}, {tiles} tiles, {tokens} tokens: measured {measured / unit:.2f} streams, "
        f"predicted {predicted / unit:.2f}: {[(k.describe(), round(v / unit, 2)) for k, v in moments.items()]}"
    )
    assert measured == pytest.approx(predicted, rel=0.06)
