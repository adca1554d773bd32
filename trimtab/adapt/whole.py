"""Modules that adapters replace as a whole (`modules_to_save`): switched with the adapter, the base's own kept beside.

A parameter holds the numbers of whoever is in use; those of the others wait here, as they were when they were switched
off: trained, moved to another device or cast since they were loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from trimtab.facts.errors import RecipeError

BASE = ""
"""In the place of an adapter's name: the model's own."""


@dataclass
class _Whole:
    """What a decoder holds of it."""

    kept: dict[str, dict[str, torch.Tensor]] = field(default_factory=lambda: {BASE: {}})
    """By adapter, then by parameter."""
    rounded: dict[str, list[str]] = field(default_factory=dict)
    """By adapter: parameters that lost digits when they were loaded."""
    in_use: dict[str, str] = field(default_factory=dict)
    """By parameter: whose numbers it holds; the base's where it is not named."""


def _of(decoder: nn.Module) -> _Whole:
    found: _Whole = decoder.__dict__.setdefault("whole_modules", _Whole())
    return found


def keep_whole(decoder: nn.Module, adapter: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """An adapter's own tensors for parameters of the model, to be used from its next `use_adapters` on."""
    parameters, whole = dict(decoder.named_parameters()), _of(decoder)
    mine = {
        name: tensor.to(parameters[name].device, parameters[name].dtype) for name, tensor in tensors.items()
    }
    whole.kept[adapter] = mine
    whole.rounded[adapter] = [name for name, tensor in tensors.items() if _has_lost(mine[name], tensor)]
    for name in tensors:
        whole.kept[BASE].setdefault(name, parameters[name].data)


def choose_whole(decoder: nn.Module, wanted: Sequence[str]) -> dict[str, str]:
    """For each parameter that some adapter replaces, whose it is with these; RecipeError where two replace it."""
    kept, chosen = _of(decoder).kept, {}
    for name in kept[BASE]:
        having = [adapter for adapter in wanted if name in kept.get(adapter, {})]
        if len(having) > 1:
            raise RecipeError(
                f"adapters {' and '.join(having)} both replace {name.removesuffix('.weight')}",
                "use one at a time",
            )
        chosen[name] = having[0] if having else BASE
    return chosen


def switch_whole(decoder: nn.Module, chosen: Mapping[str, str]) -> None:
    """Gives parameters the numbers of these adapters; what they hold now is kept as it is."""
    parameters, whole = dict(decoder.named_parameters()), _of(decoder)
    for name, adapter in chosen.items():
        parameter, before = parameters[name], whole.in_use.get(name, BASE)
        if adapter != before:
            whole.kept[before][name] = parameter.data
            parameter.data = whole.kept[adapter][name].to(parameter.device, parameter.dtype)
            whole.in_use[name] = adapter


def drop_whole(decoder: nn.Module, adapter: str) -> None:
    """Forgets the tensors of an adapter that is not in use."""
    whole = _of(decoder)
    whole.kept.pop(adapter, None)
    whole.rounded.pop(adapter, None)


def forget_whole(decoder: nn.Module) -> None:
    """Parameters stay what they are now: there is nothing to switch back to."""
    decoder.__dict__.pop("whole_modules", None)


def replaced_modules(decoder: nn.Module) -> dict[str, torch.Tensor]:
    """The base's own numbers, by name, of the parameters that an adapter in use replaces."""
    whole = _of(decoder)
    return {name: whole.kept[BASE][name] for name, adapter in whole.in_use.items() if adapter != BASE}


def rounded_modules(decoder: nn.Module, adapter: str) -> list[str]:
    """Parameters that an adapter replaces and that lost digits here: the model's format is narrower."""
    return _of(decoder).rounded.get(adapter, [])


def _has_lost(kept: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers are others in the format that they are kept in."""
    both = torch.promote_types(kept.dtype, tensor.dtype)
    return both != kept.dtype and not torch.equal(kept.to(tensor.device, both), tensor.to(both))
