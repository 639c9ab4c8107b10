"""What is taken along: every digit, nothing that a spreadsheet runs; both models' top tokens."""

import csv
import io
import math
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from quantwatch.domain import RunResult
from quantwatch_dashboard.logic import exports
from quantwatch_dashboard.logic.grid import TokenGrid, TokenPlace
from quantwatch_dashboard.logic.summaries import WorstToken
from quantwatch_dashboard.logic.toplogits import top_rows


def read(payload: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(payload.decode())))


@pytest.mark.parametrize(
    "cell",
    ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "  =cmd|' /C calc'!A0", "\n=1", "＝1+1",
     "＋1", "－1", "＠A1", "\ufeff=1", "\u3000=1", "\xa0=1", "\u200b=1", "\0=1", " \v\f@A1"],
    ids=ascii,
)  # fmt: skip
def test_text_is_no_formula(cell: str) -> None:
    """Catches a prompt that a spreadsheet runs."""
    assert exports.safe(cell) == f"'{cell}"


@pytest.mark.parametrize(
    ("cell", "kept"),
    [(-0.25, "-0.25"), (1 / 3, "0.3333333333333333"), (math.nan, "nan"), (-math.inf, "-inf"),
     ("plain", "plain"), ("a=b", "a=b"), (7, 7), (None, None)],
    ids=repr,
)  # fmt: skip
def test_numbers_stay_numbers(cell: object, kept: object) -> None:
    """Catches a minus that makes text of a number, and digits that are lost."""
    assert exports.safe(cell) == kept


def test_measurements_are_complete_and_exact(planted: RunResult) -> None:
    """Catches a metric, scope or candidate that is left out, and rounded numbers."""
    odd = replace(
        planted, candidates=(replace(planted.candidates[0], name="=evil"), *planted.candidates[1:])
    )
    rows = read(exports.measurements_csv(odd))

    assert len(rows) == sum(len(c.measurements) for c in planted.candidates)
    assert rows[0]["candidate"] == "'=evil"
    first = planted.candidates[0].measurements[0]
    assert float(rows[0]["mean"]) == first.mean
    assert (rows[0]["metric"], rows[0]["unit"], float(rows[0]["noise_floor"])) == (
        "logit_kl",
        "nats",
        3e-9,
    )


def test_matrix_has_a_row_per_token() -> None:
    """Catches 30,000 columns, which no spreadsheet opens, and unmeasured cells that are 0."""
    places = (TokenPlace(3, 7, 11, "=x"), TokenPlace(3, 8, 12, None))
    values = np.array([[0.1, math.nan], [math.inf, 0.0]])
    grid = TokenGrid(
        ("layers.0", "layers.1"), places, values, np.array([[False] * 2, [False, True]])
    )
    rows = read(exports.matrix_csv([grid]))

    assert rows[0] == {"prompt": "3", "position": "7", "token_id": "11", "token": "'=x",
                       "layers.0": "0.1", "layers.1": "inf"}  # fmt: skip
    assert (rows[1]["token"], rows[1]["layers.0"], rows[1]["layers.1"]) == ("", "nan", "")


def wide(tokens: int, prompt: int = 0, scopes: int = 10) -> TokenGrid:
    places = tuple(TokenPlace(prompt, 5 + j, j, "x") for j in range(tokens))
    values = np.arange(scopes * tokens, dtype=np.float64).reshape(scopes, tokens)
    names = tuple(f"layers.{i}" for i in range(scopes))
    return TokenGrid(names, places, values, np.zeros(values.shape, bool))


def test_matrix_of_many_tokens_is_whole() -> None:
    """Catches a token that is lost, or there twice, between two slices."""
    rows = read(exports.matrix_csv([wide(1_000), wide(300, prompt=1)]))

    assert [(int(row["prompt"]), int(row["position"])) for row in rows] == [
        *((0, 5 + j) for j in range(1_000)), *((1, 5 + j) for j in range(300))
    ]  # fmt: skip
    assert [float(row["layers.9"]) for row in rows[:1_000]] == list(range(9_000, 10_000))


