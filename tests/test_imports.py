"""Imports point one way, and importing the package costs torch and no more."""

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "titans_lm"

# A room may import from its own row and from rows above it; a new room needs a place here. "" is the package
# itself, which is made of the core and nothing later.
ROOMS = (
    ("checks", "allocator"),
    ("beyond_config",),
    ("config", "former", "ops"),
    ("layers", "attention", "memory_rule", "caching", "shards", "memory", "tnt"),
    ("blocks",),
    ("backbone",),
    ("",),
    ("hf", "retrofit"),
    ("data",),
    ("evaluate",),
    ("train",),
    ("streaming", "generate", "surprise", "questions", "lm_eval", "distill"),
    ("ask",),
    ("forecast", "genomics", "bench", "serve", "report", "demo", "prepare", "experiments"),
    ("recipes",),
    ("repro",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
RANK = {room: rank for rank, row in enumerate(ROOMS) for room in row}
CORE = {room for room, rank in RANK.items() if rank <= RANK[""]}
NOT_IN_CORE = {"transformers", "datasets", "matplotlib", "rich", "tyro"}
HEAVY = {
    "transformers",
    "datasets",
    "fastapi",
    "uvicorn",
    "matplotlib",
    "pandas",
    "peft",
    "rich",
    "sklearn",
    "lm_eval",
    "triton",
    "tyro",
}

MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path, package: Path) -> str:
    """Give the dotted name of a module's file, without the package's own: ops/state.py is ops.state."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(name: str) -> str:
    return name.split(".")[0]


def exists(name: str, package: Path) -> bool:
    path = package.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path.is_dir() and name != "")


def imported(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of everything a file imports, inside functions too."""
    here = ["titans_lm", *filter(None, name_of(path, package).split("."))]
    here = here if path.name == "__init__.py" else here[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                yield node.lineno, f"{origin}.{alias.name}"


def arrows(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, room) of every room of the package that a file imports from."""
    for line, name in imported(path, package):
        root, _, rest = name.partition(".")
        if root == "titans_lm":
            yield line, room_of(rest) if exists(room_of(rest), package) else ""


def pointing_back(package: Path) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.py")):
        room = room_of(name_of(path, package))
        if room not in RANK:
            found.append(f"{path.relative_to(package)}: no place in ROOMS for {room!r}")
            continue
        for line, other in arrows(path, package):
            if RANK.get(other, len(ROOMS)) > RANK[room]:
                found.append(f"{path.relative_to(package)}:{line}: {room!r} imports the later room {other!r}")
    return found


def test_imports_point_one_way() -> None:
    assert pointing_back(PACKAGE) == []


def test_rooms_of_one_row_do_not_import_each_other_both_ways() -> None:
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        room = room_of(name_of(path, PACKAGE))
        graph.setdefault(room, set()).update(other for _, other in arrows(path, PACKAGE) if other != room)
    assert list(graphlib.TopologicalSorter(graph).static_order())  # a cycle raises graphlib.CycleError


def module_of(name: str, package: Path) -> str:
    """The module of the package that a dotted name is, or is in; "" is the package itself."""
    while name and not exists(name, package):
        name = name.rpartition(".")[0]
    return name


def files_in_circles(package: Path) -> list[str]:
    graph: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        own, names = name_of(path, package), [name.partition(".") for _, name in imported(path, package)]
        found = {module_of(rest, package) for root, _, rest in names if root == "titans_lm"}
        graph[own] = found - {own}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_file_imports_one_that_imports_it() -> None:
    """Imports inside functions count; what a package makes public is imported from its files inside the package."""
    assert files_in_circles(PACKAGE) == []


def test_a_circle_of_files_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("from titans_lm.two import a")
    (tmp_path / "two.py").write_text("def f():\n    from titans_lm import three")
    (tmp_path / "three.py").write_text("from titans_lm.one.b import c")
    assert set(files_in_circles(tmp_path)) == {"one", "two", "three"}
    (tmp_path / "three.py").write_text("import torch")
    assert files_in_circles(tmp_path) == []


@pytest.mark.parametrize(
    "line",
    [
        "from titans_lm.hf import TitansConfig",
        "from titans_lm import hf",
        "import titans_lm.hf.config",
        "def f():\n    from titans_lm.hf import TitansConfig",
        "from ..hf import TitansConfig",
        "from .. import hf",
        "from titans_lm import Backbone",
    ],
)
def test_an_arrow_that_points_back_is_found(tmp_path: Path, line: str) -> None:
    for folder in ("hf", "ops"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "config.py").touch()
    state = tmp_path / "ops" / "state.py"
    state.write_text(line)
    [found] = pointing_back(tmp_path)
    assert found.startswith("ops/state.py:")
    state.write_text("import torch\nfrom . import chunked\nfrom titans_lm.config import nearest\n")
    assert pointing_back(tmp_path) == []


def test_a_room_without_a_place_is_found(tmp_path: Path) -> None:
    (tmp_path / "misc.py").write_text("")
    assert pointing_back(tmp_path) == ["misc.py: no place in ROOMS for 'misc'"]


def test_the_core_knows_torch_only() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in MODULES
        if room_of(name_of(path, PACKAGE)) in CORE
        for line, name in imported(path, PACKAGE)
        if name.split(".")[0] in NOT_IN_CORE
    ]
    assert found == []


def test_importing_the_package_costs_torch_and_no_more() -> None:
    """In a fresh process, and beside what torch itself loads."""
    code = (
        "import sys, torch; before = set(sys.modules); from titans_lm import NeuralMemory; import titans_lm.backbone; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}), 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    *loaded, compiler = done.stdout.split()
    assert compiler == "False", "torch's compiler takes a second to load, and waits until something is compiled"
    loaded = set(loaded)
    assert "titans_lm" in loaded
    assert loaded & HEAVY == set()
