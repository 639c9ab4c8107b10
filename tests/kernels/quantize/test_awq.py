"""AWQ: folding scales changes nothing before quantization, and the scale is the best of its grid."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2MoeConfig,
)

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.awq import awq_factors, clipped_qparams, scale_layer
from quantwatch_kernels.quantize.hadamard import Hadamard
from quantwatch_kernels.quantize.input_stats import InputStats
from quantwatch_kernels.quantize.interpose import add_input_transform
from quantwatch_kernels.quantize.qparams import choose_qparams
from quantwatch_kernels.quantize.recipe import PerGroup, Recipe, WeightSpec
from quantwatch_kernels.quantize.selection import Layer, scope_names, select
from quantwatch_kernels.quantize.walk import LayerWalk

AWQ = WeightSpec(INT_FORMATS["uint3"], PerGroup(16), "integer", method="awq")
SIZE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "num_experts": 4}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZE, attention_bias=True, mlp_bias=True),
    "one key-value head": lambda: LlamaConfig(**{**SIZE, "num_key_value_heads": 1}),
    "gemma2": lambda: Gemma2Config(**SIZE, head_dim=16),
    "gpt2": lambda: GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4),
    "phi3": lambda: Phi3Config(**SIZE, pad_token_id=0),
    "mixtral": lambda: MixtralConfig(**SIZE, num_local_experts=4),
    "qwen2-moe": lambda: Qwen2MoeConfig(**SIZE, **EXPERTS),
}
SCALED = {
    "llama": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    "one key-value head": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    "gemma2": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    "gpt2": "c_attn c_fc",
    "phi3": "qkv_proj gate_up_proj",
    "mixtral": "q_proj k_proj v_proj o_proj",
    "qwen2-moe": "q_proj k_proj v_proj o_proj up_proj down_proj",
}


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
            else:  # gains and biases that differ between channels
                parameter.add_(torch.rand(parameter.shape, generator=generator))
    return model.to(dtype)


def token_ids() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 96, (2, 30), generator=generator) for _ in range(3)]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(ids, use_cache=False).logits.flatten(0, 1) for ids in token_ids()])


def scale(model: Any) -> dict[str, tuple[str, ...]]:
    """Fold scales into every layer, nothing quantized; returns the notes."""
    layers = select(model, Recipe(AWQ), scope_names(model, {})).layers
    walk, notes = LayerWalk(model, token_ids()), {}
    for index, (path, _) in enumerate(walk.layers):
        inside = [layer for layer in layers if layer.path.startswith(f"{path}.")]
        notes.update(scale_layer(walk, index, inside))
        walk.run(index)
    return notes


@pytest.mark.parametrize("name", CONFIGS)
def test_the_function_stays(name: str) -> None:
    """Catches a reader that isn't rescaled: experts, routers, shared value heads (bug log 40)."""
    model, plain = build(name), build(name)
    notes = scale(model)
    expected = logits(plain)
    assert (logits(model) - expected).norm() / expected.norm() < 1e-5
    before = dict(plain.named_parameters())
    changed = {
        path.removesuffix(".weight").rpartition(".")[2]
        for path, parameter in model.named_parameters()
        if path.endswith(".weight") and parameter.ndim == 2
        if not torch.allclose(parameter, before[path], rtol=1e-3)
    }
    assert changed == set(SCALED[name].split())
    unscaled = {path.rpartition(".")[2] for path in notes}
    assert unscaled.isdisjoint(changed - {"up_proj"})  # a maker there: its rows


class Shortcut(nn.Module):
    """An MLP that reads its norm a second time, by something that isn't a linear layer."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.mlp(x) + x
        return result


def test_an_undone_fold_leaves_the_same_bits() -> None:
    """Catches a norm that stays divided though a reader couldn't follow (llm-compressor#1455)."""
    model, plain = build("llama"), build("llama")
    for each in (model, plain):
        each.model.layers[0].mlp = Shortcut(each.model.layers[0].mlp)
    notes = scale(model)
    why = "not scaled: scaling its input changes the layer's output by"
    paths = [f"model.layers.0.mlp.mlp.{name}_proj" for name in ("gate", "up")]
    assert set(notes) == set(paths)
    assert all(notes[path][0].startswith(why) for path in paths)
    for name in ("post_attention_layernorm", "mlp.mlp.gate_proj"):
        first, second = (m.model.layers[0].get_submodule(name).weight for m in (model, plain))
        assert torch.equal(first, second)


