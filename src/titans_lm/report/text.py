"""A comparison of models trained on the same text: what was equal, bits per byte, shapes; a sweep as a ranking."""

from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any

from titans_lm.report.figures import Plot, Ranking
from titans_lm.report.models import (
    COLOURS,
    MODEL,
    PARAMETERS,
    contender_lines,
    parts,
    remembers,
    shown,
    title,
    title_of,
)
from titans_lm.report.section import Section
from titans_lm.report.sources import Result
from titans_lm.report.spread import mean_with_spread, written
from titans_lm.report.table import Column, Table

RESET, EQUAL_TIME = "reset − carried", "held out at equal time"


def heading(result: Result) -> str:
    """Say what kind of comparison it is: of models, or of settings."""
    varied = any(parts(one["name"])[1] for one in result["contenders"])
    return f"{'Settings of models' if varied else 'Language models'} of equal size on the same text"


def tables(result: Result) -> list[Table]:
    """Models or settings, best on the test text first, and the shapes of models."""
    return [ranked(result) if is_sweep(result) else compared(result), shapes(result)]


def best_first(result: Result) -> list[Result]:
    return sorted(result["contenders"], key=lambda one: one["test_bits_per_byte"]["mean"])


def average(name: str, form: str, unit: float = 1.0) -> Callable[[Result], str]:
    """Write the mean over a contender's runs."""
    return lambda one: f"{mean(run[name] for run in one['runs']) / unit:{form}}"


TEST = Column("test", lambda one: written(one["test_bits_per_byte"], ".4f"))
HELD_OUT = Column("held out", average("held_out_bits_per_byte", ".4f"))
SPEED = Column("tokens/s", average("tokens_per_second", ",.0f"))


def compared(result: Result) -> Table:
    """Say what was equal, and give every model's bits per byte, by position too."""
    told, found = result["settings"], best_first(result)
    timed = "equal_time" in result
    ranges = [f"{b['start']:,}–{b['stop']:,}" for b in found[0]["runs"][0]["test"]["by_position"]]
    return Table(
        said=f"{equal(result, found)} {also_told(result)}{verdict(found)}".strip(),
        columns=[
            MODEL,
            PARAMETERS,
            Column("learning rate", lambda one: rate_told(one, told)),
            TEST,
            HELD_OUT,
            *(Column(name, lambda one, i=i: f"{by_position(one)[i]['mean']:.3f}") for i, name in enumerate(ranges)),
            *([Column(RESET, reset_told), Column(EQUAL_TIME, at_equal_time)] if timed else []),
            SPEED,
            Column("minutes", average("seconds", ".1f", 60)),
        ],
        rows=found,
    )


def equal(result: Result, found: list[Result]) -> str:
    """Say what was equal, and what the numbers are."""
    told, train, first = result["settings"], result["settings"]["train"], found[0]["runs"][0]
    asked, seeds = result["parameters_asked_for"], len(told["seeds"])
    apart = max(abs(one["parameters"] / asked - 1.0) for one in found)
    return (
        f"Every model has {asked:,} parameters (the farthest is {apart:.1%} away), reads the same {first['tokens']:,} "
        f"tokens in rows of {train['seq_len']}{reread(train)}, and {tuned(told)} {seeds} "
        f"seed{'s' * (seeds > 1)}. The test text is {first['test']['bytes']:,} "
        f"bytes, cut into stretches of {told['positions']:,} tokens, each read from a fresh start: with its state "
        "carried along where a model has one, at once where it has none. Numbers are bits per byte, lower is better, "
        "mean ± standard deviation over seeds; the columns with positions say where in the stretch. "
        f"Tokens per second and minutes are those of training, {told['jobs']} at once on this machine."
    )


def also_told(result: Result) -> str:
    """Say what the columns of a state that is reset and of equal time mean, where a result has them."""
    if "equal_time" not in result:
        return ""
    every = next((one["runs"][0]["reset"]["every"] for one in result["contenders"] if "reset" in one["runs"][0]), None)
    reset = (
        f"**{RESET}** is what the test costs more where a state is thrown away every {every:,} tokens" if every else ""
    )
    time = result["equal_time"]
    return (
        f"{reset}{'. ' * bool(reset)}**{EQUAL_TIME}** is what a model had reached on the held-out part after "
        f"{time['seconds'] / 60:.1f} minutes of training, when {title(time['fastest'])}, the fastest, was done: by the "
        "line between two evaluations, with a learning rate that has not come down yet. "
    )


