"""The W8A8 layer: every back end against exact sums of codes, scaled in float64."""

import pytest
import torch
from torch import Tensor, nn

from quantwatch_kernels.formats import INT8, INT_FORMATS
from quantwatch_kernels.numerics import relative_rmse
from quantwatch_kernels.quantize import native_rows, w8a8_linear
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.recipe import ActivationSpec, PerTensor, Recipe
from quantwatch_kernels.quantize.w8a8_linear import W8A8Linear, int_mm_why_not
from quantwatch_kernels.registry import fallbacks
from quantwatch_kernels.testing import VIEWS, assert_close

ACTIVATIONS = {
    "symmetric": ActivationSpec(INT8),
    "asymmetric": ActivationSpec(INT_FORMATS["uint8"]),
    "clipped": ActivationSpec(INT8, clip_ratio=0.9),
}
BACKENDS = ["aten", "dequantized", "reference"]
SHAPES = {"576": (192, 576), "odd": (37, 91), "one": (1, 1), "column": (5, 1), "tall": (5, 1536)}
# The sums are exact; what is left is one rounding of the result and a few of float32.
RMSE = {torch.float32: 5e-7, torch.bfloat16: 3.4e-3, torch.float16: 4.2e-4}


def layer(
    rows: int, columns: int, backend: str, kind: str = "symmetric", bias: bool = True
) -> W8A8Linear:
    torch.manual_seed(3)
    weight = quantize_weight(torch.randn(rows, columns), Recipe.named("int8-channel").weights)
    parameter = nn.Parameter(torch.randn(rows)) if bias else None
    return W8A8Linear(weight, parameter, ACTIVATIONS[kind], backend)


def definition(layer: W8A8Linear, x: Tensor) -> Tensor:
    """Rows and columns one by one, in Python integers."""
    weight, made = layer.quantized(), layer.quantize_input(x)
    zeros = torch.zeros(len(x), 1) if made.zeros is None else made.zeros
    a = [
        [code - int(z) for code in row]
        for row, z in zip(made.codes.tolist(), zeros.flatten(), strict=True)
    ]
    w = weight.codes.tolist()
    sums = torch.tensor(
        [[sum(p * q for p, q in zip(r, c, strict=True)) for c in w] for r in a], dtype=torch.float64
    )
    y = sums * made.scales.double() * weight.qparams.scales.double().T
    return y if layer.bias is None else y + layer.bias.detach().double()


@pytest.mark.parametrize("dtype", RMSE, ids=str)
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape: str, backend: str, kind: str, dtype: torch.dtype) -> None:
    """Catches wrong scales, a zero term with the wrong sum, and sums that aren't exact."""
    rows, columns = SHAPES[shape]
    made = layer(rows, columns, backend, kind)
    x = (torch.randn(6, columns) * 3 + 1).to(dtype)
    y = made(x.view(2, 3, columns))
    assert y.dtype == dtype
    error = relative_rmse(y.view(6, rows), definition(made, x))
    print(f"{shape} {backend} {kind} {dtype}: relative RMSE {error:.1e}")
    assert error <= RMSE[dtype]
    assert not fallbacks()


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_torch_operators_give_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a machine without a compiler that gets other numbers, or isn't told so."""
    made, x = layer(37, 91, "aten", kind), torch.randn(7, 91).bfloat16()
    expected = made(x)
    monkeypatch.setattr(native_rows, "why_not", lambda: "no compiler")
    assert torch.equal(made(x), expected)
    assert [each.reason for each in fallbacks()] == ["no compiler"]


@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_sums_are_exact_where_float32_is_not(backend: str) -> None:
    """Catches int8 products through float32: all 127, K = 4097 and one odd code (bug log 15)."""
    weight = torch.full((2, 4097), 127.0)
    weight[1, 0] = 126.0
    spec = Recipe.named("int8-channel").weights
    made = W8A8Linear(quantize_weight(weight, spec), None, backend=backend)
    y = made(torch.full((3, 4097), 127.0, dtype=torch.float64))
    exact = torch.tensor([127 * 127 * 4097, 127 * 127 * 4096 + 127 * 126], dtype=torch.float64)
    assert torch.equal(y.float(), exact.float().expand(3, 2))


def test_sums_that_float32_loses() -> None:
    """Catches a product in float32 in a way that its rounding can't hide: the sum cancels."""
    codes = torch.tensor([127.0] * 1300 + [-127.0] * 1300 + [1.0])
    spec = Recipe.named("int8-channel").weights
    made = W8A8Linear(quantize_weight(codes[None], spec), None, backend="aten")
    x = torch.full((1, 2601), 127.0)
    assert made(x).item() == 127.0


