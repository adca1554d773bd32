"""One of two ranks that shard quantized layers with FSDP2; run by test_quantized_sharded.py.

python sharded_quantized_rank.py RANK FOLDER
"""

from __future__ import annotations

import copy
import gc
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from trimtab.adapt import LoraSettings, add_lora
from trimtab.adapt.packed_layout import NAMES, ROW_NAMES
from trimtab.adapt.quantized import QuantizedLinear, quantized_layers

WORLD = 2
KINDS: list[dict[str, Any]] = [
    {"kind": "nf4", "double": True},
    {"kind": "nf4", "double": False},
    {"kind": "nf4", "double": True, "block": 32},
    {"kind": "int8"},
]
WIDTH, MIDDLE = 128, 151
"""The middle is odd: the ranks have 76 and 75 rows, and the second starts within a block of 256 scales."""


def whole_model(options: dict[str, Any]) -> nn.Module:
    """Two quantized layers with nonzero adapters, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    layers = []
    for rows, columns in ((MIDDLE, WIDTH), (WIDTH, 2 * WIDTH)):
        layer = QuantizedLinear(columns, rows, bias=True, dtype=torch.float32, **options)
        layer.set_weight(torch.randn(rows, columns, generator=generator))
        assert layer.bias is not None
        layer.bias.data.normal_(generator=generator)
        layers.append(layer)
    model = nn.Sequential(layers[0], nn.ReLU(), nn.ConstantPad1d((0, 2 * WIDTH - MIDDLE), 0.0), layers[1])
    add_lora(model, LoraSettings(r=4))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


def results(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the gradient of x."""
    x = x.clone().requires_grad_(True)
    y = model(x)
    y.float().square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def check_shards(model: nn.Module, whole: nn.Module, rank: int) -> None:
    """Codes and scales are sharded along dim 0, and a rank's are those of a slice of the whole layer."""
    for (_, mine), (_, theirs) in zip(quantized_layers(model), quantized_layers(whole), strict=True):
        each = -(-theirs.out_features // WORLD)
        part = theirs.slice_rows(each * rank, min(each * (rank + 1), theirs.out_features))
        for name in ROW_NAMES:
            parameter, expected = getattr(mine, name), getattr(part, name)
            assert isinstance(parameter, DTensor)
            assert parameter.placements == (Shard(0),)
            assert not parameter.requires_grad
            assert parameter.to_local().dtype == expected.dtype == theirs.get_parameter(name).dtype
            assert torch.equal(parameter.to_local(), expected)


def check_gathered(model: nn.Module, whole: nn.Module) -> None:
    for (_, mine), (_, theirs) in zip(quantized_layers(model), quantized_layers(whole), strict=True):
        assert torch.equal(mine.dequantized(torch.float32), theirs.dequantized(torch.float32))


def fill_shards(model: nn.Module, whole: nn.Module, rank: int) -> None:
    """Loads a model that was sharded on meta and materialized from slices of the whole model."""
    for (_, mine), (_, theirs) in zip(quantized_layers(model), quantized_layers(whole), strict=True):
        each = -(-theirs.out_features // WORLD)
        part = theirs.slice_rows(each * rank, min(each * (rank + 1), theirs.out_features))
        for name in NAMES:
            place, tensor = getattr(mine, name), getattr(part, name)
            if tensor is not None:
                (place.to_local() if isinstance(place, DTensor) else place).copy_(tensor)
    named = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            shards = named[name].detach().chunk(WORLD)
            parameter.to_local().copy_(shards[rank])  # type: ignore[attr-defined]


def shard(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Shards the first layer as a separate unit; both are freed after the forward and gathered for the backward."""
    for unit in (model.get_submodule("0"), model):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def exercise(rank: int, options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    whole = whole_model(options)
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
    for dtype in (None, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        model = copy.deepcopy(whole)
        empty = copy.deepcopy(whole).to("meta")
        twin = copy.deepcopy(whole)
        if dtype is not None:  # FSDP2 casts adapters and biases, not codes, scales and tables
            twin, x = twin.to(dtype), x.to(dtype)
        expected = results(twin, x)
        shard(model, mesh, policy)
        check_shards(model, whole, rank)
        shard(empty, mesh, policy)
        empty.to_empty(device="cpu")
        with torch.no_grad():
            fill_shards(empty, whole, rank)
        check_shards(empty, whole, rank)
        for sharded in (model, empty):
            found = results(sharded, x)
            assert torch.equal(found[0], expected[0]), (options, dtype, "output")
            assert torch.equal(found[1], expected[1]), (options, dtype, "gradient of the input")
            check_shards(sharded, whole, rank)
            units = [module for module in sharded.modules() if isinstance(module, FSDPModule)]
            assert len(units) == 2
            for unit in units:
                unit.unshard()
            check_gathered(sharded, whole)
            for unit in units:
                unit.reshard()
        for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            if mine.requires_grad:
                assert mine.grad is not None
                assert theirs.grad is not None
                rows = theirs.grad.chunk(WORLD)[rank]
                assert torch.allclose(mine.grad.to_local(), rows.float(), rtol=1e-2), name  # type: ignore[attr-defined]
            else:
                assert mine.grad is None


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD)
    for options in KINDS:
        exercise(rank, options)
    gc.collect()  # sharded modules reference the group in cycles: its threads end with the last of them
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
