"""Settings of the compile study: scope, shapes, method and backend. Imports no torch."""

from __future__ import annotations

import enum


class Scope(enum.Enum):
    """The part of a model that is compiled as one program."""

    REGIONS = "regions"
    """Each block, like `torch_compile: true`: equal layers share one program."""
    WHOLE = "whole"
    """The model with its loss."""


class Shapes(enum.Enum):
    """The lengths for which a program is valid."""

    DYNAMIC = "dynamic"
    """All lengths, from the first program on."""
    STATIC = "static"
    """One length: each further length is recompiled."""
    AUTO = "auto"
    """torch's default: the first program serves one length, the second all. Only for the whole model."""

    @property
    def dynamic(self) -> bool | None:
        """The `dynamic` argument of torch.compile.

        Example:
            >>> Shapes.STATIC.dynamic, Shapes.AUTO.dynamic
            (False, None)
        """
        return {Shapes.DYNAMIC: True, Shapes.STATIC: False, Shapes.AUTO: None}[self]


class Method(enum.Enum):
    """The training method of a study model; a recipe has its own."""

    FULL = "full"
    QLORA = "qlora"
    """LoRA adapters on NF4 weights."""


class Backend(enum.Enum):
    """The backend of torch.compile."""

    INDUCTOR = "inductor"
    """Generates kernels."""
    AOT_EAGER = "aot_eager"
    """Traces both passes and generates no code: only graph breaks and recompilations."""
    EAGER = "eager"
    """Traces only the forward pass."""
