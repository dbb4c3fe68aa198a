"""The page of surprise: whole, of its own, and with nothing in it that the text or its name has put there."""

import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest

from report.surprise_cases import FACTS, HOSTILE, HOSTILE_NAME, Page, as_text, made_up
from titans_lm.report.surprise.page import COLOURS, LEVELS, levels, shades, surprise_page
from titans_lm.report.surprise.text import by_piece


def hostile() -> str:
    text = as_text(HOSTILE, HOSTILE_NAME)
    return surprise_page(made_up(text), text, FACTS, 20_000)


def test_the_text_is_there_and_coloured_by_rank() -> None:
    text = as_text("Ein Löwe saß\nam Fluss.\n".encode())
    found = made_up(text)
    page = Page(surprise_page(found, text, FACTS, 20_000))
    assert [shown for shown, _ in page.pieces] == [piece.replace("\n", "↵\n") for piece in text.pieces]
    expected = levels(by_piece(found.summary(), text.starts))
    assert [kind for _, kind in page.pieces] == [f"s{level}" for level in expected]


def test_it_says_what_it_shows() -> None:
    text = as_text(b"x" * 300)
    page = Page(surprise_page(made_up(text), text, FACTS, 20_000))
    facts = page.text("header")
    for said in ("book.txt", "runs/<first> (mac)", "a & b.memory, 1,234 tokens", "301"):
        assert said in facts
    assert "this page shows" not in facts
    told = page.text("section")
    for equation in ("‖∇ℓ(M; k_t, v_t)‖", "‖η_t S_{t−1}‖", "‖α_t (M_{t−1} − M_init)‖", "−log₂ p(token t)"):
        assert equation in told
    zero = Page(surprise_page(made_up(text), text, replace(FACTS, forget_to="zero", memory=None), 20_000))
    assert "‖α_t M_{t−1}‖" in zero.text("section")
    assert "read before" not in zero.text("header")
    assert "multiples of the median, averaged over 8 memory layers." in page.text("says")
    single = Page(surprise_page(made_up(text, 1, 1, 1), text, FACTS, 20_000))
    assert single.text("says").endswith("multiples of the median.")


def test_a_long_text_is_cut_and_the_page_says_so() -> None:
    text = as_text("é".encode() * 50)
    page = Page(surprise_page(made_up(text), text, FACTS, 20))
    assert len(page.pieces) == page.data["pieces"] == 10
    assert page.data["tokens"] == 19
    assert "101; this page shows the first 19, surprise.jsonl has all" in page.text("header")


def test_nothing_in_the_text_becomes_part_of_the_page() -> None:
    page, plain = Page(hostile()), as_text(b"calm")
    calm = Page(surprise_page(made_up(plain), plain, FACTS, 20_000))
    kinds = [name for name, _ in page.elements if name != "span"]
    assert kinds == [name for name, _ in calm.elements if name != "span"]
    assert len(page.all("script")) == 1
    for name, attributes in page.elements:
        assert not any(key.startswith("on") or key in ("src", "style", "srcset") for key in attributes), name
    assert "".join(shown for shown, _ in page.pieces).startswith("<bos></script><script>window.hacked = 1</script><img")
    assert page.text("title") == f"{HOSTILE_NAME}: what surprised the memory"


def test_it_asks_nobody_for_anything() -> None:
    source = hostile()
    page = Page(source)
    [link] = page.all("link")
    assert link["href"] == "data:,"
    assert not any("href" in attributes for name, attributes in page.elements if name != "link")
    own = page.text("script") + page.text("style")
    assert "//" not in re.sub(r"^\s*//.*$", "", own, flags=re.MULTILINE)
    assert "url(" not in own
    assert "@import" not in own
    assert not re.search("https?:", source), "the one in the text stands there letter by letter"


def test_its_policy_names_its_script_and_its_style() -> None:
    page = Page(hostile())
    [rules] = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert rules.startswith("default-src 'none'; ")
    for kind in ("script", "style"):
        text = page.text(kind)
        digest = b64encode(sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in rules
        assert "</" not in text
    assert "unsafe" not in rules
    order = [name for name, attributes in page.elements if name in ("style", "script") or "http-equiv" in attributes]
    assert order[0] == "meta", "the policy comes before what it rules"


def test_choosers_have_labels_and_a_choice_for_each_memory() -> None:
    text = as_text(b"some text")
    page = Page(surprise_page(made_up(text, blocks=3, heads=4, layers=2), text, FACTS, 20_000))
    selects = [attributes["id"] for attributes in page.all("select")]
    assert selects == ["what", "block", "head", "layer"]
    assert [label["for"] for label in page.all("label")] == selects
    assert len(page.all("option")) == 4 + (1 + 3) + (1 + 4) + (1 + 2)
    [text_box] = [attributes for _, attributes in page.elements if attributes.get("id") == "text"]
    assert text_box["tabindex"] == "0"
    assert text_box["aria-label"]
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_every_shade_gets_equally_many() -> None:
    values = np.random.default_rng(0).normal(size=10 * LEVELS) ** 3
    found = levels(values)
    assert np.bincount(found).tolist() == [10] * LEVELS
    assert found[values.argmax()] == LEVELS - 1
    assert found[values.argmin()] == 0
    assert levels(np.array([5.0, np.nan, 7.0]))[1] == 0
    assert levels(np.zeros(0)).tolist() == []


def test_equal_values_have_one_shade() -> None:
    assert levels(np.full(50, 3.0)).tolist() == [0] * 50
    values = np.repeat([1.0, np.nan, 2.0, 9.0], 4)
    assert levels(values).tolist() == [4] * 4 + [0] * 4 + [8] * 4 + [12] * 4


def luminance(colour: tuple[int, ...]) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [c / 255 for c in colour]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def test_text_can_be_read_on_every_shade() -> None:
    ink = luminance((0x1B, 0x1F, 0x27))
    found = re.findall(r'\[data-what="(\w+)"\] \.s(\d+) \{ background: rgb\((\d+), (\d+), (\d+)\)', shades())
    assert len(found) == 16 * len(COLOURS)
    for what, level, *colour in found:
        contrast = (luminance(tuple(map(int, colour))) + 0.05) / (ink + 0.05)
        assert contrast >= 4.5, (what, level)
    by_level = [luminance(tuple(map(int, colour))) for what, _, *colour in found if what == "past"]
    assert by_level == sorted(by_level, reverse=True)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_memory_that_has_diverged_can_still_be_looked_at(broken: float) -> None:
    text = as_text(b"some text")
    found = made_up(text)
    found.past[1][4:] = broken
    page = Page(surprise_page(found, text, FACTS, 20_000))
    assert len(page.pieces) == len(text.pieces)
