"""The lenses whose factors are rounded to 16 bits: bfloat16, and integers with a step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import pytest
import torch
from numpy.typing import NDArray
from tests.kernels.compare.heads import readout, weight_of
from torch import Tensor, nn

from quantwatch_kernels.compare import lens_rounded, lens_words_native
from quantwatch_kernels.compare.lens import LensStatistics, Readout, lens_statistics
from quantwatch_kernels.compare.lens_rounded import LENS_ROUNDED
from quantwatch_kernels.compare.lens_words_native import PAIRS, products, suits_cpu, why_not_words
from quantwatch_kernels.compare.rounding import ROUNDINGS, Rounded
from quantwatch_kernels.compare.workspace import workspace
from quantwatch_kernels.registry import fallbacks, prefer
from quantwatch_kernels.testing import assert_close


def kernel_of(factors: Rounded, *values: str) -> Any:
    reason = why_not_words(factors)
    marks = pytest.mark.skipif(reason is not None, reason=str(reason))
    return pytest.param(factors, *values, marks=marks, id="-".join((factors, *values)))


KERNELS = pytest.mark.parametrize("factors", list(map(kernel_of, ROUNDINGS)))
WAYS = pytest.mark.parametrize(
    ("factors", "backend"),
    [
        kernel_of(factors, name) if name == "native" else (factors, name)
        for factors in ROUNDINGS
        for name in ("native", "aten", "reference")
    ],
)
RTOL: dict[Rounded, float] = {"bfloat16": 2e-6, "int16": 2e-5}
"""Of a KL whose factors are `made`: in bfloat16 their sums are exact, steps of int16 are odd."""
GAPS: dict[Rounded, float] = {"bfloat16": 1e-12, "int16": 2e-6}
"""Of a logit's deviation: logits are up to 16 in size, float32 numbers are then 1e-6 apart."""
Matrix = NDArray[np.float64]


def made(rows: int, width: int, ids: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Readout]:
    """States and a head with more digits than bfloat16 keeps; sums are exact in float32.

    Sixteen channels of a row are in use, its last one among them.
    """
    h = torch.zeros(rows, width)
    channels = torch.rand(rows, width).topk(min(16, width), dim=-1).indices
    channels[:, 0] = width - 1
    h.scatter_(1, channels, 1 + torch.randint(0, 1024, channels.shape) / 1024)
    difference = (1 + torch.randint(0, 1024, h.shape) / 1024) / 4
    other = h + torch.where(h != 0, difference * torch.randint(-1, 2, h.shape), 0.0)
    weight = (1 + torch.randint(0, 1024, (ids, width)) / 1024) / 4
    return h, other, readout(scale * weight * (2 * torch.randint(0, 2, (ids, width)) - 1))


def by_bits(x: Matrix) -> Matrix:
    """Round to bfloat16, to nearest and even."""
    bits = x.astype(np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return nearest.view(np.float32).astype(np.float64)


def by_steps(x: Matrix) -> Matrix:
    """Round to multiples of a step per 32 inputs: as rounding.py defines it, in float32."""
    out = np.zeros_like(x, np.float64)
    for row in range(len(x)):
        for first in range(0, x.shape[1], 32):
            block = x[row, first : first + 32]
            step = np.float32(max(np.abs(block).max() / 32767, np.sqrt(block @ block) / 46330))
            counts = np.rint(block.astype(np.float32) * (np.float32(1) / step)) if step else 0.0
            out[row, first : first + 32] = np.float64(step) * counts
    return out


DEFINED: dict[Rounded, Callable[[Matrix], Matrix]] = {"bfloat16": by_bits, "int16": by_steps}


def rounded(factors: Rounded, h: Tensor, other: Tensor, r: Readout) -> tuple[Matrix, Matrix]:
    """Both models' logits in float64 from rounded factors, in NumPy."""

    def b(x: Tensor) -> Matrix:
        return DEFINED[factors](x.numpy().astype(np.float64))

    weight = b(weight_of(r)).T
    z = b(h) @ weight
    return z, z + b(other - h) @ weight


def defined(z: Matrix, y: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """KL and both deviations, from the definitions."""
    log_p, log_q = (x - x.max(-1, keepdims=True) for x in (z, y))
    log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (log_p, log_q))
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    order = np.argsort(-z, axis=-1, kind="stable")[:, :5]
    gaps = np.abs(np.take_along_axis(z - y, order, -1))
    return kl, gaps.mean(-1), gaps[:, :3].mean(-1)


def lens(factors: Rounded, backend: str, *args: Tensor | Readout) -> LensStatistics:
    with prefer(backend):
        return lens_statistics(*args, products=factors)  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [1, 47, 48, 49, 481, 1025])
