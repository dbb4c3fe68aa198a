"""The house keeps its own rules: sizes, pages, versions, and nothing left half done."""

import ast
import importlib
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import titans_lm

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PAGES = sorted((ROOT / "docs").rglob("*.md"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def text_of(*parts: str) -> str:
    return ROOT.joinpath(*parts).read_text(encoding="utf-8")


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=names(SOURCES + TESTS))
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 450, f"{len(lines)} lines; split the file by what it is about"


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", SOURCES, ids=names(SOURCES))
def test_a_function_fits_on_a_screen(path: Path) -> None:
    """Sixty lines of code: docstrings with their equations do not count."""
    for node in functions(path):
        first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
        length = (node.end_lineno or first.lineno) - first.lineno + 1
        assert length <= 60, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=names(SOURCES))
def test_nothing_is_left_open_or_hidden(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    open_ends = r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b"
    assert re.search(open_ends, text) is None, "finish it, or leave it out"
    assert "from __future__ import annotations" not in text, "it hides the shapes from the checks"


def in_nav(entry: Any) -> Iterator[str]:
    match entry:
        case str():
            yield entry
        case dict():
            for value in entry.values():
                yield from in_nav(value)
        case list():
            for value in entry:
                yield from in_nav(value)


def test_the_navigation_lists_every_page_and_no_other() -> None:
    nav = yaml.safe_load(text_of("mkdocs.yml"))["nav"]
    assert sorted(in_nav(nav)) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in PAGES)


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *PAGES], ids=names([*ROOT.glob("*.md"), *PAGES]))
def test_links_between_files_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:|#", target):
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name} links to {target}"


def test_decisions_that_the_code_cites_are_written_down() -> None:
    written = set(re.findall(r"\bD[1-9]\d*\b", text_of("docs", "decisions.md")))
    for path in SOURCES:
        cited = set(re.findall(r"\bD[1-9]\d*\b", path.read_text(encoding="utf-8")))
        assert cited <= written, f"{path.relative_to(ROOT)} cites {sorted(cited - written)}"


def test_one_version() -> None:
    version = PROJECT["version"]
    assert titans_lm.__version__ == version
    assert str(yaml.safe_load(text_of("CITATION.cff"))["version"]) == version
    assert f"## [{version}]" in text_of("CHANGELOG.md")


def pins() -> dict[str, str]:
    lines = text_of("constraints.txt").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_what_is_asked_for_is_pinned_within_its_range() -> None:
    asked = [
        *PROJECT["dependencies"],
        *(r for extra in PROJECT["optional-dependencies"].values() for r in extra),
    ]
    pinned = pins()
    for requirement in map(Requirement, asked):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt lacks {requirement.name}"
        assert requirement.specifier.contains(version), f"{requirement} leaves out {version}, which is pinned"


def test_pins_hold_for_any_build() -> None:
    """A local version such as +cpu exists on some machines only."""
    assert [pin for pin in pins().items() if "+" in pin[1]] == []


def test_the_command_exists() -> None:
    for entry in PROJECT["scripts"].values():
        module, _, function = entry.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_the_licence_is_the_one_that_is_named() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert re.search(r"Apache License\s+Version 2\.0", text_of("LICENSE"))


def targets() -> dict[str, str]:
    """Give every target of the Makefile that is a command, with what it needs."""
    text = text_of("Makefile")
    [phony] = re.findall(r"^\.PHONY:(.*)$", text, flags=re.MULTILINE)
    rules = dict(re.findall(r"^([a-z]+):[ \t]*(.*)$", text, flags=re.MULTILINE))
    assert sorted(rules) == sorted(phony.split())
    return rules


def test_every_target_sets_up_its_environment() -> None:
    rules = targets()
    assert rules.pop("help") == ""
    assert {"demo", "test", "lint"} <= rules.keys()
    assert set(rules.values()) == {"$(READY)"}
    assert all(f"make {name}" in text_of("Makefile") for name in rules), "make help names them all"


def test_documents_name_targets_that_exist() -> None:
    for page in [*ROOT.glob("*.md"), *PAGES]:
        named = re.findall(r"`make ([a-z]+)\b", page.read_text(encoding="utf-8"))
        assert set(named) <= targets().keys(), page.name


def test_ci_runs_what_the_readme_says() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text(encoding="utf-8").splitlines()[-1] == "make test"
    assert all(command in text_of("README.md") for command in ("make demo", "make test"))
