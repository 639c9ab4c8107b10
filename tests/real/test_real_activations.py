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
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.off_grid import take_off_grid_
from quantwatch_kernels.quantize.recipe import (
    ActivationSpec,
    PerGroup,
    Recipe,
    RotationSpec,
)
from quantwatch_kernels.quantize.rotation import rotate_

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


def test_four_bits_need_a_rotation(reference: Any) -> None:
    """Groups of 64 in both; the weights at 8 bits, so that it is the activations that count."""
    recipe = Recipe(W8, activations=ActivationSpec(INT_FORMATS["uint4"], PerGroup(64)))
    plain = rounded_kl(recipe, reference)
    rotated = rounded_kl(replace(recipe, rotation=replace(ROTATION, block=64)), reference)
    assert 0 < rotated < 0.7 * plain
