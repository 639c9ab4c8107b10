"""Markup that can't be injected: whatever isn't `Html` is escaped when it is put into a tag.

Streamlit's Markdown interprets `$`, `:red[…]`, links and images, so no text from the database ever
goes through it; it becomes a child of a tag here, or a cell of a data frame.
"""

from collections.abc import Iterable
from typing import TypeGuard

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


def table(headers: Iterable[object], rows: Iterable[Iterable[object]], class_: str = "") -> Html:
    """Return a table that scrolls sideways when it is wider than the page."""
    head = tag("tr", *(_scoped(h) if _is_cell(h) else tag("th", h, scope="col") for h in headers))
    body = (tag("tr", *(c if _is_cell(c) else tag("td", c) for c in row)) for row in rows)
    inner = tag("table", tag("thead", head), tag("tbody", *body))
    return tag("div", inner, class_=f"qw-scroll {class_}".strip())


def _scoped(header: Html) -> Html:
    """Return a header that says whose it is: a screen reader names the column with each cell."""
    scoped = " scope=" in header.partition(">")[0]
    return header if scoped else Html(header.replace("<th", '<th scope="col"', 1))


def link(label: object, page: str, **query: str) -> Html:
    """Return a link to a page of this app with its query parameters."""
    from urllib.parse import urlencode

    return tag("a", label, href=f"{page}?{urlencode(query)}" if query else page)


def _is_cell(child: object) -> TypeGuard[Html]:
    return isinstance(child, Html) and child.startswith(("<td", "<th"))
