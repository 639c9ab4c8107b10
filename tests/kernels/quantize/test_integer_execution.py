"""A model whose W8A8 layers multiply in integers is the model that rounds and multiplies floats."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quantwatch_kernels.formats import INT8, INT_FORMATS
from quantwatch_kernels.numerics import relative_rmse
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.recipe import ActivationSpec, PerTensor, Recipe, WeightSpec
from quantwatch_kernels.quantize.w8a8_linear import W8A8Linear
from quantwatch_kernels.registry import fallbacks

WEIGHTS = Recipe.named("int8-channel").weights


def logits(model: Any, batch: int = 2) -> torch.Tensor:
    tokens = torch.randint(0, 96, (batch, 12), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        result: torch.Tensor = model(tokens).logits
    return result


def recipe(fmt: str, weights: WeightSpec = WEIGHTS) -> Recipe:
    return Recipe(weights, activations=ActivationSpec(INT_FORMATS[fmt]))


@pytest.mark.parametrize("execution", ["aten", "reference"])
@pytest.mark.parametrize("fmt", ["int8", "uint8"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_integers_are_the_rounded_floats(
    decoder: Callable[[str], Any], family: str, fmt: str, execution: Any
) -> None:
    """Catches inputs that are rounded twice or not at all once layers are replaced."""
    floats, integers = decoder(family), decoder(family)
    quantize_(floats, recipe(fmt))
    report = quantize_(integers, recipe(fmt), execution=execution)
    layers = [m for m in integers.modules() if isinstance(m, W8A8Linear)]
    assert len(layers) == len(report.converted)
    assert not report.fallbacks
    assert not fallbacks()
    # A product that rounds otherwise can turn a tie of the next layer's codes, a step of 1/127.
    error = relative_rmse(logits(integers), logits(floats))
    plain = relative_rmse(logits(decoder(family)), logits(floats))
    print(f"{family} {fmt} {execution}: {error:.1e}, without quantization {plain:.1e}")
    assert error <= 0.05 * plain


@pytest.mark.parametrize(
    "activations",
    [ActivationSpec(INT_FORMATS["int4"]), ActivationSpec(INT8, PerTensor())],
    ids=["4 bits", "whole input"],
)
def test_other_activations_stay_in_floats(
    decoder: Callable[[str], Any], activations: ActivationSpec
) -> None:
    """Catches an integer layer that ignores how its inputs are to be quantized."""
    model, expected = decoder("llama"), decoder("llama")
    quantize_(model, Recipe(WEIGHTS, activations=activations), execution="reference")
    quantize_(expected, Recipe(WEIGHTS, activations=activations))
    assert not [m for m in model.modules() if isinstance(m, W8A8Linear)]
    assert relative_rmse(logits(model), logits(expected)) <= 0.02


def test_rows_of_a_model_do_not_depend_on_the_batch(decoder: Callable[[str], Any]) -> None:
    """Catches codes that depend on the batch: a prompt alone is rounded as it is among four."""
    model = decoder("llama")
    quantize_(model, recipe("int8"), execution="aten")
    together = logits(model, 4)
    tokens = torch.randint(0, 96, (4, 12), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        alone = model(tokens[:1]).logits
    assert relative_rmse(together[:1], alone) <= 1e-3


def test_a_cpu_that_saturates_multiplies_floats(
    decoder: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches inputs that are no longer rounded where integers can't be multiplied (log 16)."""
    monkeypatch.setattr("quantwatch_kernels.quantize.api.int_mm_why_not", lambda: "saturates")
    floats, refused = decoder("llama"), decoder("llama")
    quantize_(floats, recipe("int8"))
    report = quantize_(refused, recipe("int8"), execution="aten")
    assert {reason for _, reason in report.fallbacks} == {"saturates"}
    assert {(each.op, each.used) for each in fallbacks()} == {("w8a8_linear", "dequantized")}
    assert torch.equal(logits(refused), logits(floats))
