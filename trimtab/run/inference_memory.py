"""Predicts the memory of evaluation and generation with a loaded model, for the report when memory runs out.

Weights are counted from the loaded model; activations come from the same declared operations as in `trimtab plan`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from trimtab.adapt.quantized import QuantizedLinear
from trimtab.adapt.spec_quantized import Quantization
from trimtab.facts.dtypes import TORCH_NAMES
from trimtab.generate.loop import DEFAULT_NEW_TOKENS
from trimtab.model import Decoder
from trimtab.plan.inference import generation_tensors, loss_tensors, total
from trimtab.plan.job import Job
from trimtab.plan.memory import PROCESS_BYTES
from trimtab.run.memory_report import PredictedMemory


def predict_generation(decoder: Decoder, rows: int, prompt: int, new_tokens: int) -> PredictedMemory:
    """Predicts the memory of generation for one batch of prompts.

    Args:
        decoder: the loaded model.
        rows: number of prompts in the batch.
        prompt: tokens of the longest prompt.
        new_tokens: maximum number of new tokens.

    Example:
        >>> predict_generation(decoder, rows=8, prompt=100, new_tokens=64).moment   # doctest: +SKIP
        'a batch of 8 prompts of at most 100 + 64 tokens, with their KV cache'
    """
    passes = generation_tensors(_job(decoder, rows, prompt, packed=False), rows, prompt, new_tokens)
    texts = "one prompt" if rows == 1 else f"a batch of {rows} prompts"
    return _predicted(
        decoder, total(passes), f"{texts} of at most {prompt} + {new_tokens} tokens, with their KV cache"
    )


def predict_prompts(
    decoder: Decoder, ids: Sequence[Sequence[int]], max_new_tokens: int | None, batch_size: int
) -> PredictedMemory:
    """Predicts the memory of the largest batch of tokenized prompts, with as many new tokens as `generate` allows."""
    longest = max(map(len, ids))
    room = max(decoder.shape.max_positions - longest, 1)
    new_tokens = max_new_tokens or min(DEFAULT_NEW_TOKENS, room)
    return predict_generation(decoder, min(batch_size, len(ids)), longest, new_tokens)


def predict_losses(decoder: Decoder, rows: int, tokens: int, *, packed: bool) -> PredictedMemory:
    """Predicts the memory of per-token losses of one batch of `rows` sequences of at most `tokens` tokens.

    Example:
        >>> predict_losses(decoder, rows=8, tokens=1024, packed=True).moment        # doctest: +SKIP
        'per-token losses of a batch of 8 × 1024 tokens'
    """
    passes = loss_tensors(_job(decoder, rows, tokens, packed=packed))
    return _predicted(decoder, total(passes), f"per-token losses of a batch of {rows} × {tokens} tokens")


def _predicted(decoder: Decoder, activations: int, moment: str) -> PredictedMemory:
    device = next(decoder.parameters()).device.type
    tensors = {id(t): t for t in itertools.chain(decoder.parameters(), decoder.buffers())}
    weights = sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())
    return PredictedMemory(
        allocated=weights + activations,
        moment=moment,
        process=weights + activations + PROCESS_BYTES.get(device, 0),
        buckets={"weights": weights, "gradients": 0, "optimizer": 0, "activations": activations, "other": 0},
        phase_allocated=weights + activations,
        host=weights + activations + PROCESS_BYTES["cpu"] if device == "cpu" else PROCESS_BYTES["cpu"],
    )


def _job(decoder: Decoder, rows: int, tokens: int, *, packed: bool) -> Job:
    norm = decoder.model.norm.weight
    dtype = _name(norm.dtype)
    backends = tuple(k.attention if packed else k.unpacked_attention for k in decoder.kernels)
    return Job(
        decoder.shape,
        batch=rows,
        tokens=tokens,
        accumulation=1,
        dtype=dtype,
        weights_dtype=dtype,
        gradient_dtype=dtype,
        optimizer="adamw_torch",
        attention=backends[0],
        layer_attention=backends,
        device=norm.device.type,
        packed=packed,
        pointwise=decoder.kernels[0].pointwise,
        loss_impl=decoder.loss_impl,
        loss_memory=decoder.loss_memory,
        quantization=_quantization(decoder, dtype),
    )


def _quantization(decoder: Decoder, dtype: str) -> Quantization | None:
    """The quantization of the packed layers; None if there are none, or if they have dequantized copies."""
    for module in decoder.modules():
        if isinstance(module, QuantizedLinear) and module.dequantized_copy is None:
            layout = module.packed_layout
            return Quantization(layout.kind, layout.block, layout.nested_block > 0, dtype, impl=layout.impl)
    return None


def _name(dtype: torch.dtype) -> str:
    """trimtab's name of a torch dtype."""
    names = {getattr(torch, torch_name): name for name, torch_name in TORCH_NAMES.items()}
    return names[dtype]
