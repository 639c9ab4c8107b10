"""Tiny seeded decoders with enough heads to tell strong ones apart, and a pool for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
)

COMMON = {
    "vocab_size": 80,
    "max_position_embeddings": 48,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**COMMON),
    "gemma2": lambda: Gemma2Config(**COMMON),
    "mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": lambda: GPT2Config(
        vocab_size=80,
        n_positions=48,
        n_embd=48,
        n_layer=4,
        n_head=6,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "few-heads": lambda: LlamaConfig(**{**COMMON, "num_hidden_layers": 2}),
    "mamba": lambda: MambaConfig(
        vocab_size=80, hidden_size=16, state_size=4, num_hidden_layers=2, pad_token_id=0
    ),
}


@pytest.fixture
def decoder() -> Callable[[str], Any]:
    """Return a builder: name of a family → float32 model in evaluation mode."""

    def build(family: str = "llama") -> Any:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
        model.requires_grad_(False)
        for parameter in model.parameters():
            if parameter.ndim > 1:  # so large that heads attend unevenly
                parameter.mul_(6)
        return model

    return build


@pytest.fixture
def pool() -> list[torch.Tensor]:
    """Return samples of unequal lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = (9, 14, 5, 2, 11, 20, 7, 16)
    return [torch.randint(3, 80, (1, n), generator=generator) for n in lengths]
