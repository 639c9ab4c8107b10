"""A model's experts as codes: what it computes, against the same model with those values."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, Qwen2MoeConfig

from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.recipe import Recipe
from quantwatch_kernels.serve.moe_replace import EXPERT_FORMATS, ServedExperts, serve_experts_
from quantwatch_kernels.testing import assert_close

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 40, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 36, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
CONFIGS = {
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4),
    "qwen2_moe": lambda: Qwen2MoeConfig(**SIZES, num_experts=4),
    "deepseek_v3": lambda: DeepseekV3Config(
        **SIZES,
        **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8},
        v_head_dim=8,
    ),
}
IDS = torch.arange(3, 23)[None] * 7 % 61


def build(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()


def stacks(model: nn.Module) -> dict[str, nn.Module]:
    return {p: m for p, m in model.named_modules() if p.endswith("mlp.experts")}


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("family", CONFIGS)
def test_it_is_the_model_with_those_values(family: str, name: str) -> None:
    """Catches gate and up in the wrong order, scales of another expert, and a layer left out."""
    model, plain = build(family), build(family)
    count = len(stacks(plain))
    spec = Recipe.named(EXPERT_FORMATS[name][0]).weights
    with torch.no_grad():
        for module in stacks(plain).values():
            for parameter in module.parameters():
                for expert in parameter:
                    expert.copy_(quantize_weight(expert, spec).values)
    before = logits(model)
    taken = serve_experts_(model, name)
    after = logits(model)
    assert [each.path for each in taken] == list(stacks(plain))
    assert len(taken) == count == (1 if family == "deepseek_v3" else 2)
    assert_close(after, logits(plain).double(), rtol=1e-4, atol=1e-5)
    assert float((after - before).abs().max()) > 1e-4
    assert all(isinstance(module, ServedExperts) for module in stacks(model).values())


def test_the_bytes_are_those_that_are_held() -> None:
    """Catches floats that stay in the model beside the codes."""
    model = build("mixtral")

    def held() -> int:
        return sum(v.numel() * v.element_size() for v in model.state_dict().values())

    before = held()
    taken = serve_experts_(model, "int4")
    assert before - held() == sum(each.before - each.after for each in taken)
    one = 4 * (2 * 48 * 40 + 40 * 48)
    assert taken[0].before == 4 * one
    # Half a byte per weight; a float32 scale and a zero point per 32 inputs or what is left of them.
    assert one / 2 < taken[0].after < one / 2 + one / 20 * 8


def test_four_bits_of_both() -> None:
    """Catches rows that stay as they were: W4A4 is further off than W4A16."""
    errors = []
    for name in ("int8", "int4", "int4-a4"):
        model = build("mixtral")
        before = logits(model)
        serve_experts_(model, name)
        errors.append(float((logits(model) - before).norm()))
    assert errors[0] < errors[1] < errors[2]


def test_no_tokens_one_expert_and_dropped_ones() -> None:
    """An empty batch, everything to one expert, NaN in an expert nobody uses, the sentinel id."""
    model = build("mixtral")
    serve_experts_(model, "int8")
    served = next(iter(stacks(model).values()))
    assert isinstance(served, ServedExperts)
    assert served(torch.empty(0, 40), torch.empty(0, 2).long(), torch.empty(0, 2)).shape == (0, 40)
    served.gate_up.scales[[0, 1, 3]] = torch.nan
    x, weights = torch.randn(6, 40), torch.rand(6, 1)
    ids = torch.full((6, 1), 2)
    up, down = served.gate_up.expert(2).values.double(), served.down.expert(2).values.double()
    gate, linear = (x.double() @ up.T).chunk(2, -1)
    expected = weights.double() * ((nn.functional.silu(gate) * linear) @ down.T)
    with torch.no_grad():
        assert_close(served(x, ids, weights), expected, rtol=1e-4, atol=1e-7)
        ids[3] = 4  # what transformers calls no expert
        found = served(x, ids, weights)
    assert not found[3].any()
    assert bool(found[[0, 1, 2, 4, 5]].isfinite().all())


class Clamped(nn.Module):
    """Experts with the right shapes that do something else."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 8, 6))
        self.down_proj = nn.Parameter(torch.randn(2, 6, 4))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Any:
        gate, up = (x @ self.gate_up_proj[0].T).chunk(2, -1)
        return (self.act_fn(gate).clamp(max=0.1) * up) @ self.down_proj[0].T


def test_what_can_not_be_taken() -> None:
    """Catches weights that stay rounded although nothing was replaced."""
    model = nn.ModuleDict({"experts": Clamped()})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="experts: Clamped computes something else"):
        serve_experts_(model, "int8")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model["experts"].act_fn = nn.GELU()
    with pytest.raises(ValueError, match=r"no stack .* with silu: it has GELU"):
        serve_experts_(model, "int8")
    with pytest.raises(ValueError, match="'int3' is no format of experts; known: int8, int4"):
        serve_experts_(model, "int3")
    with pytest.raises(ValueError, match="Linear has no stacked experts"):
        serve_experts_(nn.Linear(2, 2), "int8")
