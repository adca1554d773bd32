"""Data sheets: each is plausible, has a source and is found by all its names; values that `--gpu` accepts and
rejects."""

from __future__ import annotations

import contextlib
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.facts.data_sheets import DataSheet, data_sheets, known_sheet, normalize_name
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import RecipeError
from trimtab.facts.gpus import MAX_MEMORY, MIN_MEMORY, find_gpu

SHEETS = data_sheets()
NAMES = [(sheet, name) for sheet in SHEETS for name in sheet.names]


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.id)
def test_a_sheet_is_plausible_and_has_a_source(sheet: DataSheet) -> None:
    assert len(sheet.source) > 20
    assert "http" in sheet.source
    assert len(sheet.checked) > 10
    assert 6 * 2**30 <= sheet.memory_bytes <= 512 * 2**30
    assert 0.6 * sheet.memory_bytes < sheet.usable_bytes < sheet.memory_bytes
    assert 50e9 <= sheet.bandwidth <= 10e12
    assert set(sheet.flops) <= {"fp32", "tf32", "fp16", "bf16", "fp8", "int8"}
    assert all(1e12 <= rate <= 1e16 for rate in sheet.flops.values())
    if sheet.unified:
        assert sheet.host_link is None
    else:
        assert sheet.host_link is not None
        assert 15e9 < sheet.host_link < sheet.bandwidth
    assert (sheet.capability is not None) == (sheet.vendor == "nvidia")


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.id)
def test_peak_rates_grow_with_narrower_dtypes(sheet: DataSheet) -> None:
    rates = [sheet.flops[dtype] for dtype in ("fp32", "tf32", "bf16", "fp8") if dtype in sheet.flops]
    assert rates == sorted(rates)
    if "bf16" in sheet.flops:
        assert sheet.flops["bf16"] == sheet.flops["fp16"]
    if sheet.capability is not None:
        assert ("bf16" in sheet.flops) == (sheet.capability >= (8, 0)), "Volta and Turing have no bf16"
        assert ("fp8" in sheet.flops) <= (sheet.capability >= (8, 9)), "nor Ampere fp8"
    if "GeForce RTX" in sheet.name:
        # Tensor cores of GeForce cards accumulate in fp32 at half of the rate that is advertised.
        ratio = sheet.flops["fp16"] / sheet.flops["fp32"]
        assert ratio == pytest.approx(4 if sheet.capability == (7, 5) else 2, rel=0.01)


@pytest.mark.parametrize(("sheet", "name"), NAMES, ids=lambda value: getattr(value, "id", value))
def test_a_sheet_is_found_by_each_of_its_names(sheet: DataSheet, name: str) -> None:
    for spelling in (name, name.upper(), name.replace("-", " "), name.replace("-", ""), f" {name}\n"):
        assert find_gpu(spelling).sheet is sheet
    found = find_gpu(name)
    assert found.memory_bytes == sheet.usable_bytes
    assert found.assumptions


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.id)
def test_a_sheet_is_found_by_the_driver_s_name(sheet: DataSheet) -> None:
    assert known_sheet(sheet.name, sheet.memory_bytes) is sheet
    here = DeviceFacts(sheet.name, "cuda", sheet.memory_bytes, capability=sheet.capability)
    assert here.bandwidth == sheet.bandwidth
    assert here.ceiling("bf16") == (
        (sheet.flops["bf16"], f"data sheet of {sheet.name}") if "bf16" in sheet.flops else None
    )


