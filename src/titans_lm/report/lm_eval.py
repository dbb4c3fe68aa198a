"""Questions: scores by task and model, with what guessing gives beside them."""

from functools import partial
from typing import Any

from titans_lm.report.section import Result, Section
from titans_lm.report.table import Column, Table

NOTHING = "–"
AS_SHARE = ("acc", "exact_match", "contains")
"""Metrics that are shares of items, by how their names begin; RULER's are lengths, which are numbers."""
BEGINNINGS = {"True": "<bos> first", "False": "no <bos>", "tokenizer": "begun as its tokenizer does"}
Score = tuple[str, Any, str]
"""A task, what one model scored in it, and a metric."""


def heading(result: Result) -> str:
    asked = "lm-eval's tasks" if result["settings"]["local"] is None else "Questions scored as lm-eval scores them"
    return f"{asked}: {', '.join(one['name'] for one in result['models'])}"


def tables(result: Result) -> list[Table]:
    """A line for every task and metric, a column for every model."""
    models = result["models"]
    tasks = {task: scores for one in models for task, scores in one["tasks"].items()}

    def guess(row: Score, name: str) -> str:
        value = row[1][name] if row[2].startswith("acc") else None
        return NOTHING if value is None else f"{100 * value:.2f}"

    def scored(row: Score, one: Result) -> str:
        return shown(row[2], one["tasks"].get(row[0], {"metrics": {}})["metrics"].get(row[2]))

    columns = [
        Column("task", lambda row: row[0] if row[2] == next(iter(row[1]["metrics"])) else ""),
        Column("metric", lambda row: row[2]),
        Column("items", lambda row: NOTHING if row[1]["items"] is None else f"{row[1]['items']:,}"),
        Column("chance", partial(guess, name="chance")),
        Column("most frequent answer", partial(guess, name="majority")),
        *(Column(one["name"], partial(scored, one=one)) for one in models),
    ]
    rows = [(task, scores, metric) for task, scores in tasks.items() for metric in scores["metrics"]]
    return [Table(columns=columns, rows=rows, said=said(result, tasks))]


def said(result: Result, tasks: dict[str, Any]) -> str:
    told = result["settings"]
    models = "; ".join(
        f"{one['name']}: {one['architecture']}, {one['parameters']:,} parameters, {one['dtype']}, "
        f"{BEGINNINGS[str(one['bos'])]}, "
        + ("any length" if one["max_length"] is None else f"up to {one['max_length']:,} tokens")
        for one in result["models"]
    )
    limit = "" if told["limit"] is None else f", the first {told['limit']:,} items of each task"
    notes = [f"{task}: {scores['note']}" for task, scores in tasks.items() if scores["note"]]
    cut = sum(scores.get("cut", 0) for one in result["models"] for scores in one["tasks"].values())
    lost = f" {cut:,} choices, counted for each model, were too long for it and lost their beginning." if cut else ""
    differ = f" Not lm-eval's items: {'; '.join(notes)}." if notes else ""
    return (
        f"{models}. Scored by {result['scorer']}{limit}, every choice read from a fresh state; "
        f"{result['wall_seconds'] / 60:.1f} minutes. Shares are in %, with their standard error over items; "
        "acc takes the choice with the largest summed log-probability, acc_norm divides it by the characters of the "
        f"choice, perplexity is exp of minus the mean sum over whole answers.{lost}{differ}"
    )


def shown(metric: str, found: Result | None) -> str:
    """Write a score with its standard error, shares in per cent; null is what JSON makes of infinity."""
    if found is None:
        return NOTHING
    if found["value"] is None:
        return "∞"
    times = 100.0 if metric.startswith(AS_SHARE) or metric.isdecimal() else 1.0
    value = f"{times * found['value']:,.2f}"
    return value if found["stderr"] is None else f"{value} ± {times * found['stderr']:,.2f}"


SECTION = Section(topic=lambda _: "language", heading=heading, tables=tables)