class Quiet(nn.Module):
    """An MLP that holds a linear layer and never calls it."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self.spare_proj = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.mlp(x)
        return result


@pytest.mark.parametrize("name", ["llama", "gemma2", "one key-value head"])
def test_an_input_that_is_transformed_online_is_reported(name: str) -> None:
    """Catches a rotated down projection that is left unscaled without a word."""
    model, plain = build(name), build(name)
    for each in (model, plain):
        for layer in each.model.layers:
            add_input_transform(layer.mlp.down_proj, Hadamard(48, 1))
    before = logits(plain)
    notes = scale(model)
    why = ("not scaled: its input is transformed online",)
    assert notes == {f"model.layers.{n}.mlp.down_proj": why for n in (0, 1)}
    assert (logits(model) - before).norm() / before.norm() < 1e-5
    first, second = (m.model.layers[0].mlp.down_proj.weight for m in (model, plain))
    assert torch.equal(first, second)


def test_a_layer_that_is_not_called_is_reported() -> None:
    """Catches a linear layer that no forward pass reaches and nobody mentions."""
    model = build("llama")
    model.model.layers[1].mlp = Quiet(model.model.layers[1].mlp)
    why = ("not scaled: its decoder layer didn't call it",)
    assert scale(model)["model.layers.1.mlp.spare_proj"] == why


def test_experts_are_reported() -> None:
    """Catches a shared expert that is scaled while router and experts are not (bug log 40)."""
    notes = scale(build("qwen2-moe"))
    why = "not scaled: no norm or linear layer before it takes the scale"
    assert notes["model.layers.0.mlp.shared_expert.gate_proj"] == (why,)


def problem(repeats: int = 1) -> tuple[Layer, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, 32, generator=generator) * torch.logspace(-2, 1, 32)
    if repeats > 1:
        x = torch.randn(200, 32, generator=generator) * torch.logspace(-1, 1, 32)
    linear = nn.Linear(32, 24, bias=False)
    with torch.no_grad():
        linear.weight.copy_(0.1 * torch.randn(24, 32, generator=generator))
    return Layer("x.up_proj", "x", linear, AWQ), x


def stats_of(x: Tensor) -> InputStats:
    stats = InputStats(x.shape[1])
    stats.add(x)
    return stats


def test_the_best_of_the_grid() -> None:
    """Catches an objective on weights instead of outputs, and a scale that isn't normalised."""
    layer, x = problem()
    found = awq_factors([layer], stats_of(x))
    assert found.max().item() * found.min().item() == pytest.approx(1.0)

    def output_mse(factors: Tensor) -> float:
        values = quantize_weight(layer.weight * factors.float(), AWQ).values / factors.float()
        return ((values - layer.weight).double() @ x.double().T).square().sum().item()

    tried = []
    for i in range(20):
        factors = x.double().abs().mean(0) ** (i / 20)
        tried.append(output_mse(factors / (factors.max() * factors.min()).sqrt()))
    assert output_mse(found) == pytest.approx(min(tried), rel=1e-3)
    assert min(tried) < 0.7 * tried[0]


def test_heads_that_share_values_share_scales() -> None:
    """Catches repeats of channels instead of heads (llm-compressor#2818)."""
    layer, x = problem(repeats=2)
    factors = awq_factors([layer], stats_of(x), repeats=2, head_dim=8).view(2, 2, 8)
    assert torch.equal(factors[:, 0], factors[:, 1])
    assert len(set(factors[:, 0].flatten().tolist())) == 16


def test_inputs_that_are_always_zero() -> None:
    """Catches 0 ** r and 1/0 for dead inputs."""
    layer, x = problem()
    x[:, 3] = 0
    assert torch.isfinite(awq_factors([layer], stats_of(x))).all()
    assert torch.equal(awq_factors([layer], stats_of(0 * x)), torch.ones(32, dtype=torch.float64))


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_queries_and_keys_are_not_clipped(name: str) -> None:
    """Catches a clip search on what the softmax amplifies."""
    layer, x = problem()
    spec = WeightSpec(AWQ.format, AWQ.granularity, "integer", "mse", "awq")
    layer = Layer(f"layer.{name}", "x", layer.module, spec)
    found = clipped_qparams(layer, stats_of(x).hessian)
    plain = choose_qparams(layer.weight, spec)
    assert torch.equal(found.scales, plain.scales) == (name != "v_proj")


def test_a_positive_group_stays_what_it_is() -> None:
    """Catches a range without 0: a group 10.5 … 14 would become 3.5 (llm-awq#193)."""
    layer, x = problem()
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(10.5, 14, 16).repeat(24, 2))
    spec = WeightSpec(INT_FORMATS["uint4"], PerGroup(16), "integer", method="awq")
    values = quantize_weight(layer.weight, spec).values
    assert (values - layer.weight).abs().max() <= 14 / 15 / 2 + 1e-6
    assert torch.isfinite(awq_factors([layer], stats_of(x))).all()


def test_bfloat16_keeps_the_function() -> None:
    """Catches a tolerance that undoes every fold in 16 bits."""
    model = build("llama", torch.bfloat16)
    assert not scale(model)
