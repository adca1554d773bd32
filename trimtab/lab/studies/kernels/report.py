"""The report of the kernel study: time by kind, longest kernels, parts of attention, clocks. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.lab.kernel_kinds import KernelKind, short_name
from trimtab.lab.profile_data import Profile
from trimtab.lab.profile_tables import kernel_blocks, kernel_sections, ms, percent, ratio
from trimtab.lab.studies.kernels.attention_report import attention_section
from trimtab.lab.studies.kernels.results import KernelsResult, ProfiledPass
from trimtab.lab.studies.reference_figures import LABEL
from trimtab.lab.study import CellOutcome, Measurement
from trimtab.report.document import Bar, BarChart, Block, Section, Table, Text

__all__ = ["kernel_sections", "sections"]

REFERENCE_SETTINGS = {"size": "small", "batch": 4, "precision": "fp32", "kernels": "reference"}
REFERENCE_SOFTMAX = {128: "0.7 %", 1024: "3.6 %"}
"""Share of the small model's forward pass, by context."""
REFERENCE_GEMM = "70–85 %"
CLOCK_TOLERANCE = 0.03


@dataclass(frozen=True)
class Row:
    """One measured cell."""

    name: str
    id: str
    measurement: Measurement
    result: KernelsResult

    @property
    def is_reference(self) -> bool:
        """Whether the reference study has figures for these settings."""
        settings = self.measurement.cell.settings
        return all(settings[key] == value for key, value in REFERENCE_SETTINGS.items())

    @property
    def context(self) -> int:
        """Tokens per sequence."""
        return int(self.measurement.cell.settings["context"])


def sections(measurements: Sequence[Measurement]) -> list[Section]:
    """All tables of the study; cells that were not measured are listed with their outcome."""
    rows = [_row(m) for m in measurements if m.outcome is CellOutcome.MEASURED]
    profiled = [row for row in rows if row.result.profiles]
    report_sections = [Section("What was run", _what_was_run(measurements, rows))]
    if not profiled:
        return report_sections
    report_sections += [_kinds_section(profiled), _products_section(profiled), _leading_section(profiled)]
    if any(row.result.attention for row in profiled):
        report_sections.append(attention_section([(row.name, row.result.attention) for row in profiled]))
    report_sections.append(_clock_section(profiled))
    report_sections += [
        Section(
            f"Full step: {row.name}",
            kernel_blocks(row.result.profiles[ProfiledPass.FULL], ProfiledPass.FULL.value),
        )
        for row in profiled
    ]
    return report_sections


def cell_name(measurement: Measurement) -> str:
    """The name of a cell in the report: "small, context 128, fp32, reference"."""
    settings = measurement.cell.settings
    parts = [settings["size"], f"context {settings['context']}", settings["precision"], settings["kernels"]]
    return ", ".join(str(part) for part in parts)


def _row(measurement: Measurement) -> Row:
    settings = measurement.cell.settings
    id = "-".join(str(settings[key]) for key in ("size", "context", "precision", "kernels"))
    return Row(
        cell_name(measurement), id.replace(".", "-"), measurement, KernelsResult.from_dict(measurement.result)
    )


def _what_was_run(measurements: Sequence[Measurement], rows: Sequence[Row]) -> tuple[Block, ...]:
    first = measurements[0].cell.settings
    entries = "kernels of the GPU" if first["device"] == "cuda" else "operators of torch on the CPU"
    text = (
        f"Entries are {entries}. Inference is a forward pass that saves nothing; forward saves activations for "
        "backward; a full step is forward, backward and AdamW. CUDA graphs and torch.compile are off while profiling, "
        "so that each kernel is recorded with the operator that launched it. Weights are fp32; bf16 and fp16 run under "
        "autocast. Kernels `reference` are plain attention and torch's own operations, `fast` those that "
        f"`trimtab train` chooses here. The loss is {first['loss'].replace('_', ' ')}, the batch size {first['batch']}."
    )
    blocks: list[Block] = [Text(text)]
    others = [m for m in measurements if m.outcome is not CellOutcome.MEASURED]
    if others:
        reasons = tuple((cell_name(m), m.outcome.value, m.message) for m in others)
        blocks.append(Table("Not measured", ("cell", "outcome", "reason"), reasons))
    ranges = [row for row in rows if row.result.ranges is not None]
    if ranges:
        counts = tuple((row.name, f"{row.result.ranges:,}") for row in ranges)
        blocks.append(Table("NVTX ranges, without the profiler", ("cell", "ranges emitted"), counts))
        blocks.append(
            Text("The ranges appear in the tool that runs the command: nsys profile trimtab bench …")
        )
    traces = [row for row in rows if row.result.trace is not None]
    if traces:
        table = tuple((row.name, str(row.result.trace)) for row in traces)
        blocks.append(Table("Traces of one full step: open them at ui.perfetto.dev", ("cell", "file"), table))
    return tuple(blocks)


