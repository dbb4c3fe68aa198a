"""The plan of a table at a scale, read from TOML: `table5.toml` says what is run, `tiny.toml` how much of it.

A text in these files may hold names in braces: what a user gives (data, test, hay, local, out), words of the files,
what a step goes through (`each`), and, where the setting is described, the steps themselves: {text.train.seq_len}.
"""

import itertools
import re
import string
import sysconfig
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from titans_lm.bench.settings import ModelSettings, OpsSettings, ScalingSettings
from titans_lm.config import check_choice, nearest
from titans_lm.data.text import STDLIB, overlap
from titans_lm.experiments.reading_settings import QuestionSettings
from titans_lm.experiments.settings import TASK_EXPERIMENTS, CompareSettings
from titans_lm.forecast.settings import EvaluateForecasters
from titans_lm.genomics import settings as dna
from titans_lm.prepare.settings import PrepareSettings
from titans_lm.recipes.find import read_recipe, recipe_names
from titans_lm.repro.sets import describe_sets, differs_in_size, find_sets
from titans_lm.train.options import as_options, merge_settings
from titans_lm.train.settings import LanguageSettings

Scale = Literal["tiny", "small", "paper"]
SOURCE, EMPTY = "arXiv 2501.00663", "–"
"""The paper, and a cell that is empty there."""
ALSO = {"table6": "figure6", "babilong": "figure6"}
"""Other names of a table."""
COMMANDS: dict[str, tuple[type, tuple[str, ...], str | None]] = {
    "prepare": (PrepareSettings, ("source",), None),
    "train": (LanguageSettings, ("data",), None),
    "compare": (CompareSettings, ("data",), "compare.json"),
    "evaluate mqar": (TASK_EXPERIMENTS["mqar"], (), "results.json"),
    "evaluate needle": (TASK_EXPERIMENTS["needle"], (), "results.json"),
    "evaluate babilong": (TASK_EXPERIMENTS["babilong"], (), "results.json"),
    "evaluate lm-eval": (QuestionSettings, ("models",), None),
    "forecast evaluate": (EvaluateForecasters, ("data",), "results.json"),
    "genomics evaluate": (dna.EvaluateSettings, ("data",), "results.json"),
    "genomics train": (dna.TrainSettings, ("data",), None),
    "genomics predict": (dna.PredictSettings, ("model", "data"), None),
    "bench ops": (OpsSettings, (), None),
    "bench model": (ModelSettings, (), None),
    "bench scaling": (ScalingSettings, (), None),
}
"""Of each command its settings, which of them stand behind its words without a name, and its file in the folder --out:
where there is none, results are in the file of --json."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command of a plan."""

    name: str
    what: str
    """What it measures, in words."""
    command: str
    settings: Any
    recipe: str | None = None
    """Recipe that the settings of training lie over."""

    @property
    def argv(self) -> list[str]:
        """Write the step as the words behind `titans`."""
        kind, positional, _ = COMMANDS[self.command]
        default = kind() if self.recipe is None else from_recipe(self.recipe)
        values = [getattr(self.settings, name) for name in positional]
        words = [str(one) for value in values for one in (value if isinstance(value, tuple) else (value,))]
        options = as_options(replace(self.settings, **{n: getattr(default, n) for n in positional}), default)
        return [*self.command.split(), *([self.recipe] if self.recipe else []), *words, *options]

    @property
    def file(self) -> Path:
        """File that is there when the step is done."""
        name = COMMANDS[self.command][2]
        return self.settings.json if name is None else self.settings.out / name


