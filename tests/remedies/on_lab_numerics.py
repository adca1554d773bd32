"""`trimtab numerics`: numbers, formats, sums, data and blocks that are refused, and what each refusal names."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from cases import World, case, in_turn, listed
from safetensors.torch import save_file

from trimtab.lab.numerics.autocast import study_autocast


def bits(*words: object) -> object:
    return lambda w: w.cli("numerics", "bits", *words)


def offered(w: World, remedy: str) -> None:
    """Every number that the remedy writes."""
    examples = re.split(r", | or ", remedy.removeprefix("write it as ").partition(", or write")[0])
    in_turn(lambda number: w.cli("numerics", "bits", number), [*examples, remedy.rpartition(" ")[2]])


case(
    "lab/numerics/number_text.py:parse_number: write it as 3.14, 1e-8, 1/3, 0x1.8p3, inf or nan, or write the bits of "
    "a format as fp16:0x3c00",
    bits("pi"),
    offered,
)
case(
    "lab/numerics/number_text.py:parse_number: use at most 1000 characters",
    bits("1" * 1001),
    lambda w, remedy: w.cli("numerics", "bits", "1" * int(re.findall(r"\d+", remedy)[0])),
)
case(
    "lab/numerics/number_text.py:_check_exponent: use one between -5000 and 5000",
    bits("1e5001"),
    lambda w, remedy: in_turn(
        lambda exponent: w.cli("numerics", "bits", f"1e{exponent}"), re.findall(r"-?\d+", remedy)
    ),
)
case(
    "lab/numerics/number_text.py:_stored: use at most {} bits",
    bits("fp16:0x10000"),
    lambda w, remedy: w.cli("numerics", "bits", f"fp16:0b{'1' * int(re.findall(r'[0-9]+', remedy)[0])}"),
)
case(
    "lab/numerics/formats.py:unknown_format: {}the formats are {}",
    bits("1", "--formats", "fp17"),
    lambda w, remedy: in_turn(
        lambda name: w.cli("numerics", "bits", "1", "--formats", name), listed(remedy, "formats are")
    ),
)
case(
    "lab/numerics/bits.py:study_bits: name some of {}",
    bits("1", "--formats", ","),
    lambda w, remedy: w.cli("numerics", "bits", "1", "--formats", ",".join(listed(remedy, "some of"))),
)


def no_number(w: World) -> None:
    from trimtab.lab.numerics.bits import study_bits

    study_bits([])


case(
    "lab/numerics/bits.py:study_bits: give one or more, as `trimtab numerics bits 3.14`",
    no_number,
    lambda w, remedy: w.cli(*remedy.split("`")[1].split()[1:]),
)
case(
    "lab/numerics/bits.py:_block_absmax: give a number above 0 that is at least {}",
    bits("2/3", "--absmax", "0.5"),
    lambda w, remedy: w.cli("numerics", "bits", "2/3", "--absmax", remedy.rpartition(" ")[2]),
)
case(
    "cli/numerics_bits.py:bits: see `trimtab numerics bits --help`",
    bits("1", "--format", "fp16"),
    lambda w, remedy: w.cli(*remedy.split("`")[1].split()[1:]),
)


def sums(*words: object) -> object:
    return lambda w: w.cli("numerics", "accumulate", *words)


case(
    "lab/numerics/accumulate.py:study_accumulation: use 1 to 100000",
    sums("--count", 0),
    lambda w, remedy: w.cli("numerics", "accumulate", "--count", re.findall(r"\d+", remedy)[0]),
)
case(
    "lab/numerics/accumulate.py:study_accumulation: use a magnitude between 1e-300 and 1e300",
    sums("--value", "0"),
    lambda w, remedy: in_turn(
        lambda value: w.cli("numerics", "accumulate", "--count", 2, "--value", value),
        re.findall(r"1e-?\d+", remedy),
    ),
)
case(
    "lab/numerics/autocast.py:study_autocast: {}use bf16 or fp16",
    lambda w: w.cli("numerics", "autocast", "--device", "cpu", "--dtype", "fp32"),
    lambda w, remedy: in_turn(
        lambda name: w.cli("numerics", "autocast", "--device", "cpu", "--dtype", name),
        re.findall(r"\w+16", remedy.rpartition("use ")[2]),
    ),
)


def without_bf16(w: World) -> None:
    w.patch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    study_autocast("bf16", "cuda")


case(
    "lab/numerics/autocast.py:study_autocast: use --dtype fp16",
    without_bf16,
    lambda w, remedy: study_autocast(
        remedy.rpartition(" ")[2], "cpu"
    ),  # there is no such GPU to follow it on
)


def model(w: World) -> Path:
    path = w.tmp / "tensors.safetensors"
    if not path.exists():
        tensors = {
            "weight": torch.linspace(-1, 1, 64).reshape(2, 32),
            "broken": torch.tensor([1.0, float("nan")]),
            "ids": torch.arange(4),
            "none": torch.zeros(0),
            "ones": torch.ones(4),
        }
        save_file(tensors, path)
    return path


def quantize(w: World, data: object) -> str:
    return w.cli("numerics", "quantize", "--blocks", "64", "--data", data)


def tensor(name: str) -> object:
    return lambda w: quantize(w, f"{model(w)}:{name}")


def another(w: World, remedy: str) -> None:
    quantize(w, f"{model(w)}:weight")


case(
    "lab/numerics/samples.py:load_sample: {}use one of {}, or a tensor as FILE.safetensors:TENSOR",
    lambda w: quantize(w, "gaus"),
    lambda w, remedy: in_turn(
        lambda data: quantize(w, f"{model(w)}:weight" if "FILE" in data else data),
        [*listed(remedy.replace(", or", ";"), "one of"), remedy.rpartition(" ")[2]],
    ),
)
case(
    "lab/numerics/samples.py:_read: pass the path of a safetensors file",
    lambda w: quantize(w, w.tmp / "missing.safetensors:weight"),
    another,
)


def cut_short(w: World) -> None:
    content = model(w).read_bytes()
    model(w).write_bytes(content[:100])
    quantize(w, f"{model(w)}:weight")


def written_again(w: World, remedy: str) -> None:
    model(w).unlink()
    another(w, remedy)


case("lab/numerics/samples.py:_read: download or write the file again", cut_short, written_again)
case(
    "lab/numerics/samples.py:_read: {}name one with :TENSOR; it has {}",
    tensor("wieght"),
    lambda w, remedy: quantize(w, f"{model(w)}:{listed(remedy, 'it has')[-1]}"),
)
case("lab/numerics/samples.py:_read: choose another tensor", tensor("none"), another)
case("lab/numerics/samples.py:_read: choose a floating-point tensor", tensor("ids"), another)
case("lab/numerics/samples.py:_check_values: choose another tensor", tensor("broken"), another)
case("lab/numerics/samples.py:_check_values: choose a tensor whose values differ", tensor("ones"), another)


def blocks(text: str) -> object:
    return lambda w: w.cli("numerics", "quantize", "--blocks", text)


def all_blocks(w: World, remedy: str) -> None:
    w.cli("numerics", "quantize", "--blocks", ",".join(listed(remedy, "some of")))


case("lab/numerics/quantize.py:check_blocks: use some of {}", blocks("-32"), all_blocks)
case("lab/numerics/quantize.py:check_blocks: use some of {}", blocks(","), all_blocks)
case(
    "lab/numerics/quantize.py:parse_blocks: use whole numbers, as in 32,64",
    blocks("many"),
    lambda w, remedy: w.cli("numerics", "quantize", "--blocks", remedy.rpartition(" ")[2]),
)
