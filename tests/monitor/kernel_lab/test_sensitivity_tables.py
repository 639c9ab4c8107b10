"""The tables of sensitivity, allocation and modules, built on a tiny checkpoint from end to end."""

from typing import Any

import pytest

from quantwatch.kernel_lab.tables import allocation, modules, sensitivity
from quantwatch.kernel_lab.tables.model import Table, TableRequest, to_markdown

pytestmark = pytest.mark.slow


def column(table: Table, name: str) -> list[Any]:
    index = [c.name for c in table.columns].index(name)
    return [row[index] for row in table.rows]


def test_sensitivity(tiny_request: TableRequest) -> None:
    """Catches rows of one model under the other's name, and a kind that is left out."""
    table = sensitivity.build(tiny_request)
    kinds = list(zip(column(table, "model"), column(table, "kind"), strict=True))
    assert [kind for model, kind in kinds if model == tiny_request.model] == [
        "embedding",
        "layer",
        "layer",
    ]
    moe = {kind for model, kind in kinds if model == "tiny-moe"}
    assert moe == {"embedding", "layer", "attention", "mlp", "linear", "experts", "expert",
                   "shared expert", "router", "shared gate", "head"}  # fmt: skip
    assert all(kl > 0 for kl in column(table, "kl"))
    assert all(0 < e < 5.55 for e in column(table, "entropy") if e is not None)
    assert "layers.1.mlp.experts.5" in column(table, "module")
    assert any("rank correlation" in note for note in table.notes)
    assert "2 × layer" not in to_markdown(table)


def test_allocation(tiny_request: TableRequest) -> None:
    """Catches ways that may spend different budgets, and one that is over its own."""
    table = allocation.build(tiny_request)
    assert column(table, "chosen") == ["sensitivity", "uniform", "random, seed 0"]
    bits, targets = column(table, "bits_per_weight"), column(table, "target")
    assert all(0 <= target - bit < 0.2 for bit, target in zip(bits, targets, strict=True))
    predicted = column(table, "predicted_kl")
    assert predicted[0] == min(predicted)
    assert column(table, "kl")[0] == min(column(table, "kl"))


def test_modules(tiny_request: TableRequest) -> None:
    """Catches a kind whose rules reach other layers, and matrices that stay without a reason."""
    table = modules.build(tiny_request)
    names = column(table, "module")
    assert names[:2] == ["layers.*.attention.q_proj", "layers.*.attention.k_proj"]
    whole = names.index("all of these")
    assert column(table, "count")[:3] == [2, 2, 14]
    kls = column(table, "kl")
    assert all(kl > 0 for kl in kls[: whole + 1])
    assert kls[whole] > max(kls[:whole])
    speeds = [column(table, f"{name}_16")[0] for name in ("low", "speed", "high")]
    assert speeds == sorted(speeds)
    assert speeds[0] > 0
    reasons = column(table, "reason")
    assert all(reasons[whole + 1 :])
    assert column(table, "weights")[-1] == 5 * 32
