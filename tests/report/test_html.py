"""Pages that cannot forget to escape."""

from titans_lm.report.html import Markup, escaped, figure, page, paragraphs, section, table, tag

NASTY = "<script>alert('x')</script> & \"quoted\""
SAFE = "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; &quot;quoted&quot;"


def test_text_is_escaped_wherever_it_goes() -> None:
    assert tag("p", NASTY) == f"<p>{SAFE}</p>"
    assert tag("p", title=NASTY) == f'<p title="{SAFE}"></p>'
    for built in (
        paragraphs([NASTY]),
        table([NASTY, NASTY], [[NASTY, NASTY]]),
        figure(tag("svg"), NASTY),
        section(NASTY, NASTY),
        page(NASTY, NASTY),
    ):
        assert "<script" not in built
        assert SAFE in built


def test_markup_passes_through_once() -> None:
    inner = tag("b", "a & b")
    assert isinstance(inner, Markup)
    assert tag("p", "1 < 2 ", inner) == "<p>1 &lt; 2 <b>a &amp; b</b></p>"
    assert escaped(inner) is inner
    assert not isinstance(inner + "<i>", Markup), "what is glued on by hand is text again"
    assert not isinstance(f"{inner}", Markup)


def test_elements() -> None:
    assert tag("br") == "<br>"
    assert tag("td", 3, class_="number", data_note=None) == '<td class="number">3</td>'
    assert tag("label", "x", for_="y", aria_label="z") == '<label for="y" aria-label="z">x</label>'


def test_a_table_has_a_cell_for_every_column() -> None:
    built = table(["a", "b"], [[1, 2], [3, 4]])
    assert built.count("<td") == 4
    assert built.count('class="number"') == 3
    assert 'class="number"' not in table(["a", "b"], [[1, 2]], numbers=False)


def test_a_page_with_a_script_allows_no_other() -> None:
    built = page("title", "x", style="b { color: red; }", script="let a = 1 < 2;")
    assert built.count("<script>let a = 1 < 2;</script></body>") == 1
    rules = built.partition('http-equiv="Content-Security-Policy" content="')[2].partition('"')[0]
    assert rules.startswith("default-src &#x27;none&#x27;; ")
    assert rules.count("-src &#x27;sha256-") == 2
    assert built.index("Content-Security-Policy") < built.index("<style>")
    other = page("title", "x", style="b { color: red; }", script="let a = 2 < 2;")
    assert other.partition("script-src")[2][:60] != built.partition("script-src")[2][:60]
    assert "Content-Security-Policy" not in page("title", "x")


def test_a_page_is_whole() -> None:
    built = page("title", tag("p", "x"), style=".a > b { color: red; }")
    assert built.startswith("<!DOCTYPE html>\n<html")
    assert ".a > b { color: red; }" in built, "style is not text"
    assert '<meta charset="utf-8">' in built
