"""Markup that can't be injected: whatever isn't `Html` is escaped when it is put into a tag.

Streamlit's Markdown interprets `$`, `:red[…]`, links and images, so no text from the database ever
goes through it; it becomes a child of a tag here, or a cell of a data frame.
"""

import math
import re
from collections.abc import Collection, Iterable
from urllib.parse import urlencode

from quantwatch_dashboard import text


class Html(str):
    """Markup that was built by this module."""

    __slots__ = ()


def tag(name: str, *children: object, **attributes: object) -> Html:
    """Return an element; children that aren't `Html` are escaped. `class_` stands for class."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text.escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>{join(children)}</{name}>")


def image(source: str, alt: str, class_: str) -> Html:
    """Return an image of our own making (a data URI)."""
    return Html(f'<img class="{class_}" src="{text.escape(source)}" alt="{text.escape(alt)}">')


def join(children: Iterable[object]) -> Html:
    """Return children one after the other, escaped unless they are markup."""
    return Html("".join(c if isinstance(c, Html) else text.escape(c) for c in children))


def numbers(*names: object) -> list[Html]:
    """Return headers of columns of numbers."""
    return [tag("th", name, class_="qw-n") for name in names]


def table(
    headers: Iterable[object],
    rows: Iterable[Iterable[object]],
    class_: str = "",
    cards: Collection[str] = (),
) -> Html:
    """Return a table that scrolls sideways when it is wider than the page.

    With `cards` each row is a card on a narrow page; these headers are repeated in it.
    """
    heads = [_cell("th", header, scope="col") for header in headers]
    labels = [name if (name := _words(head)) in cards else None for head in heads]
    body = (
        tag("tr", *(_cell("td", c, data_label=_at(labels, i)) for i, c in enumerate(row)))
        for row in rows
    )
    inner = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *body))
    kinds = ("qw-scroll", class_, "qw-cards" if cards else "")
    return tag("div", inner, class_=" ".join(filter(None, kinds)))


def pairs(shown: Iterable[tuple[str, object]], class_: str | None = None) -> Html:
    """Return names and values in two columns."""
    parts = (part for key, value in shown for part in (tag("dt", key), tag("dd", value)))
    return tag("dl", *parts, class_=class_)


def bar(share: float, color: str, title: str | None = None) -> Html:
    """Return a share as a bar; more than all of it is no longer than all, NaN is nothing."""
    wide = 0.0 if math.isnan(share) else 100 * min(1.0, max(0.0, share))
    filled = tag("b", style=f"width: {wide:.2f}%; --series: {color}")
    return tag("span", filled, class_="qw-bar", title=title)


def soft(words: object, title: str | None = None) -> Html:
    """Return words that stand back."""
    return tag("span", words, class_="qw-soft", title=title)


def sub(*words: object, title: str | None = None) -> Html:
    """Return a smaller line below."""
    return tag("span", *words, class_="qw-sub", title=title)


def link(label: object, page: str, **query: str) -> Html:
    """Return a link to a page of this app with its query parameters."""
    return tag("a", label, href=f"{page}?{urlencode(query)}" if query else page)


def run_link(run_id: str | None) -> Html:
    """Return a link to a run by the end of its id, a dash without one."""
    return link(text.short_id(run_id), "run", run=run_id) if run_id else Html(text.NONE)


def _cell(name: str, child: object, **attributes: str | None) -> Html:
    """Return a cell; one that is a cell already only gets the attributes."""
    made = tag(name, **attributes).removesuffix(f"</{name}>").removesuffix(">")
    if isinstance(child, Html) and re.match(f"<{name}[ >]", child):
        return Html(made + child[len(name) + 1 :])
    return Html(f"{made}>{join([child])}</{name}>")


def _words(cell: Html) -> str:
    return re.sub("<[^>]*>", "", cell).strip()


def _at(labels: list[str | None], place: int) -> str | None:
    return labels[place] if place < len(labels) else None
