"""Memory remedies of runs that do not fit, on devices of many sizes; explicit recompute and dequantized_layers."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from cases import World, case, settings

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.shapes import uniform_shape
from trimtab.facts.units import parse_bytes
from trimtab.plan import Plan, check_fits, make_plan
from trimtab.recipe import loads
from trimtab.run.resolve import resolve_recipe

QWEN = uniform_shape("qwen3", 151_936, 1024, 3072, 28, num_heads=16, num_kv_heads=8, head_dim=128,
                  tie_embeddings=True, qk_norm=True, max_positions=32_768)  # fmt: skip
GPU = DeviceFacts("a GPU", "cuda", 24 * 10**9, capability=(9, 0), bf16=True, host_free_bytes=64 * 2**30)
CPU = DeviceFacts("a CPU", "cpu", 16 * 10**9, cores=8)
RECIPES = {
    "8-bit": "model: q\ndata: {train: x}\noptim: adamw_8bit\nmax_seq_length: 2048\n",
    "plain": "model: q\ndata: {train: x}\noptim: adamw_torch\nmax_seq_length: 1024\n",
    "lora": "model: q\ndata: {train: x}\nlora: {r: 8}\nmax_seq_length: 4096\nper_device_train_batch_size: 2\n",
}


def sized(device: DeviceFacts, gigabytes: float) -> DeviceFacts:
    return dataclasses.replace(device, memory_bytes=int(gigabytes * 10**9))


def planned(recipe: str, overrides: list[str], device: DeviceFacts) -> Plan:
    """As a run is planned on such a device: every `auto` decided first."""
    loaded = loads(recipe, overrides)
    return make_plan(loaded, QWEN, resolve_recipe(loaded, QWEN, device, threads=4), device=device)


def fit(recipe: str, overrides: list[str], device: DeviceFacts, *, resumed: bool = False) -> None:
    check_fits(planned(recipe, overrides, device), device, resumed=resumed)


def too_large(w: World, recipe: str, device: DeviceFacts, *overrides: str, resumed: bool = False) -> None:
    w.kept.update(recipe=RECIPES[recipe], device=device, overrides=list(overrides), resumed=resumed)
    fit(RECIPES[recipe], list(overrides), device, resumed=resumed)


def follow(w: World, remedy: str) -> None:
    """Everything that is named as enough is; what is named together is enough together."""
    recipe, device, given = w.kept["recipe"], w.kept["device"], w.kept["overrides"]
    if remedy.startswith("use a smaller model or a larger device"):
        return fit(recipe, given, sized(device, 200))
    more: list[str] = []
    at = re.search(r"(raise memory_limit to|continue on a device with) ([\d.]+ \w+)", remedy)
    if at is not None:
        size = parse_bytes(at[2].replace(" ", ""))
        assert size is not None
        device = dataclasses.replace(device, memory_bytes=max(size, device.memory_bytes))
        given = [word for word in given if not word.startswith("memory_limit")]
        if at[1].startswith("raise"):
            more = [f"memory_limit={at[2].replace(' ', '')}"]
        remedy = remedy[: at.start()]
    together = ": together" in remedy
    offered = settings(remedy) if ": " in remedy else [[]]
    for alternative in [[word for words in offered for word in words]] if together else offered:
        kept = [
            word for word in given if word.partition("=")[0] not in {a.partition("=")[0] for a in alternative}
        ]
        fit(recipe, [*kept, *alternative, *more], device, resumed=w.kept["resumed"])
    return None


FITS = "plan/fit.py:check_fits: {}"
for name, device, sizes in (
    ("8-bit", GPU, (1, 2, 3, 3.5, 4, 4.5, 5, 6)),
    ("plain", GPU, (3, 4, 5, 6, 7, 8)),
    ("lora", GPU, (1.0, 1.5, 1.8, 2.2)),
    ("plain", CPU, (4, 7, 9, 10, 11)),
    ("8-bit", CPU, (4, 6, 7)),
):
    for gigabytes in sizes:
        case(FITS, lambda w, a=(name, device, gigabytes): too_large(w, a[0], sized(a[1], a[2])), follow)
for limit in ("3GB", "4GB"):
    case(FITS, lambda w, a=f"memory_limit={limit}": too_large(w, "8-bit", GPU, a, resumed=True), follow)
case(FITS, lambda w: too_large(w, "8-bit", sized(GPU, 6), "recompute=none", resumed=True), follow)
case(FITS, lambda w: too_large(w, "8-bit", GPU, "memory_limit=3GB"), follow)


def sampled(*overrides: str) -> None:
    fit(RECIPES["lora"], ["max_seq_length=256", *overrides], sized(GPU, 3.5))


def follow_samples(w: World, remedy: str) -> None:
    assert "fewer prompts" in remedy
    sampled('prompts=["1 + 1 ="]')
    assert "smaller number of answers" in remedy
    sampled("answers=4")


case("plan/fit.py:_check_phases: {}", lambda w: sampled("answers=100"), follow_samples)
case(
    "plan/fit.py:_check_phases: {}",
    lambda w: sampled("prompts=[" + ", ".join(['"1 + 1 ="'] * 64) + "]"),
    follow_samples,
)


TIGHT = ["memory_limit=6.95GiB", "cuda_graphs=true"]
case(
    "plan/fit.py:_check_graphs: set cuda_graphs: auto",
    lambda w: fit(RECIPES["8-bit"], TIGHT, GPU),
    lambda w, remedy: fit(RECIPES["8-bit"], [*TIGHT[:1], *settings(remedy)[0]], GPU),
)


def offloaded(w: World, *overrides: str, length: int = 32_768) -> None:
    host = dataclasses.replace(sized(GPU, 150), host_free_bytes=2 * 2**30)
    recipe = RECIPES["lora"].replace("max_seq_length: 4096", f"max_seq_length: {length}")
    fit(recipe, list(overrides), host)


def follow_offload(w: World, remedy: str) -> None:
    offloaded(w, *settings(remedy)[0])
    assert "fewer layers" in remedy
    offloaded(w, "recompute={offload: 1}")
    assert "shorter max_seq_length" in remedy
    offloaded(w, "recompute=offload", length=256)


case(
    "plan/fit.py:_check_host: set recompute: auto, or fewer layers to offload, or a shorter max_seq_length",
    lambda w: offloaded(w, "recompute=offload"),
    follow_offload,
)
UNIFIED = dataclasses.replace(sized(GPU, 150), unified=True, host_free_bytes=None)
case(
    "plan/fit.py:_check_host: set recompute: auto",
    lambda w: fit(RECIPES["lora"], ["recompute=offload"], UNIFIED),
    lambda w, remedy: fit(RECIPES["lora"], settings(remedy)[0], UNIFIED),
)


def recompute(w: World, value: Any) -> object:
    return w.plan(recompute=value)


case(
    "plan/limits.py:requested_policies: give one policy per layer, one policy for all layers, or the number of "
    "layers per policy",
    lambda w: recompute(w, ["block"]),
    lambda w, remedy: (
        recompute(w, ["block", "none"]),
        recompute(w, "block"),
        recompute(w, {"block": 1}),
    ),
)
case(
    "plan/limits.py:requested_policies: make the counts add up to at most {}",
    lambda w: recompute(w, {"block": 9}),
    lambda w, remedy: recompute(w, {"block": int(re.findall(r"\d+", remedy)[0])}),
)


def unpacked(w: World, layers: int) -> object:
    return w.plan(
        f"dequantized_layers={layers}", model=str(w.shared("wide")), lora={"r": 2}, load_in_4bit=True
    )


case(
    "plan/dequantized_copies.py:requested_copies: set dequantized_layers to at most {}",
    lambda w: unpacked(w, 9),
    lambda w, remedy: unpacked(w, int(remedy.split()[-1])),
)