def test_names_are_unique_and_there_are_enough_devices() -> None:
    assert len({sheet.name for sheet in SHEETS}) >= 60
    names = Counter(normalize_name(name) for sheet in SHEETS for name in {*sheet.names, sheet.id})
    assert [name for name, times in names.items() if times > 1] == []
    shared = {normalize_name(name) for sheet in SHEETS for name in sheet.shared_aliases}
    assert shared.isdisjoint(names)


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("a100", "a100-sxm-40gb, a100-pcie-40gb, a100-sxm-80gb, a100-pcie-80gb"),
        ("V100", "v100-sxm-16gb, v100-pcie-16gb, v100-sxm-32gb, v100-pcie-32gb"),
        ("h100", "h100-pcie, h100-sxm, h100-nvl"),
        ("RTX 5060 Ti", "rtx5060ti-8gb, rtx5060ti-16gb"),
        ("A100 80", "a100-sxm-80gb, a100-pcie-80gb"),
        ("NVIDIA GeForce RTX 3080", "rtx3080-10gb, rtx3080-12gb"),
        ("apple-m4-max", "apple-m4-max-36gb, apple-m4-max-48gb, apple-m4-max-64gb, apple-m4-max-128gb"),
    ],
)
def test_a_name_of_several_devices_lists_them(name: str, listed: str) -> None:
    with pytest.raises(RecipeError, match=f"means several devices; write {listed}$"):
        find_gpu(name)


@pytest.mark.parametrize(
    ("name", "sheet"),
    [
        ("RTX 4090 24GB", "rtx4090"),
        ("rtx4090-24gb", "rtx4090"),
        ("H100-SXM5-80GB", "h100-sxm"),
        ("h200-141gb", "h200"),
        ("NVIDIA RTX 5060 Ti 16 GB", "rtx5060ti-16gb"),
        ("m4 max 64", "apple-m4-max-64gb"),
    ],
)
def test_a_name_may_end_with_the_memory_size(name: str, sheet: str) -> None:
    assert find_gpu(name) == find_gpu(sheet)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24 * 10**9),
        ("24gb", 24 * 10**9),
        ("24 GB", 24 * 10**9),
        ("24g", 24 * 10**9),
        ("24000MB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        ("24gi", 24 * 2**30),
        ("1.5 GB", 1_500_000_000),
    ],
)
def test_memory_sizes_are_parsed_in_any_spelling(text: str, size: int) -> None:
    gpu = find_gpu(text)
    assert gpu.memory_bytes == gpu.available_bytes == size
    assert (gpu.kind, gpu.bf16, gpu.ceiling("bf16"), gpu.bandwidth) == ("cuda", True, None, None)
    assert "Ampere" in " ".join(gpu.assumptions)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("24", "has no unit; write a size such as 24GB"),
        ("24000", "has no unit; write a size such as 24000MB"),
        ("24000000000", "has no unit; write a size such as 24000000000B"),
        ("1.5", "has no unit; write a size such as 1.5GB"),
        ("0", "has no unit; write a size such as 24GB"),
        ("4090", "is not a memory size; write rtx4090 for the card"),
        ("3090 Ti", "is not a memory size; write rtx3090ti for the card"),
        ("1080ti", "is not a memory size; write gtx1080ti for the card"),
        ("7900xtx", "is not a memory size; write rx7900xtx for the card"),
        ("4070 super", "is not a memory size; write rtx4070super for the card"),
        ("5060ti", "is not a memory size; write rtx5060ti-8gb or rtx5060ti-16gb for the card"),
        ("5060 Ti 16GB", "is not a memory size; write rtx5060ti-16gb for the card"),
        ("rtx4090-48gb", "is not a GPU of the catalogue; did you mean "),
        ("h100 80 80", "is not a GPU of the catalogue"),
        ("0GB", "less than a CUDA context"),
        ("500MB", "less than a CUDA context"),
        ("-24GB", "is negative"),
        ("24000GB", "more than any GPU has"),
        ("1e3GB", "neither a memory size nor a GPU"),
        ("24GBx", "neither a memory size nor a GPU"),
        ("", "without a value is not a GPU"),
        ("banana", "is not a GPU of the catalogue; for example rtx4090"),
        ("rtx4091", "did you mean rtx4090"),
        ("apple-m9-max-64gb", "did you mean apple-m4-max-64gb"),
        ("x\x00\n" * 100, "is not a GPU of the catalogue"),
    ],
)
def test_an_unknown_gpu_raises_with_a_remedy(text: str, words: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(words)) as refused:
        find_gpu(text)
    assert refused.value.remedy
    assert len(str(refused.value)) < 300
    assert str(refused.value).isprintable()


