"""The report of sizes: the models, their parameters by part, the formula's error, bytes of training."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.facts.dtypes import nbytes
from trimtab.facts.units import format_bytes, format_count
from trimtab.lab.studies.sizes.counts import SizeResult
from trimtab.lab.study import CellOutcome, Measurement
from trimtab.report.document import Bar, BarChart, Section, Table, Text

ADAMW_MOMENTS = 2

Sized = tuple[str, SizeResult]


def sections(measurements: Sequence[Measurement]) -> list[Section]:
    """Tables, one row per model, and a chart of the parts."""
    counted = [m for m in measurements if m.outcome is CellOutcome.MEASURED]
    models = [(str(m.cell.settings["size"]), SizeResult.from_dict(m.result)) for m in counted]
    failed = [Text(f"{m.cell.settings['size']}: {m.outcome.value}: {m.message}")
              for m in measurements if m.outcome is not CellOutcome.MEASURED]  # fmt: skip
    if not models:
        return [Section("Parameters", tuple(failed))]
    return [
        Section("Models", (*failed, _models(models))),
        Section("Parameters", (_share_text(models), _parts(models), _chart(models))),
        Section("The formula", (_formula_text(models), _difference(models))),
        Section("Bytes", (_bytes_text(models), _bytes(models))),
    ]


def _models(models: Sequence[Sized]) -> Table:
    head = (
        "model",
        "family",
        "vocabulary",
        "d_model",
        "d_ff",
        "layers",
        "heads",
        "key/value heads",
        "head tied",
    )
    rows = [
        (name, size.family, f"{size.vocabulary:,}", f"{size.d_model:,}", f"{size.d_ff:,}", str(size.layers),
         str(size.heads), str(size.key_value_heads), "yes" if size.tied else "no")
        for name, size in models
    ]  # fmt: skip
    return Table("", head, tuple(rows))


def _parts(models: Sequence[Sized]) -> Table:
    parts = list(models[0][1].counted.by_part())
    experts = any(size.active != size.counted.total for _, size in models)
    head = ("model", *parts, "parameters", *(("active per token",) if experts else ()))
    rows = []
    for name, size in models:
        counts = [f"{value:,}" for value in (*size.counted.by_part().values(), size.counted.total)]
        rows.append((name, *counts, *((f"{size.active:,}",) if experts else ())))
    return Table("Parameters by part", head, tuple(rows))


def _share_text(models: Sequence[Sized]) -> Text:
    """Names the largest part, and the smallest and largest share of the vocabulary."""
    shares = {name: _vocabulary_share(size) for name, size in models}
    most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
    leading = sorted({_leading(size) for _, size in models})
    text = f"Most parameters are in {' or '.join(leading)}. Embedding and head are {_percent(shares[most])} of {most}"
    if most != least:
        text += f" and {_percent(shares[least])} of {least}"
    return Text(text + ".")


def _leading(size: SizeResult) -> str:
    parts = size.counted.by_part()
    name = max(parts, key=parts.__getitem__)
    return f"the {name} layers" if name in ("attention", "feed-forward") else f"the {name}"


def _vocabulary_share(size: SizeResult) -> float:
    return (size.counted.embedding + size.counted.head) / size.counted.total


def _chart(models: Sequence[Sized]) -> BarChart:
    bars = tuple(
        Bar(
            name,
            tuple((part, float(value)) for part, value in size.counted.by_part().items() if value),
            f"{format_count(size.counted.total)} parameters",
        )
        for name, size in models
    )
    return BarChart("sizes-parts", "Parameters by part", "parameters", bars)


def _formula_text(models: Sequence[Sized]) -> Text:
    name, size = max(models, key=lambda sized: abs(sized[1].counted.total / sized[1].formula.total - 1))
    return Text(
        "The usual formula counts matrices alone: 2·V·d for embedding and head, 4·d² per layer for attention and "
        "2·d·d_ff per layer for a feed-forward layer of two matrices. SwiGLU has three: its gate adds d·d_ff per "
        "layer. Norms add a vector each. Fewer key/value heads, heads narrower or wider than d / heads, biases, a tied "
        "head and experts are the other ways to differ. The columns show exact count minus formula, part by part. "
        f"By the formula {name} would have {format_count(size.formula.total)} parameters; it has "
        f"{format_count(size.counted.total)}."
    )


def _difference(models: Sequence[Sized]) -> Table:
    parts = list(models[0][1].counted.by_part())
    rows = []
    for name, size in models:
        exact, quoted = size.counted.by_part(), size.formula.by_part()
        gap = size.counted.total - size.formula.total
        rows.append(
            (
                name,
                f"{size.formula.total:,}",
                *(
                    f"{exact[part] - quoted[part]:+,}" if exact[part] != quoted[part] else "0"
                    for part in parts
                ),
                f"{gap:+,}",
                f"{100 * gap / size.formula.total:+.1f} %",
            )
        )
    return Table(
        "Exact count minus formula", ("model", "formula", *parts, "difference", "of formula"), tuple(rows)
    )


def _bytes(models: Sequence[Sized]) -> Table:
    head = (
        "model",
        "weights fp32",
        "weights bf16",
        "fp32 + gradients",
        "fp32 + gradients + AdamW",
        "bf16 + gradients + AdamW",
    )
    rows = []
    for name, size in models:
        count = size.counted.total
        fp32, bf16 = nbytes("fp32", count), nbytes("bf16", count)
        moments = ADAMW_MOMENTS * fp32
        sums = (fp32, bf16, 2 * fp32, 2 * fp32 + moments, 2 * bf16 + moments)
        rows.append((name, *(format_bytes(value) for value in sums)))
    note = "AdamW keeps two fp32 moments per parameter in both columns. Activations are not counted."
    return Table("Bytes of weights, gradients and optimizer states", head, tuple(rows), note)


def _bytes_text(models: Sequence[Sized]) -> Text:
    largest, size = max(models, key=lambda sized: sized[1].counted.total)
    weights = nbytes("fp32", size.counted.total)
    total = (2 + ADAMW_MOMENTS) * weights
    return Text(
        f"Training in fp32 with AdamW takes four times the weights before any activation: {format_bytes(weights)} of "
        f"weights become {format_bytes(total)} for {largest}. Mixed precision by autocast keeps fp32 weights and "
        "gradients: it reduces activations, not these."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"
