"""JSON form of the resolved configuration, for choices.json and plan.json. Reads all earlier versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from trimtab.adapt.spec import LoraSettings
from trimtab.adapt.spec_quantized import Quantization
from trimtab.plan.resolved import (
    AttentionConfig,
    CompileConfig,
    CudaGraphsConfig,
    LayerAttention,
    LossConfig,
    MemoryPlan,
    OptimizerConfig,
    ParallelConfig,
    PointwiseConfig,
    PrecisionConfig,
    Resolved,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Section = TypeVar("Section", bound="DataclassInstance")
VERSION = 2
"""Version of choices.json. Version 1 had no `parallel`; its first files also lack the optional sections below."""
REQUIRED = (
    "device",
    "dtype",
    "weights_dtype",
    "gradient_dtype",
    "attention",
    "precision",
    "threads",
    "deterministic",
)
"""Keys present in every version."""
_RENAMED_MEMORY_KEYS = {"unpacked_layers": "dequantized_layers"}


def resolved_to_dict(resolved: Resolved) -> dict[str, Any]:
    """Returns plain data; `resolved_from_dict` is the inverse."""
    precision, loss = resolved.precision, resolved.loss
    objective = {"label_smoothing": loss.label_smoothing, "z_loss": loss.z_loss}
    return {
        "device": resolved.device,
        "dtype": precision.dtype,
        "weights_dtype": precision.weights_dtype,
        "gradient_dtype": precision.gradient_dtype,
        "attention": _attention_to_dict(resolved.attention),
        "precision": precision.description,
        "threads": resolved.threads,
        "deterministic": resolved.deterministic,
        "optimizer": dataclasses.asdict(resolved.optimizer),
        "compile": _switch_to_dict(resolved.compile),
        "loss": {
            "impl": loss.impl,
            "memory_bytes": loss.memory_bytes,
            "reason": loss.reason,
            **{name: value for name, value in objective.items() if value},
        },
        "pointwise": dataclasses.asdict(resolved.pointwise),
        "graphs": _switch_to_dict(resolved.graphs),
        "memory": None if resolved.memory is None else memory_to_dict(resolved.memory),
        "lora": None if resolved.lora is None else resolved.lora.to_dict(),
        "quantization": None if resolved.quantization is None else dataclasses.asdict(resolved.quantization),
        "parallel": dataclasses.asdict(resolved.parallel),
    }


def resolved_from_dict(data: Mapping[str, Any], num_layers: int) -> Resolved:
    """Returns a resolved configuration from choices.json; other keys of that file are ignored.

    Args:
        data: at least the keys `REQUIRED`, and `recipe` in files from before `optimizer` was written.
        num_layers: layers of the model: the file has one attention backend if all layers share it.
    """
    lora, quantization = adapters_from_dict(data)
    loss = _section(LossConfig, data.get("loss"))
    memory = data.get("memory")
    return Resolved(
        device=data["device"],
        threads=data["threads"],
        deterministic=data["deterministic"],
        precision=PrecisionConfig(
            data["dtype"], data["weights_dtype"], data["gradient_dtype"], data["precision"]
        ),
        attention=_attention_from_dict(data["attention"], num_layers),
        optimizer=_optimizer_from_dict(data),
        loss=loss,
        pointwise=_section(PointwiseConfig, data.get("pointwise")),
        compile=_section(CompileConfig, _enabled(data.get("compile"))),
        graphs=_section(CudaGraphsConfig, _enabled(data.get("graphs"))),
        # The first memory plans have no loss memory: it is the loss section's.
        memory=memory_from_dict({"loss_memory": loss.memory_bytes, **memory}) if memory else None,
        lora=lora,
        quantization=quantization,
        parallel=_section(ParallelConfig, data.get("parallel")),
    )


def adapters_from_dict(data: Mapping[str, Any]) -> tuple[LoraSettings | None, Quantization | None]:
    """Returns the adapters and the quantization of frozen weights from choices.json; other keys are optional.

    Example:
        >>> adapters_from_dict({"lora": {"r": 8}, "quantization": {"kind": "int8", "block": 0}})[1].kind
        'int8'
    """
    lora, quantization = data.get("lora"), data.get("quantization")
    return (
        None if lora is None else LoraSettings.from_dict(lora),
        None if quantization is None else _section(Quantization, quantization),
    )


def memory_to_dict(memory: MemoryPlan) -> dict[str, Any]:
    """Returns plain data, including the plan's description."""
    plain = dataclasses.asdict(memory)
    return {**plain, "recompute": list(memory.recompute), "sentence": memory.description}


