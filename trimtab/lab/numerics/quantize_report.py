"""The report on quantization errors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trimtab.lab.numerics.clipping import LARGEST_CODES, ClippingSweep
from trimtab.lab.numerics.quantize import Distribution, ErrorRow, QuantizeStudy, Scheme
from trimtab.report.document import Block, Code, Document, Histogram, LineChart, Section, Series, Table, Text


def quantization_document(
    study: QuantizeStudy, facts: Sequence[str] = (), command: str = "trimtab numerics quantize"
) -> Document:
    """The report.

    Example:
        >>> from trimtab.lab.numerics.quantize import study_quantization
        >>> quantization_document(study_quantization("uniform", [64])).title
        'Quantizing uniform'
    """
    sections = (_data(study), _errors(study), _naive(study), _clipping(study), _activations(study))
    return Document(f"Quantizing {study.data}", tuple(facts), sections, command)


def _data(study: QuantizeStudy) -> Section:
    spread = study.spread
    text = (
        f"{study.shape[0]:,} × {study.shape[1]:,} values: {study.description}. From {spread.smallest:.4g} to "
        f"{spread.largest:.4g}, standard deviation {spread.deviation:.4g}: the largest magnitude is "
        f"{_ratio(spread.absmax, spread.deviation):.1f} standard deviations. The scale must cover it: "
        "the larger it is, the fewer levels remain for most values."
    )
    return Section("The values", (Text(text), _histogram("values", "Values", "value", study.values)))


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.inf


def _histogram(id: str, title: str, label: str, distribution: Distribution) -> Histogram:
    return Histogram(
        id,
        title,
        label,
        distribution.edges,
        tuple((histogram.name, histogram.counts) for histogram in distribution.counts),
    )


def _find(study: QuantizeStudy, scheme: Scheme, shared_by: str) -> ErrorRow:
    return next(row for row in study.rows if (row.scheme, row.shared_by) == (scheme, shared_by))


def _errors(study: QuantizeStudy) -> Section:
    table = Table(
        "Error by scheme",
        (
            "scheme",
            "one scale for each",
            "bytes per value",
            "rms error",
            "largest error",
            "signal to noise, dB",
        ),
        tuple(
            (
                row.scheme.value,
                row.shared_by,
                f"{row.bytes_per_value:.3f}",
                f"{row.rms_error:.3g}",
                f"{row.max_error:.3g}",
                f"{row.signal_to_noise:.1f}",
            )
            for row in study.rows
        ),
        note="6 dB more halve the error. Bytes include scales, zero points and tables.",
    )
    int8_errors, nf4_errors = study.errors
    return Section(
        "Schemes and block sizes",
        (
            Text(
                "absmax: codes -127…127 around 0. affine: the range from the smallest to the largest value, with a "
                "zero point so that 0 stays exact. nf4: 16 levels, dense around 0, for normally distributed values."
            ),
            table,
            Text(_lesson(study)),
            _histogram("int8-errors", "Errors of INT8", "error", int8_errors),
            _histogram("nf4-errors", "Errors of NF4", "error", nf4_errors),
        ),
    )


def _lesson(study: QuantizeStudy) -> str:
    """Summarizes the table."""
    tensor, row = (_find(study, Scheme.INT8_ABSMAX, word) for word in ("tensor", "row"))
    affine = _find(study, Scheme.INT8_AFFINE, "tensor")
    step = study.spread.absmax / LARGEST_CODES[8]
    blocks = [entry for entry in study.rows if entry.scheme is Scheme.NF4]
    doubled = [entry for entry in study.rows if entry.scheme is Scheme.NF4_DOUBLE]
    lost = max(-_gain(b, a) for a, b in zip(blocks, doubled, strict=True))
    saved = max(a.bytes_per_value - b.bytes_per_value for a, b in zip(blocks, doubled, strict=True))
    between_blocks = (
        f"From blocks of {blocks[-1].shared_by} to blocks of {blocks[0].shared_by} NF4 changes by "
        f"{_gain(blocks[0], blocks[-1]):+.1f} dB; scales"
        if len(blocks) > 1
        else "For NF4, scales"
    )
    return (
        f"With one scale INT8 has steps of {step:.3g}; values spread evenly over a step would have an rms error of "
        f"step / √12 = {step / math.sqrt(12):.3g}, and {tensor.rms_error:.3g} was measured. A scale for each row "
        f"changes the signal-to-noise ratio by {_gain(row, tensor):+.1f} dB, a zero point "
        f"by {_gain(affine, tensor):+.1f} dB (it helps where values are not symmetric). "
        f"{between_blocks} in 8 bits save up to {saved:.3f} "
        f"bytes per value and cost at most {max(lost, 0.0):.2f} dB."
    )


def _gain(new: ErrorRow, old: ErrorRow) -> float:
    """In dB; 0 between two schemes without error."""
    same = new.signal_to_noise == old.signal_to_noise
    return 0.0 if same else new.signal_to_noise - old.signal_to_noise


def _naive(study: QuantizeStudy) -> Section:
    naive = study.naive
    table = Table(
        "The same bins, read back from int8 and from uint8",
        ("value", "bin", "as int8", "back from int8", "back from uint8"),
        tuple(
            (
                f"{row.value:.4g}",
                str(row.bin),
                str(row.as_int8),
                f"{row.from_int8:.4g}",
                f"{row.from_uint8:.4g}",
            )
            for row in naive.rows
        ),
        note="Smallest value, quartiles and largest value.",
    )
    affine = _find(study, Scheme.INT8_AFFINE, "tensor")
    return Section(
        "The int8 cast that wraps around",
        (
            Code(
                "bins  = round((x - min) / (max - min) * 255)    # 0…255\n"
                "wrong = bins.to(int8)                           # int8 ends at 127: 128 becomes -128, 255 becomes -1\n"
                "right = bins.to(uint8)                          # or (bins - 128).to(int8), with -128 as zero point"
            ),
            Text(
                f"{naive.wrapped:.1%} of the values are in bins above 127 and come back 256 bins too low: the "
                f"rms error is {naive.rms_error:.3g} where the same bins in uint8 have {naive.rms_error_uint8:.3g}. "
                "torch raises nothing. INT8 affine, which shifts the range by a zero point, "
                f"has {affine.rms_error:.3g}."
            ),
            table,
        ),
    )


def _clipping(study: QuantizeStudy) -> Section:
    blocks: list[Block] = [
        Text(
            "A smaller range has finer steps for most values and clips the largest: rounding error falls, clipping "
            "error rises, and their sum has a minimum. One absmax scale for the whole tensor:"
        )
    ]
    rows = []
    for sweep in study.clipping:
        best, whole = sweep.best, sweep.whole
        gain = 20 * math.log10(whole.total / best.total) if best.total else 0.0
        rows.append(
            (
                f"{sweep.bits} bits",
                f"{whole.total:.3g}",
                f"{best.threshold:.4g}",
                f"{_ratio(best.threshold, study.spread.deviation):.1f}",
                f"{best.total:.3g}",
                f"{best.clipping:.3g}",
                f"{best.rounding:.3g}",
                f"{gain:.1f}",
            )
        )
    head = (
        "levels",
        "error without clipping",
        "best threshold",
        "in standard deviations",
        "error there",
        "of clipping",
        "of rounding",
        "gain, dB",
    )
    blocks.append(Table("Where clipping pays", head, tuple(rows)))
    blocks += [_clipping_chart(sweep) for sweep in study.clipping]
    return Section("Clipping against rounding", tuple(blocks))


def _clipping_chart(sweep: ClippingSweep) -> LineChart:
    points = sweep.points
    series = (
        Series("clipping", tuple((point.threshold, point.clipping or None) for point in points)),
        Series("rounding", tuple((point.threshold, point.rounding or None) for point in points)),
        Series("both", tuple((point.threshold, point.total or None) for point in points)),
    )
    return LineChart(
        f"clipping-{sweep.bits}-bits",
        f"Error by clipping threshold, {sweep.bits} bits",
        "threshold",
        "rms error",
        series,
        log_y=True,
        note=f"Minimum at {sweep.best.threshold:.4g}.",
    )


def _activations(study: QuantizeStudy) -> Section:
    scales = study.activations
    static, percentile, tensor, token = scales.rows
    table = Table(
        f"INT8 on {scales.tokens} tokens that calibration has not seen",
        ("scale", "from", "one scale for each", "largest", "clipped", "rms error", "signal to noise, dB"),
        tuple(
            (
                row.kind,
                row.source,
                row.shared_by,
                f"{row.largest:.3g}",
                f"{row.clipped:.3%}",
                f"{row.rms_error:.3g}",
                f"{row.signal_to_noise:.1f}",
            )
            for row in scales.rows
        ),
    )
    beyond = scales.absmax / scales.calibration_absmax
    text = (
        "Weights are known before a run, activations are not. A static scale is measured beforehand, on calibration "
        f"data (here {scales.calibration_tokens} tokens), and costs nothing later; values beyond it are clipped. A "
        "dynamic scale is that of the values at hand: nothing is clipped, but every activation is read once more to "
        "find its largest magnitude before it can be quantized. The activations are random, with tokens of different "
        "magnitude and four channels 20 times as large as the others; `--data activations` shows their schemes."
    )
    lesson = (
        f"The largest value is {beyond:.2f} times that of calibration. A static scale that covers all of calibration "
        f"reaches {static.signal_to_noise:.1f} dB; one that clips a thousandth of it "
        f"{percentile.signal_to_noise:.1f} dB, since the clipped values are the large channels. A dynamic scale for "
        f"the tensor reaches {tensor.signal_to_noise:.1f} dB, one for each token {token.signal_to_noise:.1f} dB: small "
        "tokens no longer share the scale of large ones. Scales by channel would help more, but a product adds up over "
        "channels, so that its result could not be scaled back."
    )
    return Section("Static and dynamic scales of activations", (Text(text), table, Text(lesson)))
