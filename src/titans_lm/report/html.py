"""HTML that cannot forget to escape: text becomes markup only by way of `tag`, and a page needs nothing but itself."""

import html
from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import sha256
from importlib.resources import files
from string import Template

STYLE = (files("titans_lm.report") / "style.css").read_text(encoding="utf-8")
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
    return Markup("".join(escaped(part) for part in parts))


def filled(template: str, **parts: object) -> Markup:
    """Put parts into the $names of HTML of ours; text is escaped like everywhere."""
    return Markup(Template(template).substitute({name: escaped(part) for name, part in parts.items()}))


def paragraphs(lines: Iterable[object]) -> Markup:
    return join(tag("p", line) for line in lines)


def table(head: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: bool = True) -> Markup:
    """Lay out rows below a head; all columns but the first are aligned as numbers unless told otherwise."""
    kinds = ["text", *["number" if numbers else "text"] * (len(head) - 1)]
    cells = [tag("tr", *(tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True))) for row in rows]
    top = tag("tr", *(tag("th", cell, class_=kind) for cell, kind in zip(head, kinds, strict=True)))
    return tag("div", tag("table", tag("thead", top), tag("tbody", *cells)), class_="scroll")


def figure(picture: Markup, caption: object) -> Markup:
    return tag("figure", tag("div", picture, class_="scroll"), tag("figcaption", caption))


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
