"""Imports are lazy, and a missing torch is reported with a remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest


def python(code: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def without_torch(*words: object) -> subprocess.CompletedProcess[str]:
    """The command line in a Python in which torch cannot be imported."""
    code = "import sys; sys.modules['torch'] = None; from trimtab.cli.main import main; sys.exit(main(sys.argv[1:]))"
    return python(code, *words)


@pytest.mark.parametrize("code", ["import trimtab", "from trimtab.cli.main import main; main(['--help'])"])
def test_imports_are_fast_and_do_not_import_torch(code: str, record_property: object) -> None:
    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        done = python(f"import sys\n{code}\nassert 'torch' not in sys.modules")
        best = min(best, time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
    record_property("seconds", round(best, 2))  # type: ignore[operator]
    assert best < 3.0  # a second on an idle machine; tests run on busy ones


def test_light_packages_import_no_torch() -> None:
    """Every module of the packages without torch, not only their public API."""
    root = Path(__file__).parents[1] / "trimtab"
    packages = ("facts", "recipe", "plan", "hub", "report", "starter", "text", "cli")
    files = [path for package in packages for path in sorted((root / package).rglob("*.py"))]
    names = [
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in files
    ]
    names += [
        f"trimtab.{name}"
        for name in (
            "run",
            "run.resolve",
            "run.locate",
            "run.choices",
            "run.metrics_summary",
            "launch",
            "run.prepare",
            "api",
        )
    ]
    names += ["trimtab.run.device", "trimtab.model.source", "trimtab.kernels.attention.choice"]
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def recipe(folder: Path) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(
        json.dumps({"model": "starter", "data": {"train": "starter:math"}, "max_seq_length": 128})
    )
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["train", "recipe"],
        ["train", "--resume", "somewhere"],
        ["eval", "starter"],
        ["generate", "starter", "hello"],
        ["export", "hf", "starter", "out"],
        ["demo"],
    ],
)
def test_without_torch_the_error_has_the_install_command(words: list[str], tmp_path: Path) -> None:
    done = without_torch(*[str(recipe(tmp_path)) if word == "recipe" else word for word in words])
    assert done.returncode == 8, done.stdout + done.stderr
    wanted = "error: this needs torch, which is not installed; pip install 'trimtab[train]'"
    assert done.stderr.strip() == wanted


def test_without_torch_the_api_raises_the_same_error(tmp_path: Path) -> None:
    for call in ("load('starter')", "train('recipe.yaml')", "resume('run')"):
        done = python(f"import sys; sys.modules['torch'] = None; import trimtab; trimtab.{call}")
        assert "MissingDependency: this needs torch" in done.stderr, done.stderr
        assert "pip install 'trimtab[train]'" in done.stderr
    code = "import sys; sys.modules['torch'] = None; import trimtab; print(trimtab.plan_run(sys.argv[1])['version'])"
    done = python(code, recipe(tmp_path))
    assert done.stdout == "1\n", done.stderr


def test_without_torch_much_still_works(tmp_path: Path) -> None:
    for words in (["--help"], ["schema"], ["train", "--help"]):
        done = without_torch(*words)
        assert done.returncode == 0, done.stderr
    done = without_torch("plan", recipe(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["memory"]["peak"]["weights"] > 0
    assert "torch is not installed" in done.stderr
    done = without_torch("plan", recipe(tmp_path), "device=cuda")
    assert done.returncode == 8
    done = without_torch("doctor")
    assert done.returncode == 8
    assert "pip install 'trimtab[train]'" in done.stdout


def test_without_torch_reports_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.0, "tokens": 5}\n')
    done = without_torch("report", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").is_file()
