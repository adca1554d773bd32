"""One file a family: the maps between its tensors' names in files and in the decoder."""

from trimtab.facts.errors import ModelError
from trimtab.model.families import llama, mistral, qwen2, qwen3
from trimtab.model.families.base import Family

_FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY for module in (llama, mistral, qwen2, qwen3)
}


def family(name: str) -> Family:
    """The key maps of a family by its name in `facts.shapes.FAMILIES`."""
    if name not in _FAMILIES:
        raise ModelError(f"no family is called {name!r}", f"supported are {', '.join(_FAMILIES)}")
    return _FAMILIES[name]


__all__ = ["Family", "family"]
