"""The laboratory on the real model: the reference it measures against, and bounds that hold."""

from pathlib import Path

import platformdirs
import pytest
import torch

from quantwatch.kernel_lab.bounds import RECIPES, check_bounds
from quantwatch.kernel_lab.inputs import fed_layers
from quantwatch.kernel_lab.measure import Yardstick
from quantwatch.kernel_lab.references import load_reference
from quantwatch.kernel_lab.texts import Text, measured_text
from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.affine import fake_quantize
from quantwatch_kernels.quantize.recipe import PerGroup, WeightSpec

pytestmark = [pytest.mark.model, pytest.mark.slow]
CACHE = Path(platformdirs.user_cache_dir("quantwatch"))


def test_off_its_grid_it_computes_the_same() -> None:
    """Trap T1: on its grid int4 is lossless; off it int4 costs something, and the KL stays 0."""
    original = load_reference("smollm2-135m", CACHE, off_grid_seed=None)
    rescaled = load_reference("smollm2-135m", CACHE)
    window = measured_text(original.tokenizer).windows[0][:, :128]
    found = Yardstick(original.module, Text("one", (window,)), {}).measure(rescaled.module)
    assert found.kl_max < 1e-6
    spec = WeightSpec(INT_FORMATS["uint4"], PerGroup(32), "float")
    path = "model.layers.3.mlp.up_proj.weight"
    errors = [
        ((fake_quantize(w, spec) - w).norm() / w.norm()).item()
        for w in (m.module.get_parameter(path).detach() for m in (original, rescaled))
    ]
    assert errors[0] < 1e-6
    assert errors[1] > 0.03


def test_bounds_hold_on_real_layers() -> None:
    """Catches a bound that real weights or activations violate, or that is of no use for them."""
    loaded = load_reference("smollm2-135m", CACHE)
    names = ("layers.0.attention.q_proj", "layers.29.mlp.down_proj", "layers.11.attention.v_proj")
    linears = {str(s): p for s, p in loaded.anatomy.linears.items() if str(s) in names}
    assert len(linears) == 3
    ids = torch.as_tensor(measured_text(loaded.tokenizer).windows[0][:, :64])
    rows = list(check_bounds(fed_layers(loaded.module, linears, ids), RECIPES))
    assert [(row.format, row.scope, row.problems) for row in rows if row.problems] == []
