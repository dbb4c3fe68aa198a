"""The page: a text coloured by what surprised the memory, and all numbers of every piece of it.

It needs nothing but itself. Text, choices and colours are HTML; page.js makes them move, and without it the text stands
there in its first colours.
"""

import json
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from titans_lm.config import ForgetTo
from titans_lm.report.heat import LEVELS, levels
from titans_lm.report.html import Markup, join, page, section, tag
from titans_lm.report.surprise.pack import by_piece, page_data
from titans_lm.report.surprise.text import TokenText
from titans_lm.surprise import PARTS, Surprise

NAMES = {
    "momentary": "momentary surprise",
    "past": "past surprise",
    "forgotten": "forgotten",
    "bits": "bits of the model",
}
COLOURS = {"momentary": (240, 120, 50), "past": (170, 130, 230), "forgotten": (60, 175, 150), "bits": (110, 150, 240)}
"""The strongest shade of each: on all of them the text keeps a contrast of at least 4.5."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the page says of the reading itself."""

    model: str
    architecture: str
    forget_to: ForgetTo
    memory: str | None = None
    """The memory file that was gone on from."""
    memory_tokens: int = 0
    """Tokens that it had read."""


def surprise_page(surprise: Surprise, text: TokenText, facts: Facts, max_tokens: int) -> str:
    """Put the page together, of the first `max_tokens` tokens."""
    count = text.pieces_within(max_tokens)
    values = by_piece(surprise.summary(), text.starts[: count + 1])
    data = json.dumps(page_data(surprise, text, count), separators=(",", ":"), allow_nan=False)
    return page(
        f"{text.name}: what surprised the memory",
        _header(surprise, text, facts, int(text.starts[count])),
        tag("section", _controls(surprise, values), _reading(text, levels(values)), id_="view", data_what="momentary"),
        _meaning(facts),
        tag("div", data, id_="data", hidden=""),
        style=_own("page.css") + shades(),
        script=_own("page.js"),
    )


def shades() -> str:
    """CSS of every shade of every colour, from white on."""
    rules = []
    for what, colour in COLOURS.items():
        for level in range(LEVELS):
            share = (level / (LEVELS - 1)) ** 1.5
            r, g, b = (round(255 + share * (part - 255)) for part in colour)
            rules.append(f'[data-what="{what}"] .s{level} {{ background: rgb({r}, {g}, {b}); }}')
    return "\n".join(rules) + "\n"


def _own(name: str) -> str:
    return (files("titans_lm.report.surprise") / name).read_text(encoding="utf-8")


def _header(surprise: Surprise, text: TokenText, facts: Facts, shown: int) -> Markup:
    total = len(text.ids)
    bits = surprise.bits[np.isfinite(surprise.bits)]
    cut = f"; this page shows the first {shown:,}, surprise.jsonl has all" if shown < total else ""
    rows = {
        "text": text.name,
        "model": f"{facts.model} ({facts.architecture})",
        "read before": None if facts.memory is None else f"{facts.memory}, {facts.memory_tokens:,} tokens",
        "tokens": f"{total:,}{cut}",
        "bits per token": f"{bits.mean():.3f}" if len(bits) else None,
    }
    pairs = [[tag("dt", name), tag("dd", value)] for name, value in rows.items() if value is not None]
    return tag(
        "header",
        tag("h1", "What surprised the memory"),
        tag(
            "p",
            "A model with a memory has read this text, and every token has changed what it remembers. The colour says "
            "by how much: white is the sixteenth of the text with the smallest numbers, the strongest colour that with "
            "the largest.",
        ),
        tag("dl", *(part for pair in pairs for part in pair), class_="facts"),
    )


def _controls(surprise: Surprise, values: np.ndarray) -> Markup:
    blocks, heads, layers = surprise.part().shape[1:]
    least, middle, most = (f"{x:.3g} ×" for x in np.quantile(values, [0.0, 0.5, 1.0]))
    swatches = [tag("i", class_=f"s{level}") for level in range(LEVELS)]
    labels = [tag("b", x, id_=name) for name, x in (("low", least), ("middle", middle), ("high", most))]
    count = blocks * heads * layers
    averaged = f", averaged over {count} memory layers" if count > 1 else ""
    return tag(
        "div",
        tag(
            "div",
            _chooser("what", "number", [(what, name) for what, name in NAMES.items()]),
            *(_counted(name, count) for name, count in (("block", blocks), ("head", heads), ("layer", layers))),
            tag("div", *swatches, *labels, class_="key"),
            class_="choosers",
        ),
        tag(
            "p",
            f"Colour: {NAMES['momentary']}, all blocks, all heads, all layers: multiples of the median{averaged}.",
            class_="says",
            id_="says",
            aria_live="polite",
        ),
        tag("noscript", tag("p", "Other numbers, and those of each token, need JavaScript.", class_="says")),
        _chart(len(values)),
        class_="controls",
    )


