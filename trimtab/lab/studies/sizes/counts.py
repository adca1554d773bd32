"""Parameters of a model by part: counted exactly, and by the usual formula. Imports no torch.

The formula is the reference's: 2·V·d for embedding and head, and per layer 4·d² for attention and 2·d·d_ff for a
feed-forward layer of two matrices. Models differ from it by a third feed-forward matrix (SwiGLU's gate), fewer
key/value heads, biases, norms, tied heads and experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from trimtab.facts.shapes import ModelShape
from trimtab.lab.samples import damaged_record


@dataclass(frozen=True)
class PartCounts:
    """Number of parameters of each part of a model.

    Example:
        >>> PartCounts(embedding=4, attention=3, feed_forward=2, norms=1, head=0).total
        10
    """

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        """Parameters of the whole model."""
        return sum(self.by_part().values())

    def by_part(self) -> dict[str, int]:
        """The parts by their names in reports, in the order of the forward pass."""
        return {field.name.replace("feed_forward", "feed-forward"): getattr(self, field.name)
                for field in fields(self)}  # fmt: skip


@dataclass(frozen=True)
class SizeResult:
    """The parameter counts of one model."""

    family: str
    vocabulary: int
    d_model: int
    d_ff: int
    """Width of the first layer's feed-forward; of one expert in a mixture of experts."""
    layers: int
    heads: int
    key_value_heads: int
    tied: bool
    """Whether the head shares the embedding's matrix, which is then counted once."""
    active: int
    """Parameters that one token uses: fewer than all in a mixture of experts."""
    counted: PartCounts
    formula: PartCounts

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> SizeResult:
        """Inverse of `to_dict`; raises DataError if the record is damaged."""
        try:
            parts = {key: PartCounts(**record[key]) for key in ("counted", "formula")}
            return SizeResult(**{**record, **parts})
        except (KeyError, TypeError) as error:
            raise damaged_record("counts", f"{type(error).__name__}: {error}") from None


def count_model(shape: ModelShape) -> SizeResult:
    """Counts the parameters of a model.

    Example:
        >>> from trimtab.lab.study_models import study_model
        >>> found = count_model(study_model("small").shape())
        >>> found.counted.total, found.formula.total
        (128625408, 100294656)
        >>> found.counted.feed_forward - found.formula.feed_forward == 12 * 768 * 3072
        True
    """
    first = shape.blocks[0]
    return SizeResult(
        family=shape.family,
        vocabulary=shape.vocab_size,
        d_model=shape.hidden_size,
        d_ff=first.feed_forward.width,
        layers=shape.num_layers,
        heads=first.mixer.num_heads,
        key_value_heads=getattr(first.mixer, "num_kv_heads", first.mixer.num_heads),
        tied=shape.tie_embeddings,
        active=shape.num_active_parameters,
        counted=_counted(shape),
        formula=_formula(shape),
    )


def _counted(shape: ModelShape) -> PartCounts:
    counts_by_part = dict.fromkeys((field.name for field in fields(PartCounts)), 0)
    for name, dims in shape.parameters():
        counts_by_part[_part(name)] += math.prod(dims)
    counts = PartCounts(**counts_by_part)
    assert counts.total == shape.num_parameters, "a parameter belongs to no part"
    return counts


def _part(name: str) -> str:
    if name.endswith("norm.weight"):
        return "norms"
    if ".self_attn." in name:
        return "attention"
    if ".mlp." in name:
        return "feed_forward"
    return "head" if name.startswith("lm_head") else "embedding"


def _formula(shape: ModelShape) -> PartCounts:
    d = shape.hidden_size
    return PartCounts(
        embedding=shape.vocab_size * d,
        attention=shape.num_layers * 4 * d * d,
        feed_forward=sum(2 * d * block.feed_forward.width for block in shape.blocks),
        norms=0,
        head=shape.vocab_size * d,
    )
