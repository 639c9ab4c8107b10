"""The table of strategies on a tiny model: each figure against a decode loop or float64 by hand."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantwatch.errors import PromptError
from quantwatch.kernel_lab.long_texts import (
    Continued,
    greedy,
    long_texts,
    median_parting,
    parting,
    rate_per_1000,
)
from quantwatch.kernel_lab.references import load_reference
from quantwatch.kernel_lab.tables import strategy
from quantwatch.kernel_lab.tables.model import TableRequest, to_json
from quantwatch_kernels.serve.kv_cache import QuantizedCache
from quantwatch_kernels.serve.kv_reads import Arrivals
from quantwatch_kernels.serve.kv_scheme import scheme_named
from quantwatch_kernels.serve.kv_single_pass import quantized_kv


@pytest.fixture
def loaded(tiny_request: TableRequest) -> Any:
    return load_reference(tiny_request.model, tiny_request.cache_dir, off_grid_seed=None)


def decoded(model: Any, ids: Tensor, prefill: int, name: str | None) -> Tensor:
    """Logits [T, V] of single steps behind a prefill, through a cache as transformers calls it."""
    cache = None if name is None else QuantizedCache(scheme_named(name), 2)
    with torch.no_grad():
        if cache is None:
            found: Tensor = model(ids, use_cache=False).logits[0]
            return found
        parts = [ids[:, :prefill], *torch.split(ids[:, prefill:], 1, 1)]
        return torch.cat([model(part, cache=cache).logits for part in parts], 1)[0]


def test_figures_by_a_decode_loop(tiny_request: TableRequest, loaded: Any) -> None:
    """Catches other positions, another token's perplexity, and a slope per token.

    A last bit turns a code now and then: the figures agree to some percent, not to the last digit.
    """
    rows = {row["strategy"]: row for row in to_json(strategy.build(tiny_request))["rows"]}
    assert list(rows) == list(strategy.QUICK)
    texts = long_texts(loaded.tokenizer, tiny_request.text, 2, 512)
    kls, firsts = [], []
    for window in texts.windows:
        p, q = (
            decoded(loaded.module, window, 384, name)[383:511].double().log_softmax(-1)
            for name in (None, "kivi4")
        )
        kls.append((p.exp() * (p - q)).sum(-1))
        firsts.append((p - q)[0, window[0, 384]].item())
    row = rows["kivi4"]
    kl = torch.stack(kls).mean(0)
    for part in range(4):
        expected = kl[part * 32 : part * 32 + 32].mean().item()
        assert row[f"kl_{part + 1}"] == pytest.approx(expected, rel=0.1)
    assert row["first_ppl"] == pytest.approx(math.exp(sum(firsts) / 2) - 1, rel=0.1, abs=1e-4)
    x = torch.arange(128.0, dtype=torch.float64)
    slope = torch.linalg.lstsq(torch.stack([x, torch.ones_like(x)], 1), kl[:, None]).solution[0, 0]
    scale = 1000 * kl.std().item() / 64
    assert row["kl_slope"] == pytest.approx(1000 * slope.item(), abs=0.1 * scale)
    order = [rows[name]["l2_attention"] for name in ("int8-symmetric", "kivi4")]
    assert 0 < rows["bfloat16"]["l2_attention"] < order[0] < order[1]


def test_figures_are_arithmetic_of_the_logits(tiny_request: TableRequest, loaded: Any) -> None:
    """Catches a slope, a standard error or a centring that isn't what its column says.

    By numpy in float64, from the logits that the table itself has: so to all digits.
    """
    (row,) = (r for r in to_json(strategy.build(tiny_request))["rows"] if r["strategy"] == "kivi4")
    texts = long_texts(loaded.tokenizer, tiny_request.text, 2, 512)
    kls, gains, squares = [], [], np.zeros(2)
    for window in texts.windows:
        with torch.no_grad():
            plain = loaded.module(window, use_cache=False).logits[0, 383:511].double().numpy()
            with quantized_kv(loaded.module, scheme_named("kivi4"), Arrivals(384)):
                found = loaded.module(window, use_cache=False).logits[0, 383:511].double().numpy()
        p, q = (z - np.logaddexp.reduce(z, axis=1, keepdims=True) for z in (plain, found))
        kls.append((np.exp(p) * (p - q)).sum(1))
        gains.append((p - q)[np.arange(128), window[0, 384:]])
        apart = found - plain
        squares += [((x - x.mean(1, keepdims=True)) ** 2).sum() for x in (apart, plain)]
    slopes, growths = (
        np.array([1000 * np.polyfit(np.arange(128), each, 1)[0] for each in values])
        for values in (kls, gains)
    )
    firsts = np.array([each[0] for each in gains])
    expected = {
        "l2_logits": np.sqrt(squares[0] / squares[1]),
        "first_ppl": np.expm1(firsts.mean()),
        "first_se": np.exp(firsts.mean()) * firsts.std(ddof=1) / np.sqrt(2),
        **{f"kl_{n + 1}": np.mean(kls, 0)[32 * n : 32 * n + 32].mean() for n in range(4)},
        "kl_slope": slopes.mean(),
        "kl_slope_se": slopes.std(ddof=1) / np.sqrt(2),
        "ppl_slope": np.expm1(growths.mean()),
        "ppl_slope_se": np.exp(growths.mean()) * growths.std(ddof=1) / np.sqrt(2),
    }
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-5), name


def test_the_residual_is_set_beside_the_article(tiny_request: TableRequest) -> None:
    """Catches a note that names a ratio other than the rows'."""
    table = strategy.build(tiny_request)
    rows = {row[0]: row for row in table.rows}
    plain, repaired = (rows[name][2] for name in ("int8-symmetric", "int8-r4"))
    assert isinstance(plain, float)
    assert isinstance(repaired, float)
    notes = [note for note in table.notes if note.startswith("low-rank residual")]
    assert len(notes) == 1
    assert f"÷ {plain / repaired:.2f}; the article says 0.182 to 0.013, ÷ 14" in notes[0]


