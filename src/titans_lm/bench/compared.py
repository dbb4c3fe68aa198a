"""A comparison for the page of results: a table, a plot by position, and what was equal."""

from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any

from titans_lm.config import MEMORY_ARCHITECTURES
from titans_lm.report.plots import Line, Plot
from titans_lm.report.spread import mean_with_spread, written

COLOURS = ("#3451c6", "#0f9d8a", "#8a4fd3", "#c2417c", "#e07a1f", "#9a6a00", "#5b6472", "#2f7d32", "#b3261e", "#00788a")
TITLES = {
    "lmm": "LMM", "mac": "MAC", "mag": "MAG", "mal": "MAL", "hybrid": "hybrid",
    "attention": "Transformer++ with short convolution (ours, no memory)",
    "sliding": "sliding window with short convolution (ours, no memory)",
    "segment": "segments with short convolution (ours, no memory)",
    "llama": "Transformer++ (Llama)", "mistral": "sliding window (Mistral)", "mamba": "Mamba", "mamba2": "Mamba2",
    "qwen3-next": "Gated DeltaNet + attention (Qwen3-Next)",
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
"""Settings that make another model's update of the op (docs/family.md), as they are written. 2 θ is DeltaNet's β."""


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
    told, train = result["settings"], result["settings"]["train"]
    found = sorted(result["contenders"], key=lambda one: one["test_bits_per_byte"]["mean"])
    asked, seeds = result["parameters_asked_for"], len(told["seeds"])
    first = found[0]["runs"][0]
    apart = max(abs(one["parameters"] / asked - 1.0) for one in found)
    said = (
        f"Every model has {asked:,} parameters (the farthest is {apart:.1%} away), reads the same {first['tokens']:,} "
        f"tokens in rows of {train['seq_len']}, and {tuned(told)} {seeds} "
        f"seed{'s' * (seeds > 1)}. The test text is {first['test']['bytes']:,} "
        f"bytes, cut into stretches of {told['positions']:,} tokens, each read from a fresh start: with its state "
        "carried along where a model has one, at once where it has none. Numbers are bits per byte, lower is better, "
        "mean ± standard deviation over seeds; the columns with positions say where in the stretch. "
        f"Tokens per second and minutes are those of training, {told['jobs']} at once on this machine. {verdict(found)}"
    ).strip()
    buckets = first["test"]["by_position"]
    head = ["model", "parameters", "learning rate", "test", "held out"]
    head += [f"{b['start']:,}–{b['stop']:,}" for b in buckets] + ["tokens/s", "minutes"]
    body = []
    for one in found:
        runs, name = one["runs"], title(one["name"])
        row = [f"**{name}**" if remembers(one["name"]) else name]
        row += [f"{one['parameters']:,}", f"{one['rate']:g}", written(one["test_bits_per_byte"], ".4f")]
        row.append(f"{mean(run['held_out_bits_per_byte'] for run in runs):.4f}")
        row += [f"{place['mean']:.3f}" for place in by_position(one)]
        row.append(f"{mean(run['tokens_per_second'] for run in runs):,.0f}")
        row.append(f"{mean(run['seconds'] for run in runs) / 60:.1f}")
        body.append(row)
    return said, head, body


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


def plot(result: dict[str, Any]) -> Plot:
    """Bits per byte by position, a line for each contender; those without a memory are dashed."""
    buckets = result["contenders"][0]["runs"][0]["test"]["by_position"]
    drawn = contender_lines(result["contenders"], by_position)
    return Plot(
        title="Bits per byte by position", x_label="position in the stretch, tokens", y_label="bits per byte",
        lines=drawn, x_labels=[f"{b['start']:,}–{b['stop']:,}" for b in buckets],
    )  # fmt: skip