def memory_from_dict(data: Mapping[str, Any]) -> MemoryPlan:
    """Returns a memory plan; the inverse of `memory_to_dict`.

    Example:
        >>> memory_from_dict({"recompute": ["none"], "unpacked_layers": 1}).dequantized_layers  # the former key
        1
    """
    renamed = {_RENAMED_MEMORY_KEYS.get(key, key): value for key, value in data.items()}
    return _section(MemoryPlan, {**renamed, "recompute": tuple(data["recompute"])})


def _section(kind: type[Section], data: Mapping[str, Any] | None) -> Section:
    """One section of the file; missing keys get defaults, unknown keys are ignored."""
    if not isinstance(data, Mapping | None):
        raise ValueError(f"a section of it is a {type(data).__name__} and not an object")
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in (data or {}).items() if name in names})


def _optimizer_from_dict(data: Mapping[str, Any]) -> OptimizerConfig:
    """The optimizer section, or the recipe's optimizer in files from before implementations were selectable."""
    if data.get("optimizer"):
        return _section(OptimizerConfig, data["optimizer"])
    name = data["recipe"]["optim"]
    return OptimizerConfig(name, "reference" if name == "adamw_8bit" else "torch", "set in the recipe")


def _attention_to_dict(attention: AttentionConfig) -> dict[str, Any]:
    """One backend with its reasons if all layers share the choice; otherwise the backends of each layer (`layers`), and
    the reasons for each kind of layer (`kinds`)."""
    first = attention.layers[0]
    kinds: dict[LayerAttention, list[int]] = {}
    for index, layer in enumerate(attention.layers):
        kinds.setdefault(layer, []).append(index)
    if len(kinds) > 1:
        return {
            **_reasons_to_dict(first),
            "layers": [{"packed": layer.packed, "unpacked": layer.unpacked} for layer in attention.layers],
            "kinds": [{"layers": indices, **_reasons_to_dict(kind)} for kind, indices in kinds.items()],
        }
    different = {} if first.packed == first.unpacked else {"whole": first.unpacked}
    return {"impl": first.packed, **_reasons_to_dict(first), **different}


def _reasons_to_dict(layer: LayerAttention) -> dict[str, Any]:
    return {"reason": layer.reason, "rejected": [list(r) for r in layer.rejected]}


def _attention_from_dict(data: Mapping[str, Any], num_layers: int) -> AttentionConfig:
    """Files of earlier versions have no `kinds`: the same reasons for all layers."""
    if "layers" not in data:
        return AttentionConfig((_layer_attention(data["impl"], data.get("whole"), data),) * num_layers)
    reasons = {index: kind for kind in data.get("kinds", ()) for index in kind["layers"]}
    return AttentionConfig(
        tuple(
            _layer_attention(layer["packed"], layer["unpacked"], reasons.get(index, data))
            for index, layer in enumerate(data["layers"])
        )
    )


def _layer_attention(packed: str, unpacked: str | None, reasons: Mapping[str, Any]) -> LayerAttention:
    rejected = tuple((impl, reason) for impl, reason in reasons.get("rejected", ()))
    return LayerAttention(packed, unpacked or packed, reasons.get("reason", ""), rejected)


def _switch_to_dict(config: CompileConfig | CudaGraphsConfig) -> dict[str, Any]:
    """`enabled` is called `on` in the file."""
    plain = dataclasses.asdict(config)
    return {"on": plain.pop("enabled"), **plain}


def _enabled(data: Mapping[str, Any] | None) -> dict[str, Any]:
    """The inverse of `_switch_to_dict`; missing keys are allowed."""
    if not isinstance(data, Mapping | None):
        raise ValueError(f"a section of it is a {type(data).__name__} and not an object")
    return {{"on": "enabled"}.get(name, name): value for name, value in (data or {}).items()}
