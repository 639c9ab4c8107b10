"""The token view: every token is seen, named, and never markup."""

import math

import numpy as np
import pytest

from quantwatch_dashboard.components.tokens import prompt_text, top_caption, top_tables
from quantwatch_dashboard.logic.grid import TokenGrid, TokenPlace

WORDS = (" the", "\n", "", "<b>", "\u202e")


def one_row(*pieces: str | None, values: list[float] | None = None) -> TokenGrid:
    places = tuple(TokenPlace(0, j, 70 + j, piece) for j, piece in enumerate(pieces))
    numbers = np.array([values or [1.0] * len(pieces)])
    return TokenGrid(("model",), places, numbers, np.zeros(numbers.shape, bool))


def top_of(*ids: float) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Both models rank the same ids, so that a row shows each once per model."""
    logits = np.linspace(9, 1, len(ids))
    return np.array([ids, logits, ids, logits, logits])


@pytest.mark.parametrize(
    ("token_id", "shown"),
    [
        pytest.param(0, "␣the", id="space"),
        pytest.param(1, "↵", id="newline"),
        pytest.param(2, "·", id="empty"),
        pytest.param(3, "&lt;b&gt;", id="markup"),
        pytest.param(4, "\\u202e", id="right-to-left override"),
    ],
)
def test_first_choices_are_named(token_id: int, shown: str) -> None:
    """Catches white space and empty tokens that nobody sees, and a vocabulary's text as markup."""
    table = top_tables(top_of(token_id), WORDS)

    assert table.count(f">{shown}</span>") == 2
    assert table.count(f">id {token_id}</span>") == 2


@pytest.mark.parametrize("words", [WORDS, ()], ids=["padding of the head", "no text is kept"])
def test_ids_without_text_are_numbers(words: tuple[str, ...]) -> None:
    """Catches an exception, or another token's text, for an id past the vocabulary's end."""
    table = top_tables(top_of(5, math.nan), words)

    assert table.count(">id 5</span>") == 2
    assert table.count("<td>–</td>") == 2


def test_prompt_shows_tokens_that_have_no_ink() -> None:
    """Catches errors at a line's end or within a split character that have no place to be red."""
    shown = prompt_text(one_row("a", "\n", "", "数", "b\n\nc"), at=2)

    assert ">a</span>" in shown
    assert "><i>↵</i>\n</span>" in shown
    assert "><i>·</i></span>" in shown
    assert ">b<i>↵</i>\n<i>↵</i>\nc</span>" in shown


def test_prompt_without_text_shows_ids() -> None:
    """Catches an empty box where the text must not be kept."""
    assert "[id 71]" in prompt_text(one_row(None, None), at=0)


def test_prompt_is_never_markup() -> None:
    """Catches a token that is an element, or that reorders the rest of the page."""
    shown = prompt_text(one_row("<script>", "\u202e", '" onmouseover="x'), at=0)

    assert "<script" not in shown
    assert "\u202e" not in shown
    assert 'onmouseover="' not in shown.replace("&quot;", "")


def test_caption_says_how_the_prompt_goes_on() -> None:
    """Catches the token itself as its own successor, and an index past the prompt's end."""
    grid = one_row("a", " b")

    assert "After token 0 “a”. The prompt goes on with “␣b”." in top_caption(grid, 0)
    assert "goes on" not in top_caption(grid, 1)


def test_heat_ends_two_decades_below_the_largest() -> None:
    """Catches a scale on which one bad token makes all the others white, or none."""
    shown = prompt_text(one_row("a", "b", "c", "d", values=[1.0, 0.1, 0.01, math.nan]), at=0)

    assert [f"--heat: {heat}%" in shown for heat in (100, 50, 0)] == [True] * 3
    assert 'class="qw-not-finite"' in shown
