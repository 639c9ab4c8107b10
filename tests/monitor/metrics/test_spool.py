"""What waits in the spool comes back as it was, and hardly anything of it stays in memory."""

import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quantwatch.domain import MODEL, Observation, Prompt, Suite, TokenMatrix
from quantwatch.metrics.aggregate import Aggregator
from quantwatch.metrics.spool import Spool

_PIECE = 64
_NUM_METRICS = 2
"""Of the pieces below: one at every position, one at some."""


@pytest.mark.parametrize("rest", [(), (3,)], ids=["matrix", "three axes"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64], ids=str)
def test_parts_come_back_as_one(tmp_path: Path, rest: tuple[int, ...], dtype: type) -> None:
    """Catches parts in another order, rows of another part, and empty parts that move the rest."""
    whole: NDArray[Any] = np.arange(4 * 9 * math.prod(rest)).reshape(4, 9, *rest).astype(dtype)
    with Spool(tmp_path) as spool:
        strip = other = None
        for first, last in ((0, 2), (2, 2), (2, 7), (7, 9)):
            strip = spool.append(whole[:, first:last], strip)
            other = spool.append(whole[::-1, first:last] * 2, other)
        assert strip is not None
        assert strip.num_columns == 9
        np.testing.assert_array_equal(spool.read(strip), whole)
        np.testing.assert_array_equal(spool.read(strip, 1, 3), whole[1:3])
        assert spool.read(strip).dtype == dtype


@pytest.mark.parametrize(
    "part",
    [np.zeros((3, 1)), np.zeros((2, 1, 1)), np.zeros((2, 1), np.float32)],
    ids=["rows", "axes", "dtype"],
)
def test_a_part_of_another_kind_is_refused(tmp_path: Path, part: NDArray[Any]) -> None:
    """Catches bytes that are read as something else."""
    with Spool(tmp_path) as spool:
        strip = spool.append(np.zeros((2, 5)))
        with pytest.raises(ValueError, match=r"a part .* of an array"):
            spool.append(part, strip)
        np.testing.assert_array_equal(spool.read(strip), np.zeros((2, 5)))


def memory_after(num_pieces: int, folder: Path) -> int:
    """Return the bytes of Python's and numpy's that live on after so many pieces of a prompt."""
    ids = tuple([7] * num_pieces * _PIECE)
    with Aggregator(Suite("s", "h", (Prompt(0, "prose", "test", ids, ()),)), folder) as sink:
        tracemalloc.start()
        try:
            for start in range(0, len(ids), _PIECE):
                at = np.arange(start, start + 8)
                matrices = (
                    TokenMatrix("logit_kl", (MODEL,), np.zeros((1, _PIECE))),
                    TokenMatrix("delta_p", (MODEL,), np.zeros((1, 8)), at),
                )
                sink.observe(Observation("c", 0, matrices, offset=start))
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()


def test_a_piece_leaves_a_few_bytes_in_memory(tmp_path: Path) -> None:
    """Catches positions that stay in memory, and an object per piece of each metric."""
    few, many = (memory_after(count, tmp_path) for count in (100, 1100))
    per_piece = (many - few) / 1000
    assert per_piece <= 16 * (_NUM_METRICS + 1) * 1.25  # arrays grow ahead by an eighth
