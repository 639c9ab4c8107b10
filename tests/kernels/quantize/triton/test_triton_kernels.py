"""Triton kernels against float64: odd shapes, strides, poisoned surroundings, guarded outputs."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quantwatch_kernels.formats import INT8, INT_FORMATS
from quantwatch_kernels.numerics import relative_rmse
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.hadamard import Hadamard
from quantwatch_kernels.quantize.int4_linear import INT4_LINEAR
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.recipe import ActivationSpec, Recipe
from quantwatch_kernels.quantize.row_codes import RowCodes, quantize_rows
from quantwatch_kernels.quantize.row_ops import HADAMARD, QUANTIZE_ROWS
from quantwatch_kernels.quantize.triton.available import triton_why_not
from quantwatch_kernels.quantize.triton.limits import hadamard_why_not, split_order
from quantwatch_kernels.quantize.w8a8_linear import W8A8_LINEAR, W8A8Linear
from quantwatch_kernels.registry import fallbacks
from quantwatch_kernels.testing import VIEWS

from .helpers import DTYPES, device, guarded_outputs, surrounded

pytestmark = [] if device() == "cpu" else [pytest.mark.gpu]
RMSE = {torch.float32: 7e-7, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device())


def same_rows(a: tuple[Tensor, Tensor], b: RowCodes) -> bool:
    return torch.equal(a[0], b.codes) and torch.equal(a[1].nan_to_num(-1), b.scales.nan_to_num(-1))


# --- rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [1, 16, 17, 100, 2049])
def test_rows_are_bit_equal(columns: int, dtype: torch.dtype) -> None:
    """Catches an approximate division, halves away from zero, and a masked lane that is read as
    anything but 0 (bug log 24, 26)."""
    x = random(4, columns)
    x[1] = torch.arange(columns) / 2 - 3
    x[2] = 0.0
    x[3] *= 1e-42 if dtype == torch.float32 else 1e-6
    poisoned = surrounded(x.to(dtype))
    with guarded_outputs():
        made = QUANTIZE_ROWS.run("triton", poisoned)
    assert same_rows(made, quantize_rows(poisoned))
    assert not fallbacks()


@pytest.mark.parametrize("view", VIEWS)
def test_rows_of_any_strides(view: str) -> None:
    """Catches strides that are ignored (bug log 18)."""
    x = VIEWS[view](random(5, 33))
    assert same_rows(QUANTIZE_ROWS.run("triton", x), quantize_rows(x.clone()))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_row_that_is_not_finite(bad: float) -> None:
    """Catches a NaN that a maximum drops, and one that is cast to an integer (bug log 39)."""
    x = random(3, 40)
    x[1, 39] = bad
    assert same_rows(QUANTIZE_ROWS.run("triton", x), quantize_rows(x))


@given(st.integers(1, 3), st.integers(1, 70), st.integers(-30, 30), st.integers(0, 9))
@settings(max_examples=15)
def test_rows_of_any_shape(rows: int, columns: int, power: int, seed: int) -> None:
    """The definition, whatever the shape and the size of the values."""
    x = random(rows, columns, seed=seed) * 2.0**power
    assert same_rows(QUANTIZE_ROWS.run("triton", x), quantize_rows(x))


# --- int8


def w8a8(rows: int, columns: int, fmt: str = "int8", bias: bool = True) -> W8A8Linear:
    weight = quantize_weight(random(rows, columns, seed=1), Recipe.named("int8-channel").weights)
    parameter = nn.Parameter(random(rows, seed=2)) if bias else None
    return W8A8Linear(weight, parameter, ActivationSpec(INT_FORMATS[fmt]), "triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", ["int8", "uint8"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 37, 91), (17, 65, 64), (65, 16, 130)], ids=str)
def test_w8a8(shape: tuple[int, int, int], fmt: str, dtype: torch.dtype) -> None:
    """Catches a grid that drops tails (bug log 18), and scales or zeros of the wrong axis."""
    M, N, K = shape
    made, x = w8a8(N, K, fmt), surrounded((random(M, K) * 2 + 1).to(dtype))
    with guarded_outputs():
        y = made(x)
    expected = W8A8_LINEAR.run("reference", x.double(), made, made.bias)
    assert y.dtype == dtype
    assert relative_rmse(y, expected) <= RMSE[dtype]
    assert not fallbacks()


def test_w8a8_sums_are_exact() -> None:
    """Catches products that are summed in float (bug log 15): all 127 but two that cancel."""
    weight = torch.full((1, 2601), 127.0, device=device())
    weight[0, 1300:2600], weight[0, 2600] = -127.0, 1.0
    made = W8A8Linear(
        quantize_weight(weight, Recipe.named("int8-channel").weights), None, backend="triton"
    )
    assert made(torch.full((1, 2601), 127.0, device=device())).item() == 127.0


@pytest.mark.parametrize("view", VIEWS)
def test_w8a8_of_any_strides(view: str) -> None:
    """Catches strides that are ignored (bug log 18)."""
    made, x = w8a8(20, 33), VIEWS[view](random(6, 33))
    assert torch.equal(made(x), made(x.clone()))


# --- int4

INT4 = {
    "int4-g32": (37, 96),
    "int4-g16": (65, 91),
    "uint4-g32": (16, 33),
    "int4-channel": (5, 70),
    "uint4-g128": (3, 129),
}


def int4(recipe: str, bias: bool = True) -> PackedLinear:
    rows, columns = INT4[recipe]
    spec = Recipe.named(recipe).weights
    parameter = nn.Parameter(random(rows, seed=2)) if bias else None
    return PackedLinear(
        quantize_weight(random(rows, columns, seed=1) + 0.3, spec), parameter, INT4_LINEAR, "triton"
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("recipe", INT4)
def test_int4(recipe: str, rows: int, dtype: torch.dtype) -> None:
    """Catches a nibble order, a sign (bug log 12), a short last group and an odd K."""
    made = int4(recipe)
    x = surrounded(random(rows, made.in_features).to(dtype))
    with guarded_outputs():
        y = made(x)
    expected = INT4_LINEAR.run("reference", x.double(), made, made.bias)
    assert y.dtype == dtype
    assert relative_rmse(y, expected) <= RMSE[dtype]
    assert not fallbacks()


@pytest.mark.parametrize("view", VIEWS)
def test_int4_of_any_strides(view: str) -> None:
    """Catches strides that are ignored (bug log 18)."""
    made = int4("int4-g32")
    x = VIEWS[view](random(6, made.in_features))
    assert torch.equal(made(x), made(x.clone()))


def test_int4_sums_in_float32() -> None:
    """Catches a float16 sum: 1e3 · 7 over 4096 inputs is 2.9e7, halves cancel (bug log 14)."""
    weight = torch.ones(1, 4096, device=device())
    weight[0, 2048:] = -1.0
    weight[0, 0] = 0.0
    made = PackedLinear(
        quantize_weight(weight, Recipe.named("int4-channel").weights), None, INT4_LINEAR, "triton"
    )
    y = made(torch.full((1, 4096), 1000.0, dtype=torch.float16, device=device()))
    assert y.item() == pytest.approx(-1000.0, rel=2e-3)


# --- all products


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "make", [lambda: w8a8(37, 91), lambda: int4("int4-g32")], ids=["w8a8", "int4"]
)
def test_rows_do_not_depend_on_the_batch(make, rows: int) -> None:  # type: ignore[no-untyped-def]
    """Catches another order of summation for another number of rows."""
    made = make()
    x = random(40, made.in_features)
    assert torch.equal(made(x)[:rows], made(x[:rows]))


@pytest.mark.parametrize(
    "make", [lambda b: w8a8(37, 91, bias=b), lambda b: int4("int4-g32", b)], ids=["w8a8", "int4"]
)
def test_bias_is_added_once(make) -> None:  # type: ignore[no-untyped-def]
    """Catches a bias added twice or dropped (bug log 13)."""
    made, plain = make(True), make(False)
    zeros = torch.zeros(2, made.in_features, device=device())
    assert torch.equal(made(zeros), made.bias.detach().expand(2, -1))
    assert not plain(zeros).any()
    assert made(zeros[:0]).shape == (0, made.out_features)


# --- rotation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("width", "block"),
    [
        (1, None),
        (2, None),
        (12, None),
        (64, None),
        (96, 24),
        (576, None),
        (1536, None),
        (4096, None),
    ],
)
def test_hadamard(width: int, block: int | None, dtype: torch.dtype) -> None:
    """Catches a factor on the wrong side, a base padded with rubbish, blocks that mix."""
    rotation = Hadamard(width, seed=3, block=block).to(device())
    x = surrounded(random(2, width).to(dtype))
    with guarded_outputs():
        y = HADAMARD.run("triton", x, rotation)
    expected = HADAMARD.run("reference", x.double(), rotation)
    assert y.dtype == dtype
    assert relative_rmse(y, expected) <= RMSE[dtype]
    assert not fallbacks()


@pytest.mark.parametrize("view", VIEWS)
def test_hadamard_of_any_strides(view: str) -> None:
    """Catches strides that are ignored (bug log 18)."""
    rotation = Hadamard(36, seed=1).to(device())
    x = VIEWS[view](random(3, 36))
    assert torch.equal(
        HADAMARD.run("triton", x, rotation), HADAMARD.run("triton", x.clone(), rotation)
    )


def test_hadamard_too_wide_is_told() -> None:
    """Catches a base that no program holds, or a fallback without a word: 344 = 343 + 1."""
    rotation = Hadamard(344).to(device())
    x = random(2, 344)
    assert torch.equal(HADAMARD.run("triton", x, rotation), HADAMARD.run("torch", x, rotation))
    assert "344" in next(iter(fallbacks())).reason


@given(st.integers(0, 12), st.sampled_from([1, 12, 20, 36]))
def test_orders_are_split_into_factors_that_fit(power: int, base: int) -> None:
    """P · Q is the order, P a power of two, and what is too wide is said to be."""
    order = base * 2**power
    left, right = split_order(order, base)
    assert left * right == order
    assert left & (left - 1) == 0
    assert right % base == 0
    assert (hadamard_why_not(order, base) is None) == (max(left, right) <= 128)


# --- where they run


@pytest.mark.skipif(device() != "cpu", reason="about the interpreter")
def test_predicates_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a kernel that is compiled for a CPU, or interprets bfloat16 (bug log 41)."""
    x = torch.zeros(2, 2)
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert triton_why_not(x) is None
    assert "bfloat16" in (triton_why_not(x, bfloat16=True) or "")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "CUDA" in (triton_why_not(x) or "")


@pytest.mark.skipif(device() != "cpu", reason="about the interpreter")
def test_bfloat16_falls_back_in_the_interpreter() -> None:
    """Catches numbers of order 1e10 from the bits of bfloat16 (bug log 41)."""
    made = int4("int4-g32")
    x = random(2, made.in_features).bfloat16()
    error = relative_rmse(made(x), INT4_LINEAR.run("reference", x.double(), made, made.bias))
    assert error <= 7e-3
    assert [each.wanted for each in fallbacks()] == ["triton"]


def test_int8_spec_is_the_default() -> None:
    """Catches a default that isn't the symmetric per-token rule."""
    assert w8a8(3, 4).activations == ActivationSpec(INT8)
