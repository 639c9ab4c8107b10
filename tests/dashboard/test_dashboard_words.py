"""Words and parts of markup that all pages share: pure functions."""

import math
from datetime import UTC, datetime, timedelta

import pytest

from quantwatch_dashboard import text
from quantwatch_dashboard.charts.axis import close_to
from quantwatch_dashboard.components import episode_page
from quantwatch_dashboard.components.explain import explained, numbers
from quantwatch_dashboard.components.markup import bar, run_link, table, tag
from quantwatch_dashboard.components.words import moment
from quantwatch_dashboard.queries import connection

NOW = datetime(2026, 1, 31, 7, 45, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (text.plural(1, "run"), "1 run"),
        (text.plural(1200, "family", "families"), "1,200 families"),
        (text.more(3, 3), ""),
        (text.more(5, 3, "checks"), "and 2 more checks"),
        (text.share(0.345), "34 %"),
        (text.share(None), "–"),
        (text.or_dash(None), "–"),
        (text.or_dash(math.nan), "NaN"),
        (text.took(NOW, None), "–"),
        (text.took(NOW, NOW + timedelta(seconds=192)), "3 min 12 s"),
        (text.minute(NOW, UTC), "2026-01-31 07:45"),
        (text.run_line("then", "pass", "01J00005KQ2M8", "demo"), "demo · then · pass · …005KQ2M8"),
        (text.digest("ab" * 20), "abababababab…"),
        (text.digest("cdcd"), "cdcd"),
    ],
    ids=str,
)  # fmt: skip
def test_words(said: str, wanted: str) -> None:
    """Catches one thing that is said in two ways."""
    assert said == wanted


def test_every_header_has_a_scope() -> None:
    """Catches columns that a screen reader can't name, numbers above all."""
    shown = table(["Name", *numbers({"KL": "logit_kl", "Size": ""}), tag("th", "x", title="y")], [])

    assert shown.count('<th scope="col"') == 4
    assert shown.count("<th") == 5, "four headers and the head around them"


def test_rows_become_cards_with_their_headers() -> None:
    """Catches a number on a phone that nobody knows the name of."""
    shown = table(["Name", *numbers({"Value": ""})], [["a", tag("td", "<1>")]], cards=("Value",))

    assert 'class="qw-scroll qw-cards"' in shown
    assert '<td data-label="Value">&lt;1&gt;</td>' in shown
    assert "<td>a</td>" in shown


def test_explanations_are_reached_by_keyboard() -> None:
    """Catches a hover card that needs a mouse."""
    assert 'tabindex="0"' in explained("p99", "of all tokens")
    assert 'tabindex="0"' in numbers({"KL": "logit_kl"})[0]


@pytest.mark.parametrize("share", [-1.0, 0.0, 0.5, 7.0, math.inf, math.nan], ids=str)
def test_a_bar_is_never_longer_than_all(share: float) -> None:
    """Catches a bar that leaves its frame."""
    shown = bar(share, "red")
    wide = float(shown.split("width: ")[1].split("%")[0])

    assert 0 <= wide <= 100


@pytest.mark.parametrize(
    ("when", "said"), [(NOW - timedelta(hours=3), "3 h ago"), (NOW + timedelta(days=3), "in 3 d")]
)
def test_a_moment_is_past_or_ahead(when: datetime, said: str) -> None:
    """Catches an instant that is to come and is said to be over."""
    assert f">{said}<" in moment(when, NOW, UTC)
    assert f'datetime="{when.isoformat()}"' in moment(when, NOW, UTC)


def test_no_run_no_link() -> None:
    """Catches a link to a run of the name None."""
    assert run_link(None) == "–"
    assert 'href="run?run=01J"' in run_link("01J")


@pytest.mark.parametrize("scale", [1e-9, 1.0, 2e5, 3e8], ids=str)
@pytest.mark.parametrize("is_log", [True, False], ids=["log", "linear"])
def test_ticks_differ(scale: float, is_log: bool) -> None:
    """Catches 200,000 and 250,000 with one label."""
    _, labels = close_to([scale, 1.6 * scale], is_log=is_log).ticks()

    assert len(set(labels)) == len(labels) > 1


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("quantwatch --database x check run a", "quantwatch --database x check run a --queue"),
        ("quantwatch --database x compare a b", "quantwatch --database x compare a b"),
    ],
)
def test_measuring_again_can_move_the_alert(line: str, wanted: str) -> None:
    """Catches a command after which the alert stays as it is: a check by hand moves none."""
    assert episode_page.repeated(line)[1] == wanted


def test_commands_name_the_database_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a command to copy that speaks of another database than the page."""
    monkeypatch.setenv("QUANTWATCH_DATABASE_URL", "sqlite:///own.db")
    said = connection.addressed("quantwatch check run a")
    assert said.startswith("quantwatch --database sqlite:///")
    assert said.endswith("own.db check run a")
