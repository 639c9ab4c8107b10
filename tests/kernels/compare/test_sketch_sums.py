"""The sums of an estimate, by compiled code and by torch, against the formulas in 60 digits."""

from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from quantwatch_kernels.compare import sketch_sums as sketch_sums_module
from quantwatch_kernels.compare import sketch_sums_native
from quantwatch_kernels.compare.sketch import Sketch
from quantwatch_kernels.compare.sketch_sums import Sums, sketch_sums
from quantwatch_kernels.registry import fallbacks, prefer
from quantwatch_kernels.testing import assert_close

BACKENDS = ("native", "aten")
FLOATS = ("kl", "standard_error", "topk_logit_deviation_k5", "topk_logit_deviation_k3")


def kept(rows: int, top: int, draws: int, tail: float = 0.3) -> Sketch:
    """A reference's logits, largest first; what is kept and the tail have a mass of 1."""
    torch.manual_seed(5)
    logits = torch.cat([torch.randn(rows, top).sort(-1, descending=True).values * 3, -9.0 * torch.rand(rows, draws)], 1)  # fmt: skip
    log_normalizer = logits[:, :top].double().logsumexp(-1) - torch.tensor(1 - tail).double().log()
    tails = torch.full((rows,), tail, dtype=torch.float64)
    ids = torch.arange(top + draws).expand(rows, -1).int()
    return Sketch(ids, logits, log_normalizer, tails, torch.zeros(rows).long(), top, 10_000)


def sums(backend: str, z: Tensor, sketch: Sketch) -> Sums:
    with prefer(backend):
        return sketch_sums(z, sketch)


def truly(z: Tensor, sketch: Sketch) -> tuple[float, float]:
    """KL and standard error of the first row, by the definitions in `sketch_estimate.py`."""
    with localcontext(prec=60):
        return _truly(z, sketch)


def _truly(z: Tensor, sketch: Sketch) -> tuple[float, float]:
    k, count = sketch.num_top, z.shape[1]
    old, new = ([Decimal(x) for x in row[0].tolist()] for row in (sketch.logits, z))
    tail, draws = Decimal(sketch.tail_mass[0].item()), count - k
    masses = [(x - Decimal(sketch.log_normalizer[0].item())).exp() for x in old[:k]]
    w = [m / (sum(masses) + tail) for m in (*masses, *[tail / draws] * draws)]
    delta = [b - a for a, b in zip(old, new, strict=True)]
    mean = sum(a * b for a, b in zip(w, delta, strict=True))
    lifted = [(x - mean).exp() for x in delta]
    growth = sum((a * b for a, b in zip(w, lifted, strict=True)), Decimal(0))
    rho = sum(w[k:])
    kl = growth.ln() + rho**2 * _variance(lifted[k:]) / (2 * draws * growth**2)
    psi = [lifted[i] - growth * (delta[i] - mean) for i in range(k, count)]
    return float(kl), float(rho * (_variance(psi) / draws).sqrt() / growth)


def _variance(x: list[Decimal]) -> Decimal:
    mean = sum(x) / Decimal(len(x))
    return sum((each - mean) ** 2 for each in x) / Decimal(len(x) - 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [(5, 2), (64, 96), (13, 10)], ids=str)
@pytest.mark.parametrize("drift", [1e-6, 1e-3, 0.4, 6.0, 90.0])
def test_equals_the_formula(backend: str, size: tuple[int, int], drift: float) -> None:
    """Catches digits lost where terms cancel, the series' last terms and lanes beyond a row."""
    sketch = kept(1, *size)
    z = sketch.logits + drift * torch.randn(1, sum(size))
    found = sums(backend, z, sketch)
    assert fallbacks() == {}
    kl, error = truly(z, sketch)
    # torch's way is right to 2e-16/|d|; the least |d| that float32 logits of 9 can show is 1e-6.
    rtol = 1e-12 if backend == "native" or drift >= 1e-3 else 1e-8
    assert_close(found.kl, torch.tensor([kl], dtype=torch.float64), rtol=rtol, atol=0)
    assert_close(
        found.standard_error, torch.tensor([error], dtype=torch.float64), rtol=rtol, atol=0
    )
    gaps = (sketch.logits.double() - z.double()).abs()
    assert_close(found.topk_logit_deviation_k5, gaps[:, :5].mean(-1), rtol=1e-14, atol=0)
    assert_close(found.topk_logit_deviation_k3, gaps[:, :3].mean(-1), rtol=1e-14, atol=0)
    assert not (found.equal | found.infinite | found.undefined).any()


