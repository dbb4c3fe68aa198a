"""The plan of a table at a scale, from what a user gives; nothing heavy is imported for it."""

import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

from titans_lm.config import check_choice, nearest
from titans_lm.data.text import STDLIB
from titans_lm.repro import beyond, local, paper
from titans_lm.repro.effort import EFFORTS, Effort
from titans_lm.repro.published import published
from titans_lm.repro.steps import Plan

Scale = Literal["tiny", "small", "paper"]
ALSO = {"table6": "figure6", "babilong": "figure6"}
"""Other names of a table."""
TABLES = tuple(published())
"""Tables and figures in the paper's order."""
RUN = local.PLANS | beyond.PLANS
"""Each as it is run."""
PRINTED = paper.PLANS | beyond.PAPER
"""Each as it is printed, at the paper's size."""
TAKEN = {
    "table1": ("data", "test", "local"), "table2": ("data", "test"), "table3": ("data",), "table4": ("data",),
    "table5": ("data", "test"), "figure6": ("data", "test"), "figure7": ("data", "test"), "figure8": (), "figure9": (),
}  # fmt: skip
"""Texts and folders that a table is made of, where it is run."""
PREPARED = "tokens.json"
"""File of a folder of titans prepare: tokens, which are no hay."""


def table_name(name: str) -> str:
    """Find a table; ValueError with the nearest name."""
    name = ALSO.get(name, name)
    if name not in TABLES:
        hint, listed = nearest(name, TABLES), f"expected one of {', '.join(TABLES)}"
        raise ValueError(f"got the table {name!r}; {f'{hint} {listed}' if hint.endswith('?') else listed}")
    return name


def list_tables() -> list[str]:
    """Say which tables there are, a line each."""
    return [f"{name:<10}{one.title} ({one.where})" for name, one in published().items()]


def make_plan(
    table: str,
    scale: str,
    *,
    out: Path | None = None,
    data: str | None = None,
    test: Path | None = None,
    questions: Path | None = None,
    effort: Effort | None = None,
) -> Plan:
    """Make the plan of a table; `effort` is another amount of work than the scale's own.

    `data` and `test` are texts to train on and to test on, by default Python files of this machine; `questions` is a
    folder of files of `titans evaluate lm-eval --local`. At the paper's scale `data` is a folder of tokens. For tables
    3 and 4 it is a folder of their data sets. ValueError for names that are unknown, and for texts and folders that are
    not there.
    """
    table = table_name(table)
    check_choice("scale", scale, get_args(Scale))
    out = Path("runs/repro") / f"{table}-{scale}" if out is None else out
    _check_taken(table, scale, {"data": data, "test": test, "local": questions})
    if scale == "paper":
        return PRINTED[table](paper.Places(data=data, books="pg19", out=out))
    effort = EFFORTS[scale]() if effort is None else effort
    return RUN[table](effort, given(table, data, test, questions, out))


def _check_taken(table: str, scale: str, told: dict[str, object]) -> None:
    """Refuse texts and folders that would not be read."""
    taken = TAKEN[table] if scale != "paper" else ("data",)
    for name, value in told.items():
        if value is not None and name not in taken:
            options = ", ".join(f"--{one}" for one in taken) or "no text"
            raise ValueError(
                f"got --{name} {value}, which {table} at the scale {scale} does not read; expected {options}"
            )


def given(table: str, data: str | None, test: Path | None, questions: Path | None, out: Path) -> local.Given:
    """Check what a user gives, and fill in the rest; ValueError for what is not there."""
    if data is not None and data != STDLIB and test is None and "test" in TAKEN[table]:
        raise ValueError(f"got --data {data} without --test; expected a text to test on, which is not in the data")
    source = None if data in (None, STDLIB) else Path(str(data))
    for name, path in (("data", source), ("test", test)):
        if path is not None and not path.exists():
            raise ValueError(f"got --{name} {path}, which does not exist; expected a file or a folder")
    if source is not None and test is not None and overlap(source, test):
        raise ValueError(f"got --data {data} and --test {test}, one in the other; expected a text that is not taught")
    if questions is not None and not questions.is_dir():
        raise ValueError(f"got --local {questions}, which is no folder; expected one of files of questions")
    test = default_test() if test is None else test
    return local.Given(data=data or STDLIB, test=test, hay=_hay(source), local=questions, out=out)


def overlap(one: Path, other: Path) -> bool:
    """Tell whether two paths are the same, or one is a folder with the other in it."""
    one, other = one.resolve(), other.resolve()
    return one == other or one in other.parents or other in one.parents


def default_test() -> Path:
    """Find Python source that is no part of the Python library: a file of torch, which is there as well."""
    spec = find_spec("torch")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    path = Path(folders[0] if folders else "torch") / "nn" / "functional.py"
    if not path.is_file():
        raise ValueError(f"got no --test, and {path} is not there to test on; expected --test TEXT")
    return path


def _hay(source: Path | None) -> Path:
    """Choose text to hide facts in: the data where it is text, or Python's help, or the longest prose beside it."""
    if source is not None and not (source / PREPARED).is_file():
        return source
    folder = Path(sysconfig.get_paths()["stdlib"])
    topics = folder / "pydoc_data" / "topics.py"
    return topics if topics.is_file() else folder / "argparse.py"
