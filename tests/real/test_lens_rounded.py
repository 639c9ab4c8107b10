"""How far a lens of 16-bit factors is off on the real model: the budget docs/metrics.md states."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import pytest
import torch
from torch import Tensor, nn

from quantwatch.capture.readout import readout_of
from quantwatch.config.schema import SuiteConfig, VariantConfig
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.loading import load_variant
from quantwatch.prompts.loading import load_suite
from quantwatch_kernels.compare.lens import Readout, lens_statistics
from quantwatch_kernels.compare.lens_words_native import why_not_words
from quantwatch_kernels.compare.rounding import Rounded
from quantwatch_kernels.registry import prefer
from quantwatch_kernels.testing import assert_close

pytestmark = [pytest.mark.model, pytest.mark.slow]
CACHE = Path(platformdirs.user_cache_dir("quantwatch"))
LAYERS = (1, 15, 29)
"""Into `hidden_states`: the outputs of layers 0, 14 and 28."""
CANDIDATES: dict[str, dict[str, Any]] = {
    "int8": {"recipe": "int8-channel"},
    "int4": {"recipe": "int4-g64"},
    "bfloat16": {"dtype": "bfloat16"},
}
TOKENS = 120


def load(**settings: Any) -> LoadedModel:
    config = VariantConfig(model="smollm2-135m", **settings)
    return load_variant("model", config, base_dir=Path(), cache_dir=CACHE)


def states(model: LoadedModel, ids: list[int]) -> dict[int, Tensor]:
    with torch.no_grad():
        out = model.module(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    return {layer: out.hidden_states[layer][0].float() for layer in LAYERS}


@pytest.fixture(scope="module")
def reference() -> tuple[Readout, list[int], dict[int, Tensor]]:
    """The readout, a text of many prompts' words, and the reference's states."""
    model = load()
    suite = load_suite(
        SuiteConfig(name="core-v1"), model.tokenizer, base_dir=Path(), max_positions=8192
    )
    every = [i for prompt in suite.prompts for i in prompt.token_ids]
    ids = [
        i for first in range(0, len(every), len(every) // 6) for i in every[first:][: TOKENS // 6]
    ]
    return readout_of(model), ids, states(model, ids)


def truth(readout: Readout, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Return the KL from products, log-softmax and sum in float64."""
    assert isinstance(readout.head, nn.Linear)
    weight = readout.head.weight.detach().double()
    with torch.no_grad():
        log_p, log_q = ((readout.normed(h).double() @ weight.t()).log_softmax(-1) for h in pair)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@dataclass(frozen=True)
class Budget:
    """How far a layer's mean, its median token and any token may be off, relative."""

    layer: float
    median: float
    token: float
    rounds: float
    """The median token is off by more than that, or nothing was rounded."""


BUDGETS: dict[Rounded, Budget] = {
    "bfloat16": Budget(layer=0.01, median=0.01, token=0.25, rounds=1e-4),
    "int16": Budget(layer=0.0005, median=0.0005, token=0.01, rounds=1e-5),
}


@pytest.mark.parametrize("name", CANDIDATES)
def test_layers_stay_within_their_budget(
    name: str, reference: tuple[Readout, list[int], dict[int, Tensor]]
) -> None:
    """Catches states rounded one by one (a mean 17 % off, a token 50 %), and sums in bfloat16."""
    readout, ids, theirs = reference
    for layer, other in states(load(**CANDIDATES[name]), ids).items():
        pair = theirs[layer], other
        right = truth(readout, pair)
        for factors, budget in BUDGETS.items():
            hold(factors, budget, readout, pair, right, layer)


def hold(
    factors: Rounded,
    budget: Budget,
    readout: Readout,
    pair: tuple[Tensor, Tensor],
    right: Tensor,
    layer: int,
) -> None:
    where = factors, layer
    with prefer("native" if why_not_words(factors) is None else "aten"):
        found = lens_statistics(*pair, readout, products=factors)
    error = (found.kl / right - 1).abs()
    assert abs(float(found.kl.mean() / right.mean()) - 1) < budget.layer, where
    assert budget.rounds < error.median() < budget.median, where
    assert error.max() < budget.token, where
    with prefer("reference"):
        twin = lens_statistics(pair[0][:16], pair[1][:16], readout, products=factors)
    assert_close(found.kl[:16], twin.kl, rtol=2e-3)
    assert abs(float(found.kl[:16].mean() / twin.kl.mean()) - 1) < 1e-4
