"""Hourly prices of GPUs: the shipped `catalogue/prices.yaml`, and optionally a file of the user.

One line per GPU: its `--gpu` name and a number, or a mapping with `usd_per_hour`, `source` and `date`. A user's file
replaces the shipped price of each GPU that it lists; with `only_these: true` it replaces all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import RecipeError
from trimtab.facts.gpus import find_gpu
from trimtab.facts.names import shortened

SHIPPED = Path(__file__).parent / "catalogue" / "prices.yaml"
ONLY = "only_these"
FIELDS = ("usd_per_hour", "source", "date")
MAX_DOLLARS = 1000
"""Upper bound of a plausible hourly price; the highest in public catalogues is below 20."""
MAX_CHARACTERS = 1_000_000
EXAMPLE = "write a line such as `rtx4090: 0.74`"


@dataclass(frozen=True)
class Price:
    """Hourly price of one GPU."""

    gpu: str
    """The id of its data sheet."""
    usd_per_hour: float
    source: str
    date: str = ""
    """Date as in the file, usually ISO 8601; empty if there is none."""


@dataclass(frozen=True)
class Prices:
    """Prices by GPU.

    Example:
        >>> prices = read_prices()
        >>> prices.of(find_gpu("rtx4090")).usd_per_hour < prices.of(find_gpu("h200")).usd_per_hour
        True
        >>> prices.of(find_gpu("24GB")) is None
        True
    """

    prices: tuple[Price, ...]

    def of(self, device: DeviceFacts) -> Price | None:
        """Returns the price of a device by its data sheet; None if there is none."""
        sheet = device.data_sheet
        if sheet is None:
            return None
        return next((price for price in self.prices if price.gpu == sheet.id), None)


def read_prices(path: Path | str | None = None) -> Prices:
    """Reads the shipped prices, overridden by those of a file; RecipeError with the line of a mistake in the file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "mine.yaml").write_text("rtx4090: 0.35\\n")
        ...     prices = read_prices(Path(folder) / "mine.yaml")
        >>> prices.of(find_gpu("rtx4090")), prices.of(find_gpu("h200")) is not None
        (Price(gpu='rtx4090', usd_per_hour=0.35, source='mine.yaml', date=''), True)
    """
    shipped, _ = _read(SHIPPED)
    if path is None:
        return Prices(tuple(shipped.values()))
    own, only = _read(Path(path))
    return Prices(tuple((own if only else shipped | own).values()))


def _read(path: Path) -> tuple[dict[str, Price], bool]:
    """Returns (prices by data sheet id, whether they replace all shipped prices)."""
    found: dict[str, Price] = {}
    lines: dict[str, int] = {}
    only = False
    for key, value in _entries(path):
        line = key.start_mark.line + 1
        where = f"{path}, line {line}"
        name = _text(key, where)
        if name == ONLY:
            only = _is_true(value, where)
            continue
        gpu = _sheet_id(name, where)
        if gpu in found:
            raise RecipeError(
                f"{where}: {shortened(name)} has a price in line {lines[gpu]} already",
                "delete one of the two lines",
            )
        found[gpu], lines[gpu] = _price(gpu, value, path, where), line
    if not found:
        raise RecipeError(f"{path} has no prices", EXAMPLE)
    return found, only


def _entries(path: Path) -> list[tuple[Node, Node]]:
    """Returns keys and values of the file's mapping as YAML nodes with line numbers; aliases are not followed."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"the price file {path} cannot be read: {error.strerror}", "check the name given with --prices"
        ) from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not a text in UTF-8", EXAMPLE) from error
    if len(text) > MAX_CHARACTERS:
        raise RecipeError(f"{path} has {len(text):,} characters", "give a price file: one line per GPU")
    try:
        node = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise RecipeError(
            f"{path}{where} is not YAML: {(error.problem or 'cannot be read').strip()}", EXAMPLE
        ) from error
    except (YAMLError, ValueError) as error:
        raise RecipeError(f"{path} is not YAML: {str(error).splitlines()[0]}", EXAMPLE) from error
    if not isinstance(node, MappingNode):
        raise RecipeError(f"{path} is not a list of `GPU: price`", EXAMPLE)
    return list(node.value)


def _sheet_id(name: str, where: str) -> str:
    """Returns the data sheet id of a GPU's name."""
    try:
        device = find_gpu(name)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error.cause.removeprefix('--gpu ')}", error.remedy) from error
    if device.sheet is None:
        raise RecipeError(f"{where}: {name} is a memory size", "name a GPU, such as rtx4090 or a100-80gb")
    return device.sheet.id


def _price(gpu: str, value: Node, path: Path, where: str) -> Price:
    if isinstance(value, ScalarNode):
        return Price(gpu, _dollars(value, where), source=path.name)
    if not isinstance(value, MappingNode):
        _invalid_price(where, "a list")
    fields: dict[str, Node] = {}
    for key, content in value.value:
        field = _text(key, where)
        if field not in FIELDS or field in fields:
            raise RecipeError(
                f"{where}: {shortened(field)} {'is given twice' if field in fields else 'is not known'}",
                f"give {', '.join(FIELDS)} once each",
            )
        fields[field] = content
    if "usd_per_hour" not in fields:
        raise RecipeError(f"{where}: there is no usd_per_hour", "give it: dollars per hour, such as 0.74")
    return Price(
        gpu,
        _dollars(fields["usd_per_hour"], where),
        source=_text(fields["source"], where) if "source" in fields else path.name,
        date=_text(fields["date"], where) if "date" in fields else "",
    )


def _dollars(node: Node, where: str) -> float:
    if not isinstance(node, ScalarNode) or not (node.tag or "").endswith((":int", ":float")):
        _invalid_price(where, shortened(node.value) if isinstance(node, ScalarNode) else "not a number")
    try:
        dollars = float(node.value)
    except ValueError:  # YAML's .nan, .inf and 0x10
        _invalid_price(where, shortened(node.value))
    if not math.isfinite(dollars) or dollars < 0:
        _invalid_price(where, shortened(node.value))
    if dollars > MAX_DOLLARS:
        raise RecipeError(
            f"{where}: {dollars:,.0f} dollars per hour are more than any GPU costs",
            f"give the price of one GPU in US dollars, at most {MAX_DOLLARS} per hour",
        )
    return dollars


def _invalid_price(where: str, found: str) -> NoReturn:
    raise RecipeError(
        f"{where}: the price is {found}",
        "give US dollars per hour as a number of at least 0, such as 0.74",
    )


def _is_true(node: Node, where: str) -> bool:
    if isinstance(node, ScalarNode) and node.value in ("true", "false"):
        return bool(node.value == "true")
    raise RecipeError(
        f"{where}: {ONLY} is neither true nor false", f"write {ONLY}: true or leave the line out"
    )


def _text(node: Node, where: str) -> str:
    if not isinstance(node, ScalarNode):
        raise RecipeError(f"{where}: a name or text is missing", EXAMPLE)
    return str(node.value)