@pytest.mark.parametrize("width", [1, 2, 31, 576, 577])
@pytest.mark.parametrize("rows", [1, 3, 130])
@WAYS
def test_equals_the_definition_of_rounded_factors(
    factors: Rounded, backend: str, rows: int, width: int, ids: int
) -> None:
    """Catches another rounding, ends of widths, panels and tiles, and a difference left out."""
    h, other, r = made(rows, width, ids)
    found = lens(factors, backend, h, other, r)
    kl, *gaps = defined(*rounded(factors, h, other, r))
    assert_close(found.kl, torch.from_numpy(kl), rtol=RTOL[factors], atol=1e-12)
    for ours, right in zip(found[1:], gaps, strict=True):
        assert_close(ours, torch.from_numpy(right), rtol=0, atol=GAPS[factors])
    assert fallbacks() == {}


OFF: dict[Rounded, tuple[float, float, float]] = {
    "bfloat16": (1e-4, 0.02, 0.2), "int16": (1e-5, 5e-4, 5e-3)
}  # fmt: skip
"""A KL's relative error: the median token's lies between two figures, every token's below one."""


@WAYS
def test_it_does_round(factors: Rounded, backend: str) -> None:
    """Catches float32 products under another name, and rounded ones that are no better than said.

    The difference is 2^-12 of the states: rounded one by one they would have an error of its size.
    """
    torch.manual_seed(1)
    h, r = torch.randn(100, 300), readout(torch.randn(2000, 300) / 4)
    other = h + 2.0**-12 * torch.randn(100, 300)
    exact = lens_statistics(h, other, readout(weight_of(r).double())).kl
    error = (lens(factors, backend, h, other, r).kl / exact - 1).abs()
    least, median, most = OFF[factors]
    assert error.min() > 0
    assert least < error.median() < median
    assert error.max() < most


@pytest.mark.parametrize("settings", [{"scale": 0.25}, {"softcap": 3.0}, {"width": 650},
                                      {"scale": 2.0, "softcap": 5.0, "width": 301}])  # fmt: skip
@WAYS
def test_scale_cap_and_cut(factors: Rounded, backend: str, settings: dict[str, Any]) -> None:
    """Catches what comes after the product being left out, or done to the difference alone."""
    h, other, plain = made(70, 64, 700)
    z, y = (x[:, : settings.get("width")] for x in rounded(factors, h, other, plain))
    scale, cap = settings.get("scale", 1.0), settings.get("softcap", np.inf)
    if np.isfinite(cap):
        z, y = (cap * np.tanh(scale * x / cap) for x in (z, y))
    else:
        z, y = scale * z, scale * y
    found = lens(factors, backend, h, other, readout(weight_of(plain), **settings))
    kl, *gaps = defined(z, y)
    assert_close(found.kl, torch.from_numpy(kl), rtol=2e-5)
    for ours, right in zip(found[1:], gaps, strict=True):
        # A capped logit is a float32 number: near 4 they are 5e-7 apart.
        assert_close(ours, torch.from_numpy(right), rtol=1e-6, atol=5e-7)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["reference", "candidate", "both"])
