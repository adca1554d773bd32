"""A recipe for a tiny model without data, and rows of every form, for runs from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chat_runs import TEMPLATE
from rich.console import Console
from tiny_model import sentences, write_tiny_model

from trimtab.report import LiveView

TEXTS = sentences(1, 40)
CHATS = [
    [
        {"role": "user", "content": f"the cat sees {i} dog"},
        {"role": "assistant", "content": f"it was {i} and a tree"},
    ]
    for i in range(24)
]


def tiny_recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    """Everything but `data.train`: a second or less for a run of a few steps."""
    if not (folder / "model").exists():
        write_tiny_model(folder / "model")
    return {
        "model": {"name": str(folder / "model"), "chat_template": TEMPLATE},
        "data": {"cache_dir": str(folder / "cache"), "num_proc": 1},
        "max_seq_length": 64,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "dtype": "fp32",
        "device": "cpu",
        "logging_steps": 1,
        "probe": False,
        "output_dir": str(folder / "run"),
        **changes,
    }


def quiet() -> LiveView:
    """A view that shows nothing."""
    return LiveView(console=Console(quiet=True))
