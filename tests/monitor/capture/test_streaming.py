"""Layers that are read one at a time: the same measurements as with the whole model in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

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


# Tied; learned positions and another linear class; stacked experts with a converted checkpoint.
FEW = ("llama-tied", "gpt2", "mixtral")


@pytest.mark.parametrize("family", FEW)
def test_families_give_the_same_bits(family: str, kit: Any, tmp_path: Path) -> None:
    """Catches renamed, stacked or split weights, buffers of layers, and what hooks would notice."""
    _compare(family, kit, tmp_path / "m", kit.suite([9, 6]))


@pytest.mark.slow
def test_every_family_gives_the_same_bits(architecture: str, kit: Any, tmp_path: Path) -> None:
    """Catches a family whose layers are stored, named or called in a way of its own."""
    if architecture == "own":
        pytest.skip("a module of one's own has no checkpoint")
    _compare(architecture, kit, tmp_path / "m", kit.suite([9, 14, 21, 6]))


def _compare(family: str, kit: Any, folder: Path, suite: Any) -> None:
    """Measure a family's model against its int8 self, resident and streamed."""
    with quiet():
        kit.build(family).save_pretrained(folder)
    resident = _pair(kit, folder, suite, False, recipe="int8-channel")
    streamed = _pair(kit, folder, suite, True, recipe="int8-channel")
    assert _assert_same(resident, streamed) > 500
    assert streamed.report.firings == resident.report.firings
    assert streamed.report.observer_effect == resident.report.observer_effect
    assert streamed.report.noise_floor_sources == resident.report.noise_floor_sources
    assert max(streamed.sink.largest("c", "rel_error").values()) > 0