@WAYS
def test_wild_rows_are_read_in_float32(
    factors: Rounded, backend: str, side: str, value: float
) -> None:
    """Catches NaN from infinity − infinity where float32 has an answer, and rows that spread."""
    h, other, r = made(20, 64, 700)
    plain = lens(factors, backend, h, other, r)
    for x in (h,) * (side != "candidate") + (other,) * (side != "reference"):
        x[7, 3] = value
    found = lens(factors, backend, h, other, r)
    with prefer("aten"):
        exact = lens_statistics(h, other, r)
    for ours, before, right in zip(found, plain, exact, strict=True):
        assert_close(ours[7:8], right[7:8], rtol=1e-6)
        keep = torch.arange(20) != 7
        assert ours[keep].tolist() == before[keep].tolist()


@WAYS
def test_ids_that_nobody_can_say(factors: Rounded, backend: str) -> None:
    """Catches −∞ − −∞ for a masked id: in both models it adds nothing."""
    h, other, r = made(9, 64, 700)
    h[:, 5] = other[:, 5] = 1.0
    weight = weight_of(r).clone()
    weight[:, 5] = 0.0
    weight[[3, 699]] = 0.0
    weight[[3, 699], 5] = -torch.inf
    h[:, :5] = other[:, :5] = h[:, 6:] = other[:, 6:] = 0.0
    h[:, 6:12], other[:, 6:12] = torch.rand(9, 6), torch.rand(9, 6)
    masked = readout(weight)
    found = lens(factors, backend, h, other, masked)
    with prefer("reference"):
        exact = lens_statistics(h, other, masked)
    assert exact.kl.isfinite().all()
    assert_close(found.kl, exact.kl, rtol=1e-5)


@WAYS
def test_memory_layouts(factors: Rounded, backend: str) -> None:
    """Catches rows and heads read as if they were contiguous."""
    h, other, r = made(33, 64, 500)
    plain = lens(factors, backend, h, other, r)
    weight = weight_of(r)
    larger = torch.full((501, 80), torch.nan)
    larger[:500, :64] = weight
    spread = torch.full((66, 128), torch.nan)
    spread[::2, ::2] = h
    for layout in (weight.t().contiguous().t(), larger[:500, :64]):
        found = lens(factors, backend, spread[::2, ::2], other, readout(layout))
        for ours, right in zip(found, plain, strict=True):
            assert_close(ours, right, rtol=1e-12)


@KERNELS
@pytest.mark.usefixtures("one_thread")
def test_threads_and_company_change_no_bit(factors: Rounded) -> None:
    """Catches panels that two threads write to, and sums whose order depends on other rows."""
    torch.manual_seed(2)
    h, weight = torch.randn(300, 100), torch.randn(3001, 100)
    other, r = h + 0.01 * torch.randn(300, 100), readout(weight)
    torch.set_num_threads(1)
    plain = lens(factors, "native", h, other, r)
    for threads in (2, 3, 40):
        torch.set_num_threads(threads)
        found = lens(factors, "native", h, other, r)
        assert [x.tolist() for x in found] == [x.tolist() for x in plain]
        torch.set_num_threads(1)
    few = slice(255, 262)
    alone = lens(factors, "native", h[few], other[few], r)
    assert [x.tolist() for x in alone] == [x[few].tolist() for x in plain]


@KERNELS
def test_dense_products_stay_float32_sums(factors: Rounded) -> None:
    """Catches products rounded to bfloat16, as torch's are: 1e-3 of a logit, all of a small KL."""
    torch.manual_seed(3)
    h, r = torch.randn(64, 577), readout(torch.randn(3000, 577) / 8)
    other = h + 0.02 * torch.randn(64, 577)
    native, twin = (lens(factors, name, h, other, r) for name in ("native", "reference"))
    for ours, right in zip(native, twin, strict=True):
        assert_close(ours, right, rtol=5e-5)


@WAYS
def test_equal_rows_are_exactly_zero(factors: Rounded, backend: str) -> None:
    """Catches layers before a fault that aren't exactly 0."""
    h, other, r = made(6, 64, 100)
    other[[0, 4]] = h[[0, 4]]
    kl = lens(factors, backend, h, other, r).kl
    assert kl.nonzero().flatten().tolist() == [1, 2, 3, 5]
    assert lens(factors, backend, h[:0], other[:0], r).kl.shape == (0,)


