"""HTML that cannot forget to escape: text becomes markup only by way of `tag`, and a page needs nothing but itself."""

import html
from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import sha256

VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})


class Markup(str):
    """Text that is HTML already. Only what this package builds itself may be one."""

    __slots__ = ()


def escaped(content: object) -> Markup:
    """Turn anything into HTML: markup as it is, all else as text."""
    return content if isinstance(content, Markup) else Markup(html.escape(str(content), quote=True))


def tag(name: str, /, *content: object, **attributes: object) -> Markup:
    """Build an element; text and attribute values are escaped, `class_` is the attribute class, None is left out."""
    pairs = [
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    ]
    start = f"<{name}{''.join(pairs)}>"
    return Markup(start if name in VOID else f"{start}{join(content)}</{name}>")


def join(parts: Iterable[object]) -> Markup:
    """Put pieces next to each other."""
    return Markup("".join(escaped(part) for part in parts))


def paragraphs(lines: Iterable[object]) -> Markup:
    return join(tag("p", line) for line in lines)


def table(head: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: bool = True) -> Markup:
    """Lay out rows below a head; all columns but the first are aligned as numbers unless told otherwise."""
    kinds = ["text", *["number" if numbers else "text"] * (len(head) - 1)]
    cells = [tag("tr", *(tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True))) for row in rows]
    top = tag("tr", *(tag("th", cell, class_=kind) for cell, kind in zip(head, kinds, strict=True)))
    return tag("div", tag("table", tag("thead", top), tag("tbody", *cells)), class_="scroll")


def figure(picture: Markup, caption: object) -> Markup:
    return tag("figure", picture, tag("figcaption", caption))


def section(title: object, *content: object, id_: str | None = None) -> Markup:
    return tag("section", tag("h2", title), *content, id_=id_)


def page(title: str, *content: object, style: str = "", script: str = "") -> str:
    """Build a whole page. `style` and `script` are ours, never anything that was read.

    A page with a script carries a policy that lets this script run, this style apply, and nothing be fetched.
    """
    style = STYLE + style
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        _policy(style, script) if script else "",
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    body = tag("body", tag("main", *content), tag("script", Markup(script)) if script else "")
    return "<!DOCTYPE html>\n" + tag("html", head, body, lang="en") + "\n"


def _policy(style: str, script: str) -> Markup:
    """Refuse all but what is named here; the empty icon keeps browsers from asking a server for one."""
    named = {"style-src": style, "script-src": script}
    allowed = [f"{what} 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for what, text in named.items()]
    rules = "; ".join(["default-src 'none'", "base-uri 'none'", "form-action 'none'", "img-src data:", *allowed])
    return join(
        [tag("meta", http_equiv="Content-Security-Policy", content=rules), tag("link", rel="icon", href="data:,")]
    )


STYLE = """
:root { --ink: #1b1f27; --soft: #5b6472; --line: #e3e6eb; --paper: #fff; --ground: #f5f6f8; --accent: #3451c6; }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 3rem 1.25rem 4rem; }
header h1 { font-size: 2rem; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 .5rem; }
header p { color: var(--soft); font-size: 1.1rem; max-width: 46rem; margin: 0; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 12px; padding: 1.75rem 2rem;
  margin-top: 1.5rem; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 0 0 .75rem; letter-spacing: -.01em; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p { margin: 0 0 .9rem; max-width: 48rem; }
figure { margin: 1.25rem 0 0; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: .875rem; line-height: 1.5; margin-top: .5rem; max-width: 48rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .925rem; }
th { font-weight: 600; color: var(--soft); }
th, td { text-align: left; padding: .45rem 1rem .45rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
pre, code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { font-size: .8125rem; line-height: 1.6; white-space: pre-wrap; overflow-wrap: anywhere; background: var(--ground);
  border-radius: 8px; padding: 1rem 1.25rem; margin: .75rem 0; }
details { margin-top: .5rem; }
summary { cursor: pointer; color: var(--accent); }
@media (max-width: 40rem) { section { padding: 1.25rem; } main { padding-top: 1.5rem; } }
@media print { body { background: none; } section { break-inside: avoid; } }
"""
