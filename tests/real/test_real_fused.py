"""Fused operators in the real model: every norm, MLP and layer, the same tokens, nearly the same bits."""

from pathlib import Path
from typing import Any

import platformdirs
import pytest
import torch

from quantwatch.config.schema import SuiteConfig, VariantConfig
from quantwatch.models.loading import load_variant
from quantwatch.prompts.loading import load_suite
from quantwatch_kernels.serve.replace import replace, restore

pytestmark = [pytest.mark.model, pytest.mark.slow]
CACHE = Path(platformdirs.user_cache_dir("quantwatch"))


def test_smollm2_is_replaced_whole() -> None:
    """61 norms, 30 MLPs, 30 layers; greedy tokens equal, KL of the fused logits below 1e-12 nats."""
    loaded = load_variant(
        "reference", VariantConfig(model="smollm2-135m"), base_dir=Path(), cache_dir=CACHE
    )
    suite = load_suite(
        SuiteConfig(name="core-v1"), loaded.tokenizer, base_dir=Path(), max_positions=8192
    )
    model: Any = loaded.module
    ids = torch.tensor([[i for prompt in suite.prompts for i in prompt.token_ids][:96]])
    with torch.no_grad():
        before = torch.log_softmax(model(ids).logits.double(), -1)
        tokens = model.generate(ids[:, :32], max_new_tokens=12, do_sample=False)
        report = replace(model)
        after = torch.log_softmax(model(ids).logits.double(), -1)
        assert torch.equal(model.generate(ids[:, :32], max_new_tokens=12, do_sample=False), tokens)
    assert (len(report.replaced), report.skipped) == (61 + 30 + 30, [])
    kl = (before.exp() * (before - after)).sum(-1)
    print(f"mean KL {kl.mean().item():.2e}, largest {kl.max().item():.2e}")
    assert float(kl.max()) < 1e-12
    assert restore(model) == 121
