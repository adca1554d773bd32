"""The five models that studies measure, named as in the reference study: vocabulary 10,000, RoPE, SwiGLU, untied head.

They are Llama models: pre-norm RMSNorm, no biases, three feed-forward matrices of d_ff. The reference's own formula
counts two; `sizes` shows both. `named_shape` also accepts a recipe, and every model name that `trimtab plan` accepts.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.facts.errors import ModelError, RecipeError
from trimtab.facts.shapes import ModelShape
from trimtab.model.families import shape_from_config

VOCABULARY = 10_000
ROPE_THETA = 10_000.0
LONGEST = 65_536
"""Maximum positions of the study models: an arbitrary bound, since RoPE needs no table."""


@dataclass(frozen=True)
class StudyModel:
    """One size: d_model, d_ff, layers and heads."""

    name: str
    d_model: int
    d_ff: int
    layers: int
    heads: int

    def config(self) -> dict[str, Any]:
        """The model as a Hugging Face config.json."""
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": VOCABULARY,
            "hidden_size": self.d_model,
            "intermediate_size": self.d_ff,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "max_position_embeddings": LONGEST,
            "rope_theta": ROPE_THETA,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
        }

    def shape(self) -> ModelShape:
        """The model's shape.

        Example:
            >>> study_model("small").shape().num_layers
            12
        """
        return shape_from_config(self.config(), f"study model {self.name}")


STUDY_MODELS = {
    model.name: model
    for model in (
        StudyModel("small", 768, 3072, 12, 12),
        StudyModel("medium", 1024, 4096, 24, 16),
        StudyModel("large", 1280, 5120, 36, 20),
        StudyModel("xl", 1600, 6400, 48, 25),
        StudyModel("2.7B", 2560, 10240, 32, 32),
    )
}
TINY = StudyModel("tiny", 64, 256, 2, 4)
"""For tests and first runs: every study accepts it, none uses it by default."""


def study_model(name: str) -> StudyModel:
    """The study model of a name; raises RecipeError with the nearest name if there is none.

    Example:
        >>> study_model("medium").d_ff
        4096
    """
    if is_study_model(name):
        return STUDY_MODELS.get(name, TINY)
    raise RecipeError(
        f"there is no study model {name!r}", f"{_nearest(name)}the sizes are {', '.join(STUDY_MODELS)}"
    )


def is_study_model(name: str) -> bool:
    """Whether a name is that of a study model.

    Example:
        >>> is_study_model("2.7B"), is_study_model("Qwen/Qwen3-0.6B")
        (True, False)
    """
    return name == TINY.name or name in STUDY_MODELS


def named_shape(name: str) -> ModelShape:
    """The shape of a study model, of a recipe's model, or of any model that `trimtab plan` accepts.

    Args:
        name: a size (`small`); a recipe; a hub id of the catalogue, a folder, a config.json or a GGUF file.

    Raises:
        RecipeError: the name is none of them; the error suggests the nearest size.

    Example:
        >>> named_shape("small").num_layers, named_shape("Qwen/Qwen3-0.6B").num_layers
        (12, 28)
    """
    if is_study_model(name):
        return study_model(name).shape()
    from trimtab.run.target import is_recipe, model_shape, named_recipe, shape_of_recipe

    try:
        return shape_of_recipe(named_recipe(name)) if is_recipe(name) else model_shape(name)[0]
    except (RecipeError, ModelError):
        path = Path(name)
        if "/" in name or path.suffix.lower() in (".yaml", ".yml", ".json", ".gguf") or path.exists():
            raise
        raise RecipeError(
            f"there is no study model {name!r}, nor a recipe or a model of that name",
            f"{_nearest(name)}the sizes are {', '.join(STUDY_MODELS)}; or name a recipe, a hub id of the "
            "catalogue, a folder, a config.json or a GGUF file",
        ) from None


def first_layers(shape: ModelShape, count: int | None) -> ModelShape:
    """The shape with only its first layers; all of them if `count` is None.

    Example:
        >>> first_layers(named_shape("small"), 1).num_layers, first_layers(named_shape("small"), None).num_layers
        (1, 12)
    """
    return shape if count is None else dataclasses.replace(shape, blocks=shape.blocks[:count])


def model_settings(name: str) -> dict[str, str]:
    """Identifies a model in a cell's settings: its name and, since files change, a checksum of its shape.

    Example:
        >>> model_settings("small"), sorted(model_settings("Qwen/Qwen3-0.6B"))
        ({'size': 'small'}, ['shape', 'size'])
    """
    if is_study_model(name):
        return {"size": name}
    digest = hashlib.sha256(repr(named_shape(name)).encode()).hexdigest()[:12]
    return {"size": name, "shape": digest}


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, STUDY_MODELS, n=1, cutoff=0.5)
    return f"did you mean {near[0]}? " if near else ""
