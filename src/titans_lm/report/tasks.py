"""Synthetic tasks on the pages of results: accuracy by size, with the bytes of state that it took."""

import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from statistics import mean
from typing import Any

from titans_lm.data.tasks import TASKS
from titans_lm.data.tasks.task import AT
from titans_lm.report.plots import SOFT, Drawn, HeatMaps, Line, Plot
from titans_lm.report.section import (
    COLOURS,
    MODEL,
    PARAMETERS,
    Result,
    Section,
    contender_lines,
    each_said,
    short_title,
    state_bytes,
    title_of,
    without_folders,
)
from titans_lm.report.table import Column, Table, in_percent, written
from titans_lm.report.text import of_results, shapes
from titans_lm.train.options import plain_settings

NEAR = 0.01
"""Share by which sizes that are matched may differ."""
KINDS: dict[str, Any] = {plan.__name__.removesuffix("Task"): plan for plan in TASKS.values()}
"""Tasks by what results call them."""
LONG = ("Needle", "Variables", "CommonWords", "BabiLong")
RATE = Column("learning rate", lambda one: "–" if one["rate"] is None else f"{one['rate']:g}")
STATE = Column("state, bytes", state_bytes)


def heading(result: Result) -> str:
    """Name the task, and the settings beside its sizes that are not the default."""
    plan = KINDS[result["task"]]
    task, usual = result["settings"]["task"], plan().task
    default = plain_settings(usual)
    changed = {name: value for name, value in task.items() if name not in usual.size_fields and value != default[name]}
    told = [without_folders(f"{name.replace('_', ' ')} {value}") for name, value in changed.items()]
    if len(result["contenders"]) == 1:  # so that files of other models have other headings
        told.append(title_of(result["contenders"][0]))
    return f"{plan.title}{': ' * bool(told)}{', '.join(told)}"


def tables(result: Result) -> list[Table]:
    """Accuracy by size, models in the order of the settings; what other runs of the task changed; shapes."""
    columns = [MODEL, PARAMETERS, STATE, RATE, *map(accuracy, result["contenders"][0]["exact"])]
    first, others = Table(columns=columns, rows=result["contenders"], said=said(result)), result.get("others", [])
    return [first, *([changed(others)] if others else []), shapes(result)]


def accuracy(size: str) -> Column:
    return Column(size or "as set", lambda one: percent(one["exact"][size]) if size in one["exact"] else "–")


def changed(results: list[Result]) -> Table:
    """Give the models of further runs of the same task, a row for each changed setting."""
    sizes = dict.fromkeys(size for result in results for size in result["contenders"][0]["exact"])
    steps = Column("steps", lambda one: f"{one['runs'][0]['steps']:,}")
    numbers = [steps, PARAMETERS, STATE, RATE, *map(accuracy, sorted(sizes, key=by_size))]
    return Table(
        title="Further runs: what each setting changes",
        columns=[*of_results("run"), *(column.of(itemgetter(1)) for column in numbers)],
        rows=[(result, one) for result in results for one in result["contenders"]],
        said=each_said(results, said),
    )


def by_size(size: str) -> list[float]:
    """Sort sizes such as 64:4, 4K and 1M by their numbers."""
    units = {"K": 2**10, "M": 2**20}
    parts = [part for part in size.replace("x", ":").split(":") if part]
    return [float(part.rstrip("KM") or 0) * units.get(part[-1], 1) for part in parts]


def said(result: Result) -> str:
    settings, runs = result["settings"], result["contenders"][0]["runs"]
    at_depths = [AT in test for test in runs[0]["tests"]]
    where = "" if all(at_depths) else " where there is one needle"
    depths = f" at each of {len(settings['depths'])} depths{where}" if any(at_depths) else ""
    counted = {size: test.get("rows", settings["examples"]) for size, test in runs[0]["tests"].items()}
    fewer = ", ".join(f"{count:,} of {size}" for size, count in counted.items() if count < settings["examples"])
    few = f" ({fewer})" if fewer else ""
    return (
        f"{equal(result)} {len(settings['seeds'])} seed{'s' * (len(settings['seeds']) > 1)}. Numbers are % of answers "
        f"that are right in all of their tokens, on {settings['examples']:,} fresh sequences of each evaluation size"
        f"{depths}{few}{stories(runs)}; {by_chance(result)} at most. State is what one sequence carries after "
        f"{result['contenders'][0]['state_bytes']['length']:,} tokens, in brackets the weights of the memories alone."
    )


def equal(result: Result) -> str:
    """Say what was equal: the number of parameters, and what was trained on, up to from how many seeds."""
    settings, train, asked = result["settings"], result["settings"]["train"], result["parameters_asked_for"]
    trained = sum("start" in one for one in result["contenders"])
    own = "trained models, each with parameters of its own"
    size = own if asked is None else f"{asked:,} parameters each"
    untrained = [one for one in result["contenders"] if asked is not None and "start" not in one]
    off = [f"{title_of(one)} ({one['parameters']:,})" for one in untrained if abs(one["parameters"] / asked - 1) > NEAR]
    size += f", but for {', '.join(off)}" if off else ""
    size += ", but for trained models, which keep theirs" if asked is not None and trained else ""
    if not train["steps"]:
        return f"{size}, tested as they are;"
    shares = ", ".join(f"{share:g}" for share in settings.get("shares", ()))
    often = f" (in the shares {shares})" if shares else ""
    weight = train.get("gate_l1", train.get("gate_price"))  # its name in older files
    penalty = f", sparsity penalty on gates {weight:g}" if weight else ""
    steps = f"{result['contenders'][0]['runs'][0]['steps']:,} {'more ' * (asked is None)}steps"
    joining = ", joining one after the other" if settings.get("curriculum") and len(settings["sizes"]) > 1 else ""
    sizes = f"training sizes {', '.join(settings['sizes']) or 'as set'}{often}{joining}{penalty}"
    return f"{size}, {steps} of {sequences(train)}, {sizes}; {rates(settings)}"


