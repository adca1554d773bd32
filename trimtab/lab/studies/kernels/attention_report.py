"""Softmax against matrix products inside plain attention: time next to FLOPs. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.lab.profile_tables import ms, percent, ratio
from trimtab.lab.studies.kernels.results import AttentionPart
from trimtab.report.document import Block, Section, Table, Text

PRODUCTS = ("attention: scores", "attention: values")
SOFTMAX = "attention: softmax"
NAMES = {
    "attention: scores": "scores Q·Kᵀ",
    "attention: softmax": "softmax",
    "attention: values": "values P·V",
    "attention": "scale, mask, casts, copies",
}


def attention_section(cells: Sequence[tuple[str, tuple[AttentionPart, ...]]]) -> Section:
    """One table over all cells that ran plain attention, and a sentence about each."""
    rows, sentences = [], []
    for name, parts in cells:
        if not parts:
            continue
        flops = sum(part.forward_flops + part.backward_flops for part in parts)
        seconds = sum(part.forward_seconds + part.backward_seconds for part in parts)
        rows += [(name, *_columns(part, flops, seconds)) for part in parts]
        sentences.append(f"{name}: {_sentence(parts)}")
    head = (
        "cell",
        "part",
        "GFLOP forward",
        "ms",
        "GFLOP backward",
        "ms",
        "share of FLOPs",
        "share of time",
        "GFLOP/s",
    )
    text = (
        "Inside plain attention, over all layers of one step. FLOPs are counted for the whole score matrix, since "
        "plain attention computes the half that it masks as well: 2·B·H·T²·D for each product, 5·B·H·T² for the "
        "softmax; backward twice as many for a product, 4·B·H·T² for the softmax. A product does 2·D FLOPs for each "
        "score that it writes or reads, the softmax five: per FLOP the softmax moves more bytes."
    )
    blocks: list[Block] = [Text(text), Table("", head, tuple(rows)), *map(Text, sentences)]
    return Section("Softmax and matrix products inside attention", tuple(blocks))


def _columns(part: AttentionPart, flops: int, seconds: float) -> tuple[str, ...]:
    own_flops = part.forward_flops + part.backward_flops
    own_seconds = part.forward_seconds + part.backward_seconds
    counted = own_flops > 0
    return (
        NAMES.get(part.name, part.name),
        f"{part.forward_flops / 1e9:.3g}" if counted else "–",
        ms(part.forward_seconds),
        f"{part.backward_flops / 1e9:.3g}" if counted else "–",
        ms(part.backward_seconds),
        percent(ratio(own_flops, flops)) if counted else "–",
        percent(ratio(own_seconds, seconds)),
        f"{ratio(own_flops, own_seconds) / 1e9:,.3g}" if counted else "–",
    )


def _sentence(parts: Sequence[AttentionPart]) -> str:
    """The cost of softmax per FLOP, compared with the matrix products."""
    softmax = [part for part in parts if part.name == SOFTMAX]
    products = [part for part in parts if part.name in PRODUCTS]
    softmax_flops, softmax_seconds = _total(softmax)
    product_flops, product_seconds = _total(products)
    if not (softmax_flops and product_flops and product_seconds):
        return "its parts were not recorded."
    more = ratio(softmax_seconds, softmax_flops) / (product_seconds / product_flops)
    return (
        f"the softmax has {percent(ratio(softmax_flops, product_flops))} of the FLOPs of the two products and takes "
        f"{percent(ratio(softmax_seconds, product_seconds))} of their time: {more:.3g} times as long per FLOP."
    )


def _total(parts: Sequence[AttentionPart]) -> tuple[int, float]:
    return (
        sum(part.forward_flops + part.backward_flops for part in parts),
        sum(part.forward_seconds + part.backward_seconds for part in parts),
    )
