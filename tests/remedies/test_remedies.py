"""Every remedy of every error is followed by a case and works.

A new error needs a case in `on_*.py` (how to meet it, how to do what it says), or, where a test cannot do what it says,
a line in `outside.py` with the reason.
"""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import pytest
from cases import CASES, Case, World, came_from, listed, recorded_sites, settings
from inventory import counted, sites
from outside import OUTSIDE

from trimtab.facts.errors import TrimtabError

for path in sorted(Path(__file__).parent.glob("on_*.py")):
    importlib.import_module(path.stem)


def test_every_remedy_has_a_case_or_a_reason() -> None:
    there, cases = counted(), Counter(case.key for case in CASES)
    reasons = Counter(key for keys in OUTSIDE.values() for key in keys)
    covered = {key: cases[key] + (there[key] if reasons[key] else 0) for key in there}
    missing = [f'case("{key}", provoke, follow)' for key in there if covered[key] < there[key]]
    assert not missing, (
        f"{len(missing)} remedies are followed by no test; add to tests/remedies/on_*.py, or with a reason to "
        "outside.py:\n" + "\n".join(missing)
    )


def test_every_case_has_a_remedy() -> None:
    there = counted()
    gone = sorted({case.key for case in CASES} - set(there))
    gone += [f"{key} (outside.py)" for keys in OUTSIDE.values() for key in keys if key not in there]
    assert not gone, "these remedies were reworded or removed; look at their cases again:\n" + "\n".join(gone)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key[:120])
def test_remedy(case: Case, world: World) -> None:
    known = sites_by_key().get(case.key, [])
    with recorded_sites(), pytest.raises(TrimtabError) as caught:
        case.provoke(world)
    error = caught.value
    shown = error.remedy
    if any(site.is_sentence for site in known):
        shown = shown or str(error).rpartition("; ")[2]
        assert any(site.says(shown) for site in known), (str(error), case.key)
    else:
        assert any(came_from(error, site) for site in known), (
            f"met another error: {error} (from {getattr(error, 'built_at', None)})"
        )
        assert any(site.says(shown) for site in known) or passes_on(error, known), (shown, case.key)
    case.follow(world, shown or "")


def passes_on(error: BaseException, known: list) -> bool:
    """Whether the site's error is one that this one passes on, with more before its cause."""
    inner = error.__cause__ or error.__context__
    return inner is not None and any(site.says(getattr(inner, "remedy", None)) for site in known)


def sites_by_key() -> dict[str, list]:
    if not _BY_KEY:
        for site in sites():
            _BY_KEY.setdefault(site.key, []).append(site)
    return _BY_KEY


_BY_KEY: dict[str, list] = {}


def test_lists_and_settings_are_read_out_of_remedies() -> None:
    assert listed("use auto or one of a, b (c)", "one of") == ["a", "b"]
    assert settings("set dtype: bf16, or weights_dtype: fp32") == [["dtype=bf16"], ["weights_dtype=fp32"]]
    nulls = "leave them out (a=null b.c=null), or set d=x"
    assert settings(nulls) == [["a=null", "b.c=null"], ["d=x"]]
    both = "set a_b: {r: 16} (saves 3 MiB), or x.y: [a, b] with z: 1: together"
    assert settings(both) == [["a_b={r: 16}"], ["x.y=[a, b]", "z=1"]]
