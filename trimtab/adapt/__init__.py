"""Transforms a decoder: adapters, quantized layers, recompute policies, compiled regions. The training loop is
elsewhere.

    settings = LoraSettings(r=16, lora_alpha=32, target_modules="all-linear")
    add_adapters(decoder, settings)
    load_weights(decoder, "my-model")
    init_adapters(decoder, seed=0)

Names are imported lazily (PEP 562), so that the package's `spec.py` files do not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazy_attributes

if TYPE_CHECKING:
    from trimtab.adapt.any_model import add_lora, quantize_linears
    from trimtab.adapt.compiling import Regions, compilations, compile_regions
    from trimtab.adapt.dequantized import set_dequantized_copies
    from trimtab.adapt.lora import (
        LoRALinear,
        active_adapters,
        adapter_names,
        add_adapters,
        create_dropout_masks,
        init_adapters,
        remove_adapter,
        trained_parameters,
        use_adapters,
    )
    from trimtab.adapt.merging import merge_adapters
    from trimtab.adapt.peft_files import load_adapter, save_adapter
    from trimtab.adapt.quantized import QuantizedLinear
    from trimtab.adapt.quantized_layout import quantize_layout
    from trimtab.adapt.spec import LoraSettings

_MODULES = {
    "LoRALinear": "lora",
    "LoraSettings": "spec",
    "QuantizedLinear": "quantized",
    "Regions": "compiling",
    "active_adapters": "lora",
    "adapter_names": "lora",
    "add_adapters": "lora",
    "add_lora": "any_model",
    "compilations": "compiling",
    "compile_regions": "compiling",
    "init_adapters": "lora",
    "load_adapter": "peft_files",
    "merge_adapters": "merging",
    "quantize_layout": "quantized_layout",
    "quantize_linears": "any_model",
    "remove_adapter": "lora",
    "save_adapter": "peft_files",
    "set_dequantized_copies": "dequantized",
    "create_dropout_masks": "lora",
    "trained_parameters": "lora",
    "use_adapters": "lora",
}

__all__ = [
    "LoRALinear",
    "LoraSettings",
    "QuantizedLinear",
    "Regions",
    "active_adapters",
    "adapter_names",
    "add_adapters",
    "add_lora",
    "compilations",
    "compile_regions",
    "create_dropout_masks",
    "init_adapters",
    "load_adapter",
    "merge_adapters",
    "quantize_layout",
    "quantize_linears",
    "remove_adapter",
    "save_adapter",
    "set_dequantized_copies",
    "trained_parameters",
    "use_adapters",
]

__getattr__ = lazy_attributes(
    __name__, _MODULES, {"keep_unpacked": "set_dequantized_copies", "set_masks": "create_dropout_masks"}
)
