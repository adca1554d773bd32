"""Documents for the tests of their writers: every kind of block, a long timeline, hostile text, empty."""

from __future__ import annotations

import math

from trimtab.report.document import (
    Band,
    Bar,
    BarChart,
    Code,
    Document,
    Histogram,
    LineChart,
    Section,
    Series,
    StackChart,
    Table,
    Text,
    TimelinePhase,
)

GIB = 2**30
SIZES = ("small", "medium", "large", "xl", "2.7B")
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def times(series: int = 5) -> LineChart:
    """Times over the context length on two logarithmic axes; larger models run out of memory earlier."""
    found = []
    for i in range(series):
        name = SIZES[i] if series <= len(SIZES) else f"{SIZES[i % 5]}, backend {i // 5}"
        points = [
            (float(c), None if n > 7 - i % 5 else (i + 1) * (30 + c / 20 + (c / 900) ** 2))
            for n, c in enumerate(CONTEXTS)
        ]
        found.append(Series(name, tuple(points)))
    return LineChart(
        f"times-{series}", "Forward and backward", "context length, tokens", "ms", tuple(found), True, True
    )


def losses() -> LineChart:
    """Curves over steps on linear axes."""
    curves = (
        Series(f"seed {s}", tuple((float(i), 3 * math.exp(-i / 300) + 1 + 0.05 * s) for i in range(2000)))
        for s in range(3)
    )
    return LineChart("losses", "Training loss", "step", "loss, nats per token", tuple(curves))


def kernels() -> BarChart:
    """Bars of two parts, with a kernel's name as long as they are."""
    names = (
        "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_execute_segment_k_off",
        "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>(int, std::array<char*, 2ul>)",
        "softmax",
        "copy",
    )
    bars = tuple(
        Bar(
            name,
            (("forward", 40.0 / (i + 1)), ("backward", 70.0 / (i + 1) ** 2)),
            f"{110 / (i + 1):.1f} ms ({40 / (i + 1):.0f} %)",
        )
        for i, name in enumerate(names)
    )
    return BarChart("kernels", "Time by kernel", "ms", bars, "Kernels of less than 1 % are added up.")


def memory(moments: int = 400, id: str = "memory") -> StackChart:
    """A step: activations grow in forward and shrink in backward, one layer after another."""
    x = tuple(i * 0.37 for i in range(moments))
    half = moments // 2
    grown = [min(i, 2 * half - i) / half if i < 2 * half else 0.0 for i in range(moments)]
    bumps = [(i % 7) * 9_000_000 for i in range(moments)]
    bumps[half + 3] = 3 * GIB
    bands = (
        Band("weights", "weights", (2 * GIB,) * moments),
        Band("optimizer states", "optimizer", (4 * GIB,) * moments),
        Band(
            "gradients",
            "gradients",
            tuple(0 if i < half else round(2 * GIB * (i - half) / half) for i in range(moments)),
        ),
        Band("attention", "attention", tuple(round(3 * GIB * g) for g in grown)),
        Band("feed-forward", "feed-forward", tuple(round(5 * GIB * g) for g in grown)),
        Band("workspace", "workspace", tuple(bumps)),
    )
    titles = tuple(
        f"{'forward' if i < half else 'backward'}, layer {i % 32}, event {i}" for i in range(moments)
    )
    end = moments * 0.37
    phases = (
        TimelinePhase("forward", 0.0, x[half]),
        TimelinePhase("backward", x[half], 0.96 * end),
        TimelinePhase("optimizer step", 0.96 * end, end),
    )
    return StackChart(
        id, "Memory of a training step", "time, ms", "bytes", x, end, bands, phases, titles, 20 * GIB
    )


def errors() -> Histogram:
    """Two distributions in bins of equal width."""
    edges = tuple(-4 + i * 0.25 for i in range(33))
    middle = [(low + 0.125) for low in edges[:-1]]
    return Histogram(
        "errors",
        "Weights by size",
        "weight",
        edges,
        (
            ("before", tuple(round(4000 * math.exp(-m * m / 2)) for m in middle)),
            (
                "after INT4",
                tuple(round(4000 * math.exp(-m * m)) if i % 4 == 0 else 0 for i, m in enumerate(middle)),
            ),
        ),
    )


def table() -> Table:
    """Numbers, outcomes and words."""
    rows = tuple(
        (
            size,
            "eager" if i % 2 else "compiled",
            f"{38.3 * (i + 1):.1f} ± 0.{i}",
            "out of memory" if i > 2 else f"{78.3 * (i + 1):.1f} ± 1.{i}",
            "not supported" if i == 4 else f"{1.5 * (i + 1):.2f} GiB",
            f"{32.2 - i:.1f} %",
            "–" if i > 2 else f"{2.04 + i / 10:.2f}×",
        )
        for i, size in enumerate(SIZES)
    )
    head = (
        "size",
        "mode",
        "forward, ms",
        "forward and backward, ms",
        "peak memory",
        "MFU",
        "backward / forward",
    )
    return Table(
        "Step time by size", head, rows, "Mean and standard deviation of 10 steps after 5 warm-up steps."
    )


