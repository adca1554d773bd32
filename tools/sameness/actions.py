"""Runs a case with whichever trimtab is imported, through its public functions only."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from tools.sameness.case import Case
from tools.sameness.recording import exact, read_checkpoint, read_metrics, read_tensors

PROMPTS = ["the cat sees", "seven plus nine is"]
SAMPLED = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": 3}


class Runner:
    """Runs a case in its working folder."""

    def __init__(self, case: Case, recipe: dict[str, Any], world: Path, work: Path) -> None:
        self.case, self.world, self.work = case, world, work
        self.device = recipe["device"]
        self.cache = work / "cache"
        self.run = work / "run"
        self.values: dict[str, str] = {}
        self.recipe = {**recipe, "output_dir": str(self.run)}
        self.recipe["data"] = {**recipe["data"], "cache_dir": str(self.cache)}

    def train(self, keep_stopped: Path | None = None) -> dict[str, str]:
        """Train, stop and resume as the case requires; returns all values. Copies the stopped run to `keep_stopped`."""
        import trimtab

        case = self.case
        if case.stop_at is None:
            with _quiet():
                _ended(trimtab.train(self.recipe, view=_view()))
        else:
            with _quiet():
                _ended(trimtab.train(self.recipe, view=_view(), callbacks=[Stop(case.stop_at)]), "stopped")
            if keep_stopped is not None:
                shutil.rmtree(keep_stopped, ignore_errors=True)
                shutil.copytree(self.run, keep_stopped, symlinks=True)
            with _quiet():
                _ended(trimtab.resume(self.run, view=_view()))
        return self.read()

    def take_over(self, stopped: Path) -> dict[str, str]:
        """Resume a run folder of another commit; returns all values of the full run."""
        import trimtab

        shutil.copytree(stopped, self.run, symlinks=True)
        with _quiet():
            _ended(trimtab.resume(self.run, view=_view(), **{"data.cache_dir": str(self.cache)}))
        return self.read()

    def read(self) -> dict[str, str]:
        """Read the values of the run folder, and run the case's actions on it."""
        found = {**read_metrics(self.run), **read_checkpoint(self.run)}
        self.values = found  # available even if an action fails
        for name in self.case.then:
            with _quiet():
                values = ACTION_FUNCTIONS[name](self)
            found.update({f"{name} {key}": value for key, value in values.items()})
        return found

    def load(self, name: Path | str, **more: Any) -> Any:
        """A model in fp32 on the case's device."""
        import trimtab

        return trimtab.load(str(name), device=self.device, dtype="fp32", **more)


