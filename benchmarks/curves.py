"""Loss curves of the training benchmarks as SVG, without a plotting library."""

from __future__ import annotations


def chart(
    x: int, title: str, lines: list[tuple[str, list[list[float]]]], *, from_zero: bool = True
) -> list[str]:
    """SVG elements of one chart at `x`: lines are (colour, [[step, value], …])."""
    width, height, top = 340, 210, 40
    values = [v for _, line in lines for _, v in line]
    low, high = min(values), max(values)
    if from_zero:
        low = min(low, 0.0)
    last = max(s for _, line in lines for s, _ in line)
    reach = (high - low) or 1.0

    def at(step: float, value: float) -> str:
        return f"{x + width * step / last:.1f},{top + height * (high - value) / reach:.1f}"

    parts = [f'<text x="{x}" y="24" font-weight="bold">{title}</text>']
    for i in range(5):
        value = low + reach * i / 4
        y = top + height * (high - value) / reach
        parts.append(f'<line x1="{x}" x2="{x + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for colour, line in lines:
        points = " ".join(at(s, v) for s, v in line)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6" opacity="0.75"/>'
        )
    parts.append(f'<text x="{x + width}" y="{top + height + 20}" text-anchor="end">step {last:.0f}</text>')
    return parts
