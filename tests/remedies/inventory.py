"""Every place in trimtab that advises a user: errors built with a remedy, found in the syntax tree.

A site is named by its module, its function and its remedy with `{}` for what is filled in, so that code may move. A
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
"""Not an error of trimtab's own kind, but it carries a remedy that becomes one's."""
SENTENCES = "recipe/rules.py"
"""Here remedies are the second halves of sentences, `cause; remedy`, that are yielded."""
PAIRS = "recipe/problems.py"
"""Here functions return or yield (cause, remedy)."""
DICTS = "text/chat_worker.py"
"""Here a process of its own sends {"error": cause, "remedy": remedy}."""
NOTHING = "(none)"


@dataclass(frozen=True)
class Site:
    """One remedy at one place."""

    module: str
    function: str
    remedy: str
    lines: tuple[int, int]
    is_sentence: bool = False

    @property
    def key(self) -> str:
        """How cases name it."""
        return f"{self.module}:{self.function}: {self.remedy}"

    def says(self, text: str | None) -> bool:
        """Whether a remedy that was shown can be this one."""
        pattern = ".*".join(re.escape(part) for part in self.remedy.split("{}"))
        return re.fullmatch(pattern, text or NOTHING, re.DOTALL) is not None


@functools.cache
def sites() -> list[Site]:
    """All of them, in the order of files and lines."""
    kinds = _error_classes()
    found: list[Site] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).as_posix()
        if module != ERRORS_MODULE:
            found += _Module(module, ast.parse(path.read_text(encoding="utf-8")), kinds).sites()
    return found


def counted() -> Counter[str]:
    """How many sites have a name: the same remedy may stand several times in a function."""
    return Counter(site.key for site in sites())


def _error_classes() -> set[str]:
    """TrimtabError, what derives from it anywhere in the package, and RowError."""
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
        """Arguments of the function that is walked which are a kind of error."""

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
    """Whether the first of a pair is a sentence, or a name for one."""
    return isinstance(node, ast.JoinedStr) or "cause" in ast.unparse(node)


def _called(call: ast.Call) -> str | None:
    return call.func.id if isinstance(call.func, ast.Name) else None


def _assigned(body: list[ast.stmt]) -> dict[str, list[ast.expr]]:
    """Names to everything that is assigned to them."""
    found: dict[str, list[ast.expr]] = {}
    for statement in body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(statement.value)
    return found


def _texts(node: ast.expr, names: dict[str, list[ast.expr]], depth: int = 0) -> list[str]:
    """The texts that an expression can be, `{}` for what is only known when it runs."""
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
