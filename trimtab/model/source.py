"""Detects whether a path is a Hugging Face folder or a GGUF file, and reads its shape. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from trimtab.facts.errors import ModelError
from trimtab.facts.gguf_header import GGUFHeader, is_gguf, read_gguf_header
from trimtab.facts.run_layout import config_folder
from trimtab.facts.shapes import ModelShape
from trimtab.model.families import shape_for_planning, shape_from_config, unknown_keys
from trimtab.model.families.config_json import read_config, read_model_json
from trimtab.model.families.gguf_metadata import shape_from_gguf
from trimtab.model.families.plan_only.gguf import gguf_shape_for_planning

SourceKind = Literal["hf", "gguf"]
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_GGUF_F32 = 0


def source_kind(path: str | Path) -> SourceKind:
    """Returns the format of a model: a Hugging Face folder or a GGUF file; ModelError for anything else."""
    path = Path(path)
    if path.is_dir():
        if not (path / "config.json").is_file() and (found := sorted(path.glob("*.gguf"))):
            raise ModelError(f"{path} is a folder of GGUF files", f"name the file, for instance {found[0]}")
        return "hf"
    if not path.exists():
        raise ModelError(f"{path} does not exist", "check the path")
    if is_gguf(path):
        return "gguf"
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise pickle_error(path)
    if path.suffix == ".safetensors":
        raise ModelError(
            f"{path} alone does not determine the model's shape", f"give the folder, {path.parent}"
        )
    raise ModelError(f"{path} is not a model", "give a Hugging Face model folder or a .gguf file")


def pickle_error(path: Path) -> ModelError:
    """The error for weights in a pickle, which could execute code when loaded."""
    return ModelError(
        f"{path} is a pickle, and loading one can execute code hidden in it",
        "use the model's safetensors files (most hubs offer a converted copy)",
    )


def read_shape(path: str | Path) -> ModelShape:
    """Reads the shape of the model at a path, from its `config.json` or its GGUF header; does not read weights.

    Example:
        >>> read_shape("SmolLM2-135M.gguf").num_layers  # doctest: +SKIP
        30
    """
    path = Path(path)
    if source_kind(path) == "hf":
        return shape_from_config(read_config(path), str(path / "config.json"))
    return shape_of_header(read_gguf_header(path))


def read_shape_for_planning(path: str | Path) -> ModelShape:
    """Reads the shape of the model at a path, for planning; also of families that cannot be trained yet.

    Args:
        path: a Hugging Face folder, a `config.json` by itself, or a GGUF file; no weights are read.

    Example:
        >>> read_shape_for_planning("Mixtral-8x7B/config.json").num_active_parameters  # doctest: +SKIP
        12879925248
    """
    path = Path(path)
    if path.suffix == ".json" and path.is_file():
        return shape_for_planning(read_model_json(path), str(path))
    if source_kind(path) == "hf":
        return shape_for_planning(read_config(path), str(path / "config.json"))
    return shape_of_header(read_gguf_header(path), plan_only=True)


def unknown_config_keys(path: str | Path) -> list[str]:
    """Returns the keys of a model's config.json that its family neither reads nor lists as harmless; none for GGUF.

    Example:
        >>> unknown_config_keys("my-model")  # doctest: +SKIP
        ['logit_scale']
    """
    path = Path(path)
    if source_kind(path) != "hf":
        return []
    return unknown_keys(read_config(path), str(path / "config.json"))


def shape_of_header(header: GGUFHeader, *, plan_only: bool = False) -> ModelShape:
    """Returns the shape described by a GGUF header and, for Llama 3, by its tensor of RoPE frequency divisors.

    Args:
        header: the file's header.
        plan_only: whether plan-only families, which cannot be trained yet, are accepted.
    """
    embeddings = header.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.dims) != 2:
        raise ModelError(
            f"{header.path} has no embeddings (token_embd.weight)", "download the file of the complete model"
        )
    describe = gguf_shape_for_planning if plan_only else shape_from_gguf
    return describe(
        header.metadata,
        header.tensors.keys(),
        vocab_size=embeddings.dims[0],
        rope_divisors=_rope_divisors(header),
        where=str(header.path),
    )


def read_token_ids(path: str | Path) -> dict[str, Any]:
    """Reads `bos_token_id`, `eos_token_id` and `pad_token_id` from the source, for the saved config."""
    path = Path(path)
    if source_kind(path) == "gguf":
        metadata = read_gguf_header(path).metadata
        stated = {key: metadata.get(f"tokenizer.ggml.{key}") for key in ("bos_token_id", "eos_token_id")}
        return {**stated, "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id")}
    config = read_config(path)
    return {key: config.get(key) for key in _TOKEN_KEYS}


def read_generation_config(path: str | Path) -> dict[str, Any] | None:
    """Reads a Hugging Face folder's `generation_config.json`; None if there is none."""
    file = config_folder(Path(path)) / "generation_config.json"
    return read_model_json(file) if file.is_file() else None


def _rope_divisors(header: GGUFHeader) -> list[float] | None:
    import numpy as np

    tensor = header.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    count = tensor.dims[0] if len(tensor.dims) == 1 else 0
    if tensor.type_id != _GGUF_F32 or not count or tensor.offset + 4 * count > header.file_size:
        raise ModelError(f"{header.path}: rope_freqs.weight is malformed", "download the file again")
    values = np.fromfile(header.path, dtype="<f4", count=count, offset=tensor.offset)
    return [float(value) for value in values]