def from_recipe(name: str) -> LanguageSettings:
    """Give the settings of a recipe over the defaults of training."""
    return merge_settings(LanguageSettings(), read_recipe(name))


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column: what of the paper stands in it, and where our number comes from."""

    title: str
    """The paper's name for it only where ours is the same measure."""
    paper: str | None = None
    step: str | None = None
    read: str | None = None
    """How the number is found in the step's results (`run.READS`), and what it is told beside the row's model."""
    at: tuple[Any, ...] = ()
    digits: int = 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row: a model, as it is called here, in the paper, and in the results of the steps."""

    title: str
    paper: str | None = None
    model: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that comes out."""

    title: str = ""
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class Published:
    """A table or a figure of the paper: `published.toml`."""

    title: str
    where: str
    columns: tuple[str, ...]
    shown: str = ""
    """Group that stands beside small models: that of the smallest."""
    notes: tuple[str, ...]
    errata: tuple[str, ...]
    groups: dict[str, dict[str, Any]]
    """Rows that belong together, models of one size: their `title`, and `rows` with cells by column, None if empty."""

    @property
    def digits(self) -> int:
        """Count the digits behind the point: the most that a number of the table has."""
        values = [v for group in self.groups.values() for row in group["rows"].values() for v in row.values()]
        return max((len(f"{v:.4f}".rstrip("0").partition(".")[2]) for v in values if v is not None), default=0)

    def cell(self, row: str | None, column: str | None) -> float | None:
        """Give a number of the group that is shown; None where the paper has no such row, column or number."""
        return self.groups.get(self.shown, {"rows": {}})["rows"].get(row, {}).get(column)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run for a table of the paper at a scale, and how that differs from the paper."""

    table: str
    scale: str
    steps: tuple[Step, ...]
    tables: tuple[Table, ...] = ()
    differs: tuple[str, ...] = ()
    """How the setting differs from the paper's, a sentence each."""
    out: Path

    @property
    def runs(self) -> bool:
        """Whether it is to be run by `titans repro`, and not by hand."""
        return self.scale != "paper"


def read_toml(name: str) -> dict[str, Any]:
    """Read a file of this folder."""
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))


def read_amounts(plan: dict[str, Any], scale: str) -> dict[str, Any]:
    """Read how much is run at a scale: its file, over that of the scale whose `sizes` the plan takes, if it does."""
    return read_toml(plan.get("sizes", scale)) | read_toml(scale)


@cache
def published() -> dict[str, Published]:
    """Read what the paper prints: all tables and figures in its order."""
    tables = read_toml("published")
    for one in tables.values():
        one["groups"] = groups = one.get("groups", {})
        for group in groups.values():
            for name, values in group["rows"].items():
                cells = [None if value == EMPTY else float(value) for value in values]
                group["rows"][name] = dict(zip(one["columns"], cells, strict=True))
        one |= {name: tuple(one[name]) for name in ("columns", "notes", "errata")}
    return {name: Published(**one) for name, one in tables.items()}


def table_name(name: str) -> str:
    """Find a table; ValueError with the nearest name."""
    name, tables = ALSO.get(name, name), published()
    if name not in tables:
        hint, listed = nearest(name, tables), f"expected one of {', '.join(tables)}"
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
    sizes: dict[str, Any] | None = None,
) -> Plan:
    """Make the plan of a table; `sizes` are other amounts of work, as the file of a scale has them.

    `data` and `test` are texts to train on and to test on, by default Python files of this machine; `questions` is a
    folder of files of `titans evaluate lm-eval --local`. At the paper's scale `data` is a folder of tokens. For tables
    3 and 4 it is a folder of their data sets. ValueError for names that are unknown, and for texts and folders that are
    not there.
    """
    table = table_name(table)
    check_choice("scale", scale, get_args(Scale))
    out = Path("runs/repro") / f"{table}-{scale}" if out is None else out
    plan = read_toml(table)
    names = {"none": None, "table": table, "scale": scale, "out": str(out), **plan.get("words", {})}
    takes = plan["takes"] if scale != "paper" else ["data"]
    _check_taken(table, scale, takes, {"data": data, "test": test, "local": questions})
    if scale == "paper":
        plan |= plan["paper"]
        names |= {"data": data, "tokens": data or "data/fineweb-edu"}
    else:
        names |= _given(takes, data, test, questions)
    amounts = read_amounts(plan, scale) if sizes is None else sizes
    own = amounts.get(table, {})
    names |= amounts.get("words", {}) | own.get("words", {})
    if "sets" in plan:
        names |= _sets(table, plan, scale, data, own.get("omit", ()))
    steps = tuple(step for one in plan["steps"] for step in _steps(one, names, amounts, own))
    names |= {step.name: step.settings for step in steps} | {"first": steps[0].settings} | _described(steps)
    tables = tuple(_table(one, names) for one in plan["tables"]) if scale != "paper" else ()
    names["not_run"] = "; ".join(
        f"{row.title} ({row.paper}) is not run at this scale"
        for one in tables[:1] for row in one.rows if row.model not in getattr(steps[0].settings, "models", ())
    )  # fmt: skip
    names |= {name: fill(words, names) for name, words in own.get("words", {}).items()}
    differs = [fill(one["say"], names) if isinstance(one, dict) else fill(one, names)
               for one in plan["differs"] if _holds(one, names)]  # fmt: skip
    lines = (line for one in differs for line in (one if isinstance(one, list) else [one]))
    return Plan(table=table, scale=scale, steps=steps, tables=tables, differs=tuple(lines), out=out)


