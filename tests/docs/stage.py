"""The folder in which a page's blocks are run: what the pages speak of, small enough for seconds."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.docs.pages import ROOT, Block, order
from tests.tiny_model import sentences, write_texts, write_tiny_model
from trimtab.cli.main import main

SMALLER: dict[str, Any] = {
    "model": "./.tiny",
    "max_seq_length": 64,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "dtype": "fp32",
    "probe": False,
}
"""What the copies of the recipes get, so that the printed commands run as they are, in a second or two."""
_SHELL_ONLY = re.compile(r"[|<>&;$`]")


def build(folder: Path) -> None:
    """Texts, a model and the recipes, under the names the pages use."""
    for name in ("my-texts", "notes"):
        (folder / name).mkdir()
        for index in range(12):
            (folder / name / f"{index:02}.txt").write_text("\n".join(sentences(index, 3)))
    write_texts(folder / "more.jsonl", 5, 8)
    write_tiny_model(folder / "my-model")
    shutil.copytree(folder / "my-model", folder / ".tiny")
    (folder / "recipes").mkdir()
    yaml = YAML()
    for path in (ROOT / "recipes").glob("*.yaml"):
        recipe = yaml.load(path.read_text(encoding="utf-8"))
        named = recipe["model"]
        recipe.update(SMALLER)
        if isinstance(named, dict):  # its chat template stays
            recipe["model"] = {**named, "name": SMALLER["model"]}
        recipe["data"]["eval_sequences"] = 2
        recipe["data"]["num_proc"] = 1
        if "replay" in recipe["data"]:  # the starter's own is refused for another model
            recipe["data"]["replay"]["sources"] = ["./notes"]
        yaml.dump(recipe, folder / "recipes" / path.name)


class Stage:
    """Runs the blocks of one page, one after the other."""

    def __init__(self, folder: Path, built: Path | None = None, without: str | None = None) -> None:
        self.folder, self.built, self.without = folder, built, without
        self.set_up()
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.printed = ""

    def set_up(self) -> None:
        """A fresh copy of what `build` made, less one thing that the page makes itself."""
        if self.built is None:
            return
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(self.built, self.folder, dirs_exist_ok=True)
        if self.without is not None:
            shutil.rmtree(self.folder / self.without)

    def play(self, block: Block) -> None:
        """Runs, writes or compares one block, as its marker says."""
        marker = block.marker or ""
        if marker.startswith("file: "):
            (self.folder / marker.removeprefix("file: ")).write_text(block.text, encoding="utf-8")
        elif marker == "printed":
            self.compare(block)
        elif marker.startswith("run"):
            self.run(block)

    def run(self, block: Block) -> None:
        wish = order(block.marker or "")
        if wish.afresh:
            self.set_up()
        if block.language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block.text, block.place, "exec"), self.names)
            self.printed = out.getvalue()
            return
        self.printed = ""
        lines = [line for line in block.text.replace("\\\n", " ").splitlines() if line.strip()]
        for number, line in enumerate(lines, 1):
            code, text = self.command(line, wish.added)
            self.printed += text
            expected = wish.exit_code if number == len(lines) else 0
            assert code == expected, f"{block.place}: {line!r} ended with {code}\n{text}"

    def command(self, line: str, added: dict[str, list[str]]) -> tuple[int, str]:
        """A line of shell: `trimtab …` alone through the installed script's own function, the rest by bash."""
        words = shlex.split(line, comments=True)
        if not words:
            return 0, ""
        if words[0] != "trimtab" or _SHELL_ONLY.search(line.split("#")[0]):
            return self.bash(line)
        if "--resume" not in words:
            words += added.get(words[1], [])
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main(words[1:])
        return code, out.getvalue()

    def bash(self, line: str) -> tuple[int, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=self.folder,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr

    def compare(self, block: Block) -> None:
        """Each line of the block is in what was printed; … stands for anything, spaces for any spaces."""
        said = " ".join(self.printed.split())
        for line in block.text.splitlines():
            pattern = r"\s".join(
                ".*?".join(re.escape(piece) for piece in word.split("…")) for word in line.split()
            )
            assert re.search(pattern.replace(r"\s", " +"), said), (
                f"{block.place}: not printed: {line!r}\n{self.printed}"
            )
