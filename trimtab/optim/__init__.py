"""AdamW with fp32, bf16 and 8-bit moments, gradient clipping without synchronization, and learning-rate schedules.

Public names are imported lazily: `trimtab.optim.spec` and the schedules do not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazy_attributes

if TYPE_CHECKING:
    from trimtab.optim.adamw import AdamW
    from trimtab.optim.adamw8bit import AdamW8bit
    from trimtab.optim.base import NamedOptimizer
    from trimtab.optim.by_name import build
    from trimtab.optim.clip import clip_factor, global_norm
    from trimtab.optim.groups import parameter_groups
    from trimtab.optim.in_backward import OptimizerInBackward
    from trimtab.optim.schedule import learning_rate
    from trimtab.optim.spec import OPTIMIZERS, SCHEDULES, state_bytes

_MODULES = {
    "AdamW": "adamw",
    "AdamW8bit": "adamw8bit",
    "OptimizerInBackward": "in_backward",
    "NamedOptimizer": "base",
    "build": "by_name",
    "clip_factor": "clip",
    "global_norm": "clip",
    "parameter_groups": "groups",
    "learning_rate": "schedule",
    "OPTIMIZERS": "spec",
    "SCHEDULES": "spec",
    "state_bytes": "spec",
}

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "AdamW",
    "AdamW8bit",
    "NamedOptimizer",
    "OptimizerInBackward",
    "build",
    "clip_factor",
    "global_norm",
    "learning_rate",
    "parameter_groups",
    "state_bytes",
]

__getattr__ = lazy_attributes(__name__, _MODULES, {"InBackward": "OptimizerInBackward"})
