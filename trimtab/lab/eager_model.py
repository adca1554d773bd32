"""A model that is measured without a recipe: eager, not quantized, without adapters and recomputation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimtab.facts.shapes import ModelShape
from trimtab.model.decoder import Decoder
from trimtab.parallel import Mesh
from trimtab.plan.resolved import (
    AttentionConfig,
    LayerAttention,
    LossConfig,
    OptimizerConfig,
    PointwiseConfig,
    PrecisionConfig,
    Resolved,
)
from trimtab.run.build import build_model


def build_eager_model(
    shape: ModelShape,
    device: str,
    *,
    dtype: str,
    weights_dtype: str,
    attention: Sequence[str],
    pointwise: str = "reference",
    loss_impl: str = "chunked",
) -> Decoder:
    """Builds a model with uninitialized parameters, by the function that builds all models.

    Args:
        shape: the model's shape.
        device: cpu, cuda or cuda:N.
        dtype: dtype of products; other than `weights_dtype` under autocast.
        weights_dtype: dtype of the parameters.
        attention: the attention backend of each layer.
        pointwise: the implementation of norms, RoPE and gated activations.
        loss_impl: the implementation of the loss.

    Example:
        >>> from trimtab.lab.study_models import study_model
        >>> model = build_eager_model(
        ...     study_model("tiny").shape(), "cpu", dtype="fp32", weights_dtype="fp32", attention=["reference"] * 2
        ... )
        >>> model.shape.num_layers
        2
    """
    resolved = Resolved(
        device,
        threads=torch.get_num_threads(),
        deterministic=False,
        precision=PrecisionConfig(dtype, weights_dtype, weights_dtype),
        attention=AttentionConfig(tuple(LayerAttention(impl, impl) for impl in attention)),
        optimizer=OptimizerConfig("none", "none", "no recipe"),
        loss=LossConfig(loss_impl),
        pointwise=PointwiseConfig(pointwise),
    )
    return build_model(shape, resolved, Mesh.single())
