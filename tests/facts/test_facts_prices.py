"""Price files: the shipped one has sources and dates, a user's file overrides lines, invalid lines raise with the
line."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.facts.errors import RecipeError
from trimtab.facts.gpus import find_gpu
from trimtab.facts.prices import Price, read_prices


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_shipped_prices_have_a_source_and_a_date() -> None:
    shipped = read_prices().prices
    assert len(shipped) >= 25
    for price in shipped:
        assert find_gpu(price.gpu).sheet is not None
        assert 0.05 <= price.usd_per_hour <= 20
        assert "github.com" in price.source or "http" in price.source
        assert datetime.date(2024, 1, 1) < datetime.date.fromisoformat(price.date)


def test_a_users_price_file_overrides_the_gpus_that_it_names(tmp_path: Path) -> None:
    text = "RTX 4090: 0.35\nrtx5060ti-16gb: {usd_per_hour: 0, source: my own, date: 2026-11-01}\n"
    prices = read_prices(written(tmp_path, text))
    assert prices.of(find_gpu("rtx4090")) == Price("rtx4090", 0.35, "mine.yaml")
    assert prices.of(find_gpu("rtx5060ti-16gb")) == Price("rtx5060ti-16gb", 0.0, "my own", "2026-11-01")
    assert prices.of(find_gpu("rtx5060ti-8gb")) is None
    assert prices.of(find_gpu("h200")) == read_prices().of(find_gpu("h200"))


def test_the_price_file_in_the_documentation_is_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    block = re.search(r"```yaml\n(rtx4090: .*?)```", page, re.DOTALL)
    assert block is not None
    prices = read_prices(written(tmp_path, block[1]))
    assert prices.of(find_gpu("a100-80gb")) == Price("a100-sxm-80gb", 1.2, "our cluster", "2026-11-01")
    assert len(prices.prices) == len(read_prices().prices)


def test_only_these_excludes_the_shipped_prices(tmp_path: Path) -> None:
    prices = read_prices(written(tmp_path, "only_these: true\nrtx4090: 0.35\n"))
    assert [price.gpu for price in prices.prices] == ["rtx4090"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rtx4090: -1", "line 1: the price is -1; give US dollars per hour"),
        ("rtx4090: cheap", "line 1: the price is cheap"),
        ("rtx4090: '0.35'", "line 1: the price is 0.35"),
        ("rtx4090: .nan", "line 1: the price is .nan"),
        ("rtx4090: .inf", "line 1: the price is .inf"),
        ("rtx4090: true", "line 1: the price is true"),
        ("rtx4090:", "line 1: the price is"),
        ("rtx4090: [1]", "line 1: the price is a list"),
        ("rtx4090: {usd_per_hour: [1]}", "line 1: the price is not a number"),
        ("# mine\nrtx4090: 100000", "line 2: 100,000 dollars per hour are more than any GPU costs"),
        ("h200: 3\nrtx9999: 1", "line 2: rtx9999 is not a GPU of the catalogue"),
        ("a100: 1", "line 1: a100 means several devices; write a100-sxm-40gb"),
        ("24GB: 1", "line 1: 24GB is a memory size"),
        ("rtx4090: 1\nRTX-4090: 2", "line 2: RTX-4090 has a price in line 1 already; delete one"),
        ("rtx4090: {source: x}", "there is no usd_per_hour"),
        ("rtx4090: {usd_per_hour: 1, price: 2}", "price is not known; give usd_per_hour, source, date"),
        ("rtx4090: {usd_per_hour: 1, usd_per_hour: 2}", "usd_per_hour is given twice"),
        ("rtx4090: {usd_per_hour: 1, source: [a]}", "a name or text is missing"),
        ("[rtx4090]: 1", "a name or text is missing"),
        ("only_these: maybe\nrtx4090: 1", "only_these is neither true nor false"),
        ("only_these: true", "has no prices"),
        ("", "is not a list of `GPU: price`"),
        ("- rtx4090", "is not a list of `GPU: price`"),
        ("rtx4090: {", "is not YAML"),
        ("a: &x [*x]\n", "line 1: a is not a GPU"),
        ("\x07", "is not YAML"),
        (b"\xff\xfe rtx4090", "is not a text in UTF-8"),
        ("#" * 1_000_001, "characters; give a price file"),
    ],
)
def test_invalid_price_files_raise_with_file_line_and_remedy(
    tmp_path: Path, text: str | bytes, words: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(RecipeError, match=re.escape(words)) as refused:
        read_prices(path)
    assert "mine.yaml" in str(refused.value)
    assert refused.value.remedy


def test_a_missing_price_file_raises(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"no\.yaml cannot be read: No such file or directory; check the name"
    ):
        read_prices(tmp_path / "no.yaml")


@given(text=st.text(max_size=60))
def test_any_text_is_prices_or_a_clear_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = written(tmp_path_factory.mktemp("prices"), text.encode("utf-8", "replace"))
    try:
        prices = read_prices(path)
    except RecipeError:
        return
    assert all(0 <= price.usd_per_hour <= 1000 for price in prices.prices)
