"""A tiny setup for the real loop: a small MLP over random vectors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from trimtab.facts.errors import DataError
from trimtab.parallel import Mesh
from trimtab.trainer import Cadence, TrainingSetup
from trimtab.trainer.microstep import LossSum, MicroStep


@dataclass
class TinyBatch:
    x_BC: torch.Tensor
    y_B: torch.Tensor
    origins: list[list[str]]
    num_targets: int


@dataclass
class TinyLoader:
    """Step s, row r is a pure function of s and r; rows are spread over `accumulation` microbatches."""

    rows: int = 16
    accumulation: int = 4
    step: int = 0
    poison_step: int | None = None
    vanish_step: int | None = None
    masked_step: int | None = None

    def next_step(self) -> list[TinyBatch]:
        if self.step == self.vanish_step:
            raise DataError("the data went away", "bring it back")
        generator = torch.Generator().manual_seed(self.step)
        x = torch.randn(self.rows, 8, generator=generator)
        y = torch.randn(self.rows, generator=generator)
        if self.step == self.poison_step:
            x[5, 0] = float("nan")
        chunks = zip(x.chunk(self.accumulation), y.chunk(self.accumulation), strict=True)
        size = self.rows // self.accumulation
        batches = [
            TinyBatch(a, b, [[f"doc:{self.step}:{i * size + r}" for r in range(size)]], len(b))
            for i, (a, b) in enumerate(chunks)
        ]
        if self.step == self.masked_step:
            for batch in batches:
                batch.num_targets = 0
        self.step += 1
        return batches

    def position(self) -> dict[str, Any]:
        return {"step": self.step}

    def restore(self, position: dict[str, Any]) -> None:
        self.step = position["step"]


class TinySGD:
    """Momentum SGD with the optimizer's protocol."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.momentum = {n: torch.zeros_like(p) for n, p in parameters.items()}
        self.steps = 0

    @torch.no_grad()
    def step(self, *, lr: float, grad_scale: torch.Tensor, skip: torch.Tensor) -> None:
        if bool(skip):
            return
        self.steps += 1
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None
            self.momentum[name].mul_(0.9).add_(parameter.grad * grad_scale)
            parameter.sub_(lr * self.momentum[name])

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"momentum.{n}": t for n, t in self.momentum.items()}

    def scalars(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def restore_scalars(self, scalars: dict[str, Any]) -> None:
        self.steps = scalars["steps"]


@dataclass
class MemoryStore:
    """Checkpoints kept in a dict."""

    saved: dict[int, tuple[dict[str, torch.Tensor], dict[str, Any], set[str]]] = field(default_factory=dict)

    def save(self, step: int, tensors: Any, scalars: Any, *, tags: Any = (), wait: bool = False) -> None:
        self.saved[step] = ({n: t.clone() for n, t in tensors.items()}, scalars, set(tags))

    def wait(self) -> None:
        pass


@dataclass
class ListLog:
    """Records kept in a list."""

    records: list[dict[str, Any]] = field(default_factory=list)

    def append(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def sync(self) -> None:
        pass

    def losses(self) -> list[float]:
        return [r["loss"] for r in self.records if r["kind"] == "train"]


def global_norm(parameters: Any) -> torch.Tensor:
    return torch.stack([p.grad.float().norm() for p in parameters if p.grad is not None]).norm()


def tiny_setup(loader: TinyLoader, *, total_steps: int = 8, **more: Any) -> TrainingSetup:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    parameters = dict(model.named_parameters())

    def loss(batch: TinyBatch) -> LossSum:
        return LossSum((model(batch.x_BC).squeeze(-1) - batch.y_B).square().sum(), batch.num_targets)

    cadence = more.pop("cadence", Cadence(total_steps=total_steps, eval_on_start=False))
    return TrainingSetup(
        model=model,
        parameters=parameters,
        microstep=MicroStep(loss, more.pop("graphs", None)),
        optimizer=TinySGD(parameters),
        learning_rate=lambda step: 0.05,
        global_norm=global_norm,
        clip_factor=lambda norm: (1.0 / (norm + 1e-6)).clamp(max=1.0),
        loader=loader,
        store=MemoryStore(),
        log=ListLog(),
        mesh=Mesh.single(),
        cadence=cadence,
        device=torch.device("cpu"),
        **more,
    )
