"""A comparison of models trained on the same text: bits per byte, shapes, what was equal."""

from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from statistics import mean
from typing import Any

from titans_lm.report.plots import Drawn, Plot
from titans_lm.report.section import (
    COLOURS,
    MODEL,
    PARAMETERS,
    Result,
    Section,
    contender_lines,
    each_said,
    has_memory,
    parts,
    title,
    title_of,
)
from titans_lm.report.table import Column, Table, mean_with_spread, written

RESET, EQUAL_TIME = "reset − carried", "held out at equal time"
Row = tuple[Result, Result]
"""A comparison and one of its models."""


def heading(result: Result) -> str:
    """Say what kind of comparison it is: of models, or of settings."""
    varied = any(parts(one["name"])[1] for one in result["contenders"])
    return f"{'Settings of models' if varied else 'Language models'} of equal size on the same text"


def tables(result: Result) -> list[Table]:
    """Models or settings, best on the test text first; those of other comparisons of this kind; shapes."""
    others = result.get("others", [])
    return [compared(result), *([further(others)] if others else []), shapes(result)]


def best_first(result: Result) -> list[Result]:
    return sorted(result["contenders"], key=lambda one: one["test_bits_per_byte"]["mean"])


def average(name: str, form: str, unit: float = 1.0) -> Callable[[Result], str]:
    return lambda one: f"{mean(run[name] for run in one['runs']) / unit:{form}}"


TEST = Column("test", lambda one: written(one["test_bits_per_byte"], ".4f"))
HELD_OUT = Column("held out", average("held_out_bits_per_byte", ".4f"))
SPEED = Column("tokens/s", average("tokens_per_second", ",.0f"))
MINUTES = Column("minutes", average("seconds", ".1f", 60))


def compared(result: Result) -> Table:
    first = result["contenders"][0]
    rate = Column("learning rate", lambda one: rate_told(one, result["settings"]))
    timed = [Column(RESET, reset_told), Column(EQUAL_TIME, at_equal_time)] if "equal_time" in result else []
    columns = [MODEL, PARAMETERS, rate, TEST, HELD_OUT, *positions(first), *timed, SPEED, MINUTES]
    return Table(columns=columns, rows=best_first(result), said=said(result))


def positions(first: Result) -> list[Column]:
    return [Column(name, lambda one, i=i: f"{by_position(one)[i]['mean']:.3f}") for i, name in enumerate(ranges(first))]


def ranges(one: Result) -> list[str]:
    return [f"{part['start']:,}–{part['stop']:,}" for part in one["runs"][0]["test"]["by_position"]]


def further(results: list[Result]) -> Table:
    """Give the models of other comparisons of this kind, each with the name of its file."""
    rate = Column("learning rate", lambda row: rate_told(row[1], row[0]["settings"]))
    numbers = [TEST, HELD_OUT, *positions(results[0]["contenders"][0]), SPEED, MINUTES]
    columns = [*of_results("comparison"), PARAMETERS.of(itemgetter(1)), rate, *(c.of(itemgetter(1)) for c in numbers)]
    rows = [(result, one) for result in results for one in best_first(result)]
    return Table(title="Further comparisons", columns=columns, rows=rows, said=each_said(results, said))


def of_results(what: str) -> list[Column]:
    """Give the first columns of a table of several results, whose rows are a result and one of its contenders."""
    return [MODEL.of(itemgetter(1)), Column(what, lambda row: Path(row[0]["file"]).stem)]


def said(result: Result) -> str:
    settings, train, first = result["settings"], result["settings"]["train"], result["contenders"][0]["runs"][0]
    asked, seeds = result["parameters_asked_for"], len(settings["seeds"])
    apart = max(abs(one["parameters"] / asked - 1.0) for one in result["contenders"])
    pilot = "**A pilot of one seed**: small differences are those of seeds as well. " if seeds == 1 else ""
    fewer = [f"{_short(one)} {len(one['runs'])}" for one in result["contenders"] if len(one["runs"]) < seeds]
    read = {run["tokens"] for one in result["contenders"] for run in one["runs"]}
    same = "the same" if len(read) == 1 else "up to"
    carried = any("stateful=true" in one["name"] for one in result["contenders"])
    begun = f"Held out, stateful models carry their state; others begin anew every {train['seq_len']} tokens. "
    but = f" (of {', '.join(fewer)})" if fewer else ""
    text = (
        f"{pilot}Every model has {asked:,} parameters (within {apart:.1%}) and reads {same} {max(read):,} "
        f"tokens in sequences of {train['seq_len']}{reread(train)}; {tuned(result)} {seeds} "
        f"seed{'s' * (seeds > 1)}{but}. The test text is {first['test']['bytes']:,} bytes in spans of "
        f"{settings['positions']:,} tokens, each read from a fresh state, carried along where a model has one; "
        f"columns of positions say where in the span. Tokens per second and minutes are those of training, "
        f"{settings['jobs']} at once. {begun * carried}"
    )
    return f"{text}{also_said(result)}{verdict(best_first(result))}".strip()


def also_said(result: Result) -> str:
    """Say what the columns of a state that is reset and of equal time mean, where a result has them."""
    if "equal_time" not in result:
        return ""
    every = next((one["runs"][0]["reset"]["every"] for one in result["contenders"] if "reset" in one["runs"][0]), None)
    reset = f"**{RESET}**: the cost of a state that is thrown away every {every:,} tokens. " if every else ""
    time = result["equal_time"]
    return (
        f"{reset}**{EQUAL_TIME}**: reached on the held-out part after {time['seconds'] / 60:.1f} minutes of training, "
        f"when {title(time['fastest'])}, the fastest, was done; interpolated between evaluations, before the learning "
        "rate came down. "
    )


