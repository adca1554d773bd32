"""Qwen2 and Qwen2.5: biases on q, k and v."""

from trimtab.model.families import base

FAMILY = base.Family(
    name="qwen2",
    gguf_top=base.TOP,
    gguf_layer={**base.LAYER, **base.QKV_BIAS},
    gguf_pairs_rotary_rows=False,
)
