"""The card that a page about one thing begins with: how it stands, and its facts."""

from collections.abc import Iterable, Sequence

from quantwatch_dashboard.components.markup import Html, pairs, tag


def card(
    head: Sequence[object],
    body: Iterable[object],
    facts: Iterable[tuple[str, object]],
    tone: str,
    picture: object = "",
) -> Html:
    """Return a card in the color of `tone`: badges, sentences, a picture beside them, facts."""
    left = tag("div", tag("div", *head), *body)
    return tag("div", left, picture, pairs(facts), class_=f"qw-hero {tone}")
