"""Synthetic tasks on the page of results: accuracy by size, with the bytes of state that it took."""

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from titans_lm.data.tasks import TASKS
from titans_lm.data.tasks.task import AT
from titans_lm.report.figures import SOFT, Drawn, HeatMaps, Line, Plot, Ranking
from titans_lm.report.models import COLOURS, MODEL, PARAMETERS, contender_lines, short_title, state_bytes, title_of
from titans_lm.report.section import Section
from titans_lm.report.sources import Result
from titans_lm.report.spread import in_percent, written
from titans_lm.report.table import Column, Table
from titans_lm.report.text import shapes
from titans_lm.train.options import plain_settings
from titans_lm.train.settings import tiny_model

KINDS: dict[str, Any] = {plan.__name__.removesuffix("Task"): plan for plan in TASKS.values()}
"""Tasks by what results call them."""
LATER = ("memory_expansion", "theta_fan_in", "theta_later_init")
"""Settings of memories of several layers, which say nothing of one."""
BEFORE = {
    "theta_fan_in": True, "alpha_stretch": 0.0, "theta_later_init": 0.5, "memory_reads_residual": False,
    "gating": "memory",
}  # fmt: skip
"""How models were before these could be set, where that is not today's default: older files do not name them."""


def heading(result: Result) -> str:
    """Name the task, and the settings beside its sizes that are not the default."""
    plan = KINDS[result["task"]]
    task, default = result["settings"]["task"], plain_settings(plan().task)
    changed = {name: value for name, value in task.items() if name not in plan.size_fields and value != default[name]}
    told = [f"{name.replace('_', ' ')} {value}" for name, value in changed.items()]
    if len(result["contenders"]) == 1:  # so that files of other models have other headings
        told.append(title_of(result["contenders"][0]))
    return f"{plan.title}{': ' * bool(told)}{', '.join(told)}"


def tables(result: Result) -> list[Table]:
    """Accuracy by size, models in the order of the settings, and the shapes of models."""
    sizes = list(result["contenders"][0]["exact"])
    accuracy = Table(
        said=said(result),
        columns=[
            MODEL,
            PARAMETERS,
            Column("state, bytes", state_bytes),
            Column("learning rate", lambda one: "–" if one["rate"] is None else f"{one['rate']:g}"),
            *(Column(size or "as set", lambda one, size=size: percent(one["exact"][size])) for size in sizes),
        ],
        rows=result["contenders"],
    )
    return [accuracy, shapes(result)]


def said(result: Result) -> str:
    """Say what was equal, and what the numbers are."""
    told = result["settings"]
    runs = result["contenders"][0]["runs"]
    depths = f" at each of {len(told['depths'])} depths" if told.get("depths") else ""
    counted = {size: test.get("rows", told["examples"]) for size, test in runs[0]["tests"].items()}
    fewer = ", ".join(f"{count:,} of {size}" for size, count in counted.items() if count < told["examples"])
    few = f" ({fewer})" if fewer else ""
    return (
        f"{equal(result)} {len(told['seeds'])} seed{'s' * (len(told['seeds']) > 1)}. "
        f"Numbers are % of answers that are right in all of their tokens, on {told['examples']:,} fresh rows of each "
        f"size{depths}{few}{stories(runs)}, mean ± standard deviation over seeds; {by_chance(result)} "
        f"at most. State is what one row carries after {result['contenders'][0]['state_bytes']['length']:,} tokens, in "
        "brackets the weights of the memories alone."
    )


def equal(result: Result) -> str:
    """Say what was equal: the number of parameters, and what was learned, up to from how many seeds."""
    told, train, asked = result["settings"], result["settings"]["train"], result["parameters_asked_for"]
    trained = sum("start" in one for one in result["contenders"])
    own = "trained models, each with parameters of its own"
    size = own if asked is None else f"{asked:,} parameters each{shape(told)}"
    size += ", but for trained models, which keep theirs" if asked is not None and trained else ""
    if not train["steps"]:
        return f"{size}, tested as they are;"
    often = f" (in the shares {', '.join(f'{share:g}' for share in told['shares'])})" if told.get("shares") else ""
    weight = train.get("gate_l1", train.get("gate_price"))  # its name in older files
    price = f", a price of {weight:g} on open gates" if weight else ""
    steps = f"{result['contenders'][0]['runs'][0]['steps']:,} {'more ' * (asked is None)}steps"
    joining = ", joining one after the other" if told.get("curriculum") and len(told["sizes"]) > 1 else ""
    sizes = f"sizes {', '.join(told['sizes']) or 'as set'} taught{often}{joining}{price}"
    return f"{size}, {steps} of {train['batch_size']} rows, {sizes}; {learned(told)}"


def shape(settings: Mapping[str, Any]) -> str:
    """Say what sets the models apart from those that the command trains today."""
    usual: Mapping[str, Any] = plain_settings(tiny_model())
    model: Mapping[str, Any] = {**BEFORE, **settings["train"]["model"]}
    deep = model["memory_depth"] > 1 or any("memory_depth=" in name for name in settings["models"])
    told = [
        f"{name.replace('_', ' ')} {str(value).lower()}"
        for name, value in model.items()
        if name in usual and value != usual[name] and (deep or name not in LATER)
    ]
    return f" ({', '.join(told)})" if told else ""


