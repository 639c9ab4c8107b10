"""What an address may name: anything, and what is not there is told; no name means "all"."""

import re
from typing import Any

import pytest
from tests.dashboard.pages import html, open_page

from quantwatch.config.base import NAME_PATTERN
from quantwatch_dashboard.components import address, markup
from quantwatch_dashboard.components.tokens import top_caption
from quantwatch_dashboard.logic import standings
from quantwatch_dashboard.text import ANY
from quantwatch_dashboard.views import check_runs

BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


@pytest.mark.parametrize("word", ["any", "all", "none", "everybody", "newest"])
def test_no_name_means_everything(word: str) -> None:
    """Catches a check, tag, operator or person that can't be chosen since its name is taken."""
    assert re.match(NAME_PATTERN, word)
    assert not re.match(NAME_PATTERN, ANY)
    assert {standings.Wanted().verdict, standings.Wanted().state, standings.Wanted().tag} == {ANY}
    assert address.given(word) == word
    assert address.given(ANY) is None


def test_a_check_named_like_a_filter(furnished: str) -> None:
    """Catches `any` that stands for all checks while one is called so."""
    page = open_page("alerts", check="any")

    assert "“any” is not among these; shown: all checks" in html(page)


@pytest.mark.parametrize(
    ("name", "query"),
    [
        pytest.param("alerts", {"check": "ghost"}, id="check of alerts"),
        pytest.param("alerts", {"show": "deliveries", "endpoint": "ghost"}, id="endpoint"),
        pytest.param("alerts", {"severity": "ghost"}, id="severity"),
        pytest.param("overview", {"state": "ghost"}, id="state"),
        pytest.param("overview", {"sort": "ghost"}, id="order"),
        pytest.param("check", {"check": "demo", "candidate": "ghost"}, id="candidate"),
    ],
)
def test_what_is_not_there_is_told(furnished: str, name: str, query: dict[str, str]) -> None:
    """Catches everybody's alerts under an address that names one check."""
    page = open_page(name, **query)
    (key,) = [key for key, value in query.items() if value == "ghost"]

    for _ in range(2):
        assert "“ghost” is not among these" in html(page)
        assert page.query_params[key] in ("ghost", ["ghost"])
        page.run()
    box = page.selectbox(key=f"filter-{key}")
    box.select(box.options[-1] if key == "sort" else str(_other(box))).run()
    assert not page.exception
    assert "is not among these" not in html(page)


def _other(box: Any) -> str:
    """Return the second value that a box offers; its options are told as they are shown."""
    values = {"all checks": "*", "any": "*", "all endpoints": "*", "all severities": "*"}
    shown = str(box.options[1])
    words = {"alerts fire": "alerts", "◐ critical": "critical"}
    return values.get(shown, words.get(shown, shown))


def test_a_default_that_moves_is_in_the_address(demo_url: str) -> None:
    """Catches a link that shows another candidate tomorrow, when that one leads."""
    page = open_page("check", check="demo")
    kept = {key: page.query_params[key] for key in ("metric", "place", "candidate")}

    assert {key: value[0] if isinstance(value, list) else value for key, value in kept.items()} == {
        "metric": "logit_kl", "place": "model", "candidate": page.selectbox(key="filter-candidate").value,
    }  # fmt: skip
    assert "statistic" not in page.query_params
    assert "range" not in page.query_params


@pytest.mark.parametrize(
    "name", ["overview", "run", "check", "compare", "alerts", "kernels", "operations"]
)
@pytest.mark.parametrize("key", ["run", "check", "run_a", "subject", "batch", "episode", "q", "\0"])
def test_a_character_that_no_name_has(demo_url: str, name: str, key: str) -> None:
    """Catches "the database can't be read" for an address with a NUL, as PostgreSQL takes it."""
    shown = html(open_page(name, **{key: "a\0b"}))

    assert "That is not in this database" in shown
    assert "that nothing is called" in shown


@pytest.mark.parametrize("control", list(BIDI), ids=ascii)
def test_nothing_turns_round_a_line(control: str) -> None:
    """Catches a reason, a comment or a prompt that reorders the line in which it stands."""
    shown = markup.tag("p", f"a{control}b", title=f"c{control}d")

    assert control not in shown
    assert shown.count(f"\\u{ord(control):04x}") == 2


@pytest.mark.parametrize(
    "kept", ["שלום", "العربية", "क्\u200dष", "می\u200cخواهم", "a\u00a0b", "👩\u200d💻"]
)
def test_languages_stay_as_they_are_written(kept: str) -> None:
    """Catches marks of a script that are taken for controls."""
    assert kept in markup.tag("p", kept)


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        ((0, 20, 45, 399), "1–20 of 45 runs"),
        ((0, 20, 45, 400), "1–20 of 45 runs among the newest 400"),
        ((0, 20, 400, 400), "1–20 of 400 runs among the newest 400"),
        ((0, 0, 0, 400), "No run of that kind among the newest 400."),
        ((0, 0, 0, 7), "No run of that kind."),
    ],
)
def test_runs_are_counted_among_those_looked_through(
    shown: tuple[int, int, int, int], words: str
) -> None:
    """Catches "5 runs with a change" of a check that has had hundreds before these."""
    assert check_runs._counted(*shown) == words


def test_shares_are_told_to_be_of_the_listed_tokens() -> None:
    """Catches a share of ten tokens that is read as a probability."""
    from tests.dashboard.test_dashboard_tokens import one_row

    assert "the probability is at most that" in top_caption(one_row("a", "b"), 0)
