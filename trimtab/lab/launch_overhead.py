"""Measures the host time of steps in eager mode, with layers so small that their kernels take almost no time.

Steps of two models that differ only in their number of layers are timed for each training method and optimizer. The
difference is the host time of the additional layers, without the constant part of a step.
"""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path
from typing import Any

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.shapes import ModelShape, uniform_shape
from trimtab.lab.timing import synchronize
from trimtab.lab.training_step import build_step, random_batch
from trimtab.plan.step_time import IN_BACKWARD, declared_launches, updated_chunks
from trimtab.recipe import build
from trimtab.run.prepare import Prepared, prepare_shape

TOKENS = 16
VOCABULARY = 64
HEAD_DIM = 64
"""Small, so that arithmetic takes little time; every attention backend of a GPU supports 64."""
LAYERS = (2, 12)
WARM_UP, TIMED = 3, 7
OF_A_RUN = 1.18
"""Host time per launch of a training run relative to these tiny layers, which stay in the CPU's caches: the median of
six eager runs with LoRA, QLoRA, INT8 and full fine-tuning (1.05 to 1.36,
benchmarks/results/plan-accuracy-development-2-nvidia-h200.jsonl)."""
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": {"r": 8}},
    "nf4": {"lora": {"r": 8}, "load_in_4bit": True},
    "int8": {"lora": {"r": 8}, "load_in_8bit": True},
}
"""Recipe keys of each training method; NF4 and INT8 with adapters."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw_torch_fused": {"optim": "adamw_torch_fused"},
    IN_BACKWARD: {"optim_in_backward": True, "max_grad_norm": 0.0, "gradient_dtype": "bf16"},
}
"""Recipe keys of optimizers that update each parameter on its own."""


def host_seconds(device: DeviceFacts, dtype: str) -> dict[str, float]:
    """Host time in seconds: per declared launch of each training method, and per updated chunk of each optimizer.

    Python, autograd and dispatcher are included. The time of an optimizer is in addition to that of `adamw_8bit`, which
    updates all parameters in one call and is part of a method's launches.

    Example:
        >>> found = host_seconds(DeviceFacts("a CPU", "cpu", 2**34), "fp32")             # doctest: +SKIP
        >>> found["full"] < found["adamw_torch"]                                         # doctest: +SKIP
        True
    """
    found: dict[str, float] = {}
    full = 0.0
    for name, keys in METHODS.items():
        seconds, launches, _ = _added_by_layers(device, dtype, keys)
        found[name] = OF_A_RUN * max(seconds, 0.0) / launches
        full = full or seconds
    for name, keys in OPTIMIZERS.items():
        seconds, _, chunks = _added_by_layers(device, dtype, keys)
        found[name] = max(seconds - full, 0.0) / chunks
    return found


def launch_seconds(device: DeviceFacts, dtype: str) -> float:
    """Host seconds per declared launch of full training, forward and backward.

    Example:
        >>> 0 <= launch_seconds(DeviceFacts("a CPU", "cpu", 2**34), "fp32") < 0.1
        True
    """
    seconds, launches, _ = _added_by_layers(device, dtype, METHODS["full"])
    return OF_A_RUN * max(seconds, 0.0) / launches


def _added_by_layers(device: DeviceFacts, dtype: str, keys: dict[str, Any]) -> tuple[float, int, int]:
    """(host seconds of a step, declared launches, updated chunks) that the additional layers cause."""
    fewer, more = (_measured(device, dtype, keys, layers) for layers in LAYERS)
    return more[0] - fewer[0], more[1] - fewer[1], more[2] - fewer[2]


def _measured(device: DeviceFacts, dtype: str, keys: dict[str, Any], layers: int) -> tuple[float, int, int]:
    prepared = _prepared(device, dtype, keys, layers)
    step = build_step(prepared, Path(), random_batch(VOCABULARY, 1, TOKENS))
    for _ in range(WARM_UP):
        step()
    times = []
    for _ in range(TIMED):
        synchronize(device.kind)
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    del step
    gc.collect()
    job = prepared.plan.job
    return statistics.median(times), declared_launches(job), updated_chunks(job)


def _prepared(device: DeviceFacts, dtype: str, keys: dict[str, Any], layers: int) -> Prepared:
    recipe = {
        "model": {"name": "layers", "init": "random"},
        "data": {"train": [{"source": "none"}]},
        "output_dir": "none",
        "device": device.kind,
        "dtype": dtype,
        "packing": False,
        "max_seq_length": TOKENS,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "optim": "adamw_8bit",
        "cuda_graphs": False,
        "recompute": "none",
        "max_steps": 1,
    }
    if dtype != "bf16":
        keys = {key: value for key, value in keys.items() if key != "gradient_dtype"}
    return prepare_shape(build({**recipe, **keys}), _shape(layers), device)


def _shape(layers: int) -> ModelShape:
    return uniform_shape(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=4 * HEAD_DIM,
        intermediate_size=8 * HEAD_DIM,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=HEAD_DIM,
        max_positions=TOKENS,
    )