class _Words(string.Formatter):
    """Texts with names; a list is written with commas (:list) or ors (:or), or counted as seeds (:seeds)."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec in ("list", "or"):
            between = ", " if format_spec == "list" else " or "
            return between.join(f"{one:g}" if isinstance(one, float) else str(one) for one in value)
        if format_spec == "seeds":
            return f"{len(value)} seed{'s' * (len(value) > 1)}"
        return super().format_field(value, format_spec)


def fill(value: Any, names: dict[str, Any]) -> Any:
    """Put names into a text, and into all texts of a list or a table; a text that is but a name becomes its value."""
    if isinstance(value, dict):
        return {name: fill(one, names) for name, one in value.items()}
    if isinstance(value, list):
        return [fill(one, names) for one in value]
    if not isinstance(value, str):
        return value
    alone = re.fullmatch(r"\{([^{}:!]+)\}", value)
    return _Words().get_field(alone[1], (), names)[0] if alone else _Words().vformat(value, (), names)


def merged(*layers: dict[str, Any]) -> dict[str, Any]:
    """Lay settings over each other, name by name."""
    out: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            out[name] = merged(out.get(name, {}), value) if isinstance(value, dict) else value
    return out


def _holds(one: Any, names: dict[str, Any]) -> bool:
    """Whether a step or a sentence belongs to the plan: what it needs is there, what it goes without is not."""
    needs, without = (one.get("needs"), one.get("without")) if isinstance(one, dict) else (None, None)
    return (needs is None or bool(names.get(needs))) and (without is None or not names.get(without))


def _each(one: dict[str, Any], names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the names with each of the values that a step or a column goes through."""
    through = fill(one.get("each", {}), names)
    for values in itertools.product(*through.values()):
        yield names | dict(zip(through, values, strict=True))


def _steps(one: dict[str, Any], names: dict[str, Any], amounts: dict[str, Any], own: dict[str, Any]) -> Iterator[Step]:
    """Yield a step, or several: shared amounts, over them what the plan says, over that the table's own amounts."""
    for each in _each(one, names) if _holds(one, names) else ():
        name = fill(one["name"], each)
        if name in own.get("omit", ()):
            continue
        shared = [amounts.get(like, {}) for like in one.get("like", [])]
        settings = fill(merged(*shared, one["settings"], own.get(name, {})), each)
        kind, recipe = COMMANDS[one["command"]][0], fill(one.get("recipe"), each)
        if recipe is not None and recipe not in recipe_names():  # another model, as large as LMM
            size, _, settings["baseline"] = recipe.partition("-")
            recipe = f"{size}-lmm"
        default = kind() if recipe is None else from_recipe(recipe)
        model = settings.get("train", {}).get("model", {})
        if "recipe" in model:
            settings["train"]["model"] = read_recipe(model.pop("recipe"))["model"] | model
        made = merge_settings(default, settings)
        what = fill(one["what"], each | {"settings": made})
        yield Step(name=name, what=what, command=one["command"], settings=made, recipe=recipe)


def _table(one: dict[str, Any], names: dict[str, Any]) -> Table:
    """Lay out a table; a column whose step is not run has the paper's number alone."""
    columns = []
    for column in one["columns"]:
        for each in _each(column, names):
            told = fill({name: value for name, value in column.items() if name != "each"}, each)
            bare = told.pop("bare", told.get("paper"))
            if "step" in told and told["step"] not in names:
                told = {"title": bare, "paper": told["paper"], "digits": told.get("digits", 1)}
            columns.append(Column(**{"title": bare, **told, "at": tuple(told.get("at", ()))}))
    return Table(
        title=one.get("title", ""), columns=tuple(columns), rows=tuple(Row(**row) for row in fill(one["rows"], names))
    )


