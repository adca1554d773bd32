"""The decoder and its modules, one file of key maps per family, loading and saving weights.

    shape = read_shape("my-model")
    check_weights(shape, "my-model")
    decoder = build(shape, dtype="fp32", device="cpu", attention="sdpa_math")
    load_weights(decoder, "my-model")

Names are imported lazily (PEP 562), so that `trimtab.model.spec` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazy_attributes

if TYPE_CHECKING:
    from trimtab.model.building import build, init_weights
    from trimtab.model.decoder import Decoder
    from trimtab.model.save import save_folder
    from trimtab.model.source import read_generation_config, read_shape, read_token_ids
    from trimtab.model.weights import check_weights, load_weights, read_weights
    from trimtab.model.weights_reader import Provenance

_MODULES = {
    "Decoder": "decoder",
    "Provenance": "weights_reader",
    "build": "building",
    "check_weights": "weights",
    "init_weights": "building",
    "load_weights": "weights",
    "read_generation_config": "source",
    "read_shape": "source",
    "read_token_ids": "source",
    "read_weights": "weights",
    "save_folder": "save",
}

__all__ = [
    "Decoder",
    "Provenance",
    "build",
    "check_weights",
    "init_weights",
    "load_weights",
    "read_generation_config",
    "read_shape",
    "read_token_ids",
    "read_weights",
    "save_folder",
]

__getattr__ = lazy_attributes(__name__, _MODULES)
