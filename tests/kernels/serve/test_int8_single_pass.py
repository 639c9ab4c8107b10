"""INT8 attention inside models: against float64, padding, windows, a soft-cap, and its refusals."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quantwatch_kernels.serve.attention_int8 import (
    ATTENTIONS,
    Int8Scores,
    attention_named,
    int8_attention,
)
from quantwatch_kernels.serve.int8_single_pass import attention_in_int8, int8_text
from quantwatch_kernels.serve.kv_attention import Score

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral, window of 7": ("Mistral", {"sliding_window": 7}),
    "gemma 2, soft-cap": (
        "Gemma2",
        {"attn_logit_softcapping": 4.0, "sliding_window": 7, "query_pre_attn_scalar": 16},
    ),
    "qwen 3, norms of heads": ("Qwen3", {}),
    "deepseek, values narrower than keys": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "v_head_dim": 8,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "first_k_dense_replace": 2,
        },
    ),
}
IDS = torch.randint(3, 96, (2, 40), generator=torch.Generator().manual_seed(1))


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    family, settings = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for path, parameter in model.named_parameters():
        if "q_proj" in path or "k_proj" in path:
            parameter.data.mul_(12)  # scores that matter
    return model.to(dtype).eval()


def logits(model: Any, ids: Tensor = IDS, **more: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids, use_cache=False, **more).logits
    return found


@pytest.mark.parametrize("how", ATTENTIONS.values(), ids=ATTENTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_near_the_plain_model(name: str, how: Int8Scores) -> None:
    """Catches a mask, a scaling or a soft-cap that is lost: smoothed scores that go into a cap
    without q·k̄ would be far off."""
    model = build(name)
    exact = logits(build(name, torch.float64))
    with attention_in_int8(model, how):
        found = logits(model)
    error = float((found - exact).norm() / exact.norm())
    assert 0 < error < (2e-5 if how.residual == "both" else 0.1)
    assert float((logits(model) - exact).norm() / exact.norm()) < 1e-5  # and it is itself again


def test_padding_and_company_change_nothing() -> None:
    """Catches scales that a neighbour in the batch sets, and padding that enters them."""
    model = build("llama")
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 23:] = 0
    for name in ("int8-plain", "int8-smooth"):
        with attention_in_int8(model, ATTENTIONS[name]):
            together = logits(model, attention_mask=mask)
            alone = logits(model, IDS[1:, :23]), logits(model, IDS[:1])
        assert torch.allclose(together[1:, :23], alone[0], atol=2e-6)
        assert torch.allclose(together[:1], alone[1], atol=2e-6)


@pytest.mark.parametrize("how", ATTENTIONS.values(), ids=ATTENTIONS)
def test_a_text_is_int8_attention(how: Int8Scores) -> None:
    """Catches another grouping of heads, and two masks that mean the same."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, heads, 12, 16, generator=generator) for heads in (4, 2, 2))
    causal = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    added = torch.zeros(1, 1, 12, 12).masked_fill(~causal, torch.finfo(torch.float32).min)
    wanted = int8_attention(q, k, v, how).out
    for mask in (None, causal, added):
        assert torch.allclose(int8_text((q, k, v), how, mask, Score()), wanted, atol=1e-6)


def test_refused() -> None:
    """Catches an unknown name, a cache, padding on the left, and a module without attention."""
    with pytest.raises(ValueError, match="unknown attention 'int8'; allowed are int8-plain, "):
        attention_named("int8")
    model, how = build("llama"), ATTENTIONS["int8-both"]
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :3] = 0
    with attention_in_int8(model, how):
        with pytest.raises(ValueError, match="padded on the right only"):
            logits(model, attention_mask=mask)
        with pytest.raises(ValueError, match="without a cache"):
            model.generate(IDS[:1], max_new_tokens=2, do_sample=False)
    with (
        pytest.raises(ValueError, match="Linear is no model of transformers"),
        attention_in_int8(torch.nn.Linear(2, 2), how),
    ):
        pass
