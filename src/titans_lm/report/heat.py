"""A text with a colour behind every character, and its numbers under the pointer."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from titans_lm.report.html import Markup, join, tag

LEVELS = 16
"""Shades, from the least to the most; the style sheet has one rule for each."""


def levels(values: np.ndarray) -> np.ndarray:
    """Sort values into shades by rank: every shade gets equally many, whatever their spread.

    Equal values get the same shade, the one of the first of them; NaN gets the least.
    """
    values = np.where(np.isnan(values), -np.inf, values)
    return np.searchsorted(np.sort(values), values) * LEVELS // max(len(values), 1)


def characters(data: bytes) -> Iterator[tuple[str, slice]]:
    r"""Walk over the characters of a text with the bytes each stands for; bytes that make none are shown as \xNN."""
    start = 0
    for character in data.decode("utf-8", "surrogateescape"):
        stop = start + len(character.encode("utf-8", "surrogateescape"))
        odd = 0xDC80 <= ord(character) <= 0xDCFF or not (character.isprintable() or character in "\n\t")
        yield ("".join(f"\\x{byte:02x}" for byte in data[start:stop]) if odd else character), slice(start, stop)
        start = stop


def coloured_text(data: bytes, shades: Sequence[np.ndarray], note: Callable[[slice], str], *, label: str) -> Markup:
    """Show a text whose bytes have one or more series of shades; `note` says what the pointer shows for some bytes.

    Series i sets the class `s{i}-{level}`; which series is seen is up to the page's style (`heat_style`).
    """
    spans = []
    for character, place in characters(data):
        classes = " ".join(f"s{i}-{int(series[place].max())}" for i, series in enumerate(shades))
        shown = "↵\n" if character == "\n" else character
        spans.append(tag("span", shown, class_=classes, data_note=note(place)))
    return tag("pre", join(spans), class_="heat", aria_label=label)


def heat_style(colours: Mapping[str, tuple[int, int, int]]) -> str:
    """CSS for coloured texts: series i is shown in the i-th colour, wherever that colour's selector holds."""
    rules = [
        f"{selector} .s{i}-{level} {{ background: rgba({r}, {g}, {b}, {0.85 * (level / (LEVELS - 1)) ** 1.6:.3f}); }}"
        for i, (selector, (r, g, b)) in enumerate(colours.items())
        for level in range(LEVELS)
    ]
    return STYLE + "\n".join(rules) + "\n"


STYLE = """
.heat { background: #fff; border: 1px solid var(--line); font-size: .8125rem; line-height: 1.75; }
.heat span { position: relative; border-radius: 2px; }
.heat span:hover { outline: 1.5px solid var(--ink); z-index: 2; }
.heat span:hover::after { content: attr(data-note); position: absolute; left: 0; top: 1.6em; z-index: 3;
  background: var(--ink); color: #fff; font: 12px/1.5 system-ui, sans-serif; padding: .35rem .6rem; border-radius: 6px;
  white-space: pre; pointer-events: none; }
"""
