"""What can be chosen: how much is compiled, for which shapes, of which model. Imports no torch."""

from __future__ import annotations

import enum


class Scope(enum.Enum):
    """How much of a model is one program."""

    REGIONS = "regions"
    """Each block, as `torch_compile: true` has it: layers alike share one program."""
    WHOLE = "whole"
    """The model with its loss."""


class Shapes(enum.Enum):
    """Which lengths a program serves."""

    DYNAMIC = "dynamic"
    """All, from the first program on."""
    STATIC = "static"
    """One: each further length is compiled anew."""
    AUTO = "auto"
    """torch's default: the first program serves one length, the second all. Of the whole model alone."""

    @property
    def dynamic(self) -> bool | None:
        """As an argument of torch.compile.

        Example:
            >>> Shapes.STATIC.dynamic, Shapes.AUTO.dynamic
            (False, None)
        """
        return {Shapes.DYNAMIC: True, Shapes.STATIC: False, Shapes.AUTO: None}[self]


class Method(enum.Enum):
    """What is trained of a study model; a recipe says it itself."""

    FULL = "full"
    QLORA = "qlora"
    """Adapters over weights in NF4."""


class Backend(enum.Enum):
    """What torch.compile gives its graphs to."""

    INDUCTOR = "inductor"
    """Generates kernels."""
    AOT_EAGER = "aot_eager"
    """Traces both passes and generates nothing: graph breaks and recompilations alone."""
    EAGER = "eager"
    """Traces the forward pass alone."""