def test_where_greedy_texts_part(loaded: Any, tiny_request: TableRequest) -> None:
    """Catches an index off by one: against a candidate that decodes on its own."""
    model = loaded.module
    texts = long_texts(loaded.tokenizer, tiny_request.text, 3, 24)
    prompts = torch.cat(texts.windows)
    continued = greedy(model, prompts, 40)
    assert continued.ids.shape == (3, 64)
    scheme = scheme_named("kivi2")
    with quantized_kv(model, scheme, Arrivals(24)):
        common, parted = parting(model, continued)
    for number, prompt in enumerate(prompts):
        cache, step, own = QuantizedCache(scheme, 2), prompt[None], []
        with torch.no_grad():
            for _ in range(40):
                step = model(step, cache=cache).logits[:, -1:].argmax(-1)
                own.append(int(step))
        same = [a == b for a, b in zip(own, continued.ids[number, 24:].tolist(), strict=True)]
        first = same.index(False) if False in same else 40
        assert common[number] == min(first, int(continued.usable[number]))
        assert bool(parted[number]) == (first < int(continued.usable[number]))
    with torch.no_grad():
        again = model(continued.ids, use_cache=False).logits[:, 23:63].argmax(-1)
    agrees = (again == continued.ids[:, 24:]).int().cumprod(-1).sum(-1)
    assert continued.usable.tolist() == agrees.tolist()


def test_ties_of_the_reference_are_nobodys_fault() -> None:
    """Catches a parting where the reference itself isn't sure."""

    class Fixed(torch.nn.Module):
        def forward(self, ids: Tensor, **kwargs: Any) -> Any:
            logits = torch.zeros(1, len(kwargs["logits_to_keep"]), 9)
            logits[0, :, 5] = 1
            return type("Output", (), {"logits": logits})

    ids = torch.tensor([[1, 1, 5, 5, 7, 5], [1, 1, 5, 5, 7, 5], [1, 1, 5, 5, 5, 5]])
    continued = Continued(ids, 2, torch.tensor([4, 2, 3]))
    common, parted = parting(Fixed(), continued)
    assert common.tolist() == [2, 2, 3]
    assert parted.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("common", "parted", "rate", "median"),
    [
        ([10, 20, 30], [True, True, True], 1000 * 3 / 63, 20.0),
        ([10, 256, 256], [True, False, False], 1000 / 523, None),
        ([10, 20, 256], [True, True, False], 2000 / 288, 20.0),
        ([256, 256], [False, False], 0.0, None),
        ([10, 256], [True, False], 1000 / 267, None),
    ],
)
def test_partings_are_counted_with_those_that_never_part(
    common: list[int], parted: list[bool], rate: float, median: float | None
) -> None:
    """Catches a mean over those that parted only."""
    assert rate_per_1000(torch.tensor(common), torch.tensor(parted)) == pytest.approx(rate)
    assert median_parting(common, parted) == median


def test_slopes_and_parts() -> None:
    """Catches a slope per token, and parts that overlap."""
    assert strategy.slope_per_1000(torch.arange(50.0).double() * 0.002 + 7) == pytest.approx(2.0)
    assert strategy.by_part([torch.arange(8.0), torch.arange(8.0) + 2]) == (1.5, 3.5, 5.5, 7.5)
    assert strategy.mean_se([1.0, 3.0]) == pytest.approx((2.0, 1.0))
    assert math.isnan(strategy.mean_se([1.0])[1])


def test_logits_are_compared_in_float64_and_centred() -> None:
    """Catches a shift of all logits that is taken for an error, and a target off by one."""
    generator = torch.Generator().manual_seed(0)
    plain, found = (torch.randn(200, 11, generator=generator) for _ in range(2))
    window = torch.randint(0, 11, (1, 584), generator=generator)
    series = strategy.compared(plain, found, window)
    p, q = (x.double().log_softmax(-1) for x in (plain, found))
    assert torch.allclose(series.kl, (p.exp() * (p - q)).sum(-1))
    expected = [(p - q)[i, window[0, 384 + i]].item() for i in range(200)]
    assert series.nll.tolist() == pytest.approx(expected)
    moved = strategy.compared(plain, plain + torch.arange(200.0)[:, None], window)
    assert moved.squares[0] < 1e-6 * moved.squares[1]


def test_too_little_text(loaded: Any, tiny_request: TableRequest, tmp_path: Path) -> None:
    """Catches windows that are shorter than they say."""
    short = tmp_path / "short.txt"
    short.write_text("abc " * 300)
    with pytest.raises(PromptError, match="windows of 512"):
        long_texts(loaded.tokenizer, short, 4, 512)
    with pytest.raises(PromptError, match=r"core-v1 .*: \d+ tokens; 99 windows of 1536 are needed"):
        long_texts(loaded.tokenizer, None, 99, 1536)


def test_windows_fit_the_model(tiny_request: TableRequest) -> None:
    """Catches windows longer than the model's context of 512."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "STRATEGIES", ("int8",))
        patch.setattr(strategy, "_NEW", 16)
        table = strategy.build(replace(tiny_request, quick=False))
    assert "4 windows of 512 tokens" in table.notes[0]
    assert len(table.rows) == 1