def rate_told(one: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Write the learning rate that won, and say where it is the last that was tried: a further one might be better."""
    rates = settings["rates"]
    if len(rates) == 1 or min(rates) < one["rate"] < max(rates):
        return f"{one['rate']:g}"
    return f"{one['rate']:g}, the {'largest' if one['rate'] == max(rates) else 'smallest'} tried"


def reset_told(one: Mapping[str, Any]) -> str:
    """Write what resetting the state costs; a model without a state has nothing to reset."""
    if "reset" not in one["runs"][0]:
        return "–"
    costs = [run["reset"]["bits_per_byte"] - run["test"]["bits_per_byte"] for run in one["runs"]]
    return written(mean_with_spread(costs), "+.4f")


def at_equal_time(one: Mapping[str, Any]) -> str:
    """Write what a model had reached when the fastest was done; nothing where it was not evaluated before."""
    return "–" if one["at_equal_time"] is None else written(one["at_equal_time"], ".4f")


def shapes(result: Result) -> Table:
    """Give the shape that every model has to have so many parameters; none for results of before shapes were kept."""

    def size(name: str, form: str = ",") -> Callable[[Result], str]:
        return lambda one: "–" if one["shape"][name] is None else f"{one['shape'][name]:{form}}"

    shaped = [one for one in result["contenders"] if "shape" in one]
    named = {"blocks": "blocks", "width": "hidden_size", "heads": "heads", "of channels": "head_dim",
             "MLP": "mlp_width"}  # fmt: skip
    return Table(
        title="Shapes" if shaped else "",
        columns=[
            Column("model", title_of),
            PARAMETERS,
            *(Column(shown, size(name)) for shown, name in named.items()),
            Column("MLP / width", size("mlp_ratio", ".2f")),
        ],
        rows=shaped,
        said="Sizes are matched by the width, the MLP's in proportion (D43); Mamba's blocks have none." * bool(shaped),
        on_screen=False,
    )


def reread(train: Mapping[str, Any]) -> str:
    """Say how passages returned in training, where they did."""
    told = train.get("reread") or {}
    first, share = told.get("first_steps", 0), told.get("share", 0.0)
    short = [f"the first {first} steps in sequences of {told['first_len']} with returning passages"] if first else []
    shares = share if isinstance(share, list) else [share]
    told_share = " to ".join(f"{100 * one:g}" for one in shares)
    twice = [f"{told_share} % of the{' later' if first else ''} sequences with a passage twice"] if any(shares) else []
    return f" ({', '.join(short + twice)})" if short or twice else ""


def tuned(result: Result) -> str:
    """Say how learning rates were found; a model of a later run may have no trials of its own."""
    settings = result["settings"]
    rates = ", ".join(f"{rate:g}" for rate in settings["rates"])
    if len(settings["rates"]) == 1:
        return f"learning rate {rates},"
    tried = [(_short(one), {trial["rate"] for trial in one["tuning"]}) for one in result["contenders"]]
    untried = [name for name, own in tried if not own]
    but = f" (of {', '.join(untried)} the one that is named, without trials)" if untried else ""
    for rate in settings["rates"]:
        missing = [name for name, own in tried if own and rate not in own]
        but += f" ({rate:g} not for {', '.join(missing)})" if missing else ""
    return f"of the learning rates {rates} the best on held-out text after {settings['tune_steps']} steps{but},"


def _short(contender: Result) -> str:
    """A model's name without its settings."""
    return title(contender["name"].partition(":")[0]).partition(" (")[0]


def verdict(found: list[Result]) -> str:
    with_memory = [one for one in found if has_memory(one)]
    without = [one for one in found if not has_memory(one)]
    if not with_memory or not without:
        return ""
    ahead, behind = with_memory[0]["test_bits_per_byte"]["mean"], without[0]["test_bits_per_byte"]["mean"]
    first, other = title(with_memory[0]["name"]), title(without[0]["name"])
    if ahead < behind:
        lead = f"{behind - ahead:.3f} bits per byte before the best without a memory"
        return f"**{first} has the lowest mean**, {lead}, {other}."
    before = [title(one["name"]) for one in found[: found.index(with_memory[0])]]
    return (
        f"**No model with a memory is best here**: {', '.join(before)} come{'s' * (len(before) == 1)} before the first "
        f"of them, {first}, which is {ahead - behind:.3f} bits per byte behind {other}."
    )


def by_position(contender: Result) -> list[Result]:
    """Bits per byte in each range, mean and standard deviation over seeds."""
    runs = [[b["bits_per_byte"] for b in run["test"]["by_position"]] for run in contender["runs"]]
    return [mean_with_spread(values) for values in zip(*runs, strict=True)]


def plots(result: Result) -> dict[str, Drawn]:
    """Draw bits per byte by position; of more models than lines can tell apart the table alone is shown."""
    if len(result["contenders"]) > len(COLOURS):
        return {}
    lines, names = contender_lines(result["contenders"], by_position), ranges(result["contenders"][0])
    x_label, y_label = "position in the span, tokens", "bits per byte"
    return {"": Plot(title="Bits per byte by position", x_label=x_label, y_label=y_label, lines=lines, x_labels=names)}


SECTION = Section(
    topic=lambda _: "language",
    heading=heading,
    group=lambda result: "".join([heading(result), *ranges(result["contenders"][0])]),
    tables=tables,
    plots=plots,
)
