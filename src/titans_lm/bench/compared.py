"""A comparison for the page of results: a table, what was equal, a plot by position, shapes; a sweep as a ranking."""

from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any

from titans_lm.config import MEMORY_ARCHITECTURES
from titans_lm.report.plots import Line, Plot, Ranking
from titans_lm.report.spread import mean_with_spread, written

COLOURS = ("#3451c6", "#0f9d8a", "#8a4fd3", "#c2417c", "#e07a1f", "#9a6a00", "#5b6472", "#2f7d32", "#b3261e", "#00788a")
TITLES = {
    "lmm": "LMM", "mac": "MAC", "mag": "MAG", "mal": "MAL", "hybrid": "hybrid",
    "attention": "Transformer++ with short convolution (ours, no memory)",
    "sliding": "sliding window with short convolution (ours, no memory)",
    "segment": "segments with short convolution (ours, no memory)",
    "llama": "Transformer++ (Llama)", "mistral": "sliding window (Mistral)", "mamba": "Mamba", "mamba2": "Mamba2",
    "qwen3-next": "Gated DeltaNet + attention (Qwen3-Next)",
    "delta-net": "DeltaNet (its rule by our op, in our block and from our start)",
    "gated-delta-net": "Gated DeltaNet (its rule by our op, in our block and from our start)",
}  # fmt: skip

UNSAID = " (ours, no memory)"
"""What titles leave out where there is little room."""
DELTA = "chunk_size=1,momentum=false,forget_to=zero,theta_bound=0.5"
TTT = "momentum=false,decay=false,memory_norm=true,memory_residual=true"
SIGMOIDS = (",theta_stretch=0,alpha_stretch=0", ",theta_stretch=0", "")
FAMILY = {
    f"{settings}{sigmoid}": shown
    # results from before D33, when θ or α was a sigmoid, do not say so
    for sigmoid in SIGMOIDS
    for settings, shown in (
        (DELTA, "the op as Gated DeltaNet"), (f"{DELTA},decay=false", "the op as DeltaNet"), (TTT, "the op as TTT"),
    )
}  # fmt: skip
"""Settings that make another model's update of the op (docs/family.md), as results have them from before
DeltaNet and Gated DeltaNet were contenders by name; its gradient was taken at the memory before it forgot.
2 θ is DeltaNet's β."""


def title(name: str) -> str:
    """Name a contender for a reader, a varied one by what was varied."""
    base, changes = parts(name)
    shown = TITLES.get(base, base)
    return f"{shown}, {changes}" if changes else shown


def title_of(one: Mapping[str, Any]) -> str:
    """Name a contender of a result for a reader, a trained one by its own name and what it is."""
    start = one.get("start")
    return title(one["name"]) if start is None else f"{start['name']}, trained {title(start['kind'])}"


def has_memory(one: Mapping[str, Any]) -> bool:
    """Tell whether a contender of a result has a neural memory."""
    start = one.get("start")
    return remembers(one["name"] if start is None else start["kind"])


def parts(name: str) -> tuple[str, str]:
    """Part the name of a contender into what it is and what is varied, as the page shows it."""
    base, colon, changes = name.partition(":")
    if not colon or base not in TITLES:
        return name, ""
    if changes in FAMILY:
        return base, FAMILY[changes]
    return base, changes_told(changes)


def changes_told(changes: str) -> str:
    """Write what is varied for a reader."""
    return changes.replace(",", ", ").replace("=", " ").replace("_", " ")


def named(name: str, own: Mapping[str, str]) -> str:
    """Name a contender for a reader, by a table's own names where it has one."""
    base, colon, changes = name.partition(":")
    if base not in own:
        return title(name)
    return own[base] + (f", {changes_told(changes)}" if colon else "")


def remembers(name: str) -> bool:
    return parts(name)[0] in MEMORY_ARCHITECTURES


def heading(result: dict[str, Any]) -> str:
    """Say what kind of comparison it is: of models, or of settings."""
    varied = any(parts(one["name"])[1] for one in result["contenders"])
    return f"{'Settings of models' if varied else 'Language models'} of equal size on the same text"


