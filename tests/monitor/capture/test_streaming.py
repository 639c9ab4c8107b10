"""Layers that are read one at a time: the same measurements as with the whole model in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantwatch.capture.plan import CapturePlan
from quantwatch.config.schema import VariantConfig
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.loading import load_variant
from quantwatch.models.quiet import quiet

PLAN = CapturePlan(batch_tokens=64, isolated_fraction=0.5)


def _variant(folder: Path, streamed: bool, **settings: Any) -> LoadedModel:
    config = VariantConfig(model=str(folder), **settings)
    return load_variant(
        "m", config, base_dir=folder, cache_dir=folder.parent / "cache", streamed=streamed
    )


def _pair(kit: Any, folder: Path, suite: Any, streamed: bool, **settings: Any) -> Any:
    """Measure a folder's model against itself changed by `settings`."""
    candidate = _variant(folder, streamed, **settings)
    return kit.capture(_variant(folder, streamed), {"c": candidate}, suite, PLAN)


def _blank(model: LoadedModel, layer: str) -> bool:
    inside = model.module.get_submodule(model.anatomy.module_path(layer)).parameters()
    return all(parameter.is_meta for parameter in inside)


def _assert_same(resident: Any, streamed: Any) -> int:
    """Compare everything that reaches the sinks bit for bit; return the number of values."""
    count = 0
    for ours, theirs in ((streamed.sink, resident.sink), (streamed.floor, resident.floor)):
        assert len(ours.observations) == len(theirs.observations) > 0
        for one, other in zip(ours.observations, theirs.observations, strict=True):
            assert (one.candidate, one.prompt) == (other.candidate, other.prompt)
            assert len(one.matrices) == len(other.matrices)
            for a, b in zip(one.matrices, other.matrices, strict=True):
                assert (a.metric, a.scopes, a.role) == (b.metric, b.scopes, b.role)
                np.testing.assert_array_equal(a.values, b.values, err_msg=a.metric)
                count += a.values.size
    return count


def test_every_family_gives_the_same_bits(architecture: str, kit: Any, tmp_path: Path) -> None:
    """Catches renamed, stacked or split weights, buffers of layers, and what hooks would notice."""
    if architecture == "own":
        pytest.skip("a module of one's own has no checkpoint")
    with quiet():
        kit.build(architecture).save_pretrained(tmp_path / "m")
    suite = kit.suite([9, 14, 21, 6])
    fault = {"faults": [{"scope": "layers.1", "scale": 1.0}]}
    del fault
    resident = _pair(kit, tmp_path / "m", suite, False, recipe="int8-channel")
    streamed = _pair(kit, tmp_path / "m", suite, True, recipe="int8-channel")
    assert _assert_same(resident, streamed) > 1000
    assert streamed.report.firings == resident.report.firings
    assert streamed.report.observer_effect == resident.report.observer_effect
    assert streamed.report.noise_floor_sources == resident.report.noise_floor_sources
    assert max(streamed.sink.largest("c", "rel_error").values()) > 0
