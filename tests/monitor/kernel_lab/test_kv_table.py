"""The table of KV caches on a tiny model: the protocol, figures by a decode loop, no peer elsewhere."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwatch.kernel_lab.references import load_reference, yardstick
from quantwatch.kernel_lab.tables import kv
from quantwatch.kernel_lab.tables.model import Table, TableRequest, to_json
from quantwatch_kernels.serve.kv_cache import QuantizedCache
from quantwatch_kernels.serve.kv_scheme import SCHEMES


def by_decoding(model: Any, window: Tensor, name: str) -> Tensor:
    """KL in nats of the 128 last predictions, in float64, through a cache token by token."""
    cache = QuantizedCache(SCHEMES[name], model.config.num_hidden_layers)
    with torch.no_grad():
        parts = [window[:, :384], *torch.split(window[:, 384:], 1, 1)]
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
    kl = torch.cat([by_decoding(loaded.module, window, "kivi2") for window in text.windows])
    assert len(kl) == 256
    assert rows["kivi2"]["kl"] == pytest.approx(kl.mean().item(), rel=0.02)
    assert 0 < rows["int8"]["kl"] < rows["int4"]["kl"] < rows["kivi2"]["kl"]


def test_bits_and_capacity_by_hand(table: Table) -> None:
    """Catches scales that are forgotten: heads of 8 features, per token and head."""
    rows = {row["scheme"]: row for row in to_json(table)["rows"]}
    assert rows["int8"]["bits"] == pytest.approx(8 + (16 + 8) / 8)
    assert rows["int8"]["capacity"] == pytest.approx(16 / 11)
    assert rows["int4"]["bits"] == pytest.approx(4 + (16 + 4) / 8)


def test_bars_belong_to_one_model(table: Table) -> None:
    """Catches a bar, or a peer's figure, beside a model it was not measured on."""
    for row in to_json(table)["rows"]:
        assert row["reach"] is None
        assert row["reached"] is None
        assert row["peer"] is None
    assert any("aren't shown" in note for note in table.notes)


def test_prompts_of_the_suite(tiny_request: TableRequest) -> None:
    """Catches core-v1 measured as one prefill, where a window would hide nothing."""
    seen: list[int] = []

    def through(measured: Any, scheme: Any, prefill: int) -> Any:
        seen.append(prefill)
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
    assert seen == [0, 0, 0]