def everything() -> Document:
    """One of each kind of block, in six sections."""
    sections = (
        Section(
            "Step time",
            (Text("Backward takes about twice as long as forward. `tf32` is off."), table(), times()),
        ),
        Section("Many series", (times(20), losses())),
        Section("Kernels", (kernels(),)),
        Section("Memory", (Text("Activations are largest at the end of forward."), memory())),
        Section("Distribution", (errors(),)),
        Section("Bits", (Code("3.14\n0 10000000 10010001111010111000011\nsign exponent mantissa"),)),
    )
    return Document(
        "Step time of the study models",
        ("NVIDIA H200, torch 2.11.0", "commit 0123456789", "2026-11-18"),
        sections,
        "trimtab bench step",
    )


def hostile_document(text: str) -> Document:
    """A document whose texts are all this text."""
    blocks = (
        Text(text),
        Code(text),
        Table(text, (text, text), ((text, text), (text,)), text),
        LineChart("a", text, text, text, (Series(text, ((1.0, 2.0), (2.0, None), (3.0, 4.0))),), note=text),
        BarChart("b", text, text, (Bar(text, ((text, 1.0), (text + "2", 2.0)), text),), text),
        StackChart(
            "c",
            text,
            text,
            text,
            (0.0, 1.0),
            2.0,
            (Band(text, text, (1.0, 2.0)),),
            (TimelinePhase(text, 0, 2),),
            (text, text),
            2.5,
            text,
            text,
        ),
        Histogram("d", text, text, (0.0, 1.0), ((text, (3,)),), text),
    )
    return Document(text, (text,), (Section(text, blocks),), text)


def odd_charts() -> list[LineChart | BarChart | StackChart | Histogram]:
    """Charts without values, with one value, and with values that cannot be drawn."""
    inf, nan = math.inf, math.nan
    return [
        LineChart("no-series", "t", "x", "y", ()),
        LineChart("no-points", "t", "x", "y", (Series("s", ()),)),
        LineChart("all-none", "t", "x", "y", (Series("s", ((1.0, None), (2.0, None))),)),
        LineChart("one-point", "t", "x", "y", (Series("s", ((5.0, 5.0),)),)),
        LineChart("one-point-log", "t", "x", "y", (Series("s", ((5.0, 5.0),)),), True, True),
        LineChart("zeros", "t", "x", "y", (Series("s", ((0.0, 0.0), (1.0, 0.0))),)),
        LineChart(
            "zeros-log", "t", "x", "y", (Series("s", ((0.0, 0.0), (1.0, 0.0), (2.0, 3.0))),), True, True
        ),
        LineChart("only-zeros-log", "t", "x", "y", (Series("s", ((0.0, 0.0),)),), True, True),
        LineChart("negative-log", "t", "x", "y", (Series("s", ((-1.0, -5.0), (1.0, 2.0))),), True, True),
        LineChart(
            "huge", "t", "x", "y", (Series("s", ((1.0, 1e308), (2.0, -1.7e308), (3.0, inf), (4.0, nan))),)
        ),
        LineChart(
            "huge-log", "t", "x", "y", (Series("s", ((1e-308, 1e-308), (1e308, 1.7e308))),), True, True
        ),
        LineChart("tiny-range", "t", "x", "y", (Series("s", ((1.0, 1e15), (2.0, 1e15 + 1))),)),
        LineChart(
            "bytes", "t", "x", "peak memory, bytes", (Series("s", ((1.0, 2e9), (2.0, 5e11))),), False, True
        ),
        BarChart("no-bars", "t", "ms", ()),
        BarChart("empty-bars", "t", "ms", (Bar("a", (), "0"), Bar("b", (("p", 0.0),), "0"))),
        BarChart(
            "odd-bars",
            "t",
            "bytes",
            (Bar("a", (("p", -1.0), ("q", nan), ("r", inf)), "?"), Bar("b", (("p", 1e308),), "!")),
        ),
        StackChart("no-moments", "t", "x", "bytes", (), 0.0, ()),
        StackChart("no-bands", "t", "x", "bytes", (0.0,), 1.0, ()),
        StackChart("all-zero", "t", "x", "bytes", (0.0, 1.0), 2.0, (Band("a", "weights", (0, 0)),)),
        StackChart("one-moment", "t", "x", "ms", (3.0,), 3.0, (Band("a", "weights", (7.5,)),)),
        StackChart(
            "odd-stack",
            "t",
            "",
            "bytes",
            (0.0, 1.0, 2.0),
            3.0,
            (Band("a", "x", (nan, 1e308, -5.0)), Band("b", "x", (inf, 1.0, 2.0))),
        ),
        Histogram("no-bins", "t", "x", (), ()),
        Histogram("no-counts", "t", "x", (0.0, 1.0), ()),
        Histogram("zero-counts", "t", "x", (0.0, 1.0), (("a", (0,)),)),
        Histogram("one-bin", "t", "x", (0.0, 1.0), (("a", (1,)),)),
        Histogram("growing", "t", "x", (0.0, 1e-6, 1e-4, 1e-2, 1.0, 1e300), (("a", (1, 2, 3, 4, 5)),)),
        Histogram("same-edges", "t", "x", (1.0, 1.0, 1.0), (("a", (1, 2)),)),
    ]