@given(
    st.text(max_size=30)
    | st.from_regex(r"[ -]?[0-9]{1,6}(\.[0-9]{1,3})? ?[kmgtKMGT]?i?[bB]?", fullmatch=True)
)
def test_any_text_is_a_device_or_a_clear_error(text: str) -> None:
    gpu = None
    with contextlib.suppress(RecipeError):
        gpu = find_gpu(text)
    assert gpu is None or gpu.sheet is not None or MIN_MEMORY <= gpu.memory_bytes <= MAX_MEMORY


@given(st.sampled_from(NAMES), st.data())
def test_separators_and_case_do_not_matter(named: tuple[DataSheet, str], data: st.DataObject) -> None:
    sheet, name = named
    mixed = "".join(
        data.draw(st.sampled_from(["", " ", "-", "_"]))
        if character == "-"
        else data.draw(st.sampled_from([character, character.upper()]))
        for character in name
    )
    assert find_gpu(mixed).sheet is sheet


@pytest.mark.parametrize("name", ["mi300x", "apple-m4-max-64gb"])
def test_devices_of_other_vendors_give_only_a_bound(name: str) -> None:
    gpu = find_gpu(name)
    assert gpu.bound is not None
    assert "does not train on" in gpu.bound
    assert find_gpu("h200").bound is None


def test_gpus_without_cuda_13_support_state_it() -> None:
    assert any("CUDA 13" in said for said in find_gpu("v100-16gb").assumptions)
    assert not any("CUDA 13" in said for said in find_gpu("t4").assumptions)


def test_unified_memory_has_no_separate_host_memory() -> None:
    for name in ("gb10", "jetson-agx-orin", "jetson-thor", "apple-m2-ultra-192gb"):
        gpu = find_gpu(name)
        assert gpu.unified
        assert gpu.pinnable_bytes == 0
    assert find_gpu("rtx4090").pinnable_bytes is None


def test_similar_device_names_have_their_own_rates() -> None:
    def bf16(name: str) -> float:
        known = find_gpu(name).ceiling("bf16")
        assert known is not None
        return known[0] / 1e12

    assert (bf16("a10"), bf16("a10g")) == (125, 70), "an A10G is no A10"
    assert (bf16("h100-pcie"), bf16("h100-sxm")) == (756, 989.4), "an H100 PCIe is slower"
    assert (bf16("l40"), bf16("l40s")) == (181.05, 362.05), "an L40 has half the rate of an L40S"
    assert (bf16("rtx3090"), bf16("rtx4090"), bf16("rtx5090")) == (71, 165.2, 209.5), "with fp32 accumulation"
    assert known_sheet("NVIDIA GeForce RTX 3090 Ti") is not known_sheet("NVIDIA GeForce RTX 3090")
    assert known_sheet("NVIDIA A100-SXM4-40GB MIG 3g.20gb") is None
    for total, gigabytes in ((9.77, 10), (11.66, 12)):
        sheet = known_sheet("NVIDIA GeForce RTX 3080", int(total * 2**30))
        assert sheet is not None
        assert sheet.id == f"rtx3080-{gigabytes}gb", "two cards with one name have two sheets"


def test_an_unknown_gpu_gets_the_host_link_of_its_generation() -> None:
    assert DeviceFacts("a card", "cuda", 2**34, capability=(9, 0)).host_link == pytest.approx(55e9, rel=0.01)
    assert DeviceFacts("a card", "cuda", 2**34, capability=(8, 6)).host_link == pytest.approx(
        27.5e9, rel=0.01
    )
    assert DeviceFacts("a card", "cuda", 2**34, capability=(3, 5)).host_link == 12e9
