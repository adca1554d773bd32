"""The two compared source trees, and the keys of their recordings."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("trimtab", "recipes", "pyproject.toml")
"""Paths that a run depends on; changes elsewhere do not invalidate recordings."""


@dataclass(frozen=True)
class Side:
    """A tree with its commit; no commit for a tree with uncommitted changes, whose recordings are not reused."""

    tree: Path
    label: str
    commit: str | None


def git(*words: str) -> str:
    """The output of a git command in this repository."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: git {' '.join(words)}: {done.stderr.strip()}; name a commit that exists")
    return done.stdout.strip()


def head_side() -> Side:
    """This tree."""
    commit = git("rev-parse", "HEAD")
    if git("status", "--porcelain", "--", *PRODUCT):
        return Side(ROOT, f"{commit}+changes", None)
    return Side(ROOT, commit, commit)


def default_parent(head: Side) -> str:
    """HEAD where there are uncommitted changes, else where the branch left main, else the commit before."""
    if head.commit is None:
        return "HEAD"
    known = subprocess.run(["git", "merge-base", "HEAD", "main"], cwd=ROOT, capture_output=True, text=True)
    base = known.stdout.strip() if known.returncode == 0 else ""
    return base if base and base != head.commit else "HEAD~1"


@contextmanager
def parent_side(ref: str, folder: Path) -> Iterator[Side]:
    """A commit checked out under `folder`, which is removed afterwards."""
    commit = git("rev-parse", "--verify", f"{ref}^{{commit}}")
    tree = folder / f"tree-{commit[:12]}"
    git("worktree", "add", "--detach", "--force", str(tree), commit)
    try:
        yield Side(tree, commit, commit)
    finally:
        git("worktree", "remove", "--force", str(tree))
        shutil.rmtree(tree, ignore_errors=True)


def scripts_hash(pattern: str = "*.py") -> str:
    """Hash of this package's files: a change invalidates recordings."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob(pattern)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def machine() -> str:
    """Hash of host, processor and torch version: results are only compared on the same machine and version."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().splitlines()
        name = next((line.split(":", 1)[1] for line in lines if line.startswith("model name")), name)
    text = f"{platform.node()} {name} torch {version('torch')} {platform.python_version()}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def key(side: Side, device: str, threads: int) -> str:
    """The name of a commit's recordings on this machine."""
    return f"{side.label[:12]}-{device}-{machine()}-{threads}-{scripts_hash()}"
