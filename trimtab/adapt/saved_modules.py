"""Switches modules that adapters fully replace (`modules_to_save`).

A parameter has the values of the active adapter or of the base model. The values of inactive adapters are stored here
when they are switched off, including changes since they were loaded: training, moves to another device, casts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from trimtab.facts.errors import RecipeError

BASE = ""
"""Stands for the base model in place of an adapter's name."""


@dataclass
class _SavedModules:
    """The replaced modules of a decoder."""

    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=lambda: {BASE: {}})
    """Stored tensors by adapter, then by parameter."""
    rounded: dict[str, list[str]] = field(default_factory=dict)
    """By adapter: parameters that were rounded when they were loaded."""
    active: dict[str, str] = field(default_factory=dict)
    """By parameter: the adapter whose values it currently has; absent for the base's."""


def _saved_modules(decoder: nn.Module) -> _SavedModules:
    found: _SavedModules = decoder.__dict__.setdefault("saved_modules", _SavedModules())
    return found


def store_modules(decoder: nn.Module, adapter: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Stores an adapter's replacements of parameters; they take effect at its next `use_adapters`."""
    parameters, saved = dict(decoder.named_parameters()), _saved_modules(decoder)
    mine = {
        name: tensor.to(parameters[name].device, parameters[name].dtype) for name, tensor in tensors.items()
    }
    saved.tensors[adapter] = mine
    saved.rounded[adapter] = [name for name, tensor in tensors.items() if _lost_precision(mine[name], tensor)]
    for name in tensors:
        saved.tensors[BASE].setdefault(name, parameters[name].data)


def resolve_modules(decoder: nn.Module, wanted: Sequence[str]) -> dict[str, str]:
    """Maps each replaceable parameter to one of the wanted adapters or the base; RecipeError if two replace it."""
    tensors, chosen = _saved_modules(decoder).tensors, {}
    for name in tensors[BASE]:
        replacing = [adapter for adapter in wanted if name in tensors.get(adapter, {})]
        if len(replacing) > 1:
            raise RecipeError(
                f"adapters {' and '.join(replacing)} both replace {name.removesuffix('.weight')}",
                "use one at a time",
            )
        chosen[name] = replacing[0] if replacing else BASE
    return chosen


def switch_modules(decoder: nn.Module, chosen: Mapping[str, str]) -> None:
    """Switches parameters to these adapters' values, and stores the current ones."""
    parameters, saved = dict(decoder.named_parameters()), _saved_modules(decoder)
    for name, adapter in chosen.items():
        parameter, before = parameters[name], saved.active.get(name, BASE)
        if adapter != before:
            saved.tensors[before][name] = parameter.data
            parameter.data = saved.tensors[adapter][name].to(parameter.device, parameter.dtype)
            saved.active[name] = adapter


def drop_modules(decoder: nn.Module, adapter: str) -> None:
    """Removes the tensors of an inactive adapter."""
    saved = _saved_modules(decoder)
    saved.tensors.pop(adapter, None)
    saved.rounded.pop(adapter, None)


def discard_stored_modules(decoder: nn.Module) -> None:
    """Makes the current values permanent by dropping all stored ones."""
    decoder.__dict__.pop("saved_modules", None)


def replaced_modules(decoder: nn.Module) -> dict[str, torch.Tensor]:
    """The base's values, by name, of the parameters that an active adapter replaces."""
    saved = _saved_modules(decoder)
    return {name: saved.tensors[BASE][name] for name, adapter in saved.active.items() if adapter != BASE}


def rounded_modules(decoder: nn.Module, adapter: str) -> list[str]:
    """Parameters that an adapter replaces and that were rounded when it was loaded: the model's dtype is narrower."""
    return _saved_modules(decoder).rounded.get(adapter, [])


def _lost_precision(stored: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether storing a tensor in this dtype changed its values."""
    both = torch.promote_types(stored.dtype, tensor.dtype)
    return both != stored.dtype and not torch.equal(stored.to(tensor.device, both), tensor.to(both))
