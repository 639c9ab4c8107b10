"""Laws of the codecs."""

import math
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from quantwatch.store.codec import codec_for, decode, decode_column, encode

SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf]
shapes = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)


def _masked(
    elements: st.SearchStrategy[float],
) -> st.SearchStrategy[tuple[NDArray[Any], NDArray[Any]]]:
    """Values and a mask of the same shape."""
    return shapes.flatmap(
        lambda shape: st.tuples(
            hnp.arrays(np.float64, shape, elements=elements), hnp.arrays(np.bool_, shape)
        )
    )


@given(_masked(st.floats(3e-8, 1.0)))
def test_log2f16_is_half_a_percent_right(pair: tuple[NDArray[Any], NDArray[Any]]) -> None:
    """Catches raw float16, which is 81 % wrong at 3e-8, and a mask that moves a neighbour."""
    values, missing = pair
    back, mask = decode(encode(values, missing, "log2f16"), values.shape, "log2f16")
    assert (np.zeros_like(missing) if mask is None else mask).tolist() == missing.tolist()
    errors = np.abs(back / values - 1)[~missing]
    assert (errors <= 0.005).all()
    assert np.isnan(back[missing]).all()


def test_log2f16_error_over_a_fine_grid() -> None:
    """Catches an offset that moves the small values out of float16's fine range."""
    values = np.geomspace(3e-8, 60.0, 200_001)
    back, _ = decode(encode(values, None, "log2f16"), values.shape, "log2f16")
    assert np.abs(back / values - 1).max() <= 2 ** (2**-8) - 1 + 1e-12


@given(hnp.arrays(np.float64, shapes, elements=st.sampled_from([*SPECIAL, 0.25, 5e-324, 1.7e308])))
def test_log2f16_keeps_special_values(values: NDArray[Any]) -> None:
    """Catches 0 → −∞, NaN → not measured, and an infinity that becomes the largest number."""
    back, missing = decode(encode(values, None, "log2f16"), values.shape, "log2f16")
    assert missing is None
    for special in (0.0, math.inf, -math.inf, 0.25):
        assert ((back == special) == (values == special)).all()
    assert (np.isnan(back) == np.isnan(values)).all()
    assert (np.isfinite(back) == np.isfinite(values)).all()


@given(st.floats(max_value=-5e-324, allow_infinity=False))
def test_log2f16_refuses_negative_values(value: float) -> None:
    """Catches a sign that is lost in the logarithm."""
    with pytest.raises(ValueError, match="no negative values"):
        encode(np.array([0.5, value]), None, "log2f16")
    hidden = encode(np.array([0.5, value]), np.array([False, True]), "log2f16")
    assert decode(hidden, (2,), "log2f16")[0][0] == 0.5


@given(_masked(st.floats(allow_nan=True, allow_infinity=True)))
def test_f64_is_exact(pair: tuple[NDArray[Any], NDArray[Any]]) -> None:
    """Catches a shuffle that isn't undone, a lost mask, a byte order."""
    values, missing = pair
    back, mask = decode(encode(values, missing, "f64"), values.shape, "f64")
    assert (np.zeros_like(missing) if mask is None else mask).tolist() == missing.tolist()
    np.testing.assert_array_equal(back, np.where(missing, np.nan, values))


@pytest.mark.parametrize("codec", ["log2f16", "f64"])
@given(st.data())
def test_a_column_is_the_matrix_at_it(codec: str, data: st.DataObject) -> None:
    """Catches another column or row, and a mask that is lost, when only one column is decoded."""
    shape = data.draw(hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=6))
    values = data.draw(hnp.arrays(np.float64, shape, elements=st.floats(1e-6, 8.0)))
    missing = data.draw(hnp.arrays(np.bool_, shape))
    payload = encode(values, missing, codec)
    whole, mask = decode(payload, shape, codec)
    for column in range(shape[1]):
        part, gone = decode_column(payload, shape, codec, column)
        np.testing.assert_array_equal(part, whole[:, [column]])
        expected = np.zeros(shape, bool) if mask is None else mask
        np.testing.assert_array_equal(
            np.zeros((shape[0], 1), bool) if gone is None else gone, expected[:, [column]]
        )


@pytest.mark.parametrize(
    ("codec", "shape", "column", "why"),
    [("f64", (2, 3), 3, "no column 3"), ("f64", (2, 3), -1, "no column -1"),
     ("f64", (6,), 0, "no column"), ("topk", (5, 2, 3), 0, "no column"), ("f64", (2, 4), 0, "can't be"),
     ("zip", (2, 3), 0, "none of")],
)  # fmt: skip
def test_columns_that_are_not_there_are_refused(
    codec: str, shape: tuple[int, ...], column: int, why: str
) -> None:
    """Catches values of another place shown for one that does not exist."""
    with pytest.raises(ValueError, match=why):
        decode_column(encode(np.zeros((2, 3)), None, "f64"), shape, codec, column)


@given(st.data())
def test_topk_is_exact(data: st.DataObject) -> None:
    """Catches ids that pass through float32 (wrong from 2²⁴ on) and non-finite logits."""
    shape = data.draw(st.tuples(st.just(5), st.integers(0, 4), st.integers(0, 4)))
    ids = hnp.arrays(np.int32, shape, elements=st.integers(-1, 2**31 - 1))
    logits = hnp.arrays(np.float32, shape, elements=st.floats(width=32))
    values = data.draw(logits).astype(np.float64)
    values[[0, 2]] = data.draw(ids)[[0, 2]]
    back, missing = decode(encode(values, None, "topk"), shape, "topk")
    np.testing.assert_array_equal(back, values)
    assert missing is None


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(np.full((5, 1, 1), 0.5), id="half an id"),
        pytest.param(np.full((5, 1, 1), 2.0**31), id="id beyond 32 bits"),
        pytest.param(np.full((5, 1, 1), math.nan), id="id NaN"),
        pytest.param(np.zeros((4, 1, 1)), id="four rows"),
    ],
)
def test_topk_refuses_what_it_cannot_hold(values: NDArray[Any]) -> None:
    """Catches ids cut to another token."""
    with pytest.raises(ValueError, match="topk"):
        encode(values, None, "topk")


@pytest.mark.parametrize("codec", ["log2f16", "f64", "topk"])
def test_bytes_of_another_shape_are_an_error(codec: str) -> None:
    """Catches a block that is read as another one."""
    values = np.ones((5, 2, 2))
    with pytest.raises(ValueError, match="bytes"):
        decode(encode(values, None, codec), (5, 2, 3), codec)
    with pytest.raises(ValueError, match="decompress"):
        decode(b"not zlib", values.shape, codec)
    with pytest.raises(ValueError, match="bytes"):
        decode(zlib.compress(b""), values.shape, codec)


@pytest.mark.parametrize(
    ("kind", "values", "codec"),
    [
        ("per_prompt", [1.0], "f64"),
        ("per_token", [1.0, math.nan, -math.inf], "log2f16"),
        ("per_token", [-0.1], "f64"),
        ("topk", [1.0], "topk"),
    ],
)
def test_codec_fits_the_values(kind: str, values: list[float], codec: str) -> None:
    """Catches a signed metric that can't be stored, and partial sums that are rounded."""
    assert codec_for(kind, np.array(values)) == codec


def test_unknown_codec_names_the_known_ones() -> None:
    """Catches a block of a newer program that is read as something else."""
    with pytest.raises(ValueError, match="none of log2f16, f64, topk"):
        decode(b"", (1,), "zstd")
