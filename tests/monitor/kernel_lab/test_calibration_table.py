"""The table of calibration sets on a tiny model: its figures against whole calibrations."""

import statistics
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.tiny_models import llama
from torch import Tensor

from quantwatch.kernel_lab.measure import Yardstick
from quantwatch.kernel_lab.tables.calibration import compare, prepared
from quantwatch.kernel_lab.tables.model import Table, TableRequest, to_json
from quantwatch.kernel_lab.texts import Text
from quantwatch_kernels.calibration.coverage import length_labels
from quantwatch_kernels.calibration.pool import draw
from quantwatch_kernels.calibration.selection import SELECTIONS, SelectionName, select_samples
from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.recipe import (
    ActivationSpec,
    PerChannel,
    PerTensor,
    Recipe,
    WeightSpec,
)

STATIC = Recipe(
    WeightSpec(INT_FORMATS["int8"], PerChannel()),
    activations=ActivationSpec(INT_FORMATS["uint8"], PerTensor(), static=True),
)


def sequence(seed: int, length: int) -> Tensor:
    return torch.randint(0, 80, (1, length), generator=torch.Generator().manual_seed(seed))


POOL = [sequence(100 + n, 4 + 3 * (n % 5)) for n in range(24)]
TEXT = Text("held out", tuple(sequence(n, 16) for n in range(3)))


@pytest.fixture
def yardstick() -> Yardstick:
    return reference()


def reference() -> Yardstick:
    heads = {"hidden_size": 48, "num_attention_heads": 6, "head_dim": 8}
    return Yardstick(llama(80, scale=6.0, **heads, num_hidden_layers=4), TEXT, {})


@cache
def table() -> Table:
    """Measured once for all tests, of a reference of its own."""
    request = TableRequest(Path(), seed=4, quick=True)
    return compare(prepared(reference(), POOL, request.tell), request)


def by_calibration(measured: Yardstick, name: SelectionName) -> list[float]:
    """KL of every seed: half of the pool, its own selection, a calibration of the whole recipe."""
    found = []
    for seed in (4, 5, 6):
        half = [POOL[n] for n in sorted(draw(range(24), 12, seed))]
        chosen = select_samples(
            measured.module, half, 8, name, seed=seed, labels=length_labels(half)
        )
        samples = [half[n] for n in chosen.indices]
        found.append(measured.try_recipe(STATIC, calibration=samples).kl)
    return found


@pytest.mark.slow
def test_figures_are_those_of_whole_calibrations(yardstick: Yardstick) -> None:
    """Catches ranges of other samples, a measured set mistaken for another, seeds not paired."""
    rows: dict[str, Any] = {row["selection"]: row for row in to_json(table())["rows"]}
    drawn = by_calibration(yardstick, "random")
    for name in SELECTIONS:
        values = drawn if name == "random" else by_calibration(yardstick, name)
        row = rows[name]
        assert row["kl"] == pytest.approx(statistics.fmean(values), rel=1e-12)
        assert row["sd"] == pytest.approx(statistics.stdev(values), rel=1e-9)
        assert (row["least"], row["most"]) == (min(values), max(values))
        if name == "random":
            assert row["difference"] is None
            continue
        gaps = [a - b for a, b in zip(values, drawn, strict=True)]
        wide = 4.302652729749464 * statistics.stdev(gaps) / 3**0.5  # Student's t, 2 degrees
        assert row["difference"] == pytest.approx(statistics.fmean(gaps), rel=1e-9)
        assert row["high"] - row["difference"] == pytest.approx(wide, rel=1e-6)
        assert row["difference"] - row["low"] == pytest.approx(wide, rel=1e-6)
        assert row["wins"] == f"{sum(gap < 0 for gap in gaps)} of 3"


def test_controls_and_notes() -> None:
    """The whole half has the most tokens; the notes say what was measured on what."""
    rows = to_json(table())["rows"]
    assert [row["selection"] for row in rows] == [*SELECTIONS, "lowest score", "whole half"]
    tokens = [row["tokens"] for row in rows]
    assert tokens[-1] > max(tokens[:-1])
    notes = " ".join(table().notes)
    assert "held out: 3 of held out, 21 scored tokens" in notes
    assert "draws 12 of 24 samples, a selection takes 8" in notes
    assert "of 12 samples have their 3 most active heads" in notes
    assert "rank correlation of entropy and attention variance over the pool: " in notes
