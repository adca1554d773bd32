"""Blocks compiled as regions: one program for all layers alike, whole graphs, lengths left open.

A region is a block. Its parameters are arguments of the compiled program, so layers that compute alike share one: a
model of 32 layers compiles as long as one of two. Whatever differs between layers (a window, a recompute policy)
makes a program of its own. Regions run in training only: measuring and generating meet many lengths once, and go
through the plain blocks.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import torch
from torch import _dynamo as dynamo
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from trimtab.adapt.recompute import compiled, uncompiled
from trimtab.model.decoder import Decoder

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
MOST_PROGRAMS = 64
"""Of one block, before torch stops with an error: policies × windows × lengths that are 0 or 1 or neither."""


def compile_regions(decoder: Decoder, *, dynamic: bool = True, backend: str = "inductor") -> Decoder:
    """Compiles each block as one graph without breaks; nothing is compiled before the first training step.

    Changes no parameter and no name, and nothing for those who run the decoder without gradients. Where a block
    cannot be traced whole, the first step raises torch's own error instead of running slowly.

    Args:
        decoder: after adapters and recompute policies, which are compiled with it.
        dynamic: whether one program serves all lengths; False makes a program, a little faster, for each.
        backend: "inductor" generates kernels; "aot_eager" only traces, for tests.

    Example:
        >>> compile_regions(decoder).loss(ids_BT, labels_BT).backward()  # doctest: +SKIP
    """
    use_cache_folder()
    if dynamic:
        # A batch as long as the model is wide would else be taken for a length that is always so, and compiled alone.
        torch.fx.experimental._config.use_duck_shape = False
    # Epsilons and the scales of adapters are constants; left open, torch 2.13 mislays them between nested graphs.
    dynamo.config.specialize_float = True
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, MOST_PROGRAMS)
    # Said of every policy that keeps some operations; ours are tested to give the plain layer's gradients.
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_not_of_in_place_operations)
    compiler = partial(torch.compile, fullgraph=True, dynamic=dynamic, backend=backend)
    # A plain list: a module in it is not registered again, and no name changes.
    decoder.regions = [compiled(block, compiler) for block in decoder.model.layers]
    return decoder


def _not_of_in_place_operations(record: logging.LogRecord) -> bool:
    return "does not contain in-place ops" not in record.getMessage()


def use_cache_folder(parent: Path | None = None) -> Path:
    """Sends compiled code to a folder of this source's own, unless the user named another; returns the folder.

    torch's default, which it may have named itself by now, is a folder in the shared temporary directory, emptied when
    the machine starts.

    Args:
        parent: where that folder is; by default in the user's cache.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if not named or named == default_cache_dir():
        parent = parent or Path.home() / ".cache" / "trimtab" / "compiled"
        os.environ[CACHE_VARIABLE] = named = str(parent / source_key())
    return Path(named)


@cache
def source_key() -> str:
    """A name for this very source. torch finds compiled code by the names of operators, and code of an earlier version
    of ours, which means something else by them, must not be found.

    Example:
        >>> len(source_key())
        12
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def compilations() -> tuple[int, float]:
    """(programs, seconds): how many graphs torch has compiled in this process, and how long that took.

    Example:
        >>> compilations()  # doctest: +SKIP
        (1, 17.2)
    """
    count = dynamo.utils.counters["stats"]["unique_graphs"]
    return int(count), float(dynamo.utils.calculate_time_spent()["total_wall_time"])


class Regions:
    """The compiled blocks of a decoder as a training loop asks of them."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def so_far(self) -> tuple[int, float]:
        """`compilations`."""
        return compilations()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the plain blocks run: hooks on their parts may look at numbers."""
        regions, self.decoder.regions = self.decoder.regions, None
        try:
            with uncompiled(self.decoder):
                yield
        finally:
            self.decoder.regions = regions