@pytest.mark.parametrize("rows", [1, 2, 64])
@pytest.mark.parametrize("copies", [0, 2**30], ids=["copied", "view"])
def test_rows_do_not_depend_on_the_batch(
    rows: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches scales of the whole batch, and layouts of the weight that aren't the same sums."""
    monkeypatch.setattr(w8a8_linear, "CACHED_WEIGHTS", copies)
    made = layer(192, 576, "aten")
    x = torch.randn(64, 576).bfloat16()
    x[0] *= 1000
    assert torch.equal(made(x)[-rows:], made(x[-rows:]))


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_layout_of_activations_does_not_matter(kind: str, view: str) -> None:
    """Catches strides that are ignored (bug log 18)."""
    made = layer(37, 91, "aten", kind)
    x = VIEWS[view](torch.randn(6, 91))
    assert torch.equal(made(x), made(x.clone()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_is_added_once(backend: str) -> None:
    """Catches a bias added twice, dropped, or scaled (bug log 13)."""
    made = layer(37, 91, backend)
    assert made.bias is not None
    assert torch.equal(made(torch.zeros(2, 91)), made.bias.detach().expand(2, 37))


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_batch(backend: str, kind: str) -> None:
    """Catches a crash on zero tokens (bug log 20)."""
    assert layer(37, 91, backend, kind)(torch.zeros(2, 0, 91)).shape == (2, 0, 37)


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_in_its_row_and_channel(backend: str, kind: str) -> None:
    """Catches a fault that quantizes to health, or spreads to healthy rows."""
    weight = torch.randn(5, 64)
    weight[3, 5] = torch.nan
    spec = Recipe.named("int8-channel").weights
    made = W8A8Linear(quantize_weight(weight, spec), None, ACTIVATIONS[kind], backend)
    x = torch.randn(4, 64)
    x[1, 7] = torch.inf
    expected = torch.zeros(4, 5, dtype=torch.bool)
    expected[1], expected[:, 3] = True, True
    assert torch.equal(made(x).isnan(), expected)


@pytest.mark.parametrize("rows", [1, 2, 3, 33])
@pytest.mark.parametrize("copies", [0, 2**30], ids=["copied", "view"])
def test_one_input(copies: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches strides (1, 1), which `_int_mm` misreads: it returns stray memory (bug log 16)."""
    monkeypatch.setattr(w8a8_linear, "CACHED_WEIGHTS", copies)
    weight = torch.linspace(-3, 3, 7)[:, None]
    spec = Recipe.named("int8-channel").weights
    x = torch.linspace(-2, 2, rows)[:, None]
    made = W8A8Linear(quantize_weight(weight, spec), None, backend="aten")
    # A channel and a token of one value are exact.
    assert torch.allclose(made(x), x @ weight.T, rtol=1e-6)
    assert not fallbacks()


@pytest.mark.parametrize(("kind", "limit"), [("symmetric", 132104), ("asymmetric", 66311)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_sums_at_the_limit_of_int32(kind: str, limit: int, sign: float) -> None:
    """Catches a limit that leaves out the zero term: 255 · 127 · K wraps (bug log 15)."""
    spec = Recipe.named("int8-channel").weights
    longest = quantize_weight(torch.ones(1, limit), spec)
    made = W8A8Linear(longest, None, ACTIVATIONS[kind], "aten")
    y = made(torch.full((2, limit), sign))
    assert torch.allclose(y, torch.full((2, 1), sign * limit), rtol=1e-5)
    longer = quantize_weight(torch.ones(1, limit + 1), spec)
    with pytest.raises(ValueError, match=f"1 … {limit}, beyond which int32 overflows"):
        W8A8Linear(longer, None, ACTIVATIONS[kind], "aten")


def test_int_mm_is_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a CPU whose int8 products saturate in 16 bits (bug log 16)."""
    assert int_mm_why_not() is None

    def saturating(a: Tensor, b: Tensor) -> Tensor:
        """As a CPU without VNNI: bytes a + 128, pairs of products added in 16 bits."""
        shifted, weights = (
            nn.functional.pad(t.long(), (0, t.shape[1] % 2)) for t in (a + 128.0, b.T)
        )
        pairs = shifted.view(len(a), 1, -1, 2) * weights.view(1, b.shape[1], -1, 2)
        return (pairs.sum(-1).clamp(-(2**15), 2**15 - 1).sum(-1) - 128 * b.sum(0)).int()

    monkeypatch.setattr(torch, "_int_mm", saturating)
    int_mm_why_not.cache_clear()
    try:
        made, x = layer(37, 91, "aten"), torch.randn(3, 91)
        assert_close(made(x), layer(37, 91, "reference")(x), rtol=1e-5, atol=1e-4)
        assert [each.used for each in fallbacks()] == ["dequantized"]
        assert "not exact" in next(iter(fallbacks())).reason
    finally:
        int_mm_why_not.cache_clear()


@pytest.mark.parametrize(
    ("recipe", "activations", "message"),
    [
        ("int8-g64", ActivationSpec(INT8), "per channel"),
        ("int4-g64", ActivationSpec(INT8), "int8"),
        ("uint8-channel", ActivationSpec(INT8), "int8"),
        ("int8-channel", ActivationSpec(INT_FORMATS["int4"]), "8 bits"),
        ("int8-channel", ActivationSpec(INT8, PerTensor()), "per token"),
        ("int8-channel", ActivationSpec(INT8, PerTensor(), static=True), "dynamic"),
    ],
)
def test_refuses_other_kinds(recipe: str, activations: ActivationSpec, message: str) -> None:
    """Catches a layer that multiplies what it wasn't made for."""
    weight = quantize_weight(torch.randn(16, 128), Recipe.named(recipe).weights)
    with pytest.raises(ValueError, match=message):
        W8A8Linear(weight, None, activations)


@pytest.mark.parametrize("backend", BACKENDS)
def test_refuses_another_width(backend: str) -> None:
    """Catches a reshape that hides a wrong input."""
    with pytest.raises(ValueError, match="91 features"):
        layer(37, 91, backend)(torch.zeros(2, 182))
