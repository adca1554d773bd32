"""Generated pages are up to date, and what the pages name exists: files, anchors, tests, verbs, options, keys."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, REFERENCE, ROOT, anchors, prose, spans
from tools import docs
from trimtab.recipe.problems import all_keys

EVERY = [*PAGES, *REFERENCE]
COMMANDS = dict(docs.commands())
GROUPS = {name.split()[0] for name in COMMANDS if " " in name}


def test_generated_pages_are_up_to_date() -> None:
    for path, text in docs.files():
        assert path.read_text(encoding="utf-8") == text, f"run `make docs` to renew {path.name}"


def test_the_command_page_has_every_verb_and_option() -> None:
    page = docs.cli_page()
    for name, command in COMMANDS.items():
        section = page.split(f"## `trimtab {name}`\n", 1)[1].split("\n## ", 1)[0]
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                assert f"`{parameter.opts[0]}" in section, (name, parameter.opts)
    assert "--die-at" not in page


def test_the_pages_are_made_without_torch() -> None:
    code = "import sys; from tools import docs; list(docs.files()); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.stem)
def test_links_have_targets(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(path), f"{page.name}: no heading {anchor} in {path.name}"


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in [*PAGES[1:], *REFERENCE]:
        if page.name != "README.md":
            assert f"({page.relative_to(ROOT / 'docs')})" in index, f"{page.name} is not in docs/README.md"


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.stem)
def test_paths_in_the_text_exist(page: Path) -> None:
    for span in spans(page):
        name, _, test = span.partition("::")
        if re.fullmatch(r"(tests|trimtab|tools|recipes|benchmarks|docs)/[\w./-]+", name):
            assert (ROOT / name).exists(), f"{page.name} names {name}"
            if test:
                text = (ROOT / name).read_text(encoding="utf-8")
                assert f"def {test}(" in text, f"{page.name} names {span}"


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.stem)
def test_commands_in_the_text_exist(page: Path) -> None:
    for span in spans(page):
        if not span.startswith("trimtab ") or span in ("trimtab --help", "trimtab --version"):
            continue
        words = shlex.split(span)[1:]
        if words[0] == "COMMAND" or (len(words) == 1 and words[0] in GROUPS):
            continue
        name = " ".join(words[:2]) if words[0] in GROUPS else words[0]
        assert name in COMMANDS, f"{page.name}: {span}"
        known = {o for p in COMMANDS[name].params for o in [*p.opts, *p.secondary_opts]} | {"--help"}
        for word in words:
            if word.startswith("--"):
                assert word in known, f"{page.name}: {span}"


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.stem)
def test_recipe_keys_in_the_text_exist(page: Path) -> None:
    known = {str(part) for path in all_keys() for part in path} | {"trust_remote_code"}
    for span in spans(page):
        match = re.fullmatch(r"([a-z_0-9.]+): \S.*", span)
        if match and match[1] != "error":
            assert all(part in known or part.isdigit() for part in match[1].split(".")), (
                f"{page.name}: {span}"
            )


def test_exit_codes_are_those_of_the_errors() -> None:
    text = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| (\d+) \|", text, flags=re.MULTILINE))
    assert listed == {code for code, _ in docs.exit_codes()}


def test_every_trouble_names_a_test() -> None:
    text = (ROOT / "docs" / "troubles.md").read_text(encoding="utf-8")
    sections = text.split("## Exit codes")[0].split("\n### ")[1:]
    assert len(sections) >= 15
    for section in sections:
        assert re.search(r"`tests/[\w/.]+::test_\w+`", section), section.splitlines()[0]


def test_the_readme_counts_models_and_devices() -> None:
    from trimtab.model.catalogue import catalogue_entries

    sheets = json.loads((ROOT / "trimtab/facts/catalogue/gpus.json").read_text(encoding="utf-8"))["sheets"]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{len(catalogue_entries())} models and {len(sheets)} devices are known by name" in readme
