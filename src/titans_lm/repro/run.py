"""The steps of a plan one after another: what is done is not done again, and what was stopped goes on."""

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titans_lm import __version__
from titans_lm.bench.settings import BenchSettings
from titans_lm.data.contents import check_contents, contents_of, files_sum, text_sum
from titans_lm.data.tasks.task import TaskPlan
from titans_lm.experiments.reading_settings import QuestionSettings
from titans_lm.experiments.settings import CompareSettings
from titans_lm.forecast.settings import EvaluateForecasters
from titans_lm.genomics.settings import EvaluateSettings
from titans_lm.report.paper import FORMAT
from titans_lm.report.table import Spread, in_percent, mean_with_spread
from titans_lm.repro.plans import SOURCE, Plan, Step, Table, published
from titans_lm.train.files import read_json, write_json
from titans_lm.train.options import plain_settings

PLAN, FILE = "plan.json", "repro.json"
Result = dict[str, Any]
Say = Callable[[str], None]


def run_plan(plan: Plan, say: Say, *, quiet: bool = False) -> Result:
    """Run every step that has not been, and write OUT/repro.json: our numbers beside the paper's.

    A step is done when its file is there. ValueError for a folder that holds another plan, or whose plan was begun
    with files that held something else; KeyboardInterrupt where it is stopped, after which the same call goes on.
    """
    _begin(plan)
    results: dict[str, Result] = {}
    for number, step in enumerate(plan.steps, 1):
        if step.file.is_file():
            say(f"step {number} of {len(plan.steps)}, {step.name}: done before, {step.file}")
        else:
            say(f"step {number} of {len(plan.steps)}, {step.name}: {step.what}\n  {command_of(step)}")
            try:
                _do(step, say, quiet)
            except KeyboardInterrupt:
                raise KeyboardInterrupt("stopped; the same command goes on") from None
        results[step.name] = read_json(step.file)
    result = report(plan, results)
    write_json(plan.out / FILE, result)
    return result


def command_of(step: Step) -> str:
    """Write the command of a step."""
    return shlex.join(["titans", *step.argv])


def report(plan: Plan, results: dict[str, Result]) -> Result:
    """Put our numbers beside the paper's; None is what was not measured, or what the paper does not have."""
    paper = published()[plan.table]
    group = paper.groups.get(paper.shown)
    return {
        "format": FORMAT,
        "what": "repro",
        "table": plan.table,
        "scale": plan.scale,
        "paper": {
            "source": SOURCE, "where": paper.where, "title": paper.title, "notes": paper.notes, "errata": paper.errata,
            "group": group and group["title"], "digits": paper.digits,
        },
        "steps": [
            {
                "name": step.name, "measures": step.what, "command": command_of(step), "file": str(step.file),
                "parameters": results[step.name].get("parameters_asked_for"),
                "hardware": results[step.name].get("hardware"),
                "commits": results[step.name].get("commits"),
            }
            for step in plan.steps
        ],
        "tables": [_filled(plan, table, results) for table in plan.tables],
        "differs": plan.differs,
    }  # fmt: skip


def _filled(plan: Plan, table: Table, results: dict[str, Result]) -> Result:
    paper = published()[plan.table]
    rows = []
    for row in table.rows:
        cells = []
        for column in table.columns:
            ours = None
            if column.read is not None:
                ours = READS[column.read](results[str(column.step)], row.model, *column.at)
            cells.append({"ours": ours, "paper": paper.cell(row.paper, column.paper)})
        rows.append({"title": row.title, "paper_row": row.paper, "cells": cells})
    columns = [{"title": c.title, "paper_column": c.paper, "digits": c.digits} for c in table.columns]
    return {"title": table.title, "columns": columns, "rows": rows}


def _begin(plan: Plan) -> None:
    """Write what is asked for into the folder, or compare it with what is there."""
    steps = [{"argv": step.argv, "settings": plain_settings(step.settings)} for step in plan.steps]
    path, asked = plan.out / PLAN, json.loads(json.dumps({"version": __version__, "steps": steps}))
    if not path.is_file() and any(step.file.is_file() for step in plan.steps):
        raise ValueError(f"{plan.out} holds results of no plan; give another --out, so that they are not mixed")
    now = plan_contents(plan)
    if not path.is_file():
        write_json(path, {**asked, "contents": now})
        return
    begun = read_json(path)
    before = begun.pop("contents", {})
    if _meant(begun) != _meant(asked):
        raise ValueError(
            f"{plan.out} holds a plan of other settings; give another --out, or those that it was begun with"
        )
    check_contents(plan.out, "a plan", before, now)


def _meant(plan: Result) -> Result:
    """Leave out how the options of a plan's steps were written: their settings say what they mean."""
    return {**plan, "steps": [{"settings": step["settings"]} for step in plan["steps"]]}