def rate_told(one: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    """Write the learning rate that won, and say where it is the last that was tried: a further one might be better."""
    rates = told["rates"]
    if len(rates) == 1 or min(rates) < one["rate"] < max(rates):
        return f"{one['rate']:g}"
    return f"{one['rate']:g}, the {'largest' if one['rate'] == max(rates) else 'smallest'} tried"


def reset_told(one: Mapping[str, Any]) -> str:
    """Write what resetting the state costs; a model without a state has nothing to reset."""
    if "reset" not in one["runs"][0]:
        return "–"
    return written(
        mean_with_spread([run["reset"]["bits_per_byte"] - run["test"]["bits_per_byte"] for run in one["runs"]]), "+.4f"
    )


def at_equal_time(one: Mapping[str, Any]) -> str:
    """Write what a model had reached when the fastest was done; nothing where it was not evaluated before."""
    return "–" if one["at_equal_time"] is None else written(one["at_equal_time"], ".4f")


def is_sweep(result: Result) -> bool:
    """Tell whether it is settings that are compared, one by one: most are varied, from one seed or too many to draw."""
    contenders = result["contenders"]
    varied = sum(bool(parts(one["name"])[1]) for one in contenders)
    return 2 * varied > len(contenders) and (len(result["settings"]["seeds"]) == 1 or len(contenders) > len(COLOURS))


def ranked(result: Result) -> Table:
    """Say what was equal in a sweep, and rank its settings."""
    told, first = result["settings"], result["contenders"][0]
    run, seeds, start = first["runs"][0], len(told["seeds"]), first["test_bits_per_byte"]["mean"]
    pilot = "**A pilot of one seed**: small differences are those of seeds as well. " if seeds == 1 else ""

    def apart(one: Result) -> str:
        return "–" if one is first else f"{one['test_bits_per_byte']['mean'] - start:+.4f}"

    return Table(
        said=(
            f"{pilot}Every model has {result['parameters_asked_for']:,} parameters, reads the same {run['tokens']:,} "
            f"tokens in rows of {told['train']['seq_len']}, and {tuned(told)} {seeds} seed{'s' * (seeds > 1)}. Numbers "
            f"are bits per byte, lower is better; the difference is that to {title(first['name'])} on the test text of "
            f"{run['test']['bytes']:,} bytes, in stretches of {told['positions']:,} tokens. Tokens per second are "
            f"those of training, {told['jobs']} at once on this machine."
        ),
        columns=[
            Column("setting changed", shown),
            Column("learning rate", lambda one: rate_told(one, told)),
            HELD_OUT,
            TEST,
            Column("difference", apart),
            SPEED,
        ],
        rows=best_first(result),
    )


def shapes(result: Result) -> Table:
    """Give the shape that every contender has to have so many parameters; results of before say by what they fit."""
    contenders = [one for one in result["contenders"] if "shape" in one]
    if not contenders:
        matched = result["parameters_asked_for"] is not None and len(result["contenders"]) > 1
        said = "Sizes were matched by the MLP's width alone, before D43: all that have an MLP have one width."
        return Table(said=said if matched else "", on_screen=False)

    def size(name: str) -> Callable[[Result], str]:
        return lambda one: "–" if one["shape"][name] is None else f"{one['shape'][name]:,}"

    def ratio(one: Result) -> str:
        return "–" if one["shape"]["mlp_ratio"] is None else f"{one['shape']['mlp_ratio']:.2f}"

    return Table(
        said=(
            "Sizes are matched by the width, with an MLP that is about as wide beside it for everybody (D43). Mamba's "
            "and Mamba2's blocks have none."
        ),
        columns=[
            Column("model", title_of),
            PARAMETERS,
            Column("blocks", size("blocks")),
            Column("width", size("hidden_size")),
            Column("heads", size("heads")),
            Column("of channels", size("head_dim")),
            Column("MLP", size("mlp_width")),
            Column("MLP / width", ratio),
        ],
        rows=contenders,
        on_screen=False,
    )


def reread(train: Mapping[str, Any]) -> str:
    """Say how passages returned in training, where they did; older files do not know of it."""
    told = train.get("reread") or {}
    first, share = told.get("first_steps", 0), told.get("share", 0.0)
    short = [f"the first {first} steps in rows of {told['first_len']} with returning passages"] if first else []
    twice = [f"{100 * share:g} % of the{' later' if first else ''} rows with a passage twice"] if share else []
    return f" ({', '.join(short + twice)})" if short or twice else ""


def tuned(told: Result) -> str:
    """Say how learning rates were found."""
    rates = ", ".join(f"{rate:g}" for rate in told["rates"])
    if len(told["rates"]) == 1:
        return f"was trained with the learning rate {rates} from"
    return (
        f"was tried with the learning rates {rates} for {told['tune_steps']} steps each; the best on the held-out part "
        "of the training data was taken for"
    )


def verdict(found: list[Result]) -> str:
    """Say whether a memory is ahead; `found` has the best first."""
    with_memory = [one for one in found if remembers(one["name"])]
    without = [one for one in found if not remembers(one["name"])]
    if not with_memory or not without:
        return ""
    ahead, behind = with_memory[0]["test_bits_per_byte"]["mean"], without[0]["test_bits_per_byte"]["mean"]
    first, other = title(with_memory[0]["name"]), title(without[0]["name"])
    if ahead < behind:
        return f"**{first} is best**, {behind - ahead:.3f} bits per byte before the best without a memory, {other}."
    before = [title(one["name"]) for one in found[: found.index(with_memory[0])]]
    return (
        f"**No model with a memory is best here**: {', '.join(before)} come{'s' * (len(before) == 1)} before the first "
        f"of them, {first}, which is {ahead - behind:.3f} bits per byte behind {other}."
    )


def by_position(contender: Result) -> list[Result]:
    """Bits per byte in each bucket, mean and standard deviation over seeds."""
    runs = [[b["bits_per_byte"] for b in run["test"]["by_position"]] for run in contender["runs"]]
    return [mean_with_spread(values) for values in zip(*runs, strict=True)]


def plot(result: Result) -> Plot | Ranking:
    """Bits per byte by position, a line for each contender, those without a memory dashed; a sweep as a ranking."""
    if is_sweep(result):
        found = {title(one["name"]): one["test_bits_per_byte"] for one in result["contenders"]}
        return Ranking(
            title="Bits per byte by setting", x_label="setting changed", y_label="bits per byte",
            values={name: (bits["mean"], bits["sd"]) for name, bits in found.items()}, marked=next(iter(found)),
        )  # fmt: skip
    buckets = result["contenders"][0]["runs"][0]["test"]["by_position"]
    drawn = contender_lines(result["contenders"], by_position)
    return Plot(
        title="Bits per byte by position", x_label="position in the stretch, tokens", y_label="bits per byte",
        lines=drawn, x_labels=[f"{b['start']:,}–{b['stop']:,}" for b in buckets],
    )  # fmt: skip


SECTION = Section(heading=heading, tables=tables, plots=lambda result: {"": plot(result)})
