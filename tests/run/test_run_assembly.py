"""Models are built in one place: `trimtab.run.build.build_model`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
OTHERS = {
    "trimtab/run/build.py": "the one place",
    "trimtab/export/hf.py": "reloads what it wrote, to compare logits, and may not import run",
    "benchmarks/reference_job.py": "writes a folder of random weights",
}
"""The modules that call `trimtab.model.build`, with the reason."""


def imports_build(path: Path) -> bool:
    found = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
    modules = ("trimtab.model", "trimtab.model.building")
    return any(node.module in modules and any(a.name == "build" for a in node.names) for node in found)


def test_models_are_built_in_one_place() -> None:
    files = [*(ROOT / "trimtab").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    names = {str(path.relative_to(ROOT)) for path in files if imports_build(path)}
    assert names - {"trimtab/model/__init__.py"} == OTHERS.keys()
