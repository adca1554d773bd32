"""Regional compilation of blocks: one graph shared by identical layers, full graphs, dynamic lengths.

A region is a block. Its parameters are inputs of the compiled graph, so identical layers share one: a model of 32
layers compiles as long as one of two. Layers that differ (in a sliding window, a recompute policy) are compiled
separately. Regions run in training only: evaluation and generation have many different lengths and use the eager
blocks.
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

from trimtab.adapt.recompute import compile_block, eager_blocks
from trimtab.model.decoder import Decoder

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
MAX_GRAPHS = 64
"""Recompile limit per block, above which torch raises: policies × windows × dynamic lengths (0, 1 or more)."""


def compile_regions(decoder: Decoder, *, dynamic: bool = True, backend: str = "inductor") -> Decoder:
    """Compiles each block as one graph without breaks; compilation happens in the first training step.

    Changes no parameter and no name, and nothing for a decoder that runs without gradients. If a block cannot be traced
    as a full graph, the first step raises torch's own error instead of running slowly.

    Args:
        decoder: with adapters and recompute policies, which are compiled too.
        dynamic: whether one graph handles all sequence lengths; False compiles a slightly faster graph per length.
        backend: "inductor" generates kernels; "aot_eager" only traces, for tests.

    Example:
        >>> compile_regions(decoder).loss(ids_BT, labels_BT).backward()  # doctest: +SKIP
    """
    use_cache_folder()
    if dynamic:
        # Otherwise a length equal to the hidden size would be specialized as a constant and compiled separately.
        torch.fx.experimental._config.use_duck_shape = False
    # Epsilons and LoRA scales are constants; as dynamic values torch 2.13 loses them between nested graphs.
    dynamo.config.specialize_float = True
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, MAX_GRAPHS)
    # torch logs this warning for every selective policy; tests check that the gradients equal those of eager layers.
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_not_in_place_warning)
    compiler = partial(torch.compile, fullgraph=True, dynamic=dynamic, backend=backend)
    # A plain list, so that modules are not registered again and no name changes.
    decoder.regions = [compile_block(block, compiler) for block in decoder.model.layers]
    return decoder


def _is_not_in_place_warning(record: logging.LogRecord) -> bool:
    return "does not contain in-place ops" not in record.getMessage()


def use_cache_folder(parent: Path | None = None) -> Path:
    """Sets torch's compile cache to a folder specific to this source, unless the user set another; returns the folder.

    torch's default, which it may have set itself already, is in the shared temporary directory, which is emptied when
    the machine starts.

    Args:
        parent: parent of that folder; by default the user's cache.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if not named or named == default_cache_dir():
        parent = parent or Path.home() / ".cache" / "trimtab" / "compiled"
        os.environ[CACHE_VARIABLE] = named = str(parent / source_key())
    return Path(named)


@cache
def source_key() -> str:
    """A hash of trimtab's source. torch keys compiled code by operator names only, and code compiled for an earlier
    version, whose operators differ, must not be reused.

    Example:
        >>> len(source_key())
        12
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def compilations() -> tuple[int, float]:
    """Returns (graphs, seconds): the number of graphs that torch compiled in this process, and the compile time.

    Example:
        >>> compilations()  # doctest: +SKIP
        (1, 17.2)
    """
    count = dynamo.utils.counters["stats"]["unique_graphs"]
    return int(count), float(dynamo.utils.calculate_time_spent()["total_wall_time"])


class Regions:
    """The compiled blocks of a decoder, as a training loop uses them."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def compilations(self) -> tuple[int, float]:
        """As the function `compilations`."""
        return compilations()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Runs the eager blocks inside, so that hooks on their modules work."""
        regions, self.decoder.regions = self.decoder.regions, None
        try:
            with eager_blocks(self.decoder):
                yield
        finally:
            self.decoder.regions = regions
