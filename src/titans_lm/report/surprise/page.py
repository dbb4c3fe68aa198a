"""The page: a text coloured by what surprised the memory, and all numbers of every piece of it.

It needs nothing but itself. Text, choices and colours are HTML (page.html is what never changes); page.js makes them
move, and without it the text stands there in its first colours.
"""

import json
from base64 import b64encode
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from titans_lm.config import ForgetTo
from titans_lm.report.html import Markup, filled, join, page, tag
from titans_lm.report.surprise.text import TokenText, by_piece
from titans_lm.surprise import PARTS, Surprise

NAMES = {
    "momentary": "momentary surprise",
    "past": "past surprise",
    "forgotten": "forgotten",
    "bits": "bits of the model",
}
COLOURS = {"momentary": (240, 120, 50), "past": (170, 130, 230), "forgotten": (60, 175, 150), "bits": (110, 150, 240)}
"""The strongest shade of each: on all of them the text keeps a contrast of at least 4.5."""
LEVELS = 16
"""Shades, from the least to the most; the style sheet has one rule for each."""
NOTHING, TOP = 0xFFFF, 0xFFFE
"""The code of what is no number, and that of the largest."""
FLOOR = 1e-50
"""What is smaller than this share of the largest counts as zero, so that no scale is too coarse."""
FORGETTING = {
    "zero": ("‖α_t M_{t−1}‖", "nothing"),
    "init": ("‖α_t (M_{t−1} − M_init)‖", "what it was before it had read anything"),
}


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
    count = text.pieces_within(max_tokens)
    values = by_piece(surprise.summary(), text.starts[: count + 1])
    blocks, heads, layers = surprise.part().shape[1:]
    sizes = {"block": blocks, "head": heads, "layer": layers}
    memories = blocks * heads * layers
    averaged = f", averaged over {memories} memory layers" if memories > 1 else ""
    least, middle, most = (f"{x:.4g} ×" for x in np.quantile(values, [0.0, 0.5, 1.0]))
    forgotten, base = FORGETTING[facts.forget_to]
    spans = zip(text.pieces, levels(values).tolist(), strict=False)
    body = filled(
        _own("page.html"),
        facts=_facts(surprise, text, facts, int(text.starts[count])),
        choosers=join([_chooser("what", "number", NAMES), *(_chooser(n, n, _counted(c)) for n, c in sizes.items())]),
        swatches=join(tag("i", class_=f"s{level}") for level in range(LEVELS)),
        least=least,
        middle=middle,
        most=most,
        says=f"Colour: {NAMES['momentary']}, all blocks, all heads, all layers: multiples of the median{averaged}.",
        last=count - 1,
        label=f"{text.name}, coloured; arrow keys go from piece to piece",
        text=join(tag("span", piece.replace("\n", "↵\n"), class_=f"s{level}") for piece, level in spans),
        numbers=join(_number(what) for what in PARTS),
        forgotten=forgotten,
        base=base,
        data=json.dumps(page_data(surprise, text, count), separators=(",", ":"), allow_nan=False),
    )
    title, style = f"{text.name}: what surprised the memory", _own("page.css") + shades()
    return page(title, body, style=style, script=_own("page.js"))


def levels(values: np.ndarray) -> np.ndarray:
    """Sort values into shades by rank, equally many into each; equal values get the first one's, NaN the least."""
    values = np.where(np.isnan(values), -np.inf, values)
    return np.searchsorted(np.sort(values), values) * LEVELS // max(len(values), 1)


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


def _facts(surprise: Surprise, text: TokenText, facts: Facts, shown: int) -> Markup:
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
    return join(join([tag("dt", name), tag("dd", value)]) for name, value in rows.items() if value is not None)


def _chooser(id_: str, label: str, choices: dict[str, str]) -> Markup:
    options = [tag("option", shown, value=value) for value, shown in choices.items()]
    select = tag("select", *options, id_=id_, autocomplete="off")
    return tag("label", label, select, for_=id_, data_scripted="", hidden="")


def _counted(count: int) -> dict[str, str]:
    return {"": "all", **{str(i): str(i + 1) for i in range(count)}}


def _number(what: str) -> Markup:
    size = tag("td", tag("span", "= "), tag("span", id_=f"tip-{what}-size"), class_="size")
    value, unit = tag("td", id_=f"tip-{what}"), tag("td", "× median", class_="unit")
    return tag("tr", tag("th", NAMES[what], scope="row"), value, unit, size)


def pack(values: np.ndarray) -> dict[str, Any]:
    """Pack series of numbers of at least 0, (…, N): code 0 is zero, c up to 65534 is low · e^{step · (c − 1)}.

    A number comes back with a relative error of at most ln(1 / FLOOR) / 65533 / 2, which is below 1e-3; what is not
    finite becomes nothing. Codes are in base64, little-endian, the scales of the series in flat lists.
    """
    x = values.astype(np.float64)
    known = np.isfinite(x)
    high = np.where(known, x, 0.0).max(-1, initial=0.0)
    counts = known & (x > FLOOR * high[..., None])
    low = np.where(counts, x, np.inf).min(-1, initial=np.inf)
    low, high = (np.where(counts.any(-1), bound, 1.0) for bound in (low, high))
    step = np.log(high / low) / (TOP - 1)
    place = np.log(np.where(counts, x, low[..., None]) / low[..., None])
    codes = np.where(counts, 1 + np.rint(place / np.where(step > 0.0, step, 1.0)[..., None]), 0)
    packed = base64(np.where(known, codes, NOTHING).astype("<u2"))
    return {"codes": packed, "low": low.ravel().tolist(), "step": step.ravel().tolist()}


def base64(x: np.ndarray) -> str:
    return b64encode(np.ascontiguousarray(x).tobytes()).decode()


def page_data(surprise: Surprise, text: TokenText, pieces: int) -> dict[str, Any]:
    """What page.js needs of the first pieces: all sizes of each block, head and layer, and bits."""
    starts = text.starts[: pieces + 1]
    sizes = {}
    for what in PARTS:
        found = by_piece(surprise.part(what), starts)  # (P, blocks, H, L)
        sizes[what] = {**pack(np.moveaxis(found, 0, -1)), "scale": surprise.scale(what).ravel().tolist()}
    blocks, heads, layers = surprise.part().shape[1:]
    return {
        "blocks": blocks,
        "heads": heads,
        "layers": layers,
        "pieces": pieces,
        "tokens": int(starts[-1]),
        "starts": base64(starts[:-1].astype("<u4")),
        "sizes": sizes,
        "bits": pack(by_piece(surprise.bits, starts, total=True)),
    }
