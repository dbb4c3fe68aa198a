"""The steps of a plan one after another: what is done is not done again, and what was stopped goes on."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from titans_lm import __version__
from titans_lm.bench.repeated import FORMAT
from titans_lm.bench.settings import BenchSettings
from titans_lm.compare.question_settings import QuestionSettings
from titans_lm.compare.settings import CompareSettings
from titans_lm.compare.task_settings import TaskSettings
from titans_lm.forecast.settings import EvaluateForecasters
from titans_lm.genomics.settings import EvaluateSettings
from titans_lm.repro.files import plan_contents
from titans_lm.repro.hours import Cost, step_cost
from titans_lm.repro.published import SOURCE, published
from titans_lm.repro.steps import Found, Plan, Result, Step, Table
from titans_lm.train.settings import plain_settings

PLAN, FILE = "plan.json", "repro.json"
Say = Callable[[str], None]


def run_plan(plan: Plan, say: Say, *, quiet: bool = False) -> Result:
    """Run every step that has not been, and write OUT/repro.json: our numbers beside the paper's.

    A step is done when its file is there. ValueError for a folder that holds another plan, or whose plan was begun
    with files that held something else; KeyboardInterrupt where it is stopped, after which the same call goes on.
    """
    _begin(plan, say)
    results: dict[str, Result] = {}
    for number, step in enumerate(plan.steps, 1):
        command = command_of(step)
        if step.file.is_file():
            say(f"step {number} of {len(plan.steps)}, {step.name}: done before, {step.file}")
        else:
            say(f"step {number} of {len(plan.steps)}, {step.name}: {step.what}\n  {command}")
            try:
                _do(step, command, say, quiet)
            except KeyboardInterrupt:
                raise KeyboardInterrupt("stopped; the same command goes on") from None
        results[step.name] = json.loads(step.file.read_bytes())
    result = report(plan, results)
    _write(plan.out / FILE, result)
    return result


def command_of(step: Step) -> str:
    """Write the command of a step."""
    return shlex.join(["titans", *step.argv])


def plain_plan(plan: Plan) -> Result:
    """Give a plan as JSON holds it: commands, and how the setting differs."""
    paper = published()[plan.table]
    return {
        "format": FORMAT, "what": "repro plan", "table": plan.table, "scale": plan.scale, "source": SOURCE,
        "title": paper.title, "differs": plan.differs,
        "steps": [
            {"name": step.name, "measures": step.what, "command": command_of(step), **_plain_cost(step_cost(step))}
            for step in plan.steps
        ],
    }  # fmt: skip


def _plain_cost(cost: Cost | None) -> Result:
    """Give what a step takes as JSON holds it; None is what is not counted."""
    if cost is None:
        return {"gpu_hours": None}
    return {
        "gpu_hours": cost.hours, "upper_bound": cost.measured > 0, "parameters": cost.parameters,
        "unit": cost.unit, "trained_on": cost.trained, "tested_on": cost.tested, "counted_by": cost.basis,
    }  # fmt: skip


def report(plan: Plan, results: dict[str, Result]) -> Result:
    """Put our numbers beside the paper's; None is what was not measured, or what the paper does not have."""
    paper = published()[plan.table]
    return {
        "format": FORMAT,
        "what": "repro",
        "table": plan.table,
        "scale": plan.scale,
        "paper": {
            "source": SOURCE, "where": paper.where, "title": paper.title, "notes": paper.notes, "errata": paper.errata,
            "group": paper.groups[paper.shown].title if paper.shown in paper.groups else None, "digits": paper.digits,
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
            found = None if column.read is None else column.read(results[str(column.step)], row.contender)
            cells.append({"ours": _plain(found), "paper": paper.cell(row.paper, column.paper)})
        rows.append({"title": row.title, "paper_row": row.paper, "cells": cells})
    columns = [{"title": c.title, "paper_column": c.paper, "digits": c.digits} for c in table.columns]
    return {"title": table.title, "columns": columns, "rows": rows}


def _plain(found: Found | None) -> dict[str, Any] | None:
    return None if found is None else {"mean": found.mean, "sd": found.sd, "seeds": found.seeds}


def _begin(plan: Plan, say: Say) -> None:
    """Write what is asked for into the folder, or compare it with what is there.

    A plan of an earlier version did not note what its files held: it is taken by its settings alone, which is said.
    """
    from titans_lm.data.contents import check_contents, unnoted

    steps = [{"argv": step.argv, "settings": plain_settings(step.settings)} for step in plan.steps]
    path, asked = plan.out / PLAN, json.loads(json.dumps({"version": __version__, "steps": steps}))
    if not path.is_file() and any(step.file.is_file() for step in plan.steps):
        raise ValueError(f"{plan.out} holds results of no plan; give another --out, so that they are not mixed")
    now = plan_contents(plan)
    if not path.is_file():
        _write(path, {**asked, "contents": now})
        return
    begun = json.loads(path.read_bytes())
    before = begun.pop("contents", None)
    if begun != asked:
        raise ValueError(
            f"{plan.out} holds a plan of other settings; give another --out, or those that it was begun with"
        )
    check_contents(plan.out, "a plan", before, now)
    if unknown := unnoted(before, now):
        say(f"{path} is of an earlier version, which did not note what {', '.join(unknown)} held")


def _do(step: Step, command: str, say: Say, quiet: bool) -> None:
    """Run a step as its command does."""
    settings = step.settings
    match settings:
        case CompareSettings():
            from titans_lm.compare.run import run_compare

            run_compare(settings, say)
        case TaskSettings():
            from titans_lm.compare.tasks import run_task

            run_task(settings, command, say)
        case QuestionSettings():
            from titans_lm.compare.questions import run_questions

            run_questions(replace(settings, quiet=quiet), command, say)
        case BenchSettings():
            from titans_lm.bench.command import run_bench

            _write(step.file, run_bench(settings, say))
        case EvaluateForecasters():
            from titans_lm.forecast.evaluate import evaluate_forecasters
            from titans_lm.forecast.table import check_pandas

            check_pandas()
            evaluate_forecasters(settings, say)
        case EvaluateSettings():
            from titans_lm.genomics.evaluate import run_evaluation

            run_evaluation(settings, command, say)
        case _:
            raise TypeError(f"{step.name} is a command to run by hand")


def _write(path: Any, value: Any) -> None:
    from titans_lm.train.files import write_json

    write_json(path, value)