def _set(row: int, column: int, value: float) -> tuple[Tensor, Sketch]:
    sketch = kept(4, 8, 6)
    z = sketch.logits + 0.1 * torch.randn(4, 14)
    z[row, column] = value
    return z, sketch


ODD = {
    "a lift of 700 nats": (_set(1, 9, 700.0), {}),
    "a fall of 700 nats": (_set(1, 2, -700.0), {}),
    "an infinite logit": (_set(1, 9, float("inf")), {"infinite"}),
    "a logit of minus infinity": (_set(1, 2, -float("inf")), {"infinite"}),
    "no number": (_set(1, 2, float("nan")), {"undefined"}),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_rows_are_those_of_torch(case: str) -> None:
    """Catches exponentials out of range, and a flag that stays behind in a neighbour."""
    (z, sketch), flags = ODD[case]
    native, torchs = (sums(backend, z, sketch) for backend in BACKENDS)
    for name in ("equal", "infinite", "undefined"):
        assert getattr(native, name).tolist() == [False, name in flags, False, False]
        assert getattr(torchs, name).tolist() == getattr(native, name).tolist()
    for name in FLOATS[: 4 if not flags else 0]:
        assert_close(getattr(native, name), getattr(torchs, name), rtol=1e-10, atol=0)
    if "undefined" in flags:
        assert native.kl.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_far_rows_are_right(backend: str) -> None:
    """Where e^−d is no number any more: the KL is the likeliest id's fall."""
    (z, sketch), _ = ODD["a lift of 700 nats"]
    kl, _ = truly(z[1:], sketch.rows(slice(1, None)))
    found = sums(backend, z, sketch)
    # One draw is all there is: the correction for the draws' variance, left out here, is 1/2.
    assert abs(found.kl[1].item() - (kl - 0.5)) < 1e-10
    assert found.standard_error.isinf().tolist() == [False, True, False, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shift_of_all_logits_is_no_difference(backend: str) -> None:
    sketch = kept(3, 8, 6)
    sketch.logits.mul_(64).round_().div_(64)
    z = sketch.logits.clone()
    z[1] += 2.0
    found = sums(backend, z, sketch)
    assert found.equal.tolist() == [True] * 3
    assert found.kl.tolist() == found.standard_error.tolist() == [0.0] * 3


def test_a_row_depends_on_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches buffers that keep a row's values, and threads that share them."""
    monkeypatch.setattr(sketch_sums_native, "_LEAST", 1)
    sketch = kept(37, 11, 7)
    z = sketch.logits + 0.3 * torch.randn(37, 18)
    whole = sums("native", z, sketch)
    alone = [sums("native", z[i : i + 1], sketch.rows(slice(i, i + 1))) for i in range(37)]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        shared = sums("native", z, sketch)
    finally:
        torch.set_num_threads(before)
    for name in FLOATS:
        expected = getattr(whole, name).tolist()
        assert [getattr(each, name).item() for each in alone] == expected
        assert getattr(shared, name).tolist() == expected


def test_a_vocabulary_of_two() -> None:
    """Catches deviations of ids that aren't there: what lies behind the row in memory."""
    sketch = kept(3, 2, 2)
    z = sketch.logits + 0.1 * torch.randn(3, 4)
    native, torchs = (sums(backend, z, sketch) for backend in BACKENDS)
    for name in FLOATS:
        assert_close(getattr(native, name), getattr(torchs, name), rtol=1e-10, atol=0)


def test_other_dtypes_are_done_by_torch() -> None:
    """Catches memory that is read as what it isn't."""
    sketch = kept(3, 8, 6)
    z = (sketch.logits + 0.1 * torch.randn(3, 14)).double()
    assert sketch_sums(z, sketch).kl.tolist() == sums("aten", z, sketch).kl.tolist()
    ((counted, _),) = fallbacks().items()
    assert (
        counted.reason == "sketch_sums.cpp takes torch.float32 on the CPU, not torch.float64 on cpu"
    )


def test_no_compiler_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches slow sums that nobody is told of."""
    sketch = kept(3, 8, 6)
    z = sketch.logits + 0.1 * torch.randn(3, 14)
    expected = sums("aten", z, sketch)
    monkeypatch.setattr(sketch_sums_module, "why_not_summed", lambda: "no compiler")
    assert sketch_sums(z, sketch).kl.tolist() == expected.kl.tolist()
    assert [(f.op, f.wanted, f.used, f.reason) for f in fallbacks()] == [
        ("sketch_sums", "native", "aten", "no compiler")
    ]