class Stop:
    """A callback that stops a run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, control: Any) -> None:
        """Request the stop."""
        if control.step == self.step:
            control.stop("sameness")


def _ended(run: Any, status: str = "finished") -> None:
    """Checks how a run ended. After a signal it saves and returns; then this process ends without a recording."""
    if run.status == "interrupted":
        raise KeyboardInterrupt
    if run.status != status:
        raise RuntimeError(f"the run ended as {run.status}, not {status}")


class _quiet:
    """Suppresses all output."""

    def __enter__(self) -> None:
        self.out, self.err = redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO())
        self.out.__enter__()
        self.err.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.err.__exit__(*error)
        self.out.__exit__(*error)


def _view() -> Any:
    from rich.console import Console

    from trimtab.report import LiveView

    return LiveView(console=Console(quiet=True))


def _use(model: Any) -> dict[str, str]:
    """Losses and completions, greedy, sampled and as a batch."""
    greedy = model.complete(PROMPTS[0], max_new_tokens=8)
    sampled = model.complete(PROMPTS[1], max_new_tokens=8, **SAMPLED)
    batch = model.complete(PROMPTS, max_new_tokens=6, **SAMPLED)
    return {
        "losses": exact(model.loss(PROMPTS)),
        "greedy": exact([greedy.ids, greedy.text]),
        "sampled": exact([sampled.ids, sampled.text]),
        "batch": exact([one.ids for one in batch]),
    }


def _generate(runner: Runner) -> dict[str, str]:
    return _use(runner.load(runner.run))


def _evaluate(runner: Runner) -> dict[str, str]:
    """`trimtab eval` on a file, as the command line does it."""
    from trimtab.cli.main import main

    words = [
        "eval",
        str(runner.run),
        str(runner.world / "data" / "general.jsonl"),
        "--json",
        "--max-seq-length",
        "64",
    ]
    words += ["--device", runner.device, "--dtype", "fp32", "--cache-dir", str(runner.cache)]
    with redirect_stdout(io.StringIO()) as out:
        code = main(words)
    records = [json.loads(line) for line in out.getvalue().splitlines() if line.startswith("{")]
    return {"exit code": str(code), **{f"record {i}": exact(record) for i, record in enumerate(records)}}


def _export(runner: Runner) -> dict[str, str]:
    found = {}
    for dtype in ("fp32", "bf16"):
        folder = runner.work / f"export-{dtype}"
        runner.load(runner.run).save(folder, dtype=dtype)
        found.update({f"{dtype} {name}": text for name, text in read_tensors(folder).items()})
    return found


def _merge(runner: Runner) -> dict[str, str]:
    folder = runner.work / "merged"
    runner.load(runner.run).merge(folder, dtype="fp32")
    return read_tensors(folder)


def _peft(runner: Runner) -> dict[str, str]:
    folder = runner.work / "peft"
    runner.load(runner.run).save_adapter(folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings.pop("base_model_name_or_path", None)
    return {"adapter_config.json": exact(settings), **read_tensors(folder)}


def _adapters(runner: Runner) -> dict[str, str]:
    """The base model with two adapters: both, one of them, none."""
    own = runner.work / "own-adapter"
    runner.load(runner.run).save_adapter(own)
    model = runner.load(runner.recipe["model"]["name"], adapter=own)
    model.add_adapter(runner.world / "adapter", "other")
    found = {}
    for names in (sorted(model.adapters), ["other"], []):
        model.use_adapters(*names)
        found.update({f"{'+'.join(names) or 'none'} {key}": value for key, value in _use(model).items()})
    return found


def _continue(runner: Runner) -> dict[str, str]:
    """A new run that begins from this one's weights."""
    import trimtab

    folder = runner.work / "continued"
    recipe = {**runner.recipe, "model": {"name": str(runner.run)}, "output_dir": str(folder)}
    _ended(trimtab.train(recipe, view=_view()))
    return {**read_metrics(folder), **read_checkpoint(folder)}


def _rows(runner: Runner) -> dict[str, str]:
    """A run over rows that are in memory, instead of files."""
    import trimtab

    folder = runner.work / "rows"
    lines = (runner.world / "data" / "train.jsonl").read_text().splitlines()
    data = {**runner.recipe["data"], "train": [json.loads(line) for line in lines]}
    recipe = {key: value for key, value in runner.recipe.items() if key != "data"}
    _ended(trimtab.train({**recipe, "output_dir": str(folder)}, data=data, view=_view()))
    return {**read_metrics(folder), **read_checkpoint(folder)}


def _loaded(runner: Runner) -> dict[str, str]:
    """A run that begins from a model in memory, whose weights were changed by merging."""
    import trimtab

    folder = runner.work / "loaded"
    model = runner.load(runner.run)
    if model.adapters:
        model.merge(runner.work / "merged-first", dtype="fp32")
    _ended(trimtab.train({**runner.recipe, "output_dir": str(folder)}, model=model, view=_view()))
    return {**read_metrics(folder), **read_checkpoint(folder)}


def _best(runner: Runner) -> dict[str, str]:
    return _use(runner.load(runner.run, checkpoint="best"))


ACTION_FUNCTIONS: dict[str, Callable[[Runner], dict[str, str]]] = {
    "generate": _generate,
    "evaluate": _evaluate,
    "export": _export,
    "merge": _merge,
    "peft": _peft,
    "adapters": _adapters,
    "continue": _continue,
    "best": _best,
    "rows": _rows,
    "loaded": _loaded,
}
