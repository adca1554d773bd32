"""Validates a file's tensors against a model: names, dimensions, number of layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape


def check_layers(shape: ModelShape, num_tensors: int, key: str, where: str) -> None:
    """Raises ModelError for more layers than tensors, before other checks loop over all layers."""
    if shape.num_layers > num_tensors:
        raise ModelError(
            f"{where} has {num_tensors} tensors, too few for a model whose {key} is {shape.num_layers}",
            "download the weights and config.json of the same model from the same source",
        )


def check_names(wanted: Iterable[str], found: Mapping[str, str], where: str) -> None:
    """Raises ModelError that names the first missing and unexpected tensors.

    `found` maps a tensor's name in `wanted` to its name in the file.
    """
    wanted = list(wanted)
    wanted_set = set(wanted)
    missing = [name for name in wanted if name not in found]
    extra = [stored for name, stored in found.items() if name not in wanted_set]
    if missing:
        raise ModelError(
            f"{where} is missing {len(missing)} of {len(wanted)} tensors: {_first_names(missing)}",
            "complete the download, or get the config.json that belongs to these weights",
        )
    if extra:
        raise ModelError(
            f"{where} has {len(extra)} unexpected tensors: {_first_names(extra)}",
            "get the config.json that belongs to these weights, or weights without an adapter or extra head",
        )


def check_dims(
    name: str, found: tuple[int, ...], wanted: tuple[int, ...], where: str, shape: ModelShape
) -> None:
    """Raises ModelError for a tensor whose size differs from the model's, with the config values that determine it."""
    if found != wanted:
        raise ModelError(
            f"{where}: {name} has shape {list(found)}, but the model has {list(wanted)}"
            + _explain_size(name, found, wanted, shape),
            "download the weights and config.json of the same model from the same source",
        )


def _explain_size(name: str, found: tuple[int, ...], wanted: tuple[int, ...], shape: ModelShape) -> str:
    """The config values that may explain a differing size."""
    values = {"vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size}
    if name.startswith("model.layers."):
        block = shape.block_of(name)
        attention, feed_forward = block.attention, block.dense
        values |= {
            "intermediate_size": feed_forward.width,
            "head_dim": attention.head_dim,
            "query heads × head_dim": attention.q_size,
            "key/value heads × head_dim": attention.kv_size,
        }
        if attention.fused_qkv:
            values["(query heads + 2 · key/value heads) × head_dim"] = sum(attention.qkv_sizes)
        if feed_forward.fused_gate_up:
            values["2 · intermediate_size"] = 2 * feed_forward.width
    differing = [dim for index, dim in enumerate(wanted) if found[index : index + 1] != (dim,)]
    named = [f"{key} is {value}" for key, value in values.items() if value in differing]
    return f" ({', '.join(named)})" if named else ""


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
