"""Export of a model with its adapters merged, as a Hugging Face folder with a receipt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trimtab.adapt.merging import merge_adapters
from trimtab.export.hf import export_hf, probe_logits
from trimtab.export.receipt import Check, Receipt
from trimtab.facts.errors import ModelError
from trimtab.facts.units import format_count
from trimtab.model.decoder import Decoder
from trimtab.model.save import check_replaceable
from trimtab.text import Tokenizer

MAX_LOGITS_ERROR = 1e-4
"""Largest difference between the logits of the merged model and of base and adapter, relative to the logits' rms, in
fp32; rounding alone causes 2e-6 with SmolLM2's shape."""


def export_merged(
    decoder: Decoder, tokenizer: Tokenizer | None, folder: str | Path, *, dtype: str, **options: Any
) -> Receipt:
    """Merge a decoder's active adapters into its weights, in place, and write the result as `export_hf` does.

    Before anything is written, the merged weights are checked to be finite and to differ from the base's in `dtype`,
    and the merged model's logits to match those of base and adapter.

    Args:
        decoder: in fp32, with the adapters active; without adapters afterwards.
        tokenizer: saved with the model.
        folder: must not exist, or be empty, unless `overwrite`.
        dtype: "fp32", "bf16" or "fp16" on disk.
        options: as in `export_hf`.

    Raises:
        ModelError: the merge changes nothing, is not finite or changes the logits, or the verification of the
            files failed.
    """
    # Before anything is changed: merging cannot be undone.
    check_replaceable(Path(folder), bool(options.get("overwrite")))
    loaded_dtype = decoder.model.embed_tokens.weight.dtype
    if loaded_dtype != torch.float32:
        raise ModelError(
            f"the model is loaded in {str(loaded_dtype).removeprefix('torch.')}, in which a merge rounds twice",
            'load it with dtype="fp32", or use `trimtab merge`',
        )
    expected_BTV = probe_logits(decoder)
    if not bool(torch.isfinite(expected_BTV).all()):
        raise ModelError(
            "the model's output with this adapter is NaN or infinite",
            "nothing was written; merge an earlier checkpoint (--checkpoint), or train again with a lower "
            "learning_rate",
        )
    merged = merge_adapters(decoder, dtype=dtype)
    merged_BTV = probe_logits(decoder)
    rms = float(expected_BTV.square().mean().sqrt())
    worst = float((merged_BTV - expected_BTV).abs().max()) / max(rms, torch.finfo(torch.float32).tiny)
    if not worst <= MAX_LOGITS_ERROR:
        raise ModelError(
            f"the merged model's logits differ from those of base and adapter by {worst:.3g} of their rms, and at most "
            f"{MAX_LOGITS_ERROR:g} is allowed: adding large updates to the weights loses precision",
            "nothing was written; use the adapter unmerged (`trimtab export peft` writes a run's), or merge an "
            "earlier checkpoint (--checkpoint)",
        )
    check = Check(
        "merge",
        f"{merged.layers} layers, {format_count(merged.changed)} of {format_count(merged.elements)} parameters changed "
        f"in {dtype}; logits within {worst:.2g} of base and adapter",
    )
    return export_hf(decoder, tokenizer, folder, dtype=dtype, kind="merge", checked=[check], **options)