@KERNELS
@pytest.mark.usefixtures("one_thread")
def test_memory_does_not_grow_with_rows_or_ids(factors: Rounded) -> None:
    """Catches a rounded copy of the head, and tensors of tokens × vocabulary."""

    def held(rows: int, ids: int) -> int:
        workspace.clear()
        h, other, r = made(rows, 64, ids)
        lens(factors, "native", h, other, r)
        return sum(buffer.numel() for buffer in workspace._buffers.values())

    assert held(PAIRS, 1000) == held(PAIRS * 3, 20_000) < 2 * PAIRS * (1000 + 64)


@pytest.mark.parametrize("factors", ROUNDINGS)
def test_without_the_instructions_the_rounding_stays(
    factors: Rounded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches another precision than was asked for, and a slow lens that nobody is told of."""
    h, other, r = made(40, 64, 700)
    monkeypatch.setattr(lens_rounded, "why_not_words", lambda factors: f"no {factors} here")
    found = lens_statistics(h, other, r, products=factors)
    kl, *_ = defined(*rounded(factors, h, other, r))
    assert_close(found.kl, torch.from_numpy(kl), rtol=RTOL[factors])
    (told,) = fallbacks()
    assert told == (f"lens_{factors}", "native", "aten", f"no {factors} here")


@pytest.mark.parametrize(
    ("factors", "instructions"),
    [kernel_of("bfloat16", "bf16"), kernel_of("int16", "vnni")],
)
def test_a_cpu_without_the_instructions_is_told(
    factors: Rounded, instructions: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a library that has no kernel and is called all the same."""
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda _: str(tmp_path))
    monkeypatch.setattr(lens_words_native, "suits_cpu", suits_cpu.__wrapped__)
    monkeypatch.setenv("CXX", f"g++ -mno-avx512{instructions}")
    assert f"no avx512_{instructions}" in str(why_not_words.__wrapped__(factors))


