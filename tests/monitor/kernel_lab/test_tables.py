"""Tables are values: right in JSON and Markdown; the harness behind ours on tiny models."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from quantwatch.errors import UserError
from quantwatch.kernel_lab import bench
from quantwatch.kernel_lab.bounds import BoundRow, check_bounds
from quantwatch.kernel_lab.inputs import FedLayer, fed_layers
from quantwatch.kernel_lab.tables import registry
from quantwatch.kernel_lab.tables.model import (
    Column,
    Rows,
    Table,
    TableRequest,
    to_json,
    to_markdown,
)
from quantwatch_kernels.quantize import error_bounds

COLUMNS = (
    Column("name", "what"),
    Column("kl", "mean KL, nats", ".4f"),
    Column("size", "bytes", ",d"),
)


def test_rows_are_told_as_they_come() -> None:
    """Catches a table that keeps an hour's figures to itself until it is killed."""
    said: list[str] = []
    rows = Rows(COLUMNS, said.append)
    rows.add("a", 0.123456, 1234)
    assert said == ["what a; mean KL, nats 0.1235; bytes 1,234"]
    rows.add("b", math.nan, None)
    assert said[1] == "what b; mean KL, nats not finite; bytes –"
    assert Table("Title", COLUMNS, tuple(rows)).rows[0] == ("a", 0.123456, 1234)
    with pytest.raises(ValueError, match="argument"):
        rows.add("too short")


def test_a_table_in_two_forms() -> None:
    """Catches NaN in JSON, rounding in JSON, and a pipe that breaks a Markdown table."""
    rows = (("a|b", 0.123456, 1234), ("c", math.nan, None), ("d", math.inf, 5))
    table = Table("Title", COLUMNS, rows, ("how it was measured",))
    data = json.loads(json.dumps(to_json(table), allow_nan=False))
    assert data["rows"][0] == {"name": "a|b", "kl": 0.123456, "size": 1234}
    assert [row["kl"] for row in data["rows"][1:]] == ["not finite", "∞"]
    lines = to_markdown(table).splitlines()
    assert lines[0] == "## Title"
    assert [cell.strip() for cell in lines[4].replace("\\|", "!").split("|")] == [
        "",
        "a!b",
        "0.1235",
        "1,234",
        "",
    ]
    assert lines[3].count("-:") == 2
    assert len({len(line) for line in lines[2:7]}) == 1
    assert lines[-1] == "- how it was measured"


def test_a_row_of_another_length_is_refused() -> None:
    """Catches a cell that slips under another heading."""
    with pytest.raises(ValueError, match="2 cells for 3 columns"):
        Table("Title", COLUMNS, (("a", 1.0),))


def test_every_table_has_a_builder() -> None:
    """Catches a line in the registry whose module is missing or has no `build`."""
    for name, entry in registry.TABLES.items():
        module = __import__(entry.module, fromlist=["build"])
        assert callable(module.build), name
        assert entry.shows


def test_an_unknown_table_names_the_known(tmp_path: Path) -> None:
    """Catches an error that leaves the reader guessing."""
    with pytest.raises(UserError, match=r"no table 'laddr'.*group-size"):
        registry.build("laddr", TableRequest(tmp_path))


def layer(weight: torch.Tensor, scope: str = "layers.0.mlp.up_proj") -> FedLayer:
    generator = torch.Generator().manual_seed(1)
    return FedLayer(scope, weight, torch.randn(16, weight.shape[1], generator=generator))


def test_bounds_hold_on_normal_weights() -> None:
    """Catches a check that reports trouble where there is none."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    rows = list(check_bounds([layer(weight)], ["int8-channel", "uint4-g32"]))
    assert [row.format for row in rows] == [
        "int8-channel",
        "uint4-g32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
    ]
    assert [row.problems for row in rows] == [()] * 6
    assert all(0.5 < row.weight_worst <= 1 for row in rows)


def test_a_wrong_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check that can't fail: bounds 10 % too small, predictions 1 dB off, σ 4 × off."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))

    def problems() -> list[tuple[str, ...]]:
        rows: list[BoundRow] = list(check_bounds([layer(weight)], ["int4-g32"], floats=()))
        return [row.problems for row in rows]

    real, square = error_bounds.worst_case, error_bounds.expected_square
    monkeypatch.setattr(error_bounds, "worst_case", lambda w, q: 0.9 * real(w, q))
    assert problems() == [("worst case exceeded",)]
    monkeypatch.setattr(error_bounds, "worst_case", real)
    monkeypatch.setattr(error_bounds, "expected_square", lambda w, q: 16 * square(w, q))
    assert problems() == [
        ("expected form off by more than 3 ×", "SQNR prediction off by more than 0.3 dB")
    ]


def test_a_broken_weight_is_refused() -> None:
    """Catches bounds that hold because NaN compares false."""
    with pytest.raises(ValueError, match="up_proj: its weight"):
        list(check_bounds([layer(torch.full((2, 4), math.nan))], ["int8-channel"]))


def test_layers_are_fed_what_they_are_fed() -> None:
    """Catches inputs of another layer, and hooks that stay."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(9, 6)
            self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 4)

        def forward(self, ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
            out: torch.Tensor = self.b(torch.relu(self.a(self.emb(ids))))
            return out

    model, ids = Two(), torch.arange(9)[None]
    found = {fed.scope: fed for fed in fed_layers(model, {"x.a": "a", "x.b": "b"}, ids, rows=3)}
    chosen = model.emb.weight[[0, 4, 8]]
    assert torch.equal(found["x.a"].inputs, chosen)
    assert torch.allclose(found["x.b"].inputs, torch.relu(model.a(chosen)))
    assert found["x.b"].kind == "b"
    assert not model.a._forward_pre_hooks
    with pytest.raises(ValueError, match=r"x\.emb is a Embedding"):
        list(fed_layers(model, {"x.emb": "emb"}, ids))


def test_a_bench_counts_what_another_back_end_did() -> None:
    """Catches a speed that is another back end's, and an interval that misses its median."""
    speeds = bench.measure_shape((2, 33, 65), 6, bench.CONTESTANTS)
    by_name = {(s.operator, s.backend): s for s in speeds}
    assert "dequantized: " in by_name["int8_linear", "aten"].message
    assert by_name["w8a8_linear", "aten"].message == ""
    for speed in speeds:
        assert 0 < speed.ratio_low <= speed.ratio <= speed.ratio_high
        assert (speed.rounds, speed.threads, speed.shape) == (6, 1, (2, 33, 65))
    with pytest.raises(ValueError, match="at least 5"):
        bench.run_bench(rounds=4)
