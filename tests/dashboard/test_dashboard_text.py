"""Numbers, times and tokens as people read them."""

import math
from datetime import UTC, datetime, timedelta

import pytest

from quantwatch_dashboard import text

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        pytest.param(None, "not measured", id="none"),
        pytest.param(0.0, "0", id="zero"),
        pytest.param(math.nan, "NaN", id="nan"),
        pytest.param(math.inf, "+∞", id="posinf"),
        pytest.param(-math.inf, "−∞", id="neginf"),
        pytest.param(0.012345, "0.0123", id="small"),
        pytest.param(1.2345e-7, "1.23e−7", id="tiny"),
        pytest.param(-0.5, "−0.500", id="negative"),
        pytest.param(1234.5, "1234", id="thousands"),
        pytest.param(123456.0, "1.23e5", id="large"),
    ],
)
def test_number(value: float | None, shown: str) -> None:
    """Catches a NaN or a missing value that is printed as 0, and digits that mean nothing."""
    assert text.number(value) == shown


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        pytest.param(1.0, "100 %", id="exactly one"),
        pytest.param(0.999999, "> 99.99 %", id="almost one"),
        pytest.param(0.9141, "91.41 %", id="usual"),
        pytest.param(math.nan, "NaN", id="nan"),
    ],
)
def test_percent(share: float, shown: str) -> None:
    """Catches an agreement that isn't perfect but is rounded to 100 %."""
    assert text.percent(share) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (3, "just now"),
        (70, "1 min ago"),
        (7200, "2 h ago"),
        (90_000, "25 h ago"),
        (864_000, "10 d ago"),
    ],
    ids=str,
)
def test_age(seconds: int, shown: str) -> None:
    """Catches ages in the wrong unit."""
    assert text.age(NOW - timedelta(seconds=seconds), NOW) == shown


@pytest.mark.parametrize(
    ("piece", "shown"),
    [
        (" the", "␣the"),
        ("\n", "↵"),
        ("", "·"),
        ("\u202e", "\\u202e"),
        (None, "id 7"),
        ("a" * 40, "a" * 13 + "…"),
    ],
    ids=["space", "newline", "empty", "right-to-left override", "not stored", "long"],
)
def test_token(piece: str | None, shown: str) -> None:
    """Catches invisible tokens, control characters that reorder the page, and labels without end."""
    assert text.token(piece, 7) == shown


@pytest.mark.parametrize(
    ("num_bytes", "shown"), [(None, "–"), (999, "999 B"), (134_500_000, "134 MB")]
)
def test_size(num_bytes: int | None, shown: str) -> None:
    """Catches binary units under decimal names."""
    assert text.size(num_bytes) == shown


@pytest.mark.parametrize(
    ("mean", "error", "shown"),
    [
        pytest.param(0.001371, 0.000111, "0.00137 ± 0.00011", id="below a thousandth"),
        pytest.param(0.523, 0.0321, "0.523 ± 0.032", id="usual"),
        pytest.param(12.34, 3.21, "12.3 ± 3.2", id="above one"),
        pytest.param(1.23e-7, 4.5e-9, "1.23e−7 ± 4.5e−9", id="tiny"),
        pytest.param(0.5, 1.2e-9, "0.500 ± 1.2e−9", id="next to nothing"),
        pytest.param(0.5, math.nan, "0.500 ± NaN", id="nan"),
        pytest.param(None, 0.1, "not measured", id="no mean"),
    ],
)
def test_plus_minus(mean: float | None, error: float, shown: str) -> None:
    """Catches a mean and its error in two notations, which nobody can compare at a glance."""
    assert text.plus_minus(mean, error) == shown


def test_readable_keeps_text_and_shows_controls() -> None:
    """Catches a prompt whose override characters reorder the page, and white space that is lost."""
    assert text.readable("a\u202eb\n c\u3000数\x00") == "a\\u202eb\n c\u3000数\\u0000"
