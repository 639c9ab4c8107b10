"""Every mixture of experts of transformers 5.24 that is a causal language model, tiny and seeded.

Left out, with the reason: `gemma4`, `dots3_note`, `llama4`, `qwen3_5_moe` and `qwen4_exp` wrap the
text models below in image or audio towers; `bamba` has no experts; `inkling2_loop_text` is
`inkling2_text` with layers that run several times; `switch_transformers` and `nllb_moe` are encoder-decoders, which the
walk over decoder layers refuses. `doge`'s experts are rows of an embedding, which stays.
"""  # fmt: skip

import inspect
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

__all__ = ["FAMILIES", "IDS", "Family", "build", "plain"]

IDS = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(1))
_SIZES: dict[str, Any] = {
    "vocab_size": 96, "max_position_embeddings": 64, "hidden_size": 48, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "moe_k": 2, "top_k": 2,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40, "shared_intermediate_size": 40,
    "decoder_sparse_step": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 12, "intermediate_size_mlp": 40, "kv_channels": 12, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_head_dim": 8, "linear_num_heads": 2, "unpadded_vocab_size": 96, "mlp_only_layers": [],
    "o_lora_rank": 16, "o_groups": 2, "index_n_heads": 4, "index_head_dim": 16,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 12,
    "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2,
    "moe_shared_expert_intermediate_size": 32, "shared_experts_intermediate_size": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Where the routers of a layer are, and what its configuration needs beside the sizes."""

    routers: tuple[str, ...] = ("mlp.gate",)
    settings: dict[str, Any] = field(default_factory=dict)
    in_out: str = "^$"
    """Pattern of the parameters whose experts are stored [in, out]."""
    slow: bool = False


_LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
_SPARSE = ("block_sparse_moe.router",)
_IN_OUT = r"experts\.(gate_up|down)_proj$"
FAMILIES: dict[str, Family] = {
    "afmoe": Family(("mlp.router",)),
    "aria_text": Family(("mlp.router",), in_out=r"\.experts\.(gate_up|down)_proj$"),
    "axk1": Family(slow=True),
    "axk2": Family(slow=True),
    "bailing_hybrid": Family(settings=_LAYERS, slow=True),
    "beam": Family(settings={"mlp_layer_types": ["dense", "sparse"]}, slow=True),
    "cohere2_moe": Family(slow=True),
    "dbrx": Family(
        ("ffn.router",),
        {
            **{"d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
            "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        },
        in_out=r"\.w2$",
    ),
    "deepseek_v2": Family(),
    "deepseek_v3": Family(),
    "deepseek_v32": Family(slow=True),
    "deepseek_v4": Family(slow=True),
    "doge": Family(("mlp.router_gate",), {"is_moe": True, "num_experts": 16}),
    "dots1": Family(settings={"num_key_value_heads": 4, "n_shared_experts": 1}, slow=True),
    "dots3_note_text": Family(settings={"num_key_value_heads": 4}, slow=True),
    "ernie4_5_moe": Family(),
    "exaone_moe": Family(slow=True),
    "flex_olmo": Family(slow=True),
    "flint": Family(slow=True),
    "gemma4_text": Family(
        ("router",),
        {
            **{"enable_moe_block": True, "top_k_experts": 2, "global_head_dim": 12},
            **{"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8},
        },
    ),
    "glm4_moe": Family(),
    "glm4_moe_lite": Family(slow=True),
    "glm_moe_dsa": Family(slow=True),
    "gpt_oss": Family(("mlp.router",), in_out=_IN_OUT),
    "granitemoe": Family(_SPARSE),
    "granitemoe_swa": Family(_SPARSE, slow=True),
    "granitemoehybrid": Family(
        _SPARSE,
        {
            **{"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_expand": 2},
            "layer_types": ["mamba", "attention"],
        },
    ),
    "granitemoeshared": Family(_SPARSE, slow=True),
    "hunyuan_v1_moe": Family(),
    "hy_v3": Family(slow=True),
    "hy_v4": Family(slow=True),
    "inkling2_text": Family(slow=True),
    "inkling_text": Family(slow=True),
    "jamba": Family(("feed_forward.router",)),
    "jetmoe": Family(("mlp.router", "self_attention.experts.router")),
    "kimi_linear": Family(slow=True),
    "kolibri1": Family(slow=True),
    "laguna": Family(slow=True),
    "lara_mini": Family(settings=_LAYERS, slow=True),
    "lfm2_moe": Family(
        ("feed_forward.gate",),
        {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        slow=True,
    ),
    "llama4_text": Family(("feed_forward.router",), in_out=_IN_OUT),
    "longcat_flash": Family(
        ("mlp.router",),
        {
            **{"num_layers": 2, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 32},
            **{"zero_expert_num": 2, "head_dim": 8},
        },
    ),
    "mellum": Family(slow=True),
    "mimo_v2_flash": Family(slow=True),
    "minimax": Family(),
    "minimax_m2": Family(slow=True),
    "minimax_m3_vl_text": Family(slow=True),
    "mixtral": Family(),
    "nemotron_h": Family(("mixer.gate",), slow=True),
    "olmoe": Family(),
    "phimoe": Family(("mlp.router",)),
    "qwen2_moe": Family(("mlp.gate", "mlp.shared_expert_gate")),
    "qwen3_5_moe_text": Family(("mlp.gate", "mlp.shared_expert_gate"), _LAYERS, slow=True),
    "qwen3_moe": Family(),
    "qwen3_next": Family(("mlp.gate", "mlp.shared_expert_gate"), _LAYERS, slow=True),
    "qwen4_exp_text": Family(("mlp.gate", "mlp.shared_expert_gate"), slow=True),
    "solar_open": Family(slow=True),
    "zaya": Family(settings={"router_hidden_size": 16, "num_experts_per_tok": 1}),
}


def build(name: str) -> Any:
    """Return a float32 model whose outputs differ in size, each expert's output rows most of all.

    Quantized along the wrong axis, a small row gets the large ones' steps.
    """
    config = CONFIG_MAPPING[name]
    known = set(inspect.signature(config.__init__).parameters)
    known |= {key for kind in config.__mro__ for key in getattr(kind, "__annotations__", {})}
    values = {key: value for key, value in _SIZES.items() if key in known}
    if "qk_rope_head_dim" in known:  # latent attention
        values.pop("head_dim", None)
        values["num_key_value_heads"] = 4
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**values | FAMILIES[name].settings)).eval()
    model.requires_grad_(False)
    for path, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in path:
            parameter.add_(0.1 * torch.randn_like(parameter))
        elif parameter.ndim == 3 and "experts" in path:
            axis = 2 if re.search(FAMILIES[name].in_out, path) else 1
            shape = [1, 1, 1]
            shape[axis] = parameter.shape[axis]
            parameter.mul_(torch.logspace(-1, 1, parameter.shape[axis]).view(shape))
        elif parameter.ndim > 1:
            parameter.mul_(2)
    return model


def plain(path: str) -> str:
    """Return a path without its layer, from the layer's own modules on."""
    return re.sub(r"^.*?(layers|blocks)\.\d+\.", "", path)
