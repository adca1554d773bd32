"""Compares training steps of two commits: `python -m benchmarks.end_to_end.commits --parent DIR`.

    git worktree add ../parent main~3
    python -m benchmarks.end_to_end.commits --parent ../parent --parent-commit A --commit B --out FILE.jsonl

Both trees run their own `benchmarks.end_to_end` in turns, so that both see the same machine; the side that runs first
alternates between rounds. A row is slower if its median exceeds the parent's slowest round by more than 2 %, and larger
if its peak exceeds the parent's by more than 1 %. Finished rounds are kept, and an interrupted command resumes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.lab.records import append_record, read_records
from trimtab.report.document_markdown import aligned_table

ROOT = Path(__file__).parents[2]
SLOWER, LARGER = 1.02, 1.01
ROWS = (
    "qwen3-0.6b full 4×1024/trimtab",
    "qwen3-0.6b full 4×1024 packed/trimtab",
    "qwen3-0.6b full 4×4096/trimtab",
    "llama-8b qlora 2×2048/trimtab",
    "llama-8b qlora 2×2048 packed/trimtab",
    "llama-8b qlora 1×8192/trimtab",
    "qwen3-0.6b full 4×1024/trimtab tight",
    "llama-8b qlora 2×2048/trimtab tight",
)


@dataclass(frozen=True)
class Comparison:
    """A row measured in several rounds of both commits: milliseconds and peak bytes, one per round."""

    name: str
    parent_ms: tuple[float, ...]
    head_ms: tuple[float, ...]
    parent_bytes: tuple[int, ...]
    head_bytes: tuple[int, ...]
    losses_equal: bool

    @property
    def verdict(self) -> str:
        """What differs.

        Example:
            >>> Comparison("row", (100.0, 104.0), (107.0, 108.0), (10, 10), (10, 10), True).verdict
            'slower'
        """
        slower = statistics.median(self.head_ms) > SLOWER * max(self.parent_ms)
        larger = max(self.head_bytes) > LARGER * max(self.parent_bytes)
        return ", ".join(word for word, is_so in (("slower", slower), ("larger", larger)) if is_so) or "equal"


def comparisons(records: Iterable[dict[str, Any]]) -> list[Comparison]:
    """One comparison per row that both commits measured."""
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for record in records:
        if record.get("median_ms"):
            rows.setdefault(record["name"], {"parent": [], "head": []})[record["side"]].append(record)
    found = []
    for name, sides in rows.items():
        parent, head = sides["parent"], sides["head"]
        if parent and head:
            ms = [tuple(one["median_ms"] for one in side) for side in (parent, head)]
            peaks = [tuple(one["peak_bytes"] or 0 for one in side) for side in (parent, head)]
            equal = len({tuple(one["losses"]) for one in (*parent, *head)}) == 1
            found.append(Comparison(name, *ms, *peaks, equal))
    return found


def markdown(found: Sequence[Comparison]) -> str:
    """The table: medians, the slowest and fastest round, and the verdict."""
    head = ["step", "parent, ms", "head, ms", "ratio", "parent, GiB", "head, GiB", "losses", "verdict"]
    return aligned_table([head, *(_cells(one) for one in found)])


def _cells(one: Comparison) -> list[str]:
    def times(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.1f} ({min(values):.1f}–{max(values):.1f})"

    return [
        one.name,
        times(one.parent_ms),
        times(one.head_ms),
        f"{statistics.median(one.head_ms) / statistics.median(one.parent_ms):.3f}",
        f"{max(one.parent_bytes) / 2**30:.3f}",
        f"{max(one.head_bytes) / 2**30:.3f}",
        "equal" if one.losses_equal else "differ",
        one.verdict,
    ]


def measure(side: str, turn: int, options: argparse.Namespace) -> None:
    """Run the rows of a tree that have no record of this round yet, and append their records."""
    here = side == "head"
    tree, commit = (ROOT, options.commit) if here else (options.parent.resolve(), options.parent_commit)
    known = read_records(options.out, "side", "round", "name")
    left = [name for name in options.only or ROWS if (side, turn, name) not in known]
    if not left:
        return
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        if device := read_records(options.out, "name").get("device"):
            append_record(results, device)  # measure the device's ceilings only once
        words = [sys.executable, "-m", "benchmarks.end_to_end", "--share-processes", "--out", str(results)]
        words += ["--commit", commit, "--weights", str(options.weights.expanduser().resolve())]
        words += [word for name in left for word in ("--only", name)] + ["--tiny"] * options.tiny
        subprocess.run(words, cwd=tree, stdout=subprocess.DEVNULL)
        for name, record in read_records(results, "name").items():
            if name in left or (name == "device" and not device):
                append_record(options.out, record | {"side": side, "round": turn})


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.end_to_end.commits", description=__doc__.split("\n")[0]
    )
    made.add_argument("--parent", type=Path, metavar="DIR", help="the other commit's tree")
    made.add_argument("--parent-commit", default="parent", help="what to call it")
    made.add_argument("--commit", default="head", help="what to call this tree")
    made.add_argument("--only", action="append", default=[], metavar="NAME", help="a row, by its full name")
    made.add_argument("--rounds", type=int, default=2)
    made.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    made.add_argument("--weights", type=Path, default=Path("~/.cache/trimtab/benchmarks"))
    made.add_argument("--tiny", action="store_true", help="tiny models on the CPU; name rows with --only")
    made.add_argument("--table", action="store_true", help="print the table of the file and exit")
    return made


def main(words: list[str] | None = None) -> int:
    """Returns 0, 1 if a row is slower or larger or was not measured, 2 without the parent's tree."""
    options = parser().parse_args(words)
    if not options.table:
        if options.parent is None or not (options.parent / "benchmarks" / "end_to_end").is_dir():
            print(
                "error: --parent is no tree of trimtab; make one: git worktree add DIR COMMIT",
                file=sys.stderr,
            )
            return 2
        for turn in range(options.rounds):
            for side in ("parent", "head") if turn % 2 == 0 else ("head", "parent"):
                measure(side, turn, options)
    found = comparisons(read_records(options.out, "side", "round", "name").values())
    print(markdown(found), end="")
    missing = set(options.only or ROWS) - {one.name for one in found}
    for name in sorted(missing):
        print(f"not measured: {name}", file=sys.stderr)
    return 1 if missing or any(one.verdict != "equal" for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