def rows(result: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Say what was equal, and give the head and the rows of a table: best on the test text first."""
    if is_sweep(result):
        return ranked(result)
    told, train = result["settings"], result["settings"]["train"]
    found = sorted(result["contenders"], key=lambda one: one["test_bits_per_byte"]["mean"])
    asked, seeds = result["parameters_asked_for"], len(told["seeds"])
    first = found[0]["runs"][0]
    apart = max(abs(one["parameters"] / asked - 1.0) for one in found)
    said = (
        f"Every model has {asked:,} parameters (the farthest is {apart:.1%} away), reads the same {first['tokens']:,} "
        f"tokens in rows of {train['seq_len']}{reread(train)}, and {tuned(told)} {seeds} "
        f"seed{'s' * (seeds > 1)}. The test text is {first['test']['bytes']:,} "
        f"bytes, cut into stretches of {told['positions']:,} tokens, each read from a fresh start: with its state "
        "carried along where a model has one, at once where it has none. Numbers are bits per byte, lower is better, "
        "mean ± standard deviation over seeds; the columns with positions say where in the stretch. "
        f"Tokens per second and minutes are those of training, {told['jobs']} at once on this machine. "
        f"{also_told(result)}{verdict(found)}"
    ).strip()
    buckets = first["test"]["by_position"]
    head = ["model", "parameters", "learning rate", "test", "held out"]
    head += [f"{b['start']:,}–{b['stop']:,}" for b in buckets]
    head += [RESET, EQUAL_TIME] if "equal_time" in result else []
    head += ["tokens/s", "minutes"]
    body = []
    for one in found:
        runs, name = one["runs"], title(one["name"])
        row = [f"**{name}**" if remembers(one["name"]) else name]
        row += [f"{one['parameters']:,}", rate_told(one, told), written(one["test_bits_per_byte"], ".4f")]
        row.append(f"{mean(run['held_out_bits_per_byte'] for run in runs):.4f}")
        row += [f"{place['mean']:.3f}" for place in by_position(one)]
        row += [reset_told(one), at_equal_time(one)] if "equal_time" in result else []
        row.append(f"{mean(run['tokens_per_second'] for run in runs):,.0f}")
        row.append(f"{mean(run['seconds'] for run in runs) / 60:.1f}")
        body.append(row)
    return said, head, body


RESET, EQUAL_TIME = "reset − carried", "held out at equal time"


def also_told(result: dict[str, Any]) -> str:
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


def is_sweep(result: dict[str, Any]) -> bool:
    """Tell whether it is settings that are compared, one by one: most are varied, from one seed or too many to draw."""
    contenders = result["contenders"]
    varied = sum(bool(parts(one["name"])[1]) for one in contenders)
    return 2 * varied > len(contenders) and (len(result["settings"]["seeds"]) == 1 or len(contenders) > len(COLOURS))


def ranked(result: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Say what was equal in a sweep, and rank its settings: best on the test text first."""
    told, first = result["settings"], result["contenders"][0]
    run, seeds, start = first["runs"][0], len(told["seeds"]), first["test_bits_per_byte"]["mean"]
    pilot = "**A pilot of one seed**: small differences are those of seeds as well. " if seeds == 1 else ""
    said = (
        f"{pilot}Every model has {result['parameters_asked_for']:,} parameters, reads the same {run['tokens']:,} "
        f"tokens in rows of {told['train']['seq_len']}, and {tuned(told)} {seeds} seed{'s' * (seeds > 1)}. Numbers are "
        f"bits per byte, lower is better; the difference is that to {title(first['name'])} on the test text of "
        f"{run['test']['bytes']:,} bytes, in stretches of {told['positions']:,} tokens. Tokens per second are those of "
        f"training, {told['jobs']} at once on this machine."
    )
    head = ["setting changed", "learning rate", "held out", "test", "difference", "tokens/s"]
    body = []
    for one in sorted(result["contenders"], key=lambda one: one["test_bits_per_byte"]["mean"]):
        name = title(one["name"])
        apart = one["test_bits_per_byte"]["mean"] - start
        row = [f"**{name}**" if remembers(one["name"]) else name, rate_told(one, told)]
        row.append(f"{mean(run['held_out_bits_per_byte'] for run in one['runs']):.4f}")
        row += [written(one["test_bits_per_byte"], ".4f"), "–" if one is first else f"{apart:+.4f}"]
        row.append(f"{mean(run['tokens_per_second'] for run in one['runs']):,.0f}")
        body.append(row)
    return said, head, body


def more(result: dict[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    """Give the shape that every contender has to have so many parameters; results of before say by what they fit."""
    contenders = [one for one in result["contenders"] if "shape" in one]
    if not contenders:
        matched = result["parameters_asked_for"] is not None and len(result["contenders"]) > 1
        said = "Sizes were matched by the MLP's width alone, before D43: all that have an MLP have one width."
        return (said if matched else ""), [], []
    said = (
        "Sizes are matched by the width, with an MLP that is about as wide beside it for everybody (D43). Mamba's and "
        "Mamba2's blocks have none."
    )
    head = ["model", "parameters", "blocks", "width", "heads", "of channels", "MLP", "MLP / width"]
    body = []
    for one in contenders:
        shape = one["shape"]
        sizes = [shape[name] for name in ("blocks", "hidden_size", "heads", "head_dim", "mlp_width")]
        ratio = "–" if shape["mlp_ratio"] is None else f"{shape['mlp_ratio']:.2f}"
        shown = ["–" if size is None else f"{size:,}" for size in sizes]
        body.append([title_of(one), f"{one['parameters']:,}", *shown, ratio])
    return said, head, body


def reread(train: Mapping[str, Any]) -> str:
    """Say how passages returned in training, where they did; older files do not know of it."""
    told = train.get("reread") or {}
    first, share = told.get("first_steps", 0), told.get("share", 0.0)
    short = [f"the first {first} steps in rows of {told['first_len']} with returning passages"] if first else []
    twice = [f"{100 * share:g} % of the{' later' if first else ''} rows with a passage twice"] if share else []
    return f" ({', '.join(short + twice)})" if short or twice else ""


def tuned(told: dict[str, Any]) -> str:
    """Say how learning rates were found."""
    rates = ", ".join(f"{rate:g}" for rate in told["rates"])
    if len(told["rates"]) == 1:
        return f"was trained with the learning rate {rates} from"
    return (
        f"was tried with the learning rates {rates} for {told['tune_steps']} steps each; the best on the held-out part "
        "of the training data was taken for"
    )


def verdict(found: list[dict[str, Any]]) -> str:
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


def by_position(contender: dict[str, Any]) -> list[dict[str, Any]]:
    """Bits per byte in each bucket, mean and standard deviation over seeds."""
    runs = [[b["bits_per_byte"] for b in run["test"]["by_position"]] for run in contender["runs"]]
    return [mean_with_spread(values) for values in zip(*runs, strict=True)]


def short_title(one: Mapping[str, Any]) -> str:
    """Name a contender of a result where there is little room."""
    return title_of(one).replace(UNSAID, "")


def contender_lines(
    contenders: list[dict[str, Any]],
    values: Callable[[dict[str, Any]], list[dict[str, Any]]],
    label: Callable[[dict[str, Any]], str] = short_title,
) -> list[Line]:
    """Give every contender a line through its means, with their spread; those without a memory are dashed."""
    drawn = []
    for index, one in enumerate(contenders):
        places = values(one)
        sds = [place["sd"] for place in places]
        line = Line(
            label=label(one),
            x=list(range(len(places))),
            y=[place["mean"] for place in places],
            spread=None if None in sds else sds,
            colour=COLOURS[index % len(COLOURS)],
            dashed=not has_memory(one),
            marker=True,
        )
        drawn.append(line)
    return drawn


def plot(result: dict[str, Any]) -> Plot | Ranking:
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