def stories(runs: list[Result]) -> str:
    """Say how many facts the stories of each size have, where it was counted: short rows have room for few."""
    sizes = [size for size, test in runs[0]["tests"].items() if "facts" in test]
    counts = [f"{mean(run['tests'][size]['facts'] for run in runs):.1f} (size {size or 'as set'})" for size in sizes]
    return f", whose stories have {', '.join(counts)} facts on average" if counts else ""


def learned(told: Result) -> str:
    """Say how learning rates were found."""
    rates = ", ".join(f"{rate:g}" for rate in told["rates"])
    if len(told["rates"]) == 1:
        return f"learning rate {rates},"
    return f"the best of the learning rates {rates} by trials of {told['tune_steps']:,} steps,"


def percent(found: dict[str, Any]) -> str:
    """Write a mean with its standard deviation in per cent."""
    return written(in_percent(found), ".1f")


def by_chance(result: Result) -> str:
    """Say how much of what the table shows is right without knowing anything but the task."""
    return f"answers are right by chance in {100 * max(result['chance'].values()):.2g} %"


def guessed(result: Result) -> str:
    """Say what is right without knowing anything but the task: of text, what the most frequent answer gives."""
    return f"by guessing {100 * max(result['chance'].values()):.3g} % of whole answers are right"


def plot(result: Result) -> Plot | Ranking:
    """Accuracy by size, a line for each contender, those without a memory dashed; a ranking where they are many."""
    if (ranked := ranking(result)) is not None:
        return ranked
    sizes = list(result["contenders"][0]["exact"])
    drawn = contender_lines(result["contenders"], lambda one: [in_percent(one["exact"][size]) for size in sizes])
    if "tokenizer" in result["settings"]["task"]:
        by_size = {test.split(AT)[0]: 100 * share for test, share in result["chance"].items()}
        guess = [by_size[size] for size in sizes]
        drawn.append(Line(label="guessing", x=list(range(len(sizes))), y=guess, colour=SOFT, dashed=True))
    return Plot(
        title=heading(result), x_label="size", y_label="right answers, %", lines=drawn, y_range=(0.0, 102.0),
        x_labels=[size or "as set" for size in sizes],
    )  # fmt: skip


def ranking(result: Result) -> Ranking | None:
    """Accuracy on the last size, for more contenders than lines can tell apart; None for fewer."""
    if len(result["contenders"]) <= len(COLOURS):
        return None
    size = list(result["contenders"][0]["exact"])[-1]
    found = [one["exact"][size] for one in result["contenders"]]
    titles = told_apart(result["contenders"], title_of)
    values = {name: (one["mean"], one["sd"]) for name, one in zip(titles, map(in_percent, found), strict=True)}
    plain = {shown for shown, one in zip(titles, result["contenders"], strict=True) if ":" not in one["name"]}
    return Ranking(
        title=f"{heading(result)}, {size or 'as set'}", x_label="model", y_label="right answers, %", values=values,
        marked=plain.pop() if len(plain) == 1 else None,
    )  # fmt: skip


def shortest_title(one: Mapping[str, Any]) -> str:
    """Name a contender without what stands behind its kind."""
    return title_of(one).partition(" with ")[0].partition(" (")[0]


def told_apart(contenders: Sequence[Mapping[str, Any]], *ways: Callable[[Mapping[str, Any]], str]) -> list[str]:
    """Show every contender in the first of these ways that no other has too; as it is written where none is its own."""
    shown = [[way(one) for one in contenders] for way in ways]
    return [next((of[i] for of in shown if of.count(of[i]) == 1), one["name"]) for i, one in enumerate(contenders)]


def heat(result: Result) -> HeatMaps | None:
    """Accuracy by length and depth, a panel for each contender; None for a task without depths."""
    tests = [test.split(AT) for test in result["contenders"][0]["by_test"] if AT in test]
    if not tests:
        return None
    sizes, depths = list(dict.fromkeys(size for size, _ in tests)), list(dict.fromkeys(depth for _, depth in tests))
    names = told_apart(result["contenders"], shortest_title, short_title, title_of)
    panels = {
        name: [[100 * one["by_test"][f"{size}{AT}{depth}"]["mean"] for size in sizes] for depth in depths]
        for name, one in zip(names, result["contenders"], strict=True)
    }
    return HeatMaps(
        title=f"{heading(result)}: right answers, %", x_label="tokens of a row", y_label="depth of the needle",
        x_labels=sizes, y_labels=[f"{100 * float(depth):g} %" for depth in depths], panels=panels,
    )  # fmt: skip


def plots(result: Result) -> dict[str, Drawn]:
    """Accuracy by size, and by length and depth where there are depths."""
    depths = heat(result)
    return {"": plot(result), **({} if depths is None else {"-depth": depths})}


SECTION = Section(heading=heading, tables=tables, plots=plots)
