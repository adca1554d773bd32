"""Llama 2 and 3.x, and what is built like them: SmolLM2, TinyLlama, Mistral's GGUF files."""

from trimtab.model.families import base

FAMILY = base.Family(
    name="llama",
    gguf_top=base.TOP,
    gguf_layer={**base.LAYER, **base.QKV_BIAS, **base.O_BIAS, **base.MLP_BIAS},
    gguf_pairs_rotary_rows=True,
)
