"""The cache that is bounded by bytes, and what of a run's matrices is read for what."""

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from tests.dashboard.invented import DEMO, Spec

from quantwatch.domain import RunResult
from quantwatch_dashboard.queries import tokens
from quantwatch_dashboard.queries.bounded import Pool, pooled

Save = Callable[[Spec], RunResult]


class Counting:
    """A function that returns its argument and knows how often it was called."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, number: int) -> int:
        self.calls.append(number)
        return number


@pytest.mark.parametrize(
    ("asked", "read"),
    [
        pytest.param([40, 40, 40], [40], id="kept"),
        pytest.param([40, 50, 40], [40, 50], id="both fit"),
        pytest.param([40, 50, 30, 40], [40, 50, 30, 40], id="the oldest goes"),
        pytest.param([40, 50, 40, 30, 40, 50], [40, 50, 30, 50], id="the one used last stays"),
        pytest.param([101, 101], [101, 101], id="larger than all"),
        pytest.param([40, 101, 40], [40, 101], id="a large one pushes nothing out"),
        pytest.param([0, 0], [0], id="nothing is kept, too"),
    ],
)
def test_a_pool_is_bounded_by_bytes(asked: list[int], read: list[int]) -> None:
    """Catches a bound by number, and the value in use that is thrown out."""
    pool, found = Pool(100, 60), Counting()
    for number in asked:
        assert pool.get(number, partial(found, number), lambda value: value) == number
        assert pool.num_bytes <= 100
    assert found.calls == read


def test_a_pool_forgets_by_time() -> None:
    """Catches a value that is told for ever, and memory that is held until others come."""
    now, found = [0.0], Counting()
    pool = Pool(100, 60, lambda: now[0])
    pool.get(7, lambda: found(7), lambda value: value)
    now[0] = 59
    pool.get(7, lambda: found(7), lambda value: value)
    now[0] = 61
    pool.get(8, lambda: found(8), lambda value: value)
    assert pool.num_bytes == 8
    pool.get(7, lambda: found(7), lambda value: value)
    assert found.calls == [7, 8, 7]


def test_one_of_many_readers_reads() -> None:
    """Catches twenty tabs that each decode the same matrix at once."""
    pool, found, begun = Pool(100, 60), Counting(), threading.Barrier(8)

    def ask() -> None:
        begun.wait()
        pool.get("same", lambda: found(7), lambda value: value)

    readers = [threading.Thread(target=ask) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert found.calls == [7]


def test_what_fails_is_asked_again() -> None:
    """Catches an error that is kept, and a lock that is held after it."""
    pool = Pool(100, 60)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            pool.get("bad", lambda: 1 // 0, lambda value: value)


def test_functions_of_a_pool_are_apart_and_cleared() -> None:
    """Catches the value of another function with the same arguments, and one kept after clear."""
    pool = Pool(100, 60)
    found = Counting()
    same = pooled(lambda: pool, lambda value: value)(found.__call__)

    @pooled(lambda: pool, lambda value: value)
    def doubled(number: int) -> int:
        return 2 * number

    assert (same(3), doubled(3), doubled(number=4)) == (3, 6, 8)
    same(3)
    doubled.clear()
    same(3)
    assert found.calls == [3, 3]


def test_matrices_share_one_bound(save_run: Save, empty_url: str) -> None:
    """Catches a matrix that is kept outside of the pool, or whose size isn't told."""
    run = save_run(Spec(candidates=DEMO[:1]))
    tokens.matrices().clear()
    key = (run.run_id, "bf16", "rel_error", 0)
    grid = tokens.grid(empty_url, key, run.suite_hash)
    assert grid is not None
    assert tokens.matrices().num_bytes >= grid.values.nbytes + grid.missing.nbytes
    assert tokens.grid(empty_url, key, run.suite_hash) is grid
    before = tokens.matrices().num_bytes
    tokens.measured_tokens(empty_url, *key[:3], run.suite_hash)
    assert tokens.matrices().num_bytes > before


def test_one_token_is_the_column_of_the_matrix(save_run: Save, empty_url: str) -> None:
    """Catches another token's values, and unmeasured places told as NaN."""
    run = save_run(Spec(candidates=DEMO[:1]))
    for metric in ("rel_error", "lens_kl"):
        key = (run.run_id, "bf16", metric, 2)
        grid = tokens.grid(empty_url, key, run.suite_hash)
        assert grid is not None
        for position in (0, 17, 63):
            j = grid.column((2, position))
            assert j is not None
            found = tokens.at_token(empty_url, key, run.suite_hash, position)
            assert list(found) == list(grid.scopes)
            shown = np.array([np.nan if v is None else v for v in found.values()])
            np.testing.assert_array_equal(
                shown, np.where(grid.missing[:, j], np.nan, grid.values[:, j])
            )
    assert tokens.at_token(empty_url, (*key[:3], 2), run.suite_hash, 64) == {}
    assert tokens.at_token(empty_url, (run.run_id, "bf16", "nothing", 2), run.suite_hash, 1) == {}
