"""The benchmark of quantized layers: on a tiny layer its contestants agree, and its comparison can fail."""

from __future__ import annotations

import torch

from benchmarks import quantized_linear as bench

SIZES: bench.Sizes = {
    "q": (64, 64),
    "k": (32, 64),
    "v": (32, 64),
    "o": (64, 64),
    "gate": (128, 64),
    "up": (128, 64),
    "down": (64, 128),
}


def test_contestants_agree_on_a_tiny_layer() -> None:
    layer = bench.make_layer(SIZES, 48, 4, "cpu")
    found = bench.build(layer)
    verdicts = {name: contestant.check() for name, contestant in found.contestants.items()}
    assert {"trimtab", "trimtab, one by one"} <= set(verdicts)
    assert not [verdict for verdict in verdicts.values() if verdict is not None]
    assert len(bench.bare(layer)()) == 7  # type: ignore[arg-type]


def test_a_disabled_adapter_is_reported() -> None:
    layer = bench.make_layer(SIZES, 16, 4, "cpu")
    right = bench.build(layer).contestants["trimtab"]
    with torch.no_grad():
        layer.adapted["up"].factors("default")[1].mul_(1.5)
    assert "up" in (right.check() or "") or "mlp" in (right.check() or "")
    with torch.no_grad():
        layer.adapted["up"].factors("default")[1].div_(1.5)
    assert right.check() is None
