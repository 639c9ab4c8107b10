"""The table of INT8 attention on a tiny model: errors by hand, pooling, no bar elsewhere."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from quantwatch.errors import ModelError
from quantwatch.kernel_lab.attention_inputs import attention_inputs
from quantwatch.kernel_lab.references import load_reference, yardstick
from quantwatch.kernel_lab.tables import attention
from quantwatch.kernel_lab.tables.model import TableRequest, to_json
from quantwatch_kernels.serve.attention_int8 import ATTENTIONS, int8_attention


def test_figures_by_hand(tiny_request: TableRequest) -> None:
    """Catches another layer's input, an error that isn't of the output, a mean of ratios."""
    rows = {row["attention"]: row for row in to_json(attention.build(tiny_request))["rows"]}
    assert list(rows) == list(ATTENTIONS)
    loaded = load_reference(tiny_request.model, tiny_request.cache_dir, off_grid_seed=None)
    window = yardstick(loaded, tiny_request.text, windows=2).text.windows[0]
    inputs = attention_inputs(loaded.module, window, frozenset({0, 1}))
    assert [each.layer for each in inputs] == [0, 1]
    squares: dict[str, list[float]] = {}
    norm = 0.0
    for each in inputs:
        q, k, v = (x.double() for x in each.text)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        norm += float(right.square().sum())
        for name in ("int8-plain", "int8-smooth"):
            error = int8_attention(*each.text, ATTENTIONS[name]).out - right
            squares.setdefault(name, []).append(float(error.square().sum()))
    plain, smooth = squares["int8-plain"], squares["int8-smooth"]
    assert rows["int8-plain"]["error"] == pytest.approx(math.sqrt(sum(plain) / norm), rel=1e-3)
    assert rows["int8-plain"]["times"] == 1.0
    times = math.sqrt(sum(plain) / sum(smooth))
    assert rows["int8-smooth"]["times"] == pytest.approx(times, rel=1e-3)
    least = [math.sqrt(a / b) for a, b in zip(plain, smooth, strict=True)]
    assert rows["int8-smooth"]["least"] == pytest.approx(min(least), rel=1e-3)
    assert rows["int8-smooth"]["layer"] == least.index(min(least))
    assert rows["int8-both"]["times"] > 1000
    assert rows["int8-both"]["kl"] < 1e-4 * rows["int8-plain"]["kl"]
    assert all(row["reach"] is None and row["reached"] is None for row in rows.values())


def test_a_layer_that_is_not_there(tiny_request: TableRequest) -> None:
    """Catches a table over nothing."""
    loaded = load_reference(tiny_request.model, tiny_request.cache_dir, off_grid_seed=None)
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"no attention in layers \[5\]"):
        attention_inputs(loaded.module, ids, frozenset({0, 5}))
    config: Any = loaded.module.config
    assert config._attn_implementation != "quantwatch_recorded"


def test_a_model_without_attention(tiny_request: TableRequest) -> None:
    """Catches an internal error for what a user names."""
    loaded = load_reference(tiny_request.model, tiny_request.cache_dir, off_grid_seed=None)
    broken = replace(loaded, module=torch.nn.Linear(2, 2))
    with pytest.raises(ModelError, match="Linear is no model of transformers"):
        attention._inputs(tiny_request, broken, torch.ones(1, 4, dtype=torch.long))
