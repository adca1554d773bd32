"""Export of a decoder as a Hugging Face folder, verified by reading it back before it is published.

Legend: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata as package_metadata
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch

from trimtab.export.reader import SAFETENSORS_DTYPES, read_tensors
from trimtab.export.receipt import Check, Receipt
from trimtab.facts.errors import ModelError
from trimtab.facts.files import sha256_of
from trimtab.facts.units import format_count
from trimtab.model.building import build, torch_dtype
from trimtab.model.decoder import Decoder
from trimtab.model.save import MAX_SHARD_BYTES, check_space, staged_folder, write_model
from trimtab.model.source import read_shape
from trimtab.model.weights import load_weights
from trimtab.text import Tokenizer
from trimtab.text import load as load_tokenizer

_PROBE_TOKENS = 32
_PROBE_TEXT = "Let f(x) = 3·x² − 2. Then f′(2) = 12; çà et là, 数学!\n\tEnd."


def export_hf(
    decoder: Decoder,
    tokenizer: Tokenizer | None,
    folder: str | Path,
    *,
    dtype: str,
    receipt: str | Path | None = None,
    config_extra: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    source: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    kind: str = "hf",
    checked: Sequence[Check] = (),
) -> Receipt:
    """Write a folder that transformers, vLLM and llama.cpp's converter load, and verify it.

    Before the folder gets its final name, an independent reader compares names, shapes and bytes of every weight with
    the model in memory, and a new decoder loaded from the files must produce bitwise identical logits.

    Args:
        decoder: the model.
        tokenizer: saved with the model; None saves no tokenizer.
        folder: must not exist, or be empty, unless `overwrite` (then it must hold a model).
        dtype: "fp32", "bf16" or "fp16" on disk.
        receipt: path of the receipt; None writes none.
        config_extra: keys of `config.json` that the shape does not contain, such as token ids; by default the
            tokenizer's BOS and EOS ids.
        generation_config: by default the tokenizer's BOS and stop tokens.
        source: the model's origin, for the receipt.
        max_shard_bytes: maximum size of a weight file.
        overwrite: replace a model folder.
        kind: kind of export, for the receipt.
        checked: checks that passed earlier, for the receipt.

    Raises:
        ModelError: the folder exists, the tokenizer does not fit, or the verification failed.
        ResourceError: not enough space.
    """
    folder = Path(folder)
    check_space(folder, decoder, dtype)
    _check_tokenizer_fits(tokenizer, decoder)
    with staged_folder(folder, overwrite=overwrite) as staging:
        write_model(
            decoder,
            staging,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            config_extra={**_token_ids(tokenizer), **(config_extra or {})},
            generation_config=generation_config or (generation_token_ids(tokenizer) if tokenizer else None),
        )
        checks = [_check_layout(decoder, staging, dtype), _check_weights(decoder, staging, dtype)]
        check, token_ids, digest = _check_logits(decoder, staging, dtype)
        checks.append(check)
        if tokenizer is not None:
            tokenizer.save(staging)
            checks.append(_check_tokenizer(tokenizer, staging))
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            for path in sorted(staging.iterdir())
        }
    result = Receipt(
        kind=kind,
        folder=str(folder),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        dtype=dtype,
        num_parameters=decoder.shape.num_parameters,
        num_tensors=len(list(decoder.shape.parameters())),
        files=files,
        checks=[*checked, *checks],
        token_ids=token_ids,
        logits_sha256=digest,
        versions=versions(),
        source=dict(source or {}),
    )
    if receipt is not None:
        result.write(receipt)
    return result


def _check_layout(decoder: Decoder, folder: Path, dtype: str) -> Check:
    """Compare names, shapes and dtypes of the files with the model, and config.json with its shape."""
    stored = read_tensors(folder)
    expected = dict(decoder.shape.parameters())
    differing = [
        name
        for name in expected.keys() | stored.keys()
        if name not in stored
        or stored[name].shape != expected.get(name)
        or stored[name].dtype != SAFETENSORS_DTYPES[dtype]
    ]
    if differing:
        raise _export_mismatch(
            f"{len(differing)} tensors differ in name, shape or dtype, {min(differing)} first"
        )
    if read_shape(folder) != decoder.shape:
        raise _export_mismatch("config.json describes a different architecture")
    return Check(
        "names and shapes", f"{len(stored)} tensors in {SAFETENSORS_DTYPES[dtype]}, config.json agrees"
    )


def _check_weights(decoder: Decoder, folder: Path, dtype: str) -> Check:
    """Compare every tensor's bytes in the files with the model in memory, cast to the stored dtype."""
    stored = read_tensors(folder)
    for name, parameter in decoder.named_parameters():
        in_memory = parameter.detach().to("cpu", torch_dtype(dtype)).contiguous().view(-1).view(torch.uint8)
        if not np.array_equal(in_memory.numpy(), stored[name].raw()):
            raise _export_mismatch(f"{name} differs between file and memory")
    count = format_count(decoder.shape.num_parameters)
    return Check("weights", f"{count} parameters byte for byte, by a reader independent of the writer")


