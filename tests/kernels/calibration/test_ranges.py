"""Ranges joined from samples: the very scales that quantize_ finds, and loud where there are none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantwatch_kernels.calibration.ranges import joined_ranges, sample_ranges, set_ranges
from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.activations import ActivationQuantizer, add_activation_quantizer
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.recipe import (
    ActivationSpec,
    PerChannel,
    PerTensor,
    Recipe,
    WeightSpec,
)


def scales(model: nn.Module) -> dict[str, tuple[Tensor, Tensor | None]]:
    found = {}
    for module in model.modules():
        if isinstance(module, ActivationQuantizer):
            assert module.scale is not None
            found[module.layer_name] = (module.scale, module.zero)
    return found


@pytest.mark.parametrize("fmt", ["int8", "uint8"])
@pytest.mark.parametrize("samples", [[3], [0, 5, 7], [7, 5, 0], [0, 1, 2, 3, 4, 5, 6, 7]])
def test_joined_ranges_are_those_of_a_calibration(
    decoder: Callable[[str], Any], pool: list[Tensor], fmt: str, samples: list[int]
) -> None:
    """Catches ranges of the unquantized model, of other samples, or rounded on their way."""
    spec = ActivationSpec(INT_FORMATS[fmt], PerTensor(), static=True)
    weights = Recipe(WeightSpec(INT_FORMATS["int8"], PerChannel()))
    expected = decoder("llama")
    whole = Recipe(weights.weights, activations=spec)
    quantize_(expected, whole, calibration=[pool[n] for n in samples])

    model = decoder("llama")
    report = quantize_(model, weights)
    layers = [(name, model.get_submodule(name)) for name in report.converted]
    ranges = sample_ranges(model, layers, pool)
    assert not any(module._forward_pre_hooks for module in model.modules())
    quantizers = [add_activation_quantizer(module, name, spec) for name, module in layers]
    set_ranges(quantizers, joined_ranges(ranges, samples))

    ours, theirs = scales(model), scales(expected)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 4 * 7
    for name, (scale, zero) in theirs.items():
        assert torch.equal(ours[name][0], scale)
        assert zero is None or torch.equal(ours[name][1], zero)  # type: ignore[arg-type]
    assert torch.equal(model(pool[2]).logits, expected(pool[2]).logits)


def test_no_sample_and_bad_inputs(decoder: Callable[[str], Any], pool: list[Tensor]) -> None:
    """Catches a range of nothing, a layer that no token reaches, and a NaN between two numbers."""
    model = decoder("llama")
    layers = [("first", model.model.layers[0].mlp.up_proj), ("unused", nn.Linear(4, 4))]
    with pytest.raises(ValueError, match="sample 0 of the pool: unused gets no finite input"):
        sample_ranges(model, layers, pool)
    ranges = sample_ranges(model, layers[:1], pool)
    with pytest.raises(ValueError, match="at least one sample"):
        joined_ranges(ranges, [])
    model.get_input_embeddings().weight[int(pool[1][0, 4])] = torch.nan
    first = next(n for n, ids in enumerate(pool) if (ids == pool[1][0, 4]).any())
    with pytest.raises(ValueError, match=f"sample {first} of the pool: first gets no finite"):
        sample_ranges(model, layers[:1], pool)
