"""From hub ids to a trained model, against a hub on loopback: pinned commits, offline resume, private models."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_world import CommandResult
from loopback_hub import LoopbackHub
from tiny_model import sentences, write_tiny_model

pyarrow = pytest.importorskip("pyarrow")


def parquet(**columns: list[str]) -> bytes:
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pyarrow.table(columns), sink)
    return sink.getvalue()


def model_files(folder: Path) -> dict[str, bytes | str]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


SEVERAL = """
import contextlib, io, json, os, sys
from trimtab.cli.main import main
said = []
for words, token in json.loads(sys.argv[1]):
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    said.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(said))
"""
Call = tuple[list[str], str | None]


def call(*words: object, token: str | None = None) -> Call:
    """A command and its access token."""
    return [str(word) for word in words], token


@dataclass
class Place:
    """A hub, and a folder in which the command line can reach only that hub."""

    hub: LoopbackHub
    folder: Path

    def trimtab(self, *calls: Call) -> list[CommandResult]:
        """Runs several commands in one new process that uses this hub."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        done = subprocess.run(
            [sys.executable, "-c", SEVERAL, json.dumps(calls)],
            cwd=self.folder,
            env={
                **clean,
                "HF_ENDPOINT": self.hub.endpoint,
                "HF_HOME": str(self.folder / "hf"),
                "XDG_CACHE_HOME": str(self.folder / "cache"),
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return [CommandResult(*result) for result in json.loads(done.stdout.splitlines()[-1])]

    def recipe(self, name: str = "recipe.yaml", **changes: object) -> str:
        """Writes a recipe of two steps from the hub; returns its name."""
        recipe: dict[str, object] = {
            "model": "org/tiny",
            "data": {"train": ["org/words"], "eval_share": 0, "cache_dir": "cache", "num_proc": 1},
            "max_seq_length": 64,
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 1,
            "lr_scheduler_type": "constant",
            "device": "cpu",
            "dtype": "fp32",
            "eval_on_start": False,
            "probe": False,
            "logging_steps": 1,
            "output_dir": "run",
        }
        (self.folder / name).write_text(json.dumps({**recipe, **changes}))  # JSON is YAML
        return name


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with LoopbackHub() as hub:
        yield Place(hub, tmp_path)


@pytest.mark.slow
def test_train_pins_its_commits_and_resumes_offline_after_the_branch_moved(
    place: Place, tmp_path: Path
) -> None:
    files = model_files(write_tiny_model(tmp_path / "made"))
    model_commit = place.hub.add_model(
        "org/tiny", {**files, "evil.py": "raise SystemExit", "pytorch_model.bin": b"x"}
    )
    table = parquet(id=[str(i) for i in range(30)], text=sentences(1, 30))
    data_commit = place.hub.add_dataset("org/words", {"data/train-00000-of-00001.parquet": table})
    [planned] = place.trimtab(call("plan", place.recipe()))
    assert planned.code == 0, planned.err
    assert "model.safetensors" not in place.hub.fetched()  # a plan does not download weights
    [done] = place.trimtab(call("train", place.recipe()))
    assert done.code == 0, done.err
    assert "model.safetensors" in place.hub.fetched()
    assert place.hub.fetched() & {"evil.py", "pytorch_model.bin"} == set()
    choices = json.loads((tmp_path / "run" / "choices.json").read_text())
    assert choices["model_commit"] == model_commit
    assert choices["data"]["commits"] == {"org/words": data_commit}
    # The branch moves to another model and other texts: the run keeps the original commit.
    other = model_files(write_tiny_model(tmp_path / "other", hidden_size=64, head_dim=16))
    place.hub.add_model("org/tiny", other)
    place.hub.add_dataset("org/words", {"data/train-00000-of-00001.parquet": parquet(text=sentences(9, 30))})
    [done] = place.trimtab(call("train", "--resume", "run", "max_steps=3"))
    assert done.code == 0, done.err
    place.hub.close()  # the server does not respond any more
    [done] = place.trimtab(call("train", "--resume", "run", "max_steps=4"))
    assert done.code == 0, done.err
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4]


@pytest.mark.slow
def test_private_models_and_columns(place: Place, tmp_path: Path) -> None:
    files = model_files(write_tiny_model(tmp_path / "made"))
    place.hub.add_model("org/tiny", files, token="secret-token")
    place.hub.add_dataset("org/words", {"train.parquet": parquet(question=["a b"], answer=["c d"])})
    chosen = {"train": [{"source": "org/words", "text_column": "answer"}], "eval_share": 0, "num_proc": 1}
    closed, unclear, trained, missing = place.trimtab(
        call("train", place.recipe()),
        call("train", place.recipe(), token="secret-token"),
        call("train", place.recipe("chosen.yaml", data=chosen, max_steps=1), token="secret-token"),
        call("train", place.recipe("missing.yaml", model="org/missing", output_dir="x")),
    )
    closed.refused(9, "org/tiny", "token")
    unclear.refused(3, "question", "answer", "text_column")
    assert trained.code == 0, trained.err
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or b"secret-token" not in path.read_bytes()
    missing.refused(9, "org/missing")
    assert not (tmp_path / "x").exists()
