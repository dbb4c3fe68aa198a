"""Questions on the page of results: scores by task and model, with what guessing gives beside them."""

from typing import Any

from titans_lm.report.table import aligned

NOTHING = "–"
AS_SHARE = ("acc", "exact_match", "contains")
"""Metrics that are shares of items, by how their names begin; RULER's are lengths, which are numbers."""
BEGINNINGS = {"True": "<bos> first", "False": "no <bos>", "tokenizer": "begun as its tokenizer does"}


def heading(result: dict[str, Any]) -> str:
    """Say who asked."""
    asked = "lm-eval's tasks" if result["settings"]["local"] is None else "Questions scored as lm-eval scores them"
    return f"{asked}: {', '.join(one['name'] for one in result['models'])}"


def rows(result: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Say how it was read, and give the head and the rows of a table: a line for every task and metric."""
    models = result["models"]
    tasks = {task: scores for one in models for task, scores in one["tasks"].items()}
    head = ["task", "metric", "items", "guessing", "most frequent answer", *(one["name"] for one in models)]
    body = []
    for task, scores in tasks.items():
        for number, metric in enumerate(scores["metrics"]):
            items = NOTHING if scores["items"] is None else f"{scores['items']:,}"
            guess = [share(scores[name]) if metric.startswith("acc") else NOTHING for name in ("chance", "majority")]
            cells = [shown(metric, one["tasks"].get(task, {"metrics": {}})["metrics"].get(metric)) for one in models]
            body.append([task if number == 0 else "", metric, items, *guess, *cells])
    return said(result, tasks), head, body


def said(result: dict[str, Any], tasks: dict[str, Any]) -> str:
    """Say what the models are and what the numbers mean."""
    told = result["settings"]
    models = "; ".join(
        f"{one['name']}: {one['architecture']}, {one['parameters']:,} parameters, {one['dtype']}, "
        f"{BEGINNINGS[str(one['bos'])]}, {read_up_to(one)}"
        for one in result["models"]
    )
    limit = "" if told["limit"] is None else f", the first {told['limit']:,} items of each task"
    notes = [f"{task}: {scores['note']}" for task, scores in tasks.items() if scores["note"]]
    cut = sum(scores.get("cut", 0) for one in result["models"] for scores in one["tasks"].values())
    lost = f" {cut:,} choices, counted for each model, were too long for it and lost their beginning." if cut else ""
    differ = f" Not lm-eval's items: {'; '.join(notes)}." if notes else ""
    return (
        f"{models}. Scored by {result['scorer']}{limit}, every choice read from a fresh start; "
        f"{result['wall_seconds'] / 60:.1f} minutes. Shares are in %, with their standard error over items; "
        "acc takes the choice with the largest summed log-probability, acc_norm divides it by the characters of the "
        f"choice, perplexity is exp of minus the mean sum over whole answers.{lost}{differ}"
    )


def read_up_to(one: dict[str, Any]) -> str:
    return "any length" if one["max_length"] is None else f"up to {one['max_length']:,} tokens"


def shown(metric: str, found: dict[str, Any] | None) -> str:
    """Write a score with its standard error, shares in per cent; null is what JSON makes of infinity."""
    if found is None:
        return NOTHING
    if found["value"] is None:
        return "∞"
    times = 100.0 if metric.startswith(AS_SHARE) or metric.isdecimal() else 1.0
    value = f"{times * found['value']:,.2f}"
    return value if found["stderr"] is None else f"{value} ± {times * found['stderr']:,.2f}"


def share(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.2f}"


def lines(result: dict[str, Any]) -> list[str]:
    """Write the table for a terminal."""
    _, head, body = rows(result)
    return aligned(head, body)
