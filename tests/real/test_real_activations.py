"""Rounded activations on the real model: rotations change nothing alone, and save four bits."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs
import pytest
import torch

from quantwatch.config.schema import SuiteConfig, VariantConfig
from quantwatch.models.loading import load_variant
from quantwatch.prompts.loading import load_suite
from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.numerics import relative_rmse
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.off_grid import take_off_grid_
from quantwatch_kernels.quantize.recipe import (
    ActivationSpec,
    PerGroup,
    Recipe,
    RotationSpec,
)
from quantwatch_kernels.quantize.rotation import rotate_
from quantwatch_kernels.quantize.w4a8_linear import W4A8Linear

pytestmark = [pytest.mark.model, pytest.mark.slow]
CACHE = Path(platformdirs.user_cache_dir("quantwatch"))
ROTATION = RotationSpec(residual=True, values=True, down=True)
W8 = Recipe.named("int8-channel").weights


@pytest.fixture(scope="module")
def reference() -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return the model off its grid, 256 tokens of core-v1, and the logits of their second half."""
    loaded = load_variant(
        "reference", VariantConfig(model="smollm2-135m"), base_dir=Path(), cache_dir=CACHE
    )
    take_off_grid_(loaded.module)
    suite = load_suite(
        SuiteConfig(name="core-v1"), loaded.tokenizer, base_dir=Path(), max_positions=8192
    )
    ids = torch.tensor([[i for prompt in suite.prompts for i in prompt.token_ids][:256]])
    return loaded.module, ids, log_probabilities(loaded.module, ids)


def log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, 128:]
    return torch.log_softmax(logits.double(), -1)


def mean_kl(model: Any, ids: torch.Tensor, expected: torch.Tensor) -> float:
    found = log_probabilities(model, ids)
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def test_rotation_alone(reference: Any) -> None:
    """576 = 36 · 16 and 1536 = 12 · 128, a tied head, three key-value heads for nine."""
    model, ids, expected = reference
    rotated = copy.deepcopy(model)
    report = rotate_(rotated, ROTATION)
    assert report.logits_moved < 1e-5
    assert abs(mean_kl(rotated, ids, expected)) < 1e-6
    assert rotated.lm_head.weight is rotated.model.embed_tokens.weight


def rounded_kl(recipe: Recipe, reference: tuple[Any, torch.Tensor, torch.Tensor]) -> float:
    model, ids, expected = reference
    rounded = copy.deepcopy(model)
    quantize_(rounded, recipe)
    return mean_kl(rounded, ids, expected)


def test_eight_bits(reference: Any) -> None:
    recipe = Recipe(W8, activations=ActivationSpec(INT_FORMATS["uint8"]), rotation=ROTATION)
    assert 0 < rounded_kl(recipe, reference) < 0.02


def test_four_bit_weights_in_integers(reference: tuple[Any, torch.Tensor, torch.Tensor]) -> None:
    """Every layer gives on codes what it gives on rounded floats, for the inputs it really gets.

    Not the logits: a last bit that differs turns a code of a later layer, whose step is no last bit.
    """
    model, ids, _ = reference
    weights = replace(Recipe.named("uint4-g64").weights, scales="stepped")
    recipe = Recipe(weights, activations=ActivationSpec(INT_FORMATS["uint8"]))
    floats, integers = copy.deepcopy(model), copy.deepcopy(model)
    quantize_(floats, recipe)
    report = quantize_(integers, recipe, execution="aten")
    assert not report.fallbacks
    assert not report.notes
    layers = {p: m for p, m in integers.named_modules() if isinstance(m, W4A8Linear)}
    assert len(layers) == len(report.converted) == 210
    errors: list[float] = []

    def compare(path: str, x: torch.Tensor, y: torch.Tensor) -> None:
        errors.append(relative_rmse(layers[path](x), y))

    for path in layers:
        floats.get_submodule(path).register_forward_hook(
            lambda _, args, output, path=path: compare(path, args[0], output)
        )
    log_probabilities(floats, ids)
    print(f"largest relative error of {len(errors)} layers: {max(errors):.1e}")
    assert len(errors) == 210
    assert max(errors) < 2e-6


def test_four_bits_need_a_rotation(reference: Any) -> None:
    """Groups of 64 in both; the weights at 8 bits, so that it is the activations that count."""
    recipe = Recipe(W8, activations=ActivationSpec(INT_FORMATS["uint4"], PerGroup(64)))
    plain = rounded_kl(recipe, reference)
    rotated = rounded_kl(replace(recipe, rotation=replace(ROTATION, block=64)), reference)
    assert 0 < rotated < 0.7 * plain