@pytest.mark.parametrize(
    ("position", "first"),
    [pytest.param(5, 5, id="start"), pytest.param(500, 450, id="middle"),
     pytest.param(1_004, 905, id="end")],
)  # fmt: skip
def test_a_file_is_capped_around_the_token(
    monkeypatch: pytest.MonkeyPatch, position: int, first: int
) -> None:
    """Catches a file of gigabytes, and one without the token that was chosen."""
    monkeypatch.setattr(exports, "MOST_CELLS", 1_000)
    part = exports.around(wide(1_000), position)

    assert (part.places[0].position, len(part.places)) == (first, 100)
    assert exports.around(part, position) is part


def test_a_file_of_all_prompts_has_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a file without an end, half a prompt, and prompts that are read for nothing."""
    monkeypatch.setattr(exports, "MOST_CELLS", 1_000)
    read_ones: list[int] = []

    def grids() -> Iterator[TokenGrid]:
        for prompt in range(9):
            read_ones.append(prompt)
            yield wide(40, prompt)

    assert [row["prompt"] for row in read(exports.matrix_csv(grids()))] == ["0"] * 40 + ["1"] * 40
    assert read_ones == [0, 1, 2]
    assert exports.matrix_csv([]) == b""


@pytest.mark.slow
def test_a_large_file_takes_little_more_than_itself() -> None:
    """Catches all cells as objects at a time: ten times the matrix, with the lock held."""
    grid = wide(20_000, scopes=20)
    tracemalloc.start()
    payload = exports.matrix_csv([grid])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 3 * len(payload)


def test_a_separator_of_other_countries_begins_no_cell() -> None:
    """Catches a token that is two cells, the second a formula, where lists are parted by `;`."""
    tokens = [WorstToken(TokenPlace(0, 1, 2, piece), 0.5) for piece in ("x;=1+1", "x\t=1", 'x";=1')]
    lines = exports.worst_csv(tokens).decode().splitlines()

    assert lines[1:] == [
        '"0","1","2","x;=1+1","0.5"',
        '"0","1","2","x\t=1","0.5"',
        '"0","1","2","x"";=1","0.5"',
    ]


def test_half_a_character_is_written() -> None:
    """Catches a token that is no UTF-8, by which the whole download fails."""
    token = WorstToken(TokenPlace(0, 1, 2, "\ud83d"), 0.5)

    assert read(exports.worst_csv([token]))[0]["token"] == "?"


def test_top_rows_know_who_moved() -> None:
    """Catches ranks counted the wrong way, and shares that don't add up."""
    ids, own = [5.0, 6.0, 7.0], [6.0, 5.0, 9.0]
    top = np.array([ids, [3.0, 2.0, 1.0], own, [3.5, 2.5, 0.0], [2.5, 3.5, -1.0]])
    rows = top_rows(top)

    assert [row.rank_in_candidate for row in rows] == [2, 1, None]
    assert [row.rank_in_reference for row in rows] == [2, 1, None]
    assert [row.difference for row in rows] == [-0.5, 1.5, -2.0]
    assert sum(row.reference_share for row in rows) == pytest.approx(1)
    assert rows[0].candidate_share == pytest.approx(math.e**3.5 / (math.e**3.5 + math.e**2.5 + 1))
    words = ["a"] * 6 + ["+b"]
    assert read(exports.top_csv(rows, words))[1]["reference_token"] == "'+b"


def test_top_rows_of_nan_are_nan() -> None:
    """Catches an exception, or a share of 0, where the model returns no number."""
    top = np.array([[1.0, 2.0], [math.nan, 1.0], [1.0, math.nan], [math.nan, math.nan], [0.0, 0.0]])
    first, second = top_rows(top)

    assert math.isnan(first.reference_share)
    assert second.candidate_id is None


def test_file_names_are_plain() -> None:
    """Catches a candidate's name that leaves the folder, and one that is too long to be a name."""
    assert exports.file_name("../../etc/<b>.csv") == "..-..-etc--b-.csv"
    assert len(exports.file_name("n" * 300 + ".csv")) == 120
    assert exports.file_name("n" * 300 + ".csv").endswith(".csv")
