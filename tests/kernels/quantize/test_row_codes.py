"""Codes of activations per row: torch, C++ and the slow rule give the same bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantwatch_kernels.formats import INT8, INT_FORMATS
from quantwatch_kernels.quantize import native_rows
from quantwatch_kernels.quantize.activations import input_qparams, quantize_input
from quantwatch_kernels.quantize.recipe import ActivationSpec
from quantwatch_kernels.quantize.row_codes import RowCodes, quantize_rows, row_values
from quantwatch_kernels.testing import VIEWS

ASYMMETRIC = ActivationSpec(INT_FORMATS["uint8"])
SPECS = {
    "symmetric": ActivationSpec(INT8),
    "asymmetric": ASYMMETRIC,
    "clipped": ActivationSpec(INT8, clip_ratio=0.9),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
needs_compiler = pytest.mark.skipif(
    "compiler" in (native_rows.why_not() or ""), reason="there is no C++ compiler"
)


def rows(seed: int = 0) -> Tensor:
    """Rows of every kind: plain, ties, zeros, constant, one sign, subnormal, huge."""
    x = torch.randn(9, 101, generator=torch.Generator().manual_seed(seed))
    x[1] = torch.arange(101) / 2 + 13.5  # absmax 63.5: a step of exactly a half, codes in between
    x[1, ::2] += 0.25
    x[2] = 0.0
    x[3] = -0.0
    x[4] = 7.0
    x[5] = x[5].abs()
    x[6] *= 1e-42
    x[7] *= 1e4
    return x


def same(a: RowCodes, b: RowCodes) -> bool:
    zeros = a.zeros is b.zeros or torch.equal(a.zeros, b.zeros)  # type: ignore[arg-type]
    return (
        torch.equal(a.codes, b.codes)
        and torch.equal(a.scales.nan_to_num(-1), b.scales.nan_to_num(-1))
        and zeros
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_follows_the_one_rule(name: str, dtype: torch.dtype) -> None:
    """Catches a fast path that rounds, clips or shifts otherwise (bug log 24)."""
    spec, x = SPECS[name], rows().to(dtype)
    made = quantize_rows(x, spec)
    expected = input_qparams(x, spec)
    codes = quantize_input(x, expected, spec).int()
    if expected.zeros is not None:
        codes = codes - expected.zeros.int()
    ours = made.codes.int() if made.zeros is None else made.codes.int() - made.zeros
    assert torch.equal(ours, codes)
    assert torch.equal(made.scales, expected.scales)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_native_rows_are_bit_equal(view: str, dtype: torch.dtype) -> None:
    """Catches a compiler that contracts, reassociates, or reads strides wrongly (bug log 18)."""
    assert native_rows.why_not() is None
    x = VIEWS[view](rows().to(dtype))
    assert same(native_rows.quantize_rows_native(x), quantize_rows(x.clone()))


@needs_compiler
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 63, 64, 65, 576])
def test_native_rows_of_every_width(columns: int) -> None:
    """Catches a vector loop that drops or repeats its tail (bug log 26)."""
    x = torch.randn(5, columns + 3)[:, :columns]
    assert same(native_rows.quantize_rows_native(x), quantize_rows(x))


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_native_rescale_is_bit_equal(bias: bool, dtype: torch.dtype) -> None:
    """Catches a second rounding, a bias before the scale, and a NaN that becomes a number."""
    sums = torch.randint(-(2**31), 2**31 - 1, (7, 33)).int()
    row_scales, scales = torch.rand(7, 1), torch.rand(33)
    row_scales[2] = torch.nan
    added = torch.randn(33) if bias else None
    y = native_rows.rescale_rows_native(sums, row_scales, scales, added, dtype)
    expected = sums.float() * scales * row_scales
    expected = (expected if added is None else expected + added).to(dtype)
    assert torch.equal(y.nan_to_num(-1), expected.nan_to_num(-1))
    assert y[2].isnan().all()


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_what_is_not_finite_stays_in_its_row(bad: float, name: str) -> None:
    """Catches a NaN cast to an integer, and a row that poisons others (bug log 39)."""
    x = rows()
    clean = quantize_rows(x, SPECS[name])
    x[5, 7] = bad
    made = quantize_rows(x, SPECS[name])
    others = [m for m in range(len(x)) if m != 5]
    assert made.scales[5].isnan().all()
    assert row_values(made)[5].isnan().all()
    assert torch.equal(made.codes[others], clean.codes[others])
    if SPECS[name] == ActivationSpec(INT8) and native_rows.why_not() is None:
        assert same(native_rows.quantize_rows_native(x), made)


@given(
    st.lists(
        st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=5, max_size=5),
        min_size=1,
        max_size=4,
    ),
    st.integers(-20, 20),
)
@settings(max_examples=60)
def test_laws(values: list[list[float]], power: int) -> None:
    """Error at most half a step, idempotent, and equivariant to powers of two."""
    x = torch.tensor(values).where(torch.tensor(values).abs() > 1e-25, 0.0)
    made = quantize_rows(x)
    back = row_values(made)
    assert bool(((back - x).abs() <= made.scales * 0.5 * (1 + 1e-5)).all())
    assert torch.equal(quantize_rows(back).codes, made.codes)
    assert torch.equal(quantize_rows(x * 2.0**power).codes, made.codes)
    if native_rows.why_not() is None:
        assert same(native_rows.quantize_rows_native(x), made)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("name", SPECS)
def test_nothing_to_quantize(name: str, shape: tuple[int, int]) -> None:
    """Catches the minimum of an empty row (bug log 20)."""
    made = quantize_rows(torch.zeros(shape), SPECS[name])
    assert made.codes.shape == shape
    assert made.scales.shape == (shape[0], 1)


@pytest.mark.parametrize(
    "x", [torch.zeros(3), torch.zeros(2, 3, dtype=torch.int64)], ids=["vector", "int"]
)
def test_refuses_what_is_no_float_matrix(x: Tensor) -> None:
    """Catches codes of codes."""
    with pytest.raises(ValueError, match="float matrix"):
        quantize_rows(x)


def test_no_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a machine without a compiler that fails, or falls back without a word."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    native_rows.why_not.cache_clear()
    native_rows._library.cache_clear()
    try:
        assert "no-such-compiler" in (native_rows.why_not() or "")
    finally:
        native_rows.why_not.cache_clear()
        native_rows._library.cache_clear()
