"""The step to compile: a recipe's step with random weights, eager or compiled in one of two scopes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import _dynamo as dynamo

from trimtab.adapt import Regions, compile_regions
from trimtab.adapt.compiling import MAX_GRAPHS
from trimtab.facts.compilers import compile_obstacle
from trimtab.facts.shapes import ModelShape
from trimtab.lab.studies.compile.settings import Backend, Scope, Shapes
from trimtab.lab.study import NotSupported
from trimtab.lab.study_models import is_study_model, named_shape
from trimtab.lab.training_step import TrainingStep, build_step, random_batch
from trimtab.run.device import detect
from trimtab.run.prepare import Prepared, prepare_shape
from trimtab.run.target import named_recipe


class Subject:
    """A training step over random tokens of any length, which `compile` compiles."""

    def __init__(self, step: TrainingStep, rows: int) -> None:
        self.step, self.rows = step, rows
        self.vocab_size = step.decoder.shape.vocab_size
        self._compiled_loss: Any = None

    def run(self, tokens: int) -> torch.Tensor:
        """Frees gradients, runs forward and backward at one length, and returns the mean loss."""
        self.drop_gradients()
        return self.step.backward(random_batch(self.vocab_size, self.rows, tokens))

    def drop_gradients(self) -> None:
        """Frees the gradients."""
        for parameter in self.step.decoder.parameters():
            parameter.grad = None

    def gradient_norm(self) -> float:
        """The global norm of the last run's gradients."""
        norms = [torch.linalg.vector_norm(p.grad.float()) for p in self._trained() if p.grad is not None]
        return float(torch.linalg.vector_norm(torch.stack(norms)))

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.step.decoder.parameters() if parameter.requires_grad]

    def compile(self, scope: Scope, shapes: Shapes, backend: Backend) -> None:
        """Prepares compilation, which happens in the next run."""
        decoder = self.step.decoder
        if scope is Scope.REGIONS:
            compile_regions(decoder, dynamic=bool(shapes.dynamic), backend=backend.value)
            return
        dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, MAX_GRAPHS)
        self._compiled_loss = torch.compile(decoder.loss, dynamic=shapes.dynamic, backend=backend.value)
        vars(decoder)["loss"] = self._compiled_loss

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Runs the model in eager mode inside."""
        attributes = vars(self.step.decoder)
        with Regions(self.step.decoder).paused():
            attributes.pop("loss", None)
            try:
                yield
            finally:
                if self._compiled_loss is not None:
                    attributes["loss"] = self._compiled_loss


def build_subject(settings: dict[str, Any]) -> Subject:
    """The step of a cell, not compiled yet.

    Raises:
        NotSupported: torch.compile finds no compiler.

    Example:
        >>> settings = {"size": "tiny", "method": "full", "precision": "fp32", "lengths": [16], "batch": 1,
        ...             "device": "cpu", "backend": "eager"}
        >>> build_subject(settings).run(16).shape
        torch.Size([])
    """
    check_compiler(settings["device"], Backend(settings["backend"]))
    shape = named_shape(settings["size"])
    prepared = prepare_random(settings, shape)
    batch = random_batch(shape.vocab_size, settings["batch"], settings["lengths"][0])
    return Subject(build_step(prepared, prepared.model, batch), settings["batch"])


def check_compiler(device: str, backend: Backend) -> None:
    """Raises NotSupported if the backend would find no compiler; the message names an alternative.

    Example:
        >>> check_compiler("cpu", Backend.AOT_EAGER)
    """
    if backend is not Backend.INDUCTOR:
        return
    capability = torch.cuda.get_device_capability() if device.startswith("cuda") else None
    obstacle = compile_obstacle(device.split(":")[0], capability)
    if obstacle is not None:
        raise NotSupported(
            f"{obstacle}; --backend aot_eager finds graph breaks and recompilations without a compiler"
        )


def prepare_random(settings: dict[str, Any], shape: ModelShape) -> Prepared:
    """Prepares the recipe of a cell as `trimtab train` does, with random weights, without CUDA graphs and not compiled.
    It needs only the shape, and reads no file of the model."""
    forced = {
        "torch_compile": "false",
        "cuda_graphs": "false",
        "optim_in_backward": "false",
        "model.init": "random",
        "device": settings["device"],
        "max_seq_length": max(settings["lengths"]),
        "per_device_train_batch_size": settings["batch"],
    }
    if settings["precision"] is not None:
        forced["dtype"] = settings["precision"]
    name, method = settings["size"], settings["method"]
    if is_study_model(name):
        name = f"study/{name}"
        forced["packing"] = "false"
    recipe = named_recipe(name, [f"{key}={value}" for key, value in forced.items()], method)
    return prepare_shape(recipe, shape, detect(recipe.device), model=Path(name))
