"""The attention study: what each refusal of an option or a record names works."""

from __future__ import annotations

from cases import World, case

from trimtab.lab.samples import Samples
from trimtab.lab.studies.attention.measure import measure
from trimtab.lab.studies.attention.settings import AttentionSettings


def measured_once_more(w: World, remedy: str) -> None:
    cell = AttentionSettings("sdpa_flash", batch=1, head_dim=8, length=8, repetitions=1)
    assert Samples.from_dict(measure(cell.to_dict())["forward"]).repetitions == 1


case(
    "lab/samples.py:damaged_record: measure once more: the same command with --remeasure",
    lambda w: Samples.from_dict({"times_ms": "fast"}),
    measured_once_more,
)
