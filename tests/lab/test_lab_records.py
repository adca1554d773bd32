"""Records: appended immediately, readable after a stop, with their provenance."""

from __future__ import annotations

from pathlib import Path

from trimtab.lab.records import append_record, is_recorded, provenance, read_records


def test_a_torn_line_loses_nothing_but_itself(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    append_record(path, {"case": "a", "ms": 1.0})
    with path.open("a") as file:
        file.write('{"case": "torn')
    append_record(path, {"case": "b", "ms": 2.0})
    append_record(path, {"case": "a", "ms": 3.0})
    append_record(path, {"no case": 1})
    found = read_records(path, "case")
    assert {name: record["ms"] for name, record in found.items()} == {"a": 3.0, "b": 2.0}
    assert set(read_records(path, "case", "ms")) == {("a", 1.0), ("b", 2.0), ("a", 3.0)}


def test_what_failed_or_differs_is_measured_again() -> None:
    where = {"commit": "abc", "device": "a GPU"}
    assert is_recorded({**where, "ms": 1.0}, where)
    assert not is_recorded(None, where)
    assert not is_recorded({**where, "failed": "out of memory"}, where)
    assert not is_recorded({**where, "commit": "def"}, where)


def test_provenance_names_device_versions_and_commit() -> None:
    found = provenance("cpu", ("torch", "no_such_package"), "abc")
    assert found["commit"] == "abc"
    assert set(found["versions"]) == {"python", "torch"}
    assert found["device"]
    assert found["time"].endswith("+00:00")
