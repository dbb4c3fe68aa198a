"""The page of surprise in a browser: Debian's Chromium, driven by Playwright."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from report.surprise_cases import FACTS, HOSTILE, HOSTILE_NAME, Page, as_text, made_up, relative, starts_of, unpacked
from titans_lm.report.surprise.page import levels, surprise_page
from titans_lm.surprise import PARTS

TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank.\nŒuvre: 3 €.\n".encode() * 12


class Opened:
    """A page in a browser without a network, and all that it said or asked for."""

    def __init__(self, browser: Any, path: Path, source: str, **settings: Any) -> None:
        path.write_text(source, encoding="utf-8")
        self.source = Page(source)
        self.data = self.source.data
        self.said: list[str] = []
        self.asked: list[str] = []
        context = browser.new_context(offline=True, viewport={"width": 1200, "height": 900}, **settings)
        self.page = context.new_page()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def levels(self) -> list[int]:
        classes = self.page.eval_on_selector_all("#text > span", "spans => spans.map(span => span.className)")
        return [int(re.match(r"s(\d+)", name)[1]) for name in classes]  # type: ignore[index]

    def choose(self, **choices: str) -> None:
        for name, label in choices.items():
            self.page.select_option(f"#{name}", label=label)

    def piece(self, i: int) -> Any:
        return self.page.locator("#text > span").nth(i)

    def told(self) -> dict[str, float]:
        """The numbers that stand in the box, by what they are."""
        found = {}
        for name in (*PARTS, *(f"{what}-size" for what in PARTS), "bits"):
            shown = self.page.inner_text(f"#tip-{name}") if self.page.is_visible(f"#tip-{name}") else ""
            if shown:
                found[name] = float("nan" if shown == "–" else shown)
        return found


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Opened]:
    """The page of a text; whatever a test does with it, it says nothing and asks for nothing."""
    text = as_text(TEXT)
    page = Opened(browser, tmp_path / "page.html", surprise_page(made_up(text), text, FACTS, 20_000))
    yield page
    assert page.said == []
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == []
    page.page.context.close()


def assert_colours(page: Opened, expected: np.ndarray) -> None:
    """Ranks as Python has them; where two numbers are equal up to rounding, either may be first."""
    found, wanted = np.array(page.levels()), levels(expected)
    assert np.abs(found - wanted).max() <= 1
    assert (found == wanted).mean() > 0.98


def assert_told(told: dict[str, float], expected: dict[str, float]) -> None:
    assert told.keys() == expected.keys()
    for name, value in expected.items():
        assert told[name] == pytest.approx(value, rel=1e-3, nan_ok=True), name


def series(page: Opened, block: int, head: int, layer: int) -> int:
    return (block * page.data["heads"] + head) * page.data["layers"] + layer


def test_it_opens_with_the_colours_that_it_was_written_with(opened: Opened) -> None:
    written = [int(kind[1:]) for _, kind in opened.source.pieces]
    assert np.abs(np.array(opened.levels()) - written).max() <= 1
    assert opened.page.title() == "book.txt: what surprised the memory"
    assert opened.page.is_visible("#what")
    assert not opened.page.is_visible("#tip")
    strongest, weakest = (
        opened.piece(opened.levels().index(level)).evaluate("span => getComputedStyle(span).backgroundColor")
        for level in (15, 0)
    )
    assert (strongest, weakest) == ("rgb(240, 120, 50)", "rgb(255, 255, 255)")


@pytest.mark.parametrize("what", ["momentary", "past", "forgotten", "bits"])
def test_a_choice_changes_the_colours(what: str, opened: Opened) -> None:
    names = {"past": "past surprise", "forgotten": "forgotten", "bits": "bits of the model"}
    before = opened.levels()
    if what in names:
        opened.choose(what=names[what])
        assert opened.levels() != before
    assert_colours(opened, relative(opened.data, what))
    assert opened.page.is_disabled("#block") == (what == "bits")
    if what == "bits":
        return
    seen = [opened.levels()]
    for choice, chosen in (
        ({"block": "2"}, [4, 5, 6, 7]),
        ({"head": "1"}, [4, 5]),
        ({"layer": "2"}, [5]),
        ({"block": "all"}, [1, 5]),
        ({"head": "all", "layer": "1"}, [0, 2, 4, 6]),
    ):
        opened.choose(**choice)
        assert_colours(opened, relative(opened.data, what, chosen))
        assert opened.levels() not in seen
        seen.append(opened.levels())
    assert "all blocks, all heads, layer 1: multiples of the median, averaged over 4" in opened.page.inner_text("#says")


def test_pointing_shows_the_numbers_of_a_piece(opened: Opened) -> None:
    values = {what: relative(opened.data, what) for what in (*PARTS, "bits")}
    for i in (1, 20, len(opened.source.pieces) - 2):
        opened.piece(i).scroll_into_view_if_needed()
        opened.piece(i).hover()
        assert_told(opened.told(), {what: series[i] for what, series in values.items()})
        assert f"token {starts_of(opened.data)[i]}" in opened.page.inner_text("#tip-name")
    opened.page.mouse.move(5, 5)
    assert not opened.page.is_visible("#tip")


def test_of_one_memory_the_sizes_themselves_are_shown(opened: Opened) -> None:
    opened.choose(block="2", head="1", layer="2")
    s, i = series(opened, 1, 0, 1), 33
    opened.piece(i).hover()
    expected = {what: relative(opened.data, what, [s])[i] for what in PARTS}
    expected |= {f"{what}-size": unpacked(opened.data["sizes"][what])[s, i] for what in PARTS}
    assert_told(opened.told(), {**expected, "bits": relative(opened.data, "bits")[i]})
    assert "block 2, head 1, layer 2: multiples of its median" in opened.page.inner_text("#says")


def test_what_has_several_tokens_says_which(opened: Opened) -> None:
    i = [shown for shown, _ in opened.source.pieces].index("€")
    first = starts_of(opened.data)[i]
    opened.piece(i).hover()
    assert opened.page.inner_text("#tip-name") == f"“€”  tokens {first} to {first + 2}"


def test_the_first_token_has_no_bits(opened: Opened) -> None:
    opened.piece(0).hover()
    assert opened.page.inner_text("#tip-bits") == "–"
    assert opened.told()["momentary"] == 0.0


def test_the_keyboard_does_what_the_mouse_does(opened: Opened) -> None:
    press = opened.page.keyboard.press
    opened.page.focus("#text")
    assert "token 0" in opened.page.inner_text("#tip-name")
    for _ in range(5):
        press("ArrowRight")
    press("ArrowLeft")
    assert opened.page.inner_text("#tip-name").endswith("token 4")
    assert opened.told()["past"] == pytest.approx(relative(opened.data, "past")[4], rel=1e-3)
    assert "here" in opened.piece(4).get_attribute("class")
    press("End")
    assert str(opened.data["tokens"] - 1) in opened.page.inner_text("#tip-name")
    assert in_sight(opened, len(opened.source.pieces) - 1)
    press("ArrowRight")
    press("Home")
    assert opened.page.inner_text("#tip-name").endswith("token 0")
    press("Escape")
    assert not opened.page.is_visible("#tip")
    opened.page.focus("#what")
    press("ArrowDown")
    assert_colours(opened, relative(opened.data, "past"))


def in_sight(opened: Opened, i: int) -> bool:
    """Whether a piece is in the window and not under the controls."""
    box, controls = opened.piece(i).bounding_box(), opened.page.locator(".controls").bounding_box()
    return controls["y"] + controls["height"] <= box["y"] <= 900


def test_a_click_stays_and_leaves_with_escape(opened: Opened) -> None:
    opened.piece(12).click()
    opened.piece(30).hover()
    assert opened.page.inner_text("#tip-name").endswith("token 30")
    opened.page.mouse.move(5, 5)
    assert opened.page.inner_text("#tip-name").endswith("token 12")
    opened.choose(what="past surprise")
    assert "here" in opened.piece(12).get_attribute("class"), "another colour does not lose the place"


@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_the_curve_leads_to_its_peaks(share: float, opened: Opened) -> None:
    chart = opened.page.locator("#chart").bounding_box()
    opened.page.mouse.click(chart["x"] + share * chart["width"], chart["y"] + chart["height"] / 2)
    opened.page.mouse.move(5, 5)
    here = opened.page.eval_on_selector_all("#text > span", "all => all.findIndex(s => s.classList.contains('here'))")
    count = len(opened.source.pieces)
    values, bins = relative(opened.data, "momentary"), min(count, 500)
    b = int(share * bins)
    near = [edge * count // bins for edge in (max(b - 1, 0), min(b + 2, bins))]
    assert near[0] <= here < near[1], "the place that was clicked, to a bin"
    assert any(here == start + np.argmax(values[start:stop]) for start, stop in bins_of(count, bins))
    assert in_sight(opened, here)
    assert opened.page.get_attribute("#here", "d").startswith("M")
    assert int(opened.page.input_value("#at")) == here


def test_what_is_scrolled_under_a_resting_pointer_is_not_pointed_at(opened: Opened) -> None:
    opened.page.set_viewport_size({"width": 400, "height": 700})
    chart = opened.page.locator("#chart")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    opened.page.mouse.click(box["x"] + 0.5 * box["width"], box["y"] + box["height"] / 2)
    opened.page.wait_for_timeout(300)  # a browser looks again at what is under the pointer, a moment after it scrolled
    here = int(opened.page.input_value("#at"))
    assert in_sight(opened, here)
    assert opened.page.inner_text("#tip-name").endswith(f"token {starts_of(opened.data)[here]}")


def bins_of(count: int, bins: int) -> list[tuple[int, int]]:
    return [(b * count // bins, (b + 1) * count // bins) for b in range(bins)]


def test_the_slider_goes_anywhere(opened: Opened) -> None:
    opened.page.locator("#at").fill("700")
    assert opened.page.inner_text("#tip-name").endswith(f"token {starts_of(opened.data)[700]}")
    assert in_sight(opened, 700)
    opened.page.focus("#at")
    opened.page.keyboard.press("ArrowRight")
    assert opened.page.inner_text("#tip-name").endswith(f"token {starts_of(opened.data)[701]}")


def test_the_box_stays_in_the_window(opened: Opened) -> None:
    width = opened.page.evaluate("document.documentElement.clientWidth")
    for i in range(0, 700, 23):
        opened.piece(i).scroll_into_view_if_needed()
        opened.piece(i).click(force=True)
        box = opened.page.locator("#tip").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert box["y"] + box["height"] <= 900 + 1


@pytest.mark.parametrize("width", [360, 768, 1600])
def test_no_window_is_too_narrow(width: int, opened: Opened) -> None:
    opened.page.set_viewport_size({"width": width, "height": 800})
    opened.choose(block="1", head="1", layer="1")
    for i in (3, 40, 75):
        opened.piece(i).click()
        box = opened.page.locator("#tip").bounding_box()
        assert 0 <= box["x"] <= box["x"] + box["width"] <= width
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width


def test_hostile_text_stays_text(browser: Any, tmp_path: Path) -> None:
    text = as_text(HOSTILE * 3, HOSTILE_NAME)
    page = Opened(browser, tmp_path / "page.html", surprise_page(made_up(text), text, FACTS, 20_000))
    page.choose(what="past surprise", block="2")
    for i in (1, 9, 30):
        page.piece(i).hover()
    assert page.page.evaluate("window.hacked") is None
    assert page.page.inner_text("#text").startswith("<bos></script><script>window.hacked = 1</script>")
    assert page.page.title().startswith("</title><script>")
    assert (page.said, page.asked) == ([], [page.page.url])
    page.page.context.close()


def test_its_policy_stops_what_is_not_its_own(browser: Any, tmp_path: Path) -> None:
    """If something did get in: no other script runs, and nothing is fetched."""
    text = as_text(b"some text")
    source = surprise_page(made_up(text), text, FACTS, 20_000)
    foreign = "<script>window.hacked = 1</script><img src='https://example.org/x.png' onerror='window.hacked = 2'>"
    page = Opened(browser, tmp_path / "page.html", source.replace("<h2>", f"{foreign}<h2>"))
    page.page.wait_for_timeout(200)
    assert page.page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in said for said in page.said)
    page.page.context.close()


def test_without_javascript_the_text_has_its_first_colours(browser: Any, tmp_path: Path) -> None:
    text = as_text(TEXT)
    source = surprise_page(made_up(text), text, FACTS, 20_000)
    page = Opened(browser, tmp_path / "page.html", source, java_script_enabled=False)
    assert page.page.inner_text("#text").startswith("<bos>Alice was beginning")
    assert page.page.is_visible("noscript p")
    for name in ("#what", "#block", "#chart", "#at", "#tip", "#data"):
        assert not page.page.is_visible(name), name
    assert page.said == []
    page.page.context.close()


def test_a_large_page_answers_at_once(browser: Any, tmp_path: Path) -> None:
    """20,000 tokens and 48 memories: a choice takes a moment, not a wait."""
    text = as_text(b"0123456789" * 1999)
    page = Opened(browser, tmp_path / "page.html", surprise_page(made_up(text, 6, 4, 2), text, FACTS, 20_000))
    took = page.page.evaluate(
        "() => { const began = performance.now(); const what = document.getElementById('what'); what.value = 'past';"
        " what.dispatchEvent(new Event('change')); return performance.now() - began; }"
    )
    assert took < 2000
    assert_colours(page, relative(page.data, "past"))
    page.page.context.close()
