"""Texts coloured by numbers."""

import re

import numpy as np

from titans_lm.report.heat import LEVELS, characters, coloured_text, heat_style, levels


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


def test_characters_and_the_bytes_they_stand_for() -> None:
    data = "aé\n€".encode() + b"\xff\x00b"
    found = list(characters(data))
    assert [shown for shown, _ in found] == ["a", "é", "\n", "€", "\\xff", "\\x00", "b"]
    assert b"".join(data[place] for _, place in found) == data
    assert [shown for shown, _ in characters("\u200b\u00a0".encode())] == ["\\xe2\\x80\\x8b", "\\xc2\\xa0"]


def test_every_character_has_its_shade_and_its_note() -> None:
    data = "<é>".encode()
    text = coloured_text(
        data,
        [np.array([0, 3, 1, 2]), np.array([4, 4, 4, 4])],
        lambda place: f"bytes {place.start} & on",
        label='a "file"',
    )
    spans = re.findall(r'<span class="([^"]*)" data-note="([^"]*)">(.*?)</span>', text)
    assert spans == [
        ("s0-0 s1-4", "bytes 0 &amp; on", "&lt;"),
        ("s0-3 s1-4", "bytes 1 &amp; on", "é"),
        ("s0-2 s1-4", "bytes 3 &amp; on", "&gt;"),
    ]
    assert "&quot;file&quot;" in text


def test_a_line_ends_where_it_ended() -> None:
    assert "↵\n</span>" in coloured_text(b"a\nb", [np.zeros(3, int)], lambda place: "", label="")


def test_every_shade_has_a_rule() -> None:
    style = heat_style({".one": (1, 2, 3), ".two": (4, 5, 6)})
    for level in range(LEVELS):
        assert f".one .s0-{level} {{ background: rgba(1, 2, 3, " in style
        assert f".two .s1-{level} {{ background: rgba(4, 5, 6, " in style