@torch.no_grad()
def _check_logits(decoder: Decoder, folder: Path, dtype: str) -> tuple[Check, list[int], str]:
    """Compare the reloaded model's logits with the original's, both in the stored dtype on the model's device."""
    device = decoder.head_weight.device
    token_ids = probe_ids(decoder)
    num_tokens = len(token_ids)
    ids_BT = torch.tensor([token_ids], device=device)
    expected_BTV = _logits(_in_dtype(decoder, dtype, device), ids_BT)
    reloaded = build(decoder.shape, dtype=dtype, device=device, kernels=decoder.kernels)
    load_weights(reloaded, folder)
    reloaded_BTV = _logits(reloaded, ids_BT)
    if not torch.equal(reloaded_BTV, expected_BTV):
        worst = float((reloaded_BTV - expected_BTV).abs().max())
        raise _export_mismatch(f"logits differ by up to {worst:.3g}")
    digest = digest_of(reloaded_BTV)
    backends = ", ".join(dict.fromkeys(kernels.unpacked_attention for kernels in decoder.kernels))
    detail = f"bitwise identical to the model's in {dtype}, {num_tokens} tokens, {backends} attention"
    return Check("logits", detail), token_ids, digest


def probe_ids(decoder: Decoder) -> list[int]:
    """The token ids for which logits are compared."""
    num_tokens = min(_PROBE_TOKENS, decoder.shape.max_positions)
    return [(1 + 7919 * i) % decoder.shape.vocab_size for i in range(num_tokens)]


@torch.no_grad()
def probe_logits(decoder: Decoder) -> torch.Tensor:
    """fp32 logits [1, T, V] for `probe_ids`."""
    return _logits(decoder, torch.tensor([probe_ids(decoder)], device=decoder.head_weight.device))


def digest_of(logits_BTV: torch.Tensor) -> str:
    """sha256 of fp32 logits, little-endian."""
    return hashlib.sha256(logits_BTV.cpu().numpy().astype("<f4").tobytes()).hexdigest()


def versions() -> dict[str, str]:
    """Versions of the software that wrote an export."""
    return {
        "trimtab": _version("trimtab"),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
    }


def _logits(decoder: Decoder, ids_BT: torch.Tensor) -> torch.Tensor:
    training = decoder.training
    decoder.eval()  # no dropout
    try:
        return decoder.logits(decoder(ids_BT)).float()
    finally:
        decoder.train(training)


def _in_dtype(decoder: Decoder, dtype: str, device: torch.device) -> Decoder:
    """The decoder itself if all its parameters have this dtype, otherwise a converted copy."""
    if all(parameter.dtype == torch_dtype(dtype) for parameter in decoder.parameters()):
        return decoder
    copy = build(decoder.shape, dtype=dtype, device=device, kernels=decoder.kernels)
    for target, parameter in zip(copy.parameters(), decoder.parameters(), strict=True):
        target.copy_(parameter)
    return copy


def _check_tokenizer(tokenizer: Tokenizer, folder: Path) -> Check:
    """Compare the saved tokenizer with the original: fingerprint, BOS and EOS, ids of a probe text."""
    reloaded = load_tokenizer(folder)
    if reloaded.encode(_PROBE_TEXT) != tokenizer.encode(_PROBE_TEXT):
        raise _export_mismatch("the saved tokenizer returns different ids")
    if (reloaded.bos_id, reloaded.eos_id) != (tokenizer.bos_id, tokenizer.eos_id):
        raise _export_mismatch("the saved tokenizer has different BOS or EOS ids")
    if reloaded.fingerprint != tokenizer.fingerprint:
        raise _export_mismatch("the saved tokenizer has a different fingerprint")
    return Check("tokenizer", f"{tokenizer.vocab_size} tokens, fingerprint {tokenizer.fingerprint[:16]}")


def _check_tokenizer_fits(tokenizer: Tokenizer | None, decoder: Decoder) -> None:
    if tokenizer is not None and tokenizer.vocab_size > decoder.shape.vocab_size:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {decoder.shape.vocab_size}",
            "export the model with its own tokenizer",
        )


def _token_ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {} if tokenizer is None else {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}


def generation_token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """BOS and EOS ids as in transformers' generation_config.json."""
    stops = sorted(tokenizer.stop_ids)
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": stops[0] if len(stops) == 1 else stops or None}


def _export_mismatch(cause: str) -> ModelError:
    return ModelError(
        f"the written files differ from the model: {cause}",
        "no folder was written; check the disk and try again",
    )


def _version(package: str) -> str:
    try:
        return package_metadata.version(package)
    except package_metadata.PackageNotFoundError:
        return "from source"
