"""The table of packages in docs/architecture.md is complete, and every import is in it."""

from __future__ import annotations

import pytest

pytest.importorskip("grimp", reason="grimp is not installed; `make test` installs it")

from tools.import_contract import TABLE, Row, read_table, violations


def test_every_import_is_in_the_table() -> None:
    assert list(violations(read_table(TABLE.read_text()))) == []


def test_a_missing_row_and_a_missing_permission_are_found() -> None:
    rows = read_table(TABLE.read_text())
    del rows["trainer"]
    rows["lost"] = Row(frozenset())
    rows["data"] = Row(frozenset({"facts"}))
    rows["plan"] = Row(rows["plan"].packages, frozenset({"choice"}))
    found = list(violations(rows))
    assert found[:2] == ["trainer/ has no row", "lost/ has a row and no modules"]
    assert any("trimtab.data" in line and "imports trimtab.text" in line for line in found[2:])
    assert any(line.startswith("trimtab.plan.step_time imports trimtab.model.spec") for line in found[2:])


def test_modules_are_allowed_by_their_first_word() -> None:
    row = Row(frozenset({"facts"}), frozenset({"spec"}))
    assert row.allows("trimtab.adapt.spec_recompute")
    assert row.allows("trimtab.kernels.attention.spec")
    assert not row.allows("trimtab.adapt.recompute")
