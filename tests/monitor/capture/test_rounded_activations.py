"""A candidate that rounds its activations is measured like any other."""

import copy
from typing import Any

import pytest
import torch

from quantwatch.capture.plan import CapturePlan
from quantwatch_kernels.formats import INT8, INT_FORMATS
from quantwatch_kernels.quantize.activations import add_activation_quantizer
from quantwatch_kernels.quantize.recipe import ActivationSpec, RotationSpec
from quantwatch_kernels.quantize.residual import round_residual_
from quantwatch_kernels.quantize.rotation import rotate_

ALL = CapturePlan(batch_tokens=64, isolated_fraction=1.0)


def test_the_rounded_layer_is_the_culprit(kit: Any) -> None:
    """Would catch rounding by a hook, which a replayed module passes by: isolated error 0."""
    model = kit.build("llama")
    candidate = copy.deepcopy(model)
    down = candidate.model.layers[1].mlp.down_proj
    add_activation_quantizer(down, "down", ActivationSpec(INT_FORMATS["int4"]))
    captured = kit.capture(model, {"c": candidate}, kit.suite([20, 9]), ALL)
    isolated = captured.sink.largest("c", "isolated_error")
    assert {scope for scope, value in isolated.items() if value > 0} == {
        "layers.1.mlp.down_proj",
        "layers.1.mlp",
        "layers.1",
    }
    assert 0.01 < isolated["layers.1.mlp.down_proj"] < 0.5
    assert captured.report.observer_effect["c"] == 0


def test_a_narrow_residual_stream_is_the_layers_own_error(kit: Any) -> None:
    """Would catch a rounded stream that shows only in the next layer."""
    model = kit.build("llama")
    candidate = copy.deepcopy(model)
    round_residual_(candidate, (("1", torch.bfloat16),))
    captured = kit.capture(model, {"c": candidate}, kit.suite([20, 9]), ALL)
    isolated = captured.sink.largest("c", "isolated_error")
    assert {scope for scope, value in isolated.items() if value > 0} == {"layers.1"}


def test_an_online_rotation_is_invisible_to_its_layer(kit: Any) -> None:
    """Would catch a tap behind the rotation: the reference's input is fed in the plain basis."""
    model = kit.build("llama")
    candidate = copy.deepcopy(model)
    rotate_(candidate, RotationSpec(residual=False, values=True, down=True))
    for layer in candidate.model.layers:
        add_activation_quantizer(layer.mlp.down_proj, "down", ActivationSpec(INT8))
    captured = kit.capture(model, {"c": candidate}, kit.suite([20, 9]), ALL)
    isolated = captured.sink.largest("c", "isolated_error")
    assert max(value for scope, value in isolated.items() if scope.endswith("mlp")) < 0.03
    assert captured.sink.largest("c", "rel_error")["layers.2"] == pytest.approx(0, abs=0.05)
