"""What README and docs say is true: their snippets run, what they name exists, and their tables are complete."""

import ast
import dataclasses
import importlib
import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from titans_lm.cli import parse
from titans_lm.config import BackboneConfig

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "titans_lm"
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
EQUATIONS = set(range(8, 32))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def named(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def snippets(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """Yield (line of the page, code) of every fenced block in that language."""
    text = text_of(page)
    for block in re.finditer(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        yield text.count("\n", 0, block.start(1)) + 1, block.group(1)


def outside_of_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)


def promised(code: str) -> list[str]:
    """What the snippet says that it prints: `print(x)  # this`."""
    return re.findall(r"^\s*print\(.*\)  # (.+)$", code, flags=re.MULTILINE)


WITH_CODE = [page for page in PAGES if any(snippets(page, "python"))]


@pytest.mark.parametrize("page", WITH_CODE, ids=named(WITH_CODE))
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippets of a page, one after the other, print what their comments say."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "snippet"}
    for line, code in snippets(page, "python"):
        tree = ast.increment_lineno(ast.parse(code), line - 1)
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(tree, str(page), "exec"), names)  # a failure points to the line of the page
        assert printed.getvalue().splitlines() == promised(code), f"{page.name}, line {line}"


def commands(page: Path, program: str) -> list[str]:
    lines = [line for _, code in snippets(page, "console") for line in code.replace("\\\n", "").splitlines()]
    return [line for line in lines if line.startswith(f"{program} ")]


LAUNCHED = list(dict.fromkeys(line for page in PAGES for line in commands(page, "torchrun")))


@pytest.mark.parametrize("command", LAUNCHED)
def test_torchrun_hands_its_commands_on(command: str) -> None:
    """Not one word of ours is taken for an option of torchrun's own."""
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(shlex.split(command)[1:])
    assert (given.no_python, given.training_script) == (True, "titans")
    assert parse(given.training_script_args) is not None
    assert given.nnodes == "1:1" or (given.rdzv_backend == "c10d" and given.rdzv_endpoint), "several machines must meet"


@pytest.mark.parametrize("command", dict.fromkeys(line for page in PAGES for line in commands(page, "titans")))
def test_commands_are_understood(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names, options and values; the files that they mention are not there, and nothing runs."""
    monkeypatch.chdir(tmp_path)
    for run in (tmp_path / "runs" / "first", tmp_path / "runs" / "near"):
        (run / "model").mkdir(parents=True)
        (run / "model" / "config.json").write_text('{"model_type": "titans"}')
        (run / "settings.json").write_text("{}")
    (tmp_path / "settings.toml").write_text("steps = 3")
    assert parse(shlex.split(command)[1:]) is not None


def module_at(path: str) -> Path | None:
    """Find the file that a page means: in the package, or from the root of the repository."""
    return next((found for found in (PACKAGE / path, ROOT / path) if found.is_file()), None)


def has(file: Path, name: str) -> bool:
    """Tell whether a module holds a name; dots lead into its classes."""
    if PACKAGE not in file.parents:
        return re.search(rf"^\s*(?:def|class) {re.escape(name)}\b", text_of(file), flags=re.MULTILINE) is not None
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    found = importlib.import_module(".".join(part for part in parts if part != "__init__"))
    for part in name.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


@pytest.mark.parametrize("page", PAGES, ids=named(PAGES))
def test_files_and_names_exist(page: Path) -> None:
    """Every `path.py` and every `path.py:name` that stands in backticks."""
    for path, name in re.findall(r"`((?:[\w.-]+/)*\w+\.py)(?::([\w.]+))?`", text_of(page)):
        file = module_at(path)
        assert file is not None, f"{page.name} names {path}, which does not exist"
        assert not name or has(file, name), f"{page.name} names {path}:{name}, and {path} has no {name}"


def numbers(text: str) -> set[int]:
    """Read "8–10, 12" as the set of its numbers."""
    ranges = [part.strip().split("–") for part in text.split(",")]
    return {number for part in ranges for number in range(int(part[0]), int(part[-1]) + 1)}


def test_every_equation_leads_to_code() -> None:
    rows = re.findall(r"^\| (\d[\d–, ]*) \|(.*)$", text_of(README), flags=re.MULTILINE)
    assert set().union(*(numbers(cell) for cell, _ in rows)) >= EQUATIONS
    for cell, row in rows:
        assert re.search(r"`[\w/]+\.py:[\w.]+`", row), f"eq. {cell} leads nowhere"


def test_decisions_are_complete() -> None:
    """Each says what is asked, what the paper says, what was chosen, why, where, and what backs it."""
    page = ROOT / "docs" / "decisions.md"
    sections = re.split(r"^## ", outside_of_blocks(page), flags=re.MULTILINE)[1:]
    found = [section for section in sections if re.match(r"D\d+ ", section)]
    assert [section.split()[0] for section in found] == [f"D{number}" for number in range(1, len(found) + 1)]
    for section in found:
        parts = re.findall(r"^- \*\*([a-z ]+)\*\*", section, flags=re.MULTILINE)
        assert parts == ["paper", "chosen", "why", "where", "backed by"], section.splitlines()[0]


def test_the_front_page_counts_the_decisions_and_begins_with_commands() -> None:
    page, decisions = text_of(ROOT / "docs" / "index.md"), text_of(ROOT / "docs" / "decisions.md")
    last = re.findall(r"^## (D\d+) ", decisions, flags=re.MULTILINE)[-1]
    assert f"D1 to {last} |" in page
    assert any(line.startswith("titans train ") for line in commands(ROOT / "docs" / "index.md", "titans"))
    listed = set(re.findall(r"\((guides/[\w-]+\.md|findings\.md)\)", page))
    assert listed == {f"guides/{path.name}" for path in (ROOT / "docs" / "guides").iterdir()} | {"findings.md"}


def test_decisions_that_pages_cite_are_written_down() -> None:
    written = set(re.findall(r"^## (D\d+) ", text_of(ROOT / "docs" / "decisions.md"), flags=re.MULTILINE))
    for page in PAGES:
        cited = set(re.findall(r"\bD[1-9]\d*\b", text_of(page)))
        assert cited <= written, f"{page.name} cites {sorted(cited - written)}"


def test_every_setting_stands_in_the_guide_with_its_default() -> None:
    page = text_of(ROOT / "docs" / "guides" / "library.md")
    listed = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page, flags=re.MULTILINE))
    defaults = {field.name: repr(field.default).replace("'", '"') for field in dataclasses.fields(BackboneConfig)}
    assert listed == defaults


def test_every_room_stands_in_the_plan() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    plan = text_of(ROOT / "docs" / "architecture.md")
    listed = set(re.findall(r"^\| `(\w+(?:\.py|(?=/)))/?` \|", plan, flags=re.MULTILINE))
    assert listed == rooms - {"__init__.py", "__main__.py"}


def test_every_public_name_stands_in_the_reference() -> None:
    """By the place where it can be imported from, so that its docstring is found."""
    named = re.findall(r"^::: (\S+)\.(\w+)$", text_of(ROOT / "docs" / "reference.md"), flags=re.MULTILINE)
    shown = {id(getattr(importlib.import_module(module), name)) for module, name in named}
    for module in ("titans_lm", "titans_lm.ops", "titans_lm.hf", "titans_lm.streaming", "titans_lm.retrofit"):
        public = importlib.import_module(module)
        missing = [name for name in public.__all__ if not name.isupper() and id(getattr(public, name)) not in shown]
        assert not missing, f"{module}: {missing}"