def _kinds_section(rows: Sequence[Row]) -> Section:
    """A row for each cell and pass, a column for each kind."""
    profiles = [(row, which, profile) for row in rows for which, profile in row.result.profiles.items()]
    kinds = [k for k in KernelKind if any(p.kind_share(k) > 0 for _, _, p in profiles)]
    kinds.sort(key=lambda kind: -max(profile.kind_share(kind) for _, _, profile in profiles))
    table = tuple(
        (row.name, which.value, ms(profile.busy_seconds), *(percent(profile.kind_share(k)) for k in kinds))
        for row, which, profile in profiles
    )
    head = ("cell", "pass", "sum, ms", *(kind.value for kind in kinds))
    bars = tuple(
        Bar(
            f"{row.name}: {which.value}",
            tuple((kind.value, 100 * profile.kind_share(kind)) for kind in kinds),
            f"{ms(profile.busy_seconds)} ms",
        )
        for row, which, profile in profiles
        if which is not ProfiledPass.INFERENCE
    )
    others = max(profile.kind_share(KernelKind.OTHER) for _, _, profile in profiles)
    note = (
        "GEMM are matrix products; attention is fused attention alone, since plain attention consists of products, a "
        "softmax and elementwise operations; copy moves bytes without computing; other are kernels that no rule "
        f"matches and, on a CPU, views, allocations and autograd's own work: at most {percent(others)} here."
    )
    return Section(
        "Share of the time by kind",
        (Table("", head, table), BarChart("kernels-kinds", "Share by kind", "%", bars), Text(note)),
    )


def _products_section(rows: Sequence[Row]) -> Section:
    """How the shares of products and of the softmax change from forward to a full step."""
    with_reference = any(row.is_reference for row in rows)
    table = []
    for row in rows:
        forward, full = row.result.profiles[ProfiledPass.FORWARD], row.result.profiles[ProfiledPass.FULL]
        products = [p.kind_share(KernelKind.GEMM) for p in (forward, full)]
        softmax = [p.kind_share(KernelKind.SOFTMAX) for p in (forward, full)]
        line = [row.name, *map(percent, products), f"{100 * (products[1] - products[0]):+.1f}"]
        line += map(percent, softmax)
        if with_reference:
            line += [
                REFERENCE_GEMM if row.is_reference else "",
                REFERENCE_SOFTMAX.get(row.context, "") if row.is_reference else "",
            ]
        table.append(tuple(line))
    head = [
        "cell",
        "GEMM, forward",
        "GEMM, full step",
        "change, points",
        "softmax, forward",
        "softmax, full step",
    ]
    if with_reference:
        head += [f"GEMM, forward: {LABEL}", f"softmax, forward: {LABEL}"]
    return Section(
        "Matrix products from forward to full step",
        (Table("", tuple(head), tuple(table)), Text(_products_text(rows))),
    )


def _products_text(rows: Sequence[Row]) -> str:
    moved = {
        row.name: row.result.profiles[ProfiledPass.FULL].kind_share(KernelKind.GEMM)
        - row.result.profiles[ProfiledPass.FORWARD].kind_share(KernelKind.GEMM)
        for row in rows
    }
    fell = [name for name, points in moved.items() if points < -0.0005]
    rose = [name for name, points in moved.items() if points > 0.0005]
    text = (
        "A backward pass has two products for each one of the forward pass, which raises their share; the optimizer "
        "and the gradients of elementwise operations lower it. "
    )
    if len(moved) == len(fell):
        text += "Here the share falls in every cell. "
    elif len(moved) == len(rose):
        text += "Here the share rises in every cell. "
    else:
        text += f"Here the share falls in {len(fell)} and rises in {len(rose)} of {len(moved)} cells. "
    name = max(moved, key=lambda cell: abs(moved[cell]))
    return text + f"It changes most in {name}: {100 * moved[name]:+.1f} percentage points."


def _leading_section(rows: Sequence[Row]) -> Section:
    table = []
    for row in rows:
        for which, profile in row.result.profiles.items():
            if not profile.entries:
                continue
            first = profile.entries[0]
            table.append(
                (
                    row.name,
                    which.value,
                    short_name(first.name),
                    first.kind.value,
                    f"{first.count:,}",
                    ms(first.seconds),
                    percent(profile.share(first.seconds)),
                )
            )
    kinds = {line[3] for line in table}
    text = (
        f"The longest kernel is of kind {kinds.pop()} everywhere."
        if len(kinds) == 1
        else f"The longest kernels are of the kinds {', '.join(sorted(kinds))}."
    )
    head = ("cell", "pass", "name", "kind", "calls", "ms", "share")
    return Section("The longest kernel", (Table("", head, tuple(table)), Text(text)))


def _clock_section(rows: Sequence[Row]) -> Section:
    """Sum and span of each profile, the host's clock for the same run, and the clock without the profiler."""
    table, differences = [], []
    for row in rows:
        for which, profile in row.result.profiles.items():
            plain = row.result.unprofiled_seconds[which]
            differences.append(abs(_difference(profile)))
            table.append(
                (
                    row.name,
                    which.value,
                    ms(profile.busy_seconds),
                    ms(profile.span_seconds),
                    ms(profile.host_seconds),
                    f"{100 * _difference(profile):+.1f} %",
                    ms(plain),
                    percent(ratio(profile.busy_seconds, profile.span_seconds)),
                )
            )
    head = ("cell", "pass", "sum, ms", "span, ms", "clock, ms", "span − clock", "clock, not profiled", "busy")
    agreeing = sum(difference <= CLOCK_TOLERANCE for difference in differences)
    text = (
        "Sum is the time of all entries; span is from the start of the first to the end of the last; clock is the "
        "host's time for the same run, synchronized before and after. Busy is the sum as a share of the span: the rest "
        "are gaps in which the device waits for the host. The profiler lengthens them, so that only the clock without "
        f"it is the time of an ordinary step. Span and clock agree within {percent(CLOCK_TOLERANCE, 0)} in {agreeing} "
        f"of {len(differences)} rows; the largest difference is {percent(max(differences))}."
    )
    return Section("Device time and host clock", (Table("", head, tuple(table)), Text(text)))


def _difference(profile: Profile) -> float:
    return ratio(profile.span_seconds - profile.host_seconds, profile.host_seconds)
