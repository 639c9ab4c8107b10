"""Small random models of several families, and what `generate` says of a prompt."""

import copy
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
HEAD = {"head_dim": 32}
MODELS = {
    "llama": lambda: LlamaConfig(**SIZES, **HEAD),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, **HEAD),
    "mistral, sliding": lambda: MistralConfig(**SIZES, **HEAD, sliding_window=11),
    "gemma2, soft-capped, every second slides": lambda: Gemma2Config(
        **SIZES, **HEAD, sliding_window=11, query_pre_attn_scalar=32, attn_logit_softcapping=1.5
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, **HEAD, sliding_window=11, query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "mixtral": lambda: MixtralConfig(
        **SIZES, **HEAD, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "deepseek v3, other widths for keys": lambda: DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, q_lora_rank=None, kv_lora_rank=16,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
        moe_intermediate_size=32, n_shared_experts=1,
    ),
    "gpt2, learned positions": lambda: GPT2Config(
        vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=256,
        bos_token_id=None, eos_token_id=None,
    ),
}  # fmt: skip


def build(name: str, seed: int = 0) -> Any:
    """A model whose logits differ from token to token: at its initial size it repeats itself."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(MODELS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    return model


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(1, 96, (length,), generator=generator).tolist())


def generated(
    model: Any, ids: tuple[int, ...], new: int, eos: int | None = None, **kwargs: Any
) -> tuple[int, ...]:
    """What the model says by itself, greedily."""
    out = model.generate(
        torch.tensor([ids]), max_new_tokens=new, do_sample=False, eos_token_id=eos,
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64), **copy.copy(kwargs),
    )  # fmt: skip
    return tuple(out[0, len(ids) :].tolist())
