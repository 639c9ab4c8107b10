"""Nothing from the database becomes markup."""

import pytest

from quantwatch_dashboard.components.markup import Html, link, table, tag

HOSTILE = [
    "<script>alert(1)</script>",
    '" onmouseover="x',
    "<td>",
    "&amp;",
    "<img src=x onerror=alert(1)>",
]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_text_is_escaped_everywhere(hostile: str) -> None:
    """Catches a name or token that becomes an element, an attribute or a table cell."""
    for made in (
        tag("p", hostile),
        tag("p", "x", title=hostile),
        table([hostile], [[hostile]]),
        link(hostile, "run", run=hostile),
    ):
        inside = made.replace("&lt;", "").replace("&quot;", "").replace("&gt;", "")
        assert "<script" not in inside
        assert "<img" not in inside
        assert 'onmouseover="' not in inside


def test_markup_of_our_own_stays() -> None:
    """Catches double escaping."""
    assert tag("p", tag("b", "a & b")) == "<p><b>a &amp; b</b></p>"
    assert isinstance(tag("p"), Html)
