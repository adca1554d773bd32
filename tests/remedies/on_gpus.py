"""Planned GPUs by name or memory size, and price files: what each refusal names is accepted."""

from __future__ import annotations

import re
from collections.abc import Callable

from cases import World, case

from trimtab.facts.gpus import find_gpu
from trimtab.facts.prices import FIELDS, MAX_DOLLARS, read_prices

EXAMPLES = "for example rtx4090, a100-80gb, apple-m4-max-64gb, or a memory size such as 24GB"
LINE = "write a line such as `rtx4090: 0.74`"


def asked(text: str) -> Callable[[World], object]:
    return lambda w: find_gpu(text)


def named(w: World, remedy: str) -> None:
    """Every name and size in the remedy is a GPU."""
    words = [word for word in re.findall(r"[a-z0-9.-]+", remedy, re.IGNORECASE) if re.search(r"\d", word)]
    assert words
    for word in words:
        assert find_gpu(word.rstrip(".")).memory_bytes > 0


GPU = {
    "find_gpu: write {}": "v100",
    "_gpu_of_size: give the memory of a GPU, such as 8GB or 24GB": "0GB",
    "_gpu_of_size: give the memory of one GPU, such as 24GB or 24000MB": "24000GB",
    "_invalid_size: write {} for the card, or a size such as 24GB": "4090",
    "_invalid_size: write a size such as {}, or a name such as rtx4090": "24",
    "_invalid_size: give the memory of a GPU, such as 24GB": "-24GB",
    f"_invalid_size: {EXAMPLES}": "24GBx",
    "_unknown: did you mean {}?": "rtx4091",
    f"_unknown: {EXAMPLES}": "banana",
}
for key, text in GPU.items():
    case(f"facts/gpus.py:{key}", asked(text), named)


def priced(text: str | bytes) -> Callable[[World], object]:
    def provoke(w: World) -> object:
        path = w.tmp / "prices.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_prices(path)

    return provoke


def followed(line: str) -> Callable[[World, str], object]:
    """A file with a line as the remedy has it."""
    return lambda w, remedy: priced(line)(w)


def with_the_line(w: World, remedy: str) -> None:
    line = re.search(r"`(.+)`", remedy)
    assert line is not None
    priced(line[1])(w)


def with_the_names(w: World, remedy: str) -> None:
    for name in re.findall(r"[a-z0-9-]*\d[a-z0-9-]*", remedy):
        priced(f"{name}: 1")(w)


def with_the_number(w: World, remedy: str) -> None:
    number = re.search(r"[\d.]+", remedy)
    assert number is not None
    priced(f"rtx4090: {{usd_per_hour: {number[0]}}}")(w)


FILE = "facts/prices.py:"
case(f"{FILE}_read: delete one of the two lines", priced("rtx4090: 1\nRTX 4090: 2"), followed("rtx4090: 1"))
case(f"{FILE}_read: {LINE}", priced("only_these: true"), with_the_line)
case(
    f"{FILE}_entries: check the name given with --prices",
    lambda w: read_prices(w.tmp / "no.yaml"),
    followed("rtx4090: 1"),
)
for wrong in (b"\xff\xfe", "rtx4090: {", "\x07", "- rtx4090"):
    case(f"{FILE}_entries: {LINE}", priced(wrong), with_the_line)
case(f"{FILE}_entries: give a price file: one line per GPU", priced("#" * 2_000_000), followed("rtx4090: 1"))
case(f"{FILE}_sheet_id: {{}}", priced("a100: 1"), with_the_names)
case(f"{FILE}_sheet_id: name a GPU, such as rtx4090 or a100-80gb", priced("24GB: 1"), with_the_names)
case(
    f"{FILE}_price: give {{}} once each",
    priced("rtx4090: {usd_per_hour: 1, price: 2}"),
    lambda w, remedy: priced(
        "rtx4090: {" + ", ".join(f"{field}: 1" for field in FIELDS if field in remedy) + "}"
    )(w),
)
case(
    f"{FILE}_price: give it: dollars per hour, such as 0.74", priced("rtx4090: {source: x}"), with_the_number
)
case(
    f"{FILE}_dollars: give the price of one GPU in US dollars, at most {MAX_DOLLARS} per hour",
    priced("rtx4090: 1000000"),
    with_the_number,
)
case(
    f"{FILE}_invalid_price: give US dollars per hour as a number of at least 0, such as 0.74",
    priced("rtx4090: -1"),
    with_the_number,
)
case(
    f"{FILE}_is_true: write only_these: true or leave the line out",
    priced("only_these: perhaps\nrtx4090: 1"),
    followed("only_these: true\nrtx4090: 1"),
)
case(f"{FILE}_text: {LINE}", priced("[rtx4090]: 1"), with_the_line)
