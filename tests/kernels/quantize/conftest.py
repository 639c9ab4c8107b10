"""Tiny seeded decoders of several families, with gains and biases that aren't ones and zeros."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    HunYuanMoEV1Config,
    JetMoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
)

COMMON = {
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_experts_per_tok": 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**COMMON),
    "llama-tied": lambda: LlamaConfig(**COMMON, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**COMMON, tie_word_embeddings=True),
    "gemma": lambda: GemmaConfig(**COMMON, head_dim=12),
    "phi3": lambda: Phi3Config(**COMMON),
    "mixtral": lambda: MixtralConfig(**COMMON, **MOE, num_local_experts=4),
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **COMMON,
        **MOE,
        num_experts=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=40,
        decoder_sparse_step=1,
    ),
    "hunyuan": lambda: HunYuanMoEV1Config(**COMMON, num_experts=4, moe_topk=2, head_dim=12),
    "jetmoe": lambda: JetMoeConfig(
        **{name: value for name, value in COMMON.items() if name != "num_attention_heads"},
        **MOE,
        num_local_experts=4,
        kv_channels=12,
    ),
    "llama4": lambda: Llama4TextConfig(
        **COMMON, num_local_experts=4, head_dim=12, intermediate_size_mlp=80
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=96,
        n_positions=64,
        n_embd=48,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "olmo2": lambda: Olmo2Config(**COMMON),
    "gemma2": lambda: Gemma2Config(**COMMON, head_dim=12),
}


@pytest.fixture
def decoder() -> Callable[[str], Any]:
    """Return a builder: name of a family → float32 model in evaluation mode."""

    def build(family: str) -> Any:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
        model.requires_grad_(False)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:  # so large that every part of the model counts
                parameter.mul_(4)
        return model

    return build


@pytest.fixture
def calibration() -> list[torch.Tensor]:
    """Return token ids of unequal batches."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 96, (n, 20), generator=generator) for n in (2, 1)]
