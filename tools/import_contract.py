"""Compares the table of packages in docs/architecture.md with every import of the code, lazy ones included.

    python -m tools.import_contract

A row names the packages that a package may import. "the modules a, b, c of others" allows modules of these names in any
package (`spec` allows `spec_recompute` as well). Errors are a package without a row, a row without a package, and an
import that the table does not allow.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grimp

TABLE = Path(__file__).resolve().parents[1] / "docs" / "architecture.md"
ROW = re.compile(r"^\| (?P<names>`\w+/`[^|]*) \|[^|]*\| (?P<allowed>[^|]*) \|$", re.MULTILINE)
ANYWHERE = re.compile(r"the modules (?P<names>[\w, ]+) of others")


@dataclass(frozen=True)
class Row:
    """Allowed imports of a package: packages (None for all), and modules by the first word of their name."""

    packages: frozenset[str] | None
    modules: frozenset[str] = frozenset()

    def allows(self, imported: str) -> bool:
        """Whether `trimtab.<package>.<module>…` may be imported."""
        package, *modules = imported.split(".")[1:]
        if self.packages is None or package in self.packages:
            return True
        return any(name.split("_")[0] in self.modules for name in modules)


def read_table(text: str) -> dict[str, Row]:
    """The rows by package.

    Example:
        >>> rows = read_table("| `plan/` | memory | facts, the modules spec, choice of others |")
        >>> rows["plan"].allows("trimtab.model.spec")
        True
    """
    rows = {}
    for match in ROW.finditer(text):
        allowed = match["allowed"]
        modules = frozenset[str]()
        if found := ANYWHERE.search(allowed):
            modules = frozenset(re.findall(r"\w+", found["names"]))
            allowed = allowed.replace(found[0], "")
        packages = None if allowed == "everything" else frozenset(re.findall(r"\w+", allowed))
        if allowed == "nothing":
            packages = frozenset()
        for name in re.findall(r"`(\w+)/`", match["names"]):
            rows[name] = Row(packages, modules)
    return rows


def violations(rows: dict[str, Row]) -> Iterator[str]:
    """Differences between the table and the code, one line each."""
    graph = grimp.build_graph("trimtab")
    packages = {name.split(".")[1] for name in graph.find_children("trimtab") if graph.find_children(name)}
    yield from (f"{name}/ has no row" for name in sorted(packages - rows.keys()))
    yield from (f"{name}/ has a row and no modules" for name in sorted(rows.keys() - packages))
    for module in sorted(graph.modules):
        package = module.split(".")[1] if "." in module else ""
        if package not in rows:
            continue
        for imported in sorted(graph.find_modules_directly_imported_by(module)):
            other = imported.split(".")[1] if "." in imported else ""
            if other not in ("", package) and not rows[package].allows(imported):
                yield f"{module} imports {imported}, which the row of {package}/ does not allow"


def main() -> int:
    """Print the differences; returns 1 if there are any."""
    found = list(violations(read_table(TABLE.read_text(encoding="utf-8"))))
    print("\n".join(found) or f"all imports match {TABLE.name}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