def _chooser(id_: str, label: str, choices: list[tuple[str, str]]) -> Markup:
    options = [tag("option", shown, value=value) for value, shown in choices]
    return tag(
        "label", label, tag("select", *options, id_=id_, autocomplete="off"), for_=id_, data_scripted="", hidden=""
    )


def _counted(name: str, count: int) -> Markup:
    return _chooser(name, name, [("", "all"), *((str(i), str(i + 1)) for i in range(count))])


def _chart(pieces: int) -> Markup:
    """Lines that page.js draws: means and maxima of neighbours, and where one stands."""
    lines = [tag("path", id_=name) for name in ("most", "means", "here")]
    at = {"min": 0, "max": pieces - 1, "value": 0, "autocomplete": "off"}
    label = "the chosen number along the text: means of neighbours, and behind them the largest of these"
    picture = tag(
        "svg", *lines, viewBox="0 0 1000 100", preserveAspectRatio="none", role="img", aria_label=label, id_="chart"
    )
    return tag(
        "div",
        picture,
        tag("span", id_="top"),
        tag("span", id_="bottom"),
        tag("input", type="range", id_="at", aria_label="position in the text", **at),
        class_="plot",
        data_scripted="",
        hidden="",
    )


def _reading(text: TokenText, shown: np.ndarray) -> Markup:
    spans = [
        tag("span", piece.replace("\n", "↵\n"), class_=f"s{level}")
        for piece, level in zip(text.pieces, shown.tolist(), strict=False)
    ]
    label = f"{text.name}, coloured; arrow keys go from piece to piece"
    return tag(
        "div",
        tag("pre", join(spans), id_="text", tabindex=0, role="region", aria_label=label),
        _tip(),
        id_="reading",
    )


def _tip() -> Markup:
    """Where page.js writes the numbers of a piece."""
    rows = [
        tag(
            "tr",
            tag("th", NAMES[what], scope="row"),
            tag("td", id_=f"tip-{what}"),
            tag("td", "× median", class_="unit"),
            tag("td", tag("span", "= "), tag("span", id_=f"tip-{what}-size"), class_="size"),
        )
        for what in PARTS
    ]
    bits = tag("td", id_="tip-bits"), tag("td", "bits", class_="unit"), tag("td", class_="size")
    rows.append(tag("tr", tag("th", "model", scope="row"), *bits))
    table = tag("table", tag("caption", id_="tip-name"), tag("tbody", *rows))
    return tag("div", table, tag("p", id_="tip-rank"), id_="tip", role="status", hidden="")


def _meaning(facts: Facts) -> Markup:
    base, equation = ("what it was before it had read anything", "‖α_t (M_{t−1} − M_init)‖")
    if facts.forget_to == "zero":
        base, equation = "nothing", "‖α_t M_{t−1}‖"
    terms = (
        (
            NAMES["momentary"],
            "‖∇ℓ(M; k_t, v_t)‖",
            "How far the memory was from knowing the token's value by its key: the size of the gradient it is written "
            "with.",
        ),
        (
            NAMES["past"],
            "‖η_t S_{t−1}‖",
            "What the surprise of earlier tokens still pushes while this token is written.",
        ),
        (
            NAMES["forgotten"],
            equation,
            f"How much of what was learned is given up while this token is written; forgetting leads to {base}.",
        ),
        (
            NAMES["bits"],
            "−log₂ p(token t)",
            "How many bits the model needed for the token, given those before it: its own surprise, which need not be "
            "that of its memory.",
        ),
    )
    rows = [
        part for name, formula, said in terms for part in (tag("dt", name), tag("dd", tag("code", formula), " ", said))
    ]
    return section(
        "What the numbers are",
        tag("dl", *rows, class_="meaning"),
        tag("h3", "How they are shown"),
        tag(
            "p",
            "Every block, head and layer of the memory has sizes of its own, which differ by orders of magnitude. "
            "Where several are chosen, each is divided by its median over the whole text, and the mean of these is "
            "shown. Colours go by rank among what is shown. A character of several tokens has the mean of their sizes "
            "and the sum of their bits. Numbers on this page are rounded by less than a thousandth; surprise.jsonl has "
            "them as they are.",
        ),
        tag(
            "p",
            "Point at a piece of the text, or click to stay there. With the text in focus ",
            tag("kbd", "←"), " ", tag("kbd", "→"), " go to the neighbours, ",
            tag("kbd", "Home"), " and ", tag("kbd", "End"), " to the ends, ", tag("kbd", "Esc"),
            " closes the numbers. The dark curve has the means of neighbours and the light one their peaks, both drawn "
            "from the lowest mean up by the square root; a click on it goes to the peak that stands there.",
        ),
    )  # fmt: skip