def sequences(train: Result) -> str:
    """Say how many sequences a step has; long ones may be fewer."""
    at_most = "up to " if train.get("batch_tokens") else ""
    return f"{at_most}{train['batch_size'] * train.get('accumulate', 1)} sequences"


def stories(runs: list[Result]) -> str:
    """Say how many facts the stories of each size have, where it was counted: short sequences have room for few."""
    sizes = [size for size, test in runs[0]["tests"].items() if "facts" in test]
    counts = [f"{mean(run['tests'][size]['facts'] for run in runs):.1f} (size {size or 'as set'})" for size in sizes]
    return f", whose stories have {', '.join(counts)} facts on average" if counts else ""


def rates(settings: Result) -> str:
    tried = ", ".join(f"{rate:g}" for rate in settings["rates"])
    if len(settings["rates"]) == 1:
        return f"learning rate {tried},"
    return f"the best of the learning rates {tried} by trials of {settings['tune_steps']:,} steps,"


def percent(found: dict[str, Any]) -> str:
    return written(in_percent(found), ".1f")


def by_chance(result: Result) -> str:
    """Say how much of what the table shows is right without knowing anything but the task."""
    alone = result.get("token_chance")
    single = f", single tokens in {100 * max(alone.values()):.2g} %" if alone else ""
    return f"answers are right by chance in {100 * max(result['chance'].values()):.2g} %{single}"


def guessed(result: Result) -> str:
    """Say what is right without knowing anything but the task: of text, what the most frequent answer gives."""
    return f"by guessing {100 * max(result['chance'].values()):.3g} % of whole answers are right"


def plots(result: Result) -> dict[str, Drawn]:
    """Accuracy by size and depth of models tested on the same sizes, each drawn once, if lines can tell them apart."""
    sizes, models = list(result["contenders"][0]["exact"]), {one["name"]: one for one in result["contenders"]}
    for one in (one for other in result.get("others", []) for one in other["contenders"]):
        if list(one["exact"]) == sizes and one["name"].partition(":")[0] not in models:
            models.setdefault(one["name"], one)
    result = {**result, "contenders": list(models.values())}
    depths = heat(result)
    drawn = {} if depths is None else {"-depth": depths}
    return {"": plot(result), **drawn} if len(models) <= len(COLOURS) else drawn


def plot(result: Result) -> Plot:
    """Accuracy by size, a line for each model, those without a memory dashed."""
    sizes = list(result["contenders"][0]["exact"])
    drawn = contender_lines(result["contenders"], lambda one: [in_percent(one["exact"][size]) for size in sizes])
    if "tokenizer" in result["settings"]["task"]:
        by_size = {test.split(AT)[0]: 100 * share for test, share in result["chance"].items()}
        guess = [by_size[size] for size in sizes]
        drawn.append(Line(label="chance", x=range(len(sizes)), y=guess, colour=SOFT, dashed=True))
    of = ":pairs" if result["task"] == "Recall" else ", tokens"
    return Plot(
        title=KINDS[result["task"]].title, x_label=f"sequence length{of}",
        y_label="accuracy, %", lines=drawn, y_range=(0.0, 102.0), x_labels=[size or "as set" for size in sizes],
    )  # fmt: skip


def shortest_title(one: Mapping[str, Any]) -> str:
    return title_of(one).partition(" with ")[0].partition(" (")[0]


def told_apart(contenders: Sequence[Mapping[str, Any]], *ways: Callable[[Mapping[str, Any]], str]) -> list[str]:
    """Show every model in the first of these ways that no other has too; as it is written where none is its own."""
    shown = [[way(one) for one in contenders] for way in ways]
    return [next((of[i] for of in shown if of.count(of[i]) == 1), one["name"]) for i, one in enumerate(contenders)]


def heat(result: Result) -> HeatMaps | None:
    """Accuracy by length and depth, a panel for each model; None for a task without depths."""
    tests = [test.split(AT) for test in result["contenders"][0]["by_test"] if AT in test]
    if not tests:
        return None
    sizes, depths = list(dict.fromkeys(size for size, _ in tests)), list(dict.fromkeys(depth for _, depth in tests))
    names = told_apart(result["contenders"], shortest_title, short_title, title_of)
    missing = {"mean": math.nan}  # where a model was not tested
    panels = {
        name: [[100 * one["by_test"].get(f"{size}{AT}{depth}", missing)["mean"] for size in sizes] for depth in depths]
        for name, one in zip(names, result["contenders"], strict=True)
    }
    return HeatMaps(
        title=f"{KINDS[result['task']].title}: accuracy, %", x_label="tokens", y_label="depth of the needle",
        x_labels=sizes, y_labels=[f"{100 * float(depth):g} %" for depth in depths], panels=panels,
    )  # fmt: skip


SECTION = Section(
    topic=lambda result: "long-context" if result["task"] in LONG else "recall",
    heading=heading,
    group=lambda result: heading({**result, "contenders": []}),
    tables=tables,
    plots=plots,
)
