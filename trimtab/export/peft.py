"""Export of an adapter in PEFT's format, verified by reading it back before it is published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimtab.adapt.lora import adapter_names, remove_adapter, save_active_adapters, use_adapters
from trimtab.adapt.peft_config import CONFIG
from trimtab.adapt.peft_files import load_adapter, save_adapter, stored_tensors
from trimtab.adapt.saved_modules import rounded_modules
from trimtab.adapt.spec import DEFAULT
from trimtab.export.hf import digest_of, generation_token_ids, probe_ids, probe_logits, versions
from trimtab.export.reader import read_tensors
from trimtab.export.receipt import Check, Receipt
from trimtab.facts.base_weights import BaseWeights
from trimtab.facts.errors import ModelError
from trimtab.facts.files import sha256_of, write_json
from trimtab.facts.units import format_count
from trimtab.model.decoder import Decoder
from trimtab.model.save import staged_folder
from trimtab.text import Tokenizer

_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_RELOADED = "read_back"
"""The name under which the written adapter is loaded next to the original one."""


def export_peft(
    decoder: Decoder,
    folder: str | Path,
    *,
    base: BaseWeights,
    base_name: str | None = None,
    adapter: str = DEFAULT,
    receipt: str | Path | None = None,
    source: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    tokenizer: Tokenizer | None = None,
) -> Receipt:
    """Write a folder that peft loads, and verify it.

    Before the folder gets its final name, an independent reader compares every tensor's bytes with the model in
    memory, and the written adapter, loaded onto the same base, must produce bitwise identical logits.

    Args:
        decoder: with the adapter on it.
        folder: must not exist, or be empty, unless `overwrite` (then it must hold an adapter).
        base: the base model's weights; `BaseWeights(NAME)` if only the name is known.
        base_name: another hub id or folder from which PEFT loads the base (`base_model_name_or_path`); the source's
            name if None.
        adapter: the adapter's name.
        receipt: path of the receipt; None writes none.
        source: the adapter's origin, for the receipt.
        overwrite: replace an adapter's folder.
        tokenizer: saved with the adapter, if it differs from the base's.

    Raises:
        ModelError: the folder exists, the verification failed, or loading rounded the adapter's weights.
    """
    folder = Path(folder)
    # Revision and checksums of the source do not apply to another base.
    other_base = base_name not in (None, base.source)
    rounded = rounded_modules(decoder, adapter)
    if rounded:
        loaded_dtype = str(decoder.get_parameter(rounded[0]).dtype).removeprefix("torch.")
        raise ModelError(
            f"{rounded[0].removesuffix('.weight')} was rounded to {loaded_dtype} when it was loaded",
            'load the model with dtype="fp32" to write it as it was trained, or use `trimtab export peft`',
        )
    with _only_adapter(decoder, adapter), staged_folder(folder, overwrite=overwrite, holds=CONFIG) as staging:
        save_adapter(
            decoder,
            staging,
            adapter=adapter,
            base_name=base_name or base.source,
            revision=None if other_base else base.revision,
            base=base if base.files and not other_base else None,
        )
        tensors = stored_tensors(decoder, adapter)
        checks = [_check_bytes(tensors, staging)]
        check, digest = _check_logits(decoder, staging, adapter)
        checks.append(check)
        if tokenizer is not None:
            tokenizer.save(staging)
            write_json(staging / "generation_config.json", generation_token_ids(tokenizer))
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            for path in sorted(staging.iterdir())
        }
    result = Receipt(
        kind="peft",
        folder=str(folder),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        dtype=", ".join(sorted({_DTYPE_NAMES[tensor.dtype] for tensor in tensors.values()})),
        num_parameters=sum(tensor.numel() for tensor in tensors.values()),
        num_tensors=len(tensors),
        files=files,
        checks=checks,
        token_ids=probe_ids(decoder),
        logits_sha256=digest,
        versions=versions(),
        source={**(source or {}), "base": base.to_dict()},
    )
    if receipt is not None:
        result.write(receipt)
    return result


@contextmanager
def _only_adapter(decoder: Decoder, adapter: str) -> Iterator[None]:
    """Activate only this adapter; restore the active adapters afterwards."""
    restore = save_active_adapters(decoder)
    use_adapters(decoder, adapter)
    try:
        yield
    finally:
        restore()


def _check_bytes(tensors: dict[str, torch.Tensor], folder: Path) -> Check:
    """Compare names, shapes and bytes of the file with the model in memory."""
    stored = read_tensors(folder)
    differing = sorted(stored.keys() ^ tensors.keys())
    if differing:
        raise _export_mismatch(f"{differing[0]} is only in the file or only in the model")
    for name, tensor in tensors.items():
        in_memory = tensor.to("cpu").contiguous().view(-1).view(torch.uint8)
        if stored[name].shape != tuple(tensor.shape) or not np.array_equal(
            in_memory.numpy(), stored[name].raw()
        ):
            raise _export_mismatch(f"{name} differs between file and memory")
    count = format_count(sum(tensor.numel() for tensor in tensors.values()))
    return Check(
        "weights",
        f"{len(tensors)} tensors, {count} parameters byte for byte, by a reader independent of the writer",
    )


def _check_logits(decoder: Decoder, folder: Path, adapter: str) -> tuple[Check, str]:
    expected_BTV = probe_logits(decoder)
    if not bool(torch.isfinite(expected_BTV).all()):
        raise ModelError(
            "the model's output with this adapter is NaN or infinite",
            "export an earlier checkpoint (--checkpoint), or train again with a lower learning_rate",
        )
    reloaded = _RELOADED
    while reloaded in adapter_names(decoder):
        reloaded += "_"
    try:
        load_adapter(decoder, folder, adapter=reloaded)
        reloaded_BTV = probe_logits(decoder)
    finally:
        if reloaded in adapter_names(decoder):
            remove_adapter(decoder, reloaded)
        use_adapters(decoder, adapter)
    if not torch.equal(reloaded_BTV, expected_BTV):
        worst = float((reloaded_BTV - expected_BTV).abs().max())
        raise _export_mismatch(f"logits differ by up to {worst:.3g}")
    use_adapters(decoder, [])
    distance = float((probe_logits(decoder) - expected_BTV).abs().max())
    use_adapters(decoder, adapter)
    num_tokens = expected_BTV.shape[1]
    detail = (
        f"bitwise identical to the adapter's on its base, {num_tokens} tokens; they differ from the base's by up to "
        f"{distance:.3g}"
    )
    return Check("logits", detail), digest_of(reloaded_BTV)


def _export_mismatch(cause: str) -> ModelError:
    return ModelError(
        f"the written files differ from the adapter: {cause}",
        "no folder was written; check the disk and try again",
    )
