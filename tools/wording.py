"""Finds wording that hides a known idea, and names the field's term for it.

    python -m tools.wording            every line to change, with the better term; exit code 1 if there is one
    python -m tools.wording --count    how often each idiom occurs
    python -m tools.wording PATH …     only these files

Code, docstrings, comments, messages, docs and templates are read. A line with `wording: allow` in a comment is skipped,
for the rare sentence in which the word is right.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".py", ".md", ".html", ".yaml", ".toml", ".js")
SKIPPED = (
    "tools/wording.py",
    "tests/tools/test_tools_wording.py",
    "benchmarks/results/",
    "trimtab/starter/text/",
    # Word lists and templates of generated text: they define the starter model's training data and its probe.
    "tools/starter/general/",
    "tools/starter/probe.py",
    "tests/tools/test_starter_corpora.py",
    "tests/tools/test_starter_general.py",
)
ALLOWED = "wording: allow"
_RATES = "token|layer|weight|parameter|step|row|second|microbatch|sequence|checkpoint|block|head|line|file"


@dataclass(frozen=True)
class Idiom:
    """A pattern, and what to write instead."""

    name: str
    pattern: re.Pattern[str]
    better: str


def _idiom(name: str, better: str, *patterns: str) -> Idiom:
    return Idiom(name, re.compile("|".join(patterns), re.IGNORECASE), better)


_UNITS = "bytes?|bits?|ms|seconds?|[KMGT]i?B|FLOPs?|numbers?|tokens|steps|documents?|times|one|two"
_SEQUENCES = "packed|whole|each|per|training|evaluation"

IDIOMS = (
    _idiom("a person", "user", r"\b(a|the|each) person\b", r"\bpersons\b", r"\bperson's\b"),
    _idiom("whoever", "the user, the caller", r"\bwhoever\b"),
    _idiom("somebody", "a user, a caller, nothing", r"\b(some|any|no)body\b"),
    _idiom("the dial", "activation checkpointing, recompute policy", r"\bthe dial\b"),
    _idiom(
        "computes again",
        "recompute, recomputation",
        r"\bcomput\w+ (\w+ ){0,4}again\b",
        r"\bcomputed twice\b",
    ),
    _idiom(
        "sent to the host",
        "offloaded to host memory",
        r"\b(sent|sends|waits?) (to|in) the host\b",
        r"\bwaits there\b",
    ),
    _idiom(
        "a window of tokens",
        "sequence, sequence length",
        rf"\b({_SEQUENCES}) windows?\b",
        r"\bwindows? of (text|tokens|documents)\b",
        r"\btokens (of|in|per) a window\b",
        r"\ba window (holds|has|is|of)\b",
    ),
    _idiom("beside", "next to, alongside, in addition to", r"\bbeside\b"),
    _idiom("number format", "dtype", r"\bnumber formats?\b"),
    _idiom("a token (rate)", "per token, per layer", rf"\b({_UNITS}) an? ({_RATES})\b(?! of)"),
    _idiom("door", "dispatcher, public function, entry point", r"\bdoors?\b"),
    _idiom(
        "room (package)",
        "package, module",
        r"\b(a|the|this|another|each|every|other) rooms?\b(?! (for|to|in|left))",
        r"\brooms\b",
    ),
    _idiom("thrifty", "lowest-memory", r"\bthrift\w*"),
    _idiom("equal bits", "bitwise identical, deterministic", r"\b(equal|same) bits\b"),
    _idiom("no fixed order", "nondeterministic", r"\bin no fixed order\b"),
    _idiom("turned to positions", "RoPE is applied", r"\bturned (to|by) (its|their|the) positions?\b"),
    _idiom("in pieces", "fragmentation", r"\bmemory in pieces\b", r"\bin pieces between\b"),
    _idiom(
        "told",
        "gets, receives; is passed; reports",
        r"\b(is|are|be|been|was|were) told\b",
        r"\btold (what|how|that|to|of)\b",
    ),
    _idiom("held", "allocated, live, kept in memory", r"\bheld\b(?![- ]out)"),
    _idiom("plainly", "eagerly, without …", r"\bplainly\b"),
    _idiom("given up", "fall back to eager, abort", r"\b(gives?|given|giving) up\b"),
    _idiom("settle", "resolve", r"\bsettl(e|es|ed|ing)\b"),
    _idiom("goes on", "continue, resume", r"\b(go|goes|going|went) on\b"),
    _idiom(
        "laid out", "allocate, arrange, build the layout of", r"\b(laid|lays?|laying) out\b", r"\blay_out\b"
    ),
    _idiom("what learns", "trainable parameters", r"\bwhat (learns|is learn(t|ed))\b"),
    _idiom("is of a key", "requires …", r"\bis of `?(adamw|load_in|optim|lora)\w*"),
    _idiom("as it has it", "as in …", r"\bas \w+ has it\b"),
    _idiom("blind", "fully masked, does not attend to", r"\bblind(ly|ness)?\b"),
    _idiom("of nothing", "empty, zero", r"\bof nothing\b"),
    _idiom("in silence", "silently, without a message", r"\bin silence\b"),
    _idiom(
        "left alone",
        "unchanged, not modified",
        r"\b(leav(e|es|ing)|left|lets?|stays?) (\w+ )?alone\b",
    ),
    _idiom("rules out", "is not possible with, excludes", r"\brul(e|es|ed|ing) (\w+ )?out\b"),
    _idiom("exclude each other", "A does not support B", r"\bexclud(e|es|ed|ing) each other\b"),
    _idiom("will do", "may be used, is enough", r"\b(any|either|one)( \w+)? will do\b"),
    _idiom("more than none", "any, at least one", r"\bmore than none\b"),
    _idiom("in vain", "without effect", r"\bin vain\b"),
    _idiom("in force", "in effect, set", r"\bin force\b"),
    _idiom("spells out", "write in full", r"\bspel(l|ls|led|ling|t) (\w+ )?out\b"),
    _idiom("gets rid of", "remove, delete", r"\bg(et|ets|etting|ot) rid\b"),
)


@dataclass(frozen=True)
class Finding:
    """One place."""

    path: Path
    line: int
    text: str
    idiom: Idiom

    def describe(self) -> str:
        """As compilers print it, so that editors jump there."""
        return f"{self.path}:{self.line}: {self.text!r}: write {self.idiom.better}"


def find(path: Path, text: str) -> Iterator[Finding]:
    """Every idiom in a file's text.

    Example:
        >>> [one.text for one in find(Path("a.md"), "what a person sees\\nin each layer")]
        ['a person']
    """
    for number, line in enumerate(text.splitlines(), 1):
        if ALLOWED in line:
            continue
        words = line.replace("_", " ")  # so that names are read too
        for idiom in IDIOMS:
            for match in idiom.pattern.finditer(words):
                yield Finding(path, number, line[match.start() : match.end()], idiom)


def tracked(root: Path) -> list[Path]:
    """The files of a checkout that are read, relative to it."""
    listed = subprocess.check_output(["git", "ls-files"], cwd=root, text=True).splitlines()
    return [
        Path(name)
        for name in listed
        if name.endswith(SUFFIXES) and not name.startswith(SKIPPED) and (root / name).is_file()
    ]


def find_all(root: Path, paths: Iterable[Path]) -> list[Finding]:
    """Every idiom in files of a checkout."""
    return [one for path in paths for one in find(path, (root / path).read_text(encoding="utf-8"))]


def main() -> int:
    """0, or 1 if there is something to change."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--count", action="store_true", help="how often each idiom occurs")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    options = parser.parse_args()
    paths = options.paths or tracked(options.root)
    found = find_all(options.root, paths)
    if options.count:
        counts = Counter(one.idiom.name for one in found)
        for idiom in IDIOMS:
            print(f"{counts[idiom.name]:6} {idiom.name}")
        print(f"{len(found):6} in {len({one.path for one in found})} files")
        return 0
    for one in found:
        print(one.describe())
    if found:
        print(f"{len(found)} phrases to change; a comment `{ALLOWED}` allows a line", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
