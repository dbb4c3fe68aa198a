"""Made-up surprise, and pages taken apart again, for the tests of what `titans surprise` writes."""

import json
from base64 import b64decode
from html.parser import HTMLParser
from typing import Any

import numpy as np

from titans_lm.data.tokenizer import BOS, byte_tokenizer
from titans_lm.report.html import VOID
from titans_lm.report.surprise.page import Facts
from titans_lm.report.surprise.text import TokenText, token_text
from titans_lm.surprise import Surprise

TOKENIZER = byte_tokenizer()
HOSTILE = (
    b"</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\n"
    b"<!-- \"quoted\" & 'single' </pre></div> \xff\x00 caf\xc3\xa9 https://example.org/?a=b&c \xe2\x82\xac\x1b[31m\n"
)
HOSTILE_NAME = "</title><script>window.hacked = 3</script>\"'&.txt"
FACTS = Facts(model="runs/<first>", architecture="mac", forget_to="init", memory="a & b.memory", memory_tokens=1234)


def as_text(data: bytes, name: str = "book.txt") -> TokenText:
    return token_text(name, data, TOKENIZER, [BOS])


def made_up(text: TokenText, blocks: int = 2, heads: int = 2, layers: int = 2, seed: int = 0) -> Surprise:
    """Sizes over several orders of magnitude, with zeros among them."""
    draw = np.random.default_rng(seed)
    T = len(text.ids)

    def sizes() -> tuple[np.ndarray, ...]:
        found = np.exp(3 * draw.normal(size=(blocks, T, heads, layers))).astype(np.float32)
        found[:, 0] = 0.0
        return tuple(found)

    bits = np.abs(4 * draw.normal(size=T))
    bits[0] = np.nan
    return Surprise(text.ids, bits, sizes(), sizes(), sizes())


class Page(HTMLParser):
    """A page taken apart: its elements, its scripts and styles, the data, and the pieces of the text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.inside: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.pieces: list[tuple[str, str]] = []
        self.feed(source)
        self.close()
        self.data: dict[str, Any] = json.loads("".join(self.texts["data"]))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        self.elements.append((tag, known))
        if tag not in VOID:
            self.inside.append(known.get("id") or tag)
        if tag == "span" and "text" in self.inside:
            self.pieces.append(("", known["class"]))

    def handle_endtag(self, tag: str) -> None:
        self.inside.pop()

    def handle_data(self, data: str) -> None:
        for name in set(self.inside):
            self.texts.setdefault(name, []).append(data)
        if "text" in self.inside and self.inside[-1] == "span":
            shown, kind = self.pieces[-1]
            self.pieces[-1] = (shown + data, kind)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, name: str) -> str:
        return "".join(self.texts.get(name, []))


def unpacked(packed: dict[str, Any]) -> np.ndarray:
    """Numbers as page.js makes them from codes, (series, pieces)."""
    codes = np.frombuffer(b64decode(packed["codes"]), "<u2").reshape(len(packed["low"]), -1)
    low, step = (np.array(packed[name])[:, None] for name in ("low", "step"))
    values = np.where(codes == 0, 0.0, low * np.exp(step * (codes.astype(float) - 1)))
    return np.where(codes == 0xFFFF, np.nan, values)


def relative(data: dict[str, Any], what: str, chosen: list[int] | None = None) -> np.ndarray:
    """The mean of the chosen series, each in multiples of its median: what the page colours by."""
    if what == "bits":
        return unpacked(data["bits"])[0]
    part = data["sizes"][what]
    values = unpacked(part) / np.array(part["scale"])[:, None]
    return values.mean(0) if chosen is None else values[chosen].mean(0)


def starts_of(data: dict[str, Any]) -> list[int]:
    return np.frombuffer(b64decode(data["starts"]), "<u4").tolist()
