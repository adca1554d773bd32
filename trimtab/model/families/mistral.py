"""Mistral 7B: Llama's tensors with a sliding window; its GGUF files say "llama" and look like those."""

from trimtab.model.families import base

FAMILY = base.Family(name="mistral", gguf_top=base.TOP, gguf_layer=base.LAYER, gguf_pairs_rotary_rows=True)
