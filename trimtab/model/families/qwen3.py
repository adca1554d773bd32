"""Qwen3: an RMS norm on each head's q and k, no biases unless the config asks for them."""

from trimtab.model.families import base

FAMILY = base.Family(
    name="qwen3",
    gguf_top=base.TOP,
    gguf_layer={**base.LAYER, **base.QK_NORM, **base.QKV_BIAS, **base.O_BIAS},
    gguf_pairs_rotary_rows=False,
)
