"""Figures at the top of a page: name, value, and what is to be known of it."""

from collections.abc import Iterable

from quantwatch_dashboard.components.markup import Html, tag


def tiles(found: Iterable[Html]) -> Html:
    """Return tiles side by side."""
    return tag("div", *found, class_="qw-tiles")


def tile(name: object, value: str, *lines: str, hot: bool = False) -> Html:
    """Return one figure; empty lines are left out."""
    below = (tag("div", line, class_="qw-tile-line") for line in lines if line)
    return tag(
        "div",
        tag("div", name, class_="qw-tile-name"),
        tag("div", value, class_="qw-tile-value qw-hot" if hot else "qw-tile-value"),
        *below,
        class_="qw-tile",
    )