def _described(steps: tuple[Step, ...]) -> dict[str, Any]:
    """Give what is said of steps as a whole: tokens that a language model learns, epochs on each table."""
    text = next((step.settings.train for step in steps if step.command == "compare"), None)
    forecasts = [step for step in steps if step.command == "forecast evaluate"]
    trained = [_Words().format("{0.name} {0.settings.train.epochs} ({0.settings.seeds:seeds})", s) for s in forecasts]
    tokens = {} if text is None else {"text_tokens": text.steps * text.batch_size * text.seq_len}
    return {**tokens, "trained": trained}


def _check_taken(table: str, scale: str, taken: list[str], told: dict[str, object]) -> None:
    """Refuse texts and folders that would not be read."""
    for name, value in told.items():
        if value is not None and name not in taken:
            options = ", ".join(f"--{one}" for one in taken) or "no text"
            raise ValueError(
                f"got --{name} {value}, which {table} at the scale {scale} does not read; expected {options}"
            )


def _given(takes: list[str], data: str | None, test: Path | None, questions: Path | None) -> dict[str, Any]:
    """Check what a user gives, and fill in the rest; ValueError for what is not there."""
    if data not in (None, STDLIB) and test is None and "test" in takes:
        raise ValueError(f"got --data {data} without --test; expected a text to test on, which is not in the data")
    source = None if data in (None, STDLIB) else Path(str(data))
    for name, path in (("data", source), ("test", test)):
        if path is not None and not path.exists():
            raise ValueError(f"got --{name} {path}, which does not exist; expected a file or a folder")
    if test is not None and overlap(data or STDLIB, test):
        raise ValueError(
            f"got --data {data or STDLIB} and --test {test}, one in the other; expected a text that is not taught"
        )
    if questions is not None and not questions.is_dir():
        raise ValueError(f"got --local {questions}, which is no folder; expected one of files of questions")
    if questions is not None and find_spec("lm_eval") is None:
        raise ValueError("got --local without lm-eval, which asks questions: pip install 'titans-lm[eval]'")
    test = default_test() if test is None else test
    local = None if questions is None else str(questions)
    return {"data": data or STDLIB, "test": str(test), "hay": str(_hay(source)), "local": local}


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
    if source is not None and not (source / "tokens.json").is_file():  # a folder of titans prepare: no text
        return source
    folder = Path(sysconfig.get_paths()["stdlib"])
    topics = folder / "pydoc_data" / "topics.py"
    return topics if topics.is_file() else folder / "argparse.py"


def _sets(table: str, plan: dict[str, Any], scale: str, data: str | None, omit: Any) -> dict[str, Any]:
    """Find the data sets of a table, each with its path; at the paper's scale, without a folder, where they would be.

    Which there are (sets), which the scale leaves out (left_out), and which are not there (missing).
    """
    known, told = plan["sets"], describe_sets(plan["sets"])
    if data in (None, STDLIB) and scale != "paper":
        raise ValueError(
            f"got no folder of data for {table}; expected --data FOLDER that holds, itself or in folders, as "
            f"many as there are of {told}"
        )
    if data is None:
        paths = {one["column"]: Path(plan["usual"]) / one["file"] / plan["part"] for one in known}
    else:
        paths = find_sets(Path(data), known, plan["kinds"])
        if plan.get("official"):  # trained on its part of a set, and tested on the other
            paths = {c: p for c, p in paths.items() if p.name == "train" and p.with_name("test").is_dir()}
            if not paths:
                raise ValueError(f"got --data {data}, where no set has folders train and test; expected {told}")
    there = [
        one | {"path": str(path), "test": str(path.with_name("test"))}
        for one in known if (path := paths.get(one["column"])) is not None
    ]  # fmt: skip
    run = [one for one in there if one["column"] not in omit]
    if not run:
        columns = [one["column"] for one in known if one["column"] not in omit]
        found = ", ".join(one["column"] for one in there)
        raise ValueError(f"got {found}, which the scale {scale} leaves out; expected {', '.join(columns)}")
    return {
        "sets": run, "all_sets": known, "files_wanted": told,
        "files": [f"{one['column']} {one['path']}" for one in run],
        "left_out": [one["column"] for one in there if one not in run],
        "missing": [one["column"] for one in known if one["column"] not in paths],
        "unlike": [] if data is None else [line for one in run if (line := differs_in_size(one)) is not None],
    }  # fmt: skip
