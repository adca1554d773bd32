"""The definition of a model family: its config.json, its tensors' names, and the order of their rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape
from trimtab.model.families.config_json import ConfigValues

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
QKV_BIAS = {
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
}
O_BIAS = {"self_attn.o_proj.bias": "attn_output.bias"}
MLP_BIAS = {
    "mlp.gate_proj.bias": "ffn_gate.bias",
    "mlp.up_proj.bias": "ffn_up.bias",
    "mlp.down_proj.bias": "ffn_down.bias",
}
QK_NORM = {"self_attn.q_norm.weight": "attn_q_norm.weight", "self_attn.k_norm.weight": "attn_k_norm.weight"}


@dataclass(frozen=True)
class Family:
    """One family: config.json ↔ shape, and key maps. trimtab's names are Hugging Face's, so only deviations are listed.

    Example:
        >>> from trimtab.model.families import family
        >>> family("llama").gguf_name("model.layers.3.self_attn.q_proj.weight")
        'blk.3.attn_q.weight'
    """

    name: str
    """transformers' `model_type`."""
    architecture: str
    """transformers' class, as in `architectures`."""
    describe: Callable[[ConfigValues], ModelShape]
    """Converts a config.json to a shape."""
    own_keys: Callable[[ModelShape], dict[str, Any]]
    """Returns the family-specific keys of a shape's config.json."""
    gguf_layer: Mapping[str, str]
    """Tensors of a layer, without their prefix: trimtab's names to GGUF's."""
    gguf_pairs_rotary_rows: bool
    """Whether GGUF files interleave the rows of q and k (elements 0 and D/2 of a head are adjacent)."""
    gguf_architecture: str = ""
    """`general.architecture` of its GGUF files, if supported."""
    gguf_windowed: bool = False
    """Whether GGUF files with a sliding window are of this family; for families that share an architecture name."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' defaults for keys that a config omits (its configuration_<family>.py)."""
    harmless: frozenset[str] = frozenset()
    """Config keys that affect neither parameters nor arithmetic, in addition to those of all families."""
    gguf_top: Mapping[str, str] = field(default_factory=lambda: dict(TOP))
    """Tensors outside the layers: trimtab's names to GGUF's."""
    hf_ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    """Patterns of tensors in Hugging Face files that are computed, not learned."""
    gguf_ignored: tuple[str, ...] = (r"rope_freqs\.weight",)

    def gguf_name(self, name: str) -> str:
        """GGUF's name of a parameter."""
        match = _LAYER.fullmatch(name)
        if match is None:
            return self.gguf_top[name]
        if match[2] not in self.gguf_layer:
            raise ModelError(
                f"a {self.name} model has no {name} in GGUF files", "use its Hugging Face folder"
            )
        return f"blk.{match[1]}.{self.gguf_layer[match[2]]}"

    def hf_name(self, stored: str) -> str:
        """Returns trimtab's name of a tensor in a Hugging Face file; files of a base model lack the `model.` prefix."""
        return stored if stored.startswith(("model.", "lm_head.")) else f"model.{stored}"

    def ignores_hf(self, stored: str) -> bool:
        """Whether a stored tensor is ignored, because the model computes it."""
        return any(re.fullmatch(pattern, stored) for pattern in self.hf_ignored)

    def ignores_gguf(self, stored: str) -> bool:
        """As `ignores_hf`, for GGUF files."""
        return any(re.fullmatch(pattern, stored) for pattern in self.gguf_ignored)
