"""Inventory of all remedies in error messages of trimtab, found in the syntax tree.

A site is named by its module, its function and its remedy with `{}` for formatted values, so that code may move. A
remedy that is one of several texts (`a if x else b`, a constant, a local name) is a site for each of them.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import trimtab

PACKAGE = Path(trimtab.__file__).parent
ERRORS_MODULE = "facts/errors.py"
ROW_ERROR = "RowError"
"""Not a TrimtabError, but its remedy becomes that of one."""
SENTENCES = "recipe/rules.py"
"""Functions in this file yield sentences `cause; remedy`."""
PAIRS = "recipe/problems.py"
"""Functions in this file return or yield (cause, remedy)."""
DICTS = "text/chat_worker.py"
"""This child process sends {"error": cause, "remedy": remedy}."""
NOTHING = "(none)"


@dataclass(frozen=True)
class Site:
    """A remedy and its location."""

    module: str
    function: str
    remedy: str
    lines: tuple[int, int]
    is_sentence: bool = False

    @property
    def key(self) -> str:
        """The key of its case."""
        return f"{self.module}:{self.function}: {self.remedy}"

    def says(self, text: str | None) -> bool:
        """Whether a displayed remedy matches this one."""
        pattern = ".*".join(re.escape(part) for part in self.remedy.split("{}"))
        return re.fullmatch(pattern, text or NOTHING, re.DOTALL) is not None


@functools.cache
def sites() -> list[Site]:
    """All sites, sorted by file and line."""
    kinds = _error_classes()
    found: list[Site] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).as_posix()
        if module != ERRORS_MODULE:
            found += _Module(module, ast.parse(path.read_text(encoding="utf-8")), kinds).sites()
    return found


def counted() -> Counter[str]:
    """Number of sites per key: a function may have the same remedy several times."""
    return Counter(site.key for site in sites())


def _error_classes() -> set[str]:
    """TrimtabError with all its subclasses, and RowError."""
    classes: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    kinds = {"TrimtabError", ROW_ERROR}
    while grown := {name for name, bases in classes.items() if bases & kinds} - kinds:
        kinds |= grown
    return kinds


class _Module:
    """The sites of one file."""

    def __init__(self, name: str, tree: ast.Module, kinds: set[str]) -> None:
        self.name, self.tree, self.kinds = name, tree, kinds
        self.constants = _assigned(tree.body)
        self.given: set[str] = set()
        """Parameters of the current function that are error classes."""

    def sites(self) -> list[Site]:
        return list(self._walk(self.tree, [], {}))

    def _walk(self, node: ast.AST, inside: list[str], local: dict[str, list[ast.expr]]) -> Iterator[Site]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inside = [*inside, node.name]
        if isinstance(node, ast.FunctionDef):
            self.given = {
                a.arg
                for a in node.args.args
                if a.annotation and "[TrimtabError]" in ast.unparse(a.annotation)
            }
            local = _assigned([inner for inner in ast.walk(node) if isinstance(inner, ast.stmt)])
        names = {**self.constants, **local}
        if isinstance(node, ast.Call) and _called(node) in self.kinds | self.given:
            for remedy in self._remedies(node, names):
                yield self._site(node, inside, remedy)
        if isinstance(node, ast.Yield) and self.name == SENTENCES and node.value is not None:
            for text in _texts(node.value, names):
                if text != "{}":  # a sentence that another function returns
                    yield self._site(node, inside, text.partition("; ")[2] or NOTHING, is_sentence=True)
        if isinstance(node, ast.Return) and self.name == SENTENCES and node.value is not None:
            for text in _texts(node.value, names):
                if "; " in text:
                    yield self._site(node, inside, text.partition("; ")[2], is_sentence=True)
        if (
            isinstance(node, ast.Yield | ast.Return)
            and self.name == PAIRS
            and isinstance(node.value, ast.Tuple)
        ):
            pair = node.value.elts
            for remedy in _texts(pair[1], names) if len(pair) == 2 and _is_cause(pair[0]) else []:
                yield self._site(node, inside, remedy, is_sentence=True)
        if isinstance(node, ast.Dict) and self.name == DICTS:
            for name, value in zip(node.keys, node.values, strict=True):
                if isinstance(name, ast.Constant) and name.value == "remedy":
                    for remedy in _texts(value, names):
                        yield self._site(node, inside, remedy, is_sentence=True)
        for child in ast.iter_child_nodes(node):
            yield from self._walk(child, inside, local)

    def _site(
        self, node: ast.expr | ast.stmt, inside: list[str], remedy: str, is_sentence: bool = False
    ) -> Site:
        lines = (node.lineno, node.end_lineno or node.lineno)
        return Site(self.name, ".".join(inside), remedy, lines, is_sentence)

    def _remedies(self, call: ast.Call, names: dict[str, list[ast.expr]]) -> list[str]:
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if call.args and isinstance(call.args[0], ast.Starred):
            return ["{}"]
        remedy = call.args[1] if len(call.args) > 1 else given.get("remedy")
        return [NOTHING] if remedy is None else _texts(remedy, names)


def _is_cause(node: ast.expr) -> bool:
    """Whether the first element of a pair is a sentence, or a name for one."""
    return isinstance(node, ast.JoinedStr) or "cause" in ast.unparse(node)


def _called(call: ast.Call) -> str | None:
    return call.func.id if isinstance(call.func, ast.Name) else None


def _assigned(body: list[ast.stmt]) -> dict[str, list[ast.expr]]:
    """All values that are assigned to each name."""
    found: dict[str, list[ast.expr]] = {}
    for statement in body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(statement.value)
    return found


def _texts(node: ast.expr, names: dict[str, list[ast.expr]], depth: int = 0) -> list[str]:
    """The possible texts of an expression, with `{}` for values known only at run time."""
    if isinstance(node, ast.Constant):
        return [NOTHING if node.value is None else str(node.value)]
    if isinstance(node, ast.IfExp):
        return [text for part in (node.body, node.orelse) for text in _texts(part, names, depth)]
    if isinstance(node, ast.JoinedStr):
        parts = [
            ["{}"] if isinstance(part, ast.FormattedValue) and not _chosen(part, names) else
            _texts(part.value if isinstance(part, ast.FormattedValue) else part, names, depth)
            for part in node.values
        ]  # fmt: skip
        return ["".join(choice) for choice in itertools.product(*parts)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        both = itertools.product(_texts(node.left, names, depth), _texts(node.right, names, depth))
        return [left + right for left, right in both]
    if isinstance(node, ast.Name) and node.id in names and depth < 3:
        return list(
            dict.fromkeys(text for value in names[node.id] for text in _texts(value, names, depth + 1))
        )
    return ["{}"]


def _chosen(part: ast.FormattedValue, names: dict[str, list[ast.expr]]) -> bool:
    """Whether what is filled in is one of a few texts that the source names: a constant, or `a if x else b`."""
    if isinstance(part.value, ast.IfExp):
        return all(isinstance(end, ast.Constant) for end in (part.value.body, part.value.orelse))
    constant = isinstance(part.value, ast.Name) and part.value.id.isupper()
    return constant and all(isinstance(value, ast.Constant) for value in names.get(part.value.id, [part]))