def by_step_products(pair: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
    """Products in 16-bit integers and the differences', from the definition, float64 [2n, V]."""
    z, y = rounded("int16", *pair, readout(weight))
    return torch.from_numpy(np.concatenate([z, y - z]))


ROWS: dict[str, Callable[[], Tensor]] = {
    "alike": lambda: torch.ones(3, 96),
    "signs": lambda: torch.randn(3, 96).sign(),
    "one": lambda: torch.eye(96)[[0, 40, 95]],
    "two": lambda: torch.eye(96)[[0, 40, 95]] + torch.eye(96)[[31, 41, 64]],
    "outlier": lambda: torch.randn(3, 96) + 1e4 * torch.eye(96)[[0, 40, 95]],
    "large": lambda: 1e15 * torch.randn(3, 96),
    "small": lambda: 1e-15 * torch.randn(3, 96),
    "mixed": lambda: torch.randn(3, 96) * 10.0 ** torch.randint(-18, 18, (3, 96)),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("factors", [kernel_of("int16")])
def test_integers_never_overflow(factors: Rounded, name: str) -> None:
    """Catches a sum that wraps: rows and ids that point the same way reach 46,330² and 2 · 32,767²."""
    torch.manual_seed(4)
    h = ROWS[name]()
    for weight in (h, -h, 3.0 * h):
        pair = h, 3.0 * h
        (found,) = (x.clone() for x in products(pair, weight, factors))
        right = by_step_products(pair, weight)
        size = (h.double().abs() @ weight.double().abs().t()).repeat(2, 1) * 3
        assert ((found - right).abs() <= 4e-7 * size).all()


@pytest.mark.parametrize("factors", [kernel_of("int16")])
def test_integers_are_those_of_the_definition(factors: Rounded) -> None:
    """Catches one count that is off by one, in rows, differences or ids, at any place."""
    torch.manual_seed(5)
    for width in (1, 31, 32, 33, 300):
        h, weight = torch.randn(5, width), torch.randn(100, width)
        other = h + 0.1 * torch.randn(5, width)
        (found,) = (x.clone() for x in products((h, other), weight, factors))
        right = by_step_products((h, other), weight)
        size = (h.double().abs() @ weight.double().abs().t()).repeat(2, 1)
        assert ((found - right).abs() <= 4e-7 * size).all()


@pytest.mark.parametrize("size", [2.0**-100, 1e-40, 0.0])
@pytest.mark.parametrize("factors", [kernel_of("int16")])
def test_what_is_too_small_for_a_step_is_none(factors: Rounded, size: float) -> None:
    """Catches infinite or undefined steps of blocks that are next to nothing."""
    small = size * torch.ones(2, 64)
    small[:, 40] = 1.0
    ones = torch.ones(48, 64)
    (found,) = (x.clone() for x in products((small, small), ones, factors))
    assert_close(found[:2], torch.ones(2, 48), rtol=1e-4)
    (found,) = products((ones, 2 * ones), small, factors)
    assert_close(found, torch.ones(96, 2), rtol=1e-4)


@pytest.mark.parametrize(("factors", "backend"), [kernel_of("int16", "native"), ("int16", "aten")])
def test_one_channel_takes_the_digits_of_its_block_alone(factors: Rounded, backend: str) -> None:
    """Catches steps of whole rows: a channel of 1,000 would cost every other one its digits.

    Its 31 neighbours are rounded to a thousandth of their size: int16 is then no better than
    bfloat16, as docs/metrics.md says.
    """
    torch.manual_seed(7)
    h, weight = torch.randn(80, 576), torch.randn(2000, 576) / 8
    other = h + 2.0**-9 * torch.randn(80, 576)
    for x in (h, other):
        x[:, 40] *= 1000
    weight[:, 40] /= 1000
    exact = lens_statistics(h, other, readout(weight.double())).kl
    error = (lens(factors, backend, h, other, readout(weight)).kl / exact - 1).abs()
    assert 1e-4 < error.median() < 5e-3
    h[:, 40] /= 1000
    other[:, 40] /= 1000
    weight[:, 40] *= 1000
    error = (lens(factors, backend, h, other, readout(weight)).kl / exact - 1).abs()
    assert error.median() < 1e-4


HEADS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bias": (lambda: nn.Linear(8, 33), "it has a bias"),
    "bfloat16": (lambda: nn.Linear(8, 33, bias=False, dtype=torch.bfloat16), "is torch.bfloat16"),
    "module": (lambda: nn.Sequential(nn.Linear(8, 33, bias=False)), "the head is a Sequential"),
}


@pytest.mark.parametrize("factors", ROUNDINGS)
@pytest.mark.parametrize("name", HEADS)
def test_other_heads_are_refused(name: str, factors: Rounded) -> None:
    """Catches a head whose products are taken in a precision that nobody asked for."""
    head, reason = HEADS[name]
    pair = torch.zeros(2, 8), torch.ones(2, 8)
    with pytest.raises(ValueError, match=f"no products in {factors}: .*{reason}"):
        lens_statistics(*pair, Readout(nn.Identity(), head()), products=factors)
    op = LENS_ROUNDED[factors]
    assert reason in str(op.why_not("native", *pair, Readout(nn.Identity(), head()), 64))


@pytest.mark.parametrize("factors", ROUNDINGS)
def test_a_head_is_not_rounded_for_nothing(
    factors: Rounded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a whole head that is rounded for no rows: as long as all rows' products."""
    h, other, r = made(20, 64, 700)

    def never(*_: Any) -> Any:
        raise AssertionError("rounded by torch")

    monkeypatch.setattr(lens_rounded, "ROUNDINGS", {factors: never})
    if why_not_words(factors) is None:
        lens_statistics(h, other, r, products=factors)
    lens_statistics(h, h.clone(), r, products=factors)
    lens_statistics(h[:0], h[:0], r, products=factors)
