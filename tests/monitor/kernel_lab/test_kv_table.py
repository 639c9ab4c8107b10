"""The table of KV caches on a tiny model: the protocol, figures by a decode loop, no peer elsewhere."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwatch.kernel_lab.references import load_reference, yardstick
from quantwatch.kernel_lab.tables import kv
from quantwatch.kernel_lab.tables.kv_rows import bar, bits
from quantwatch.kernel_lab.tables.model import Table, TableRequest, to_json
from quantwatch_kernels.serve.kv_cache import QuantizedCache
from quantwatch_kernels.serve.kv_reads import Arrivals
from quantwatch_kernels.serve.kv_scheme import SCHEMES, scheme_named
from quantwatch_kernels.serve.kv_single_pass import calibrate_gains


def by_decoding(model: Any, window: Tensor, name: str, own: Any) -> Tensor:
    """KL in nats of the 128 last predictions, in float64, through a cache as transformers calls it.

    `own` exact: the last 128 come at once; codes: one by one.
    """
    cache = QuantizedCache(SCHEMES[name], model.config.num_hidden_layers, own)
    with torch.no_grad():
        parts = [window[:, :384], *torch.split(window[:, 384:], 1 if own == "codes" else 128, 1)]
        found = torch.cat([model(part, cache=cache).logits for part in parts], 1)
        plain = model(window, use_cache=False).logits
    p, q = (x[0, 383:511].double().log_softmax(-1) for x in (plain, found))
    return (p.exp() * (p - q)).sum(-1)


@pytest.fixture
def table(tiny_request: TableRequest) -> Table:
    return kv.build(replace(tiny_request, quick=True))


def test_figures_are_those_of_a_decode_loop(tiny_request: TableRequest, table: Table) -> None:
    """Catches another prefill, other scored tokens, and a cache that isn't in the way.

    A last bit turns a code now and then: the figures agree to 2 %, not to the last digit.
    """
    rows = {row["scheme"]: row for row in to_json(table)["rows"]}
    assert list(rows) == ["int8", "int4", "kivi2"]
    loaded = load_reference(tiny_request.model, tiny_request.cache_dir, off_grid_seed=None)
    text = yardstick(loaded, tiny_request.text, windows=2).text
    for own, column in (("exact", "kl"), ("codes", "kl_served")):
        kl = torch.cat([by_decoding(loaded.module, w, "kivi2", own) for w in text.windows])
        assert len(kl) == 256
        assert rows["kivi2"][column] == pytest.approx(kl.mean().item(), rel=0.02)
        assert 0 < rows["int8"][column] < rows["int4"][column] < rows["kivi2"][column]
    assert rows["kivi2"]["kl"] < rows["kivi2"]["kl_served"]


def test_bits_and_capacity_by_hand(table: Table) -> None:
    """Catches scales that are forgotten: heads of 8 features, per token and head."""
    rows = {row["scheme"]: row for row in to_json(table)["rows"]}
    assert rows["int8"]["bits"] == pytest.approx(8 + (16 + 8) / 8)
    assert rows["int8"]["capacity"] == pytest.approx(16 / 11)
    assert rows["int4"]["bits"] == pytest.approx(4 + (16 + 4) / 8)


@pytest.mark.parametrize(
    ("name", "stored_bits", "expected"),
    [
        ("float16", 16.0, None),
        ("int8", 8.4, 0.0001), ("int8-symmetric", 8.3, 0.0001), ("int8-policy", 11.1, 0.0001),
        ("int8-chunk", 8.0, None), ("kivi8", 8.8, None),
        ("int4-symmetric", 4.3, 0.0045), ("int4", 4.6, 0.0045), ("kivi4", 4.6, 0.0045),
        ("k5v4", 4.9, 0.0045), ("int4", 5.0, 0.0045), ("int4-window", 5.01, None),
        ("kivi2", 2.6, None), ("int2-plain", 2.3, None),
        ("kivi2-r4", 5.1, 0.08), ("int2", 5.1, 0.08), ("int2-plain+gain", 2.3, 0.08),
        ("kivi2+top4", 4.0, 0.08), ("int2-plain+sinks4", 2.4, 0.08),
    ],
)  # fmt: skip
def test_a_bar_is_for_a_kind_of_scheme(
    name: str, stored_bits: float, expected: float | None
) -> None:
    """Catches a bar that stands only beside the schemes which reach it."""
    assert bar(scheme_named(name), stored_bits) == expected


def test_bars_belong_to_one_model(table: Table) -> None:
    """Catches a bar, or a peer's figure, beside a model it was not measured on."""
    for row in to_json(table)["rows"]:
        assert row["reach"] is None
        assert row["reached"] is None
        assert row["peer"] is None
    assert any("aren't shown" in note for note in table.notes)


def test_prompts_of_the_suite(tiny_request: TableRequest) -> None:
    """Catches core-v1 measured as one prefill, where a window would hide nothing."""
    seen: list[Arrivals] = []

    def through(measured: Any, scheme: Any, arrivals: Arrivals, gains: Any) -> Any:
        seen.append(arrivals)
        assert gains is None
        assert measured.text.name.startswith("core-v1")
        assert max(len(measured.text.scored(w)) for w in measured.text.windows) <= 128
        return figures

    text = Path(str(tiny_request.text))
    assert text.exists()
    loaded = load_reference(tiny_request.model, tiny_request.cache_dir, off_grid_seed=None)
    figures = yardstick(loaded, text, windows=2).measure(loaded.module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv, "through", through)
        kv.build(replace(tiny_request, text=None, quick=True))
    assert seen == [Arrivals(own="exact"), Arrivals()] * 3


def test_gains_are_calibrated_on_other_text(tiny_request: TableRequest) -> None:
    """Catches gains that are found on the windows that are measured."""
    seen: list[list[Tensor]] = []

    def calibrated(module: Any, scheme: Any, texts: list[Tensor]) -> Any:
        seen.append(texts)
        return calibrate_gains(module, scheme, texts)

    measured: list[Tensor] = []

    def through(yard: Any, scheme: Any, arrivals: Any, gains: Any) -> Any:
        assert gains is not None
        measured.extend(yard.text.windows)
        return figures

    loaded = load_reference(tiny_request.model, tiny_request.cache_dir, off_grid_seed=None)
    figures = yardstick(loaded, tiny_request.text, windows=2).measure(loaded.module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv, "calibrate_gains", calibrated)
        patch.setattr(kv, "through", through)
        patch.setattr(kv, "QUICK", ("int2-plain+gain",))
        row = to_json(kv.build(replace(tiny_request, quick=True)))["rows"][0]
    assert len(seen[0]) == 8
    read = {tuple(text.flatten().tolist()) for text in seen[0]}
    assert not read & {tuple(window.flatten().tolist()) for window in measured}
    assert row["scheme"] == "int2-plain+gain"
    assert row["bits"] == pytest.approx(2 + (16 + 2) / 8 + 2 * 16 / (2 * 512))


def test_high_layers_and_host_memory_count(tiny_request: TableRequest) -> None:
    """Catches a first layer in full precision, or pages in host memory, that cost nothing."""
    loaded = load_reference(tiny_request.model, tiny_request.cache_dir, off_grid_seed=None)
    plain, high = (bits(loaded, scheme_named(n)) for n in ("int8", "int8+high0"))
    assert high["bits"] == pytest.approx((16 + plain["bits"]) / 2)  # of two layers
    assert high["capacity"] == plain["capacity"]
    assert bits(loaded, scheme_named("int8+top4"))["host"] == 8
    assert plain["host"] == 0
