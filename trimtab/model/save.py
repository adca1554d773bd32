"""Saves a decoder as a folder that transformers loads, atomically."""

from __future__ import annotations

import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from trimtab.facts.dtypes import TORCH_NAMES, nbytes
from trimtab.facts.errors import ModelError, ResourceError
from trimtab.facts.files import sync_file, sync_folder, temporary_path, write_json
from trimtab.facts.units import format_bytes
from trimtab.model.building import torch_dtype
from trimtab.model.decoder import Decoder
from trimtab.model.families import config_from_shape
from trimtab.model.weights_safetensors import INDEX, SINGLE

MAX_SHARD_BYTES = 5_000_000_000
_SPARE_BYTES = 16 * 2**20  # config, index, tokenizer and file system overhead


def save_folder(
    decoder: Decoder,
    folder: str | Path,
    *,
    dtype: str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
    config_extra: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Saves a model folder: `config.json` and safetensors, one file or numbered shards with an index.

    The folder appears atomically: complete or not at all. The tokenizer is saved by `trimtab.text`.

    Args:
        decoder: the model, in any dtype, on any device.
        folder: must not exist, or be empty, unless `overwrite`.
        dtype: "fp32", "bf16" or "fp16" on disk.
        max_shard_bytes: the maximum size of a weight file.
        metadata: strings stored in the safetensors headers. If there are any, files of equal models differ, because
            the safetensors library writes the strings in random order.
        config_extra: further keys of `config.json`, such as `eos_token_id` (`read_token_ids`).
        generation_config: contents of `generation_config.json`, if known.
        overwrite: replace a folder that contains a model.

    Returns:
        The files written.
    """
    folder = Path(folder)
    check_space(folder, decoder, dtype)
    with staged_folder(folder, overwrite=overwrite) as staging:
        names = write_model(
            decoder,
            staging,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            metadata=metadata,
            config_extra=config_extra,
            generation_config=generation_config,
        )
    return [folder / name for name in names]


def write_model(
    decoder: Decoder,
    folder: Path,
    *,
    dtype: str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
    config_extra: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> list[str]:
    """Writes the files of `save_folder` into an existing folder; returns their names."""
    config = config_from_shape(decoder.shape, dtype=TORCH_NAMES[dtype], extra=config_extra)
    names = ["config.json"]
    write_json(folder / "config.json", config)
    if generation_config is not None:
        write_json(folder / "generation_config.json", generation_config)
        names.append("generation_config.json")
    # transformers rejects files without a framework in their metadata.
    header = {**(metadata or {}), "format": "pt"}
    shards = _shards(decoder, dtype, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(
            {name: _stored(name, tensor, dtype) for name, tensor in shard.items()}, folder / file, header
        )
        weight_map.update(dict.fromkeys(shard, file))
        names.append(file)
    if len(shards) > 1:
        total = sum(nbytes(dtype, tensor.numel()) for shard in shards for tensor in shard.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        names.append(INDEX)
    return names


def check_space(folder: Path, decoder: Decoder, dtype: str) -> None:
    """Raises ResourceError if the disk does not have enough space for the model."""
    needed = nbytes(dtype, decoder.shape.num_parameters) + _SPARE_BYTES
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ResourceError(
            f"the model needs {format_bytes(needed)} and {place} has {format_bytes(free)} free",
            "free some space or choose another folder",
        )


@contextmanager
def staged_folder(folder: Path, *, overwrite: bool = False, holds: str = "config.json") -> Iterator[Path]:
    """Yields a temporary folder that replaces `folder` if the block succeeds, and is deleted otherwise.

    An existing folder is only overwritten if it contains the file `holds`, which identifies a model or an adapter.
    """
    check_replaceable(folder, overwrite, holds)
    staging = temporary_path(folder)
    try:
        staging.mkdir(parents=True)
    except OSError as err:
        raise ResourceError(f"{folder.parent} cannot be written ({err})", "choose another folder") from err
    try:
        yield staging
        sync_folder(staging)
        old = folder.with_name(f".{folder.name}.old-{uuid.uuid4().hex[:8]}") if folder.exists() else None
        if old is not None:
            folder.rename(old)
        staging.rename(folder)
        sync_folder(folder.parent)
        if old is not None:
            shutil.rmtree(old)
    except OSError as err:
        raise ResourceError(
            f"{folder} could not be written ({err})", "check the free disk space and the permissions"
        ) from err
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_replaceable(
    folder: Path, overwrite: bool, holds: str = "config.json", *, spelled: str = "overwrite=True"
) -> None:
    """Raises ModelError for a folder that is not empty, unless it may be overwritten and contains the file `holds`.

    `spelled` is the option that requests overwriting, for the message: an argument, or a flag of the command line.
    """
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if not folder.exists():
        return
    if not overwrite:
        raise ModelError(
            f"{folder} exists already",
            f"choose another folder, or replace it with {spelled}",
        )
    if not folder.is_dir() or not (folder / holds).is_file():
        what = "a model" if holds == "config.json" else "an adapter"
        raise ModelError(
            f"{folder} is not {what} folder",
            f"choose another folder: only a folder with {holds} in it is overwritten",
        )


def _shards(decoder: Decoder, dtype: str, max_shard_bytes: int) -> list[dict[str, torch.Tensor]]:
    """Splits parameters, in order, into shards of at most this size; packed weights are not included."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, parameter in decoder.named_parameters():
        if not parameter.is_floating_point():
            continue
        size = nbytes(dtype, parameter.numel())
        if filled and filled + size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = parameter.detach()
        filled += size
    return shards


def _stored(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Converts a tensor for storage: on the CPU, contiguous, in the requested dtype; raises if it is not finite."""
    stored = tensor.to("cpu", torch_dtype(dtype)).contiguous()
    if not bool(torch.isfinite(stored).all()):
        finite = bool(torch.isfinite(tensor).all())
        raise ModelError(
            f"{name} " + (f"overflows in {dtype}" if finite else "contains NaN or infinity"),
            "save as bf16 or fp32" if finite else "the training diverged; use an earlier checkpoint",
        )
    return stored


def write_tensors(tensors: dict[str, torch.Tensor], path: Path, header: Mapping[str, str]) -> None:
    """Writes a safetensors file with the umask's permissions, and flushes it to disk (fsync).

    The library creates files with mode 0600 regardless of the umask.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(tensors, path, metadata=dict(header))
    except SafetensorError as err:
        raise ResourceError(f"{path.name} could not be written ({err})", "check the free disk space") from err
    path.chmod(mode)
    sync_file(path)