def plan_contents(plan: Plan) -> dict[str, str]:
    """Sum up all that the steps read and no step makes, by path: a step that is done says nothing of later files.

    ValueError for what is not there.
    """
    sums: dict[str, str] = {}
    for s in (step.settings for step in plan.steps):
        match s:
            case CompareSettings():
                sums |= {str(text): text_sum(text) for text in (s.data, s.test, s.train.valid) if text is not None}
            case TaskPlan():
                sums |= contents_of([*s.train_tasks, *s.eval_tasks.values()])
            case QuestionSettings(local=Path()):
                sums |= {str(s.local): files_sum(s.local)}
            case EvaluateForecasters():
                sums |= {str(path): files_sum(path) for path in s.data}
            case EvaluateSettings():
                sums |= {str(s.data): files_sum(s.data)}
    return sums


def _do(step: Step, say: Say, quiet: bool) -> None:
    """Run a step as its command does, with `quiet` where the command has it."""
    settings, command = step.settings, command_of(step)
    if hasattr(settings, "quiet"):
        settings = replace(settings, quiet=quiet)
    match settings:
        case CompareSettings():
            from titans_lm.experiments.text import run_compare

            run_compare(settings, say)
        case TaskPlan():
            from titans_lm.experiments.tasks import run_task

            run_task(settings, command, say)
        case QuestionSettings():
            from titans_lm.experiments.lm_eval import run_questions

            run_questions(settings, command, say)
        case BenchSettings():
            from titans_lm.bench.run import run_bench

            write_json(step.file, run_bench(settings, say))
        case EvaluateForecasters():
            from titans_lm.forecast.evaluate import evaluate_forecasters

            evaluate_forecasters(settings, say)
        case EvaluateSettings():
            from titans_lm.genomics.evaluate import run_evaluation

            run_evaluation(settings, command, say)
        case _:
            raise TypeError(f"{step.name} is a command to run by hand")


def _over_seeds(values: Sequence[float]) -> Spread | None:
    return mean_with_spread(values) if values else None


def _model(result: Result, name: str) -> Result | None:
    return next((one for one in result["contenders"] if one["name"] == name), None)


def _bits(result: Result, model: str, start: int | None = None) -> Spread | None:
    """Bits per byte of the whole test text, or at the positions that begin there, of `titans compare`."""
    one = _model(result, model)
    if one is None or start is None:
        return None if one is None else one["test_bits_per_byte"]
    places = [place for run in one["runs"] for place in run["test"]["by_position"] if place["start"] == start]
    return _over_seeds([place["bits_per_byte"] for place in places])


def _right(result: Result, model: str, size: str) -> Spread | None:
    """Right answers in %, of `titans evaluate mqar` and its sisters."""
    one = _model(result, model)
    found = None if one is None else one["exact"].get(size)
    return None if found is None else in_percent(found)


def _score(result: Result, model: str, task: str, metric: str) -> Spread | None:
    """Score of questions, a perplexity or in %, of `titans evaluate lm-eval` on the runs of a comparison."""
    values = [
        one["tasks"][task]["metrics"][metric]["value"]
        for one in result["models"]
        if one["name"].rpartition("-seed")[0] == model and metric in one["tasks"].get(task, {"metrics": {}})["metrics"]
    ]
    return _over_seeds([value * (1 if metric == "perplexity" else 100) for value in values if value is not None])


def _error(result: Result, model: str, measure: str) -> Spread | None:
    """Error by its measure (mse, mae), the mean over horizons, of `titans forecast evaluate` on one table."""
    (table,) = result["tables"]
    one = _model(table, model)
    return None if one is None else one["test"][measure]["mean"]


def _accuracy(result: Result, model: str) -> Spread | None:
    """Right classes in %, every sequence once a seed, of `titans genomics evaluate`."""
    one = _model(result, model)
    return None if one is None else in_percent(one["accuracy"])


def _speed(rows: list[Result]) -> Spread | None:
    return _over_seeds([row["tokens_per_second"] for row in rows if row.get("tokens_per_second")][:1])


def _model_speed(result: Result, model: str, mode: str) -> Spread | None:
    """Tokens per second of a model, of `titans bench model`."""
    return _speed([row for row in result["rows"] if (row["label"], row["mode"]) == (model, mode)])


def _op_speed(result: Result, depth: str, tokens: int) -> Spread | None:
    """Tokens per second of the op with a memory of so many layers, of `titans bench ops`.

    The base case has two allocators, and others beside it other chunks or gates: told apart by all their sizes.
    """
    heads = max(row["case"]["heads"] for row in result["rows"])
    wanted = (depth, tokens, heads, "zero", "forward+backward", "default")

    def sizes(row: Result) -> tuple[Any, ...]:
        c = row["case"]
        return str(c["depth"]), c["tokens"], c["heads"], c["forget_to"], row["mode"], row["allocator"]

    return _speed([row for row in result["rows"] if sizes(row) == wanted])


def _row_speed(result: Result, _: str, tokens: int) -> Spread | None:
    """Tokens per second of the op on one row, which is no model's, of `titans bench scaling`."""
    return _speed([row for row in result["rows"] if row["case"].get("tokens") == tokens and row["case"]["rows"] == 1])


READS: dict[str, Callable[..., Spread | None]] = {
    "bits": _bits, "right": _right, "score": _score, "error": _error, "accuracy": _accuracy,
    "model_speed": _model_speed, "op_speed": _op_speed, "row_speed": _row_speed,
}  # fmt: skip
"""How columns find their number in the results of a step, for the model of a row; None where there is none."""
