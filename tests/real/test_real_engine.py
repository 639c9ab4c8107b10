"""The engine on SmolLM2-135M: tokens of `generate()` under preemption, chunks and shared prefixes."""

from pathlib import Path
from typing import Any

import platformdirs
import pytest
import torch
from torch import Tensor

from quantwatch.config.schema import SuiteConfig, VariantConfig
from quantwatch.models.loading import load_variant
from quantwatch.prompts.loading import load_suite
from quantwatch_kernels.serve.engine.batch import Limits
from quantwatch_kernels.serve.engine.engine import Engine, EngineConfig, eos_ids
from quantwatch_kernels.serve.engine.request import Request

pytestmark = [pytest.mark.model, pytest.mark.slow]
CACHE = Path(platformdirs.user_cache_dir("quantwatch"))
NEW = 12


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, list[tuple[int, ...]]]:
    """The model and 8 prompts of 6 … 62 tokens."""
    found = load_variant(
        "reference", VariantConfig(model="smollm2-135m"), base_dir=Path(), cache_dir=CACHE
    )
    suite = load_suite(
        SuiteConfig(name="core-v1"), found.tokenizer, base_dir=Path(), max_positions=8192
    )
    ids = [token for one in suite.prompts for token in one.token_ids]
    return found.module, [tuple(ids[90 * n : 90 * n + 6 + 8 * n]) for n in range(8)]


SETTINGS = {
    "plenty": EngineConfig(128, 16, Limits(256, 8)),
    "chunks and recompute": EngineConfig(12, 16, Limits(24, 6, reserve=0), eviction="lru-k"),
    "swap": EngineConfig(12, 16, Limits(64, 6, reserve=0), host_pages=40),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_tokens_are_those_of_generate(
    loaded: tuple[Any, list[tuple[int, ...]]], settings: str
) -> None:
    model, prompts = loaded
    expected = {}
    for number, ids in enumerate(prompts):
        given = torch.tensor([ids])
        out = model.generate(given, max_new_tokens=NEW, do_sample=False)
        expected[str(number)] = tuple(out[0, len(ids) :].tolist())
    requests = [Request(str(n), ids, NEW, eos_ids(model)) for n, ids in enumerate(prompts)]
    with Engine(model, SETTINGS[settings]) as engine:
        ended = engine.run(requests)
        assert {name: one.tokens for name, one in ended.items()} == expected
        preempted = engine.stats.swapped + engine.stats.recomputed
        assert (preempted > 0) == (settings != "plenty")
        again = engine.run([Request("again", prompts[-1], NEW, eos_ids(model))])["again"]
        assert (again.tokens, again.num_cached) == (expected["7"], 48)


@pytest.mark.parametrize(("chunk", "same"), [(52, True), (64, False)], ids=["agree", "differ"])
def test_logits_with_a_cached_prefix(
    loaded: tuple[Any, list[tuple[int, ...]]], chunk: int, same: bool
) -> None:
    """A prompt of 224 tokens, 208 of them cached: bit-equal, or to 1e-4 where chunks differ."""
    model, prompts = loaded
    ids = tuple(token for one in prompts for token in one)[:224]
    assert len(ids) == 224
    seen: list[Tensor] = []
    with Engine(
        model, EngineConfig(32, 16, Limits(chunk, 1)), lambda *given: seen.append(given[2].clone())
    ) as engine:
        for name, cached in (("cold", 0), ("warm", 208)):
            assert engine.run([Request(name, ids, 1)])[name].num_cached == cached
    print(f"largest difference {float((seen[0] - seen[1]).abs().max()):.2e}")
    assert torch.equal(*seen) or not same
    torch.testing.assert_close(*seen, rtol=0, atol=1e-4)
