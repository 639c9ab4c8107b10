"""Calibrated quantization of whole models: the right inputs, in the right order, the same bits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2MoeConfig

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize import calibrate
from quantwatch_kernels.quantize.affine import (
    QuantizedWeight,
    dequantize,
    quantize,
    quantize_weight,
)
from quantwatch_kernels.quantize.api import Execution, quantize_
from quantwatch_kernels.quantize.calibrate import head_inputs
from quantwatch_kernels.quantize.gptq import gptq
from quantwatch_kernels.quantize.mse import mse_qparams
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.recipe import (
    LayerRule,
    Method,
    PerChannel,
    PerGroup,
    Recipe,
    WeightSpec,
)
from quantwatch_kernels.quantize.selection import Layer

UINT4, INT8 = INT_FORMATS["uint4"], INT_FORMATS["int8"]
GPTQ = WeightSpec(UINT4, PerGroup(16), "integer", "mse", "gptq")
ROW8 = WeightSpec(INT8, PerChannel())
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def build(config: object) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)  # so that layers matter
    return model


def llama(**changes: object) -> Any:
    return build(LlamaConfig(**{**COMMON, "tie_word_embeddings": True, **changes}))


def gpt2() -> Any:
    return build(GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4))


def token_ids(count: int = 4, length: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 96, (2, length), generator=generator) for _ in range(count)]


def logits(model: Any, inputs: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(ids, use_cache=False).logits.flatten(0, 1) for ids in inputs])


def drift(model: Any, plain: Any, inputs: list[Tensor]) -> float:
    """Mean KL(plain ‖ model) in nats."""
    p, q = (torch.log_softmax(logits(m, inputs).double(), -1) for m in (plain, model))
    return (p.exp() * (p - q)).sum(-1).mean().item()


def observed(model: Any, path: str, inputs: list[Tensor]) -> Tensor:
    """Every row that reaches a module in a plain forward pass of the whole model."""
    rows: list[Tensor] = []
    hook = model.get_submodule(path).register_forward_pre_hook(
        lambda _, args: rows.append(args[0].flatten(0, -2))
    )
    logits(model, inputs)
    hook.remove()
    return torch.cat(rows)


ORDER = [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


def test_each_layer_sees_what_the_earlier_ones_give() -> None:
    """Catches calibration on the unquantized model, and a Hessian of another input.

    Rebuilt here with whole forward passes of the model as it is after each step.
    """
    model, other, inputs = llama(), llama(), token_ids()
    quantize_(model, Recipe(GPTQ, embedding=ROW8), calibration=inputs)
    table = other.get_input_embeddings().weight
    table.data.copy_(quantize_weight(table.detach(), ROW8).values)
    for index in range(2):
        for names in ORDER:
            part = "mlp" if names[0] in ("gate_proj", "down_proj") else "self_attn"
            paths = [f"model.layers.{index}.{part}.{name}" for name in names]
            x = observed(other, paths[0], inputs).double()
            for path in paths:
                weight = other.get_submodule(path).weight
                expected, _ = gptq(weight.detach(), GPTQ, 2 * x.T @ x / len(x))
                found = model.get_submodule(path).weight
                # Float32 products in batches against float64: single codes may differ.
                different = (expected.values != found).float().mean().item()
                assert different < 0.02, (path, different)
                weight.data.copy_(found)


@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_better_than_nearest(make: Any, method: Method) -> None:
    """Catches a calibration that does harm, and Hessians of Conv1D weights by rows."""
    inputs, heldout = token_ids(8), token_ids(12)[8:]
    drifts = {}
    for used in ("nearest", method):
        model = make()
        spec = WeightSpec(INT_FORMATS["uint3"], PerGroup(16), "integer", method=used)
        quantize_(model, Recipe(spec), calibration=inputs)
        drifts[used] = drift(model, make(), heldout)
    assert drifts[method] < drifts["nearest"]


def test_the_same_bits_again() -> None:
    """Catches anything random, and an order that depends on addresses."""
    recipe, inputs = Recipe(GPTQ, embedding=GPTQ), token_ids()
    models = [llama(), llama()]
    for model in models:
        quantize_(model, recipe, calibration=inputs)
    first, second = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_stochastic_rounding_is_seeded_by_the_path() -> None:
    """Catches another result at every call, and the same noise in every layer."""
    spec = WeightSpec(UINT4, PerGroup(16), "integer", rounding="stochastic")
    weights = []
    for recipe in (Recipe(spec), Recipe(spec), Recipe(spec, exclude=("head", "*.layers.0.*"))):
        model = llama()
        quantize_(model, recipe)
        weights.append(model.model.layers[1].mlp.up_proj.weight)
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    plain = llama()
    quantize_(plain, Recipe.named("uint4-g16"))
    assert not torch.equal(weights[0], plain.model.layers[1].mlp.up_proj.weight)


PACKED: tuple[Execution, ...] = ("aten", "reference")
NATIVE = {"hidden_size": 64, "intermediate_size": 96}
"""Widths that aten's kernels take."""


@pytest.mark.parametrize("method", ["nearest", "gptq"])
@pytest.mark.parametrize("clip", ["none", "mse"])
def test_a_tied_table_once(method: Method, clip: Any) -> None:
    """Catches a tied pair that is quantized twice or torn apart (bug log 19)."""
    spec = WeightSpec(UINT4, PerGroup(16), "integer", clip, method)
    model, plain, inputs = llama(), llama(), token_ids(8)
    report = quantize_(model, Recipe(ROW8, embedding=spec), calibration=inputs)
    table = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is table
    assert "model.embed_tokens" in report.converted
    before = plain.get_input_embeddings().weight.detach()
    if method == "nearest":
        plain_range = quantize_weight(before, spec).values
        assert torch.equal(table, plain_range) == (clip == "none")
        if clip == "mse":
            params = mse_qparams(before, spec)
            assert torch.equal(table, dequantize(quantize(before, params, spec), params, spec))
        return
    x = observed(plain, "lm_head", inputs)
    errors = [((w - before) @ x.T).norm() for w in (table, quantize_weight(before, spec).values)]
    assert errors[0] < 0.9 * errors[1]


def test_known_inputs_of_the_head() -> None:
    """Catches other bits than without them, and a rotated model quantized for the plain one's."""
    recipe, inputs = Recipe(GPTQ, embedding=GPTQ), token_ids()
    model, again = llama(), llama()
    head = head_inputs(llama(), inputs)
    quantize_(model, recipe, calibration=inputs, head=head)
    quantize_(again, recipe, calibration=inputs)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    x = observed(llama(), "lm_head", inputs).double()
    assert torch.allclose(head.hessian, 2 / len(x) * x.T @ x, rtol=0, atol=4e-6)
    smooth = replace(recipe, smooth=0.5)
    models = [llama(), llama()]
    for each, known in zip(models, (head, None), strict=True):
        quantize_(each, smooth, calibration=inputs, head=known)
    assert torch.equal(*(each.lm_head.weight for each in models))


def test_gptq_of_a_table_that_is_only_looked_up() -> None:
    """Catches a Hessian of nothing."""
    recipe = Recipe(ROW8, embedding=GPTQ)
    with pytest.raises(ValueError, match="embed_tokens is only looked up"):
        quantize_(llama(tie_word_embeddings=False), recipe, calibration=token_ids())


def test_position_tables_stay() -> None:
    """Catches GPT-2's learned positions quantized as if they were tokens."""
    report = quantize_(gpt2(), Recipe(ROW8, embedding=ROW8))
    assert "transformer.wte" in report.converted
    assert dict(report.skipped)["transformer.wpe"] == (
        "only the embedding of tokens is ever quantized"
    )


def test_a_head_of_its_own() -> None:
    """Catches layers outside the decoder that are left out of calibration, or seen too early."""
    model, other = llama(tie_word_embeddings=False), llama(tie_word_embeddings=False)
    inputs, recipe = token_ids(), Recipe(GPTQ, exclude=())
    report = quantize_(model, recipe, calibration=inputs)
    assert "head" in report.converted
    x = observed(model, "lm_head", inputs)
    before = other.lm_head.weight.detach()
    nearest = quantize_weight(before, GPTQ).values
    assert ((model.lm_head.weight - before) @ x.T).norm() < 0.9 * ((nearest - before) @ x.T).norm()


def test_rules_mix_methods() -> None:
    """Catches one method for all, and a kept layer that is calibrated."""
    rules = (LayerRule("*.down_proj", ROW8), LayerRule("*.layers.1.self_attn.*", None))
    model, plain = llama(), llama()
    report = quantize_(model, Recipe(GPTQ, layers=rules), calibration=token_ids())
    down = plain.model.layers[0].mlp.down_proj.weight.detach()
    assert torch.equal(
        model.model.layers[0].mlp.down_proj.weight, quantize_weight(down, ROW8).values
    )
    assert len(report.converted) == 10
    kept = dict(report.skipped)["model.layers.1.self_attn.q_proj"]
    assert kept == "kept by a rule of the recipe"


@pytest.mark.parametrize("execution", PACKED)
def test_executions_use_the_same_codes(execution: Execution) -> None:
    """Catches calibration on the arithmetic of a back end."""
    spec = replace(GPTQ, granularity=PerGroup(32))
    model, other, inputs = llama(**NATIVE), llama(**NATIVE), token_ids()
    quantize_(model, Recipe(spec), execution=execution, calibration=inputs)
    quantize_(other, Recipe(spec), calibration=inputs)
    layers = {path: m for path, m in model.named_modules() if isinstance(m, PackedLinear)}
    assert len(layers) == 14
    for path, layer in layers.items():
        assert torch.equal(layer.quantized().values, other.get_submodule(path).weight), path
    expected = logits(other, inputs)
    limit = 1e-2 if execution == "aten" else 1e-5  # aten multiplies in bfloat16
    assert (logits(model, inputs) - expected).norm() / expected.norm() < limit


def test_bfloat16_models() -> None:
    """Catches Hessians summed in 16 bits."""
    model, plain = llama().bfloat16(), llama().bfloat16()
    report = quantize_(model, Recipe(GPTQ), calibration=token_ids(8))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert len(report.converted) == 14
    nearest = llama().bfloat16()
    quantize_(nearest, Recipe.named("uint4-g16"))
    heldout = token_ids(12)[8:]
    assert drift(model, plain, heldout) < drift(nearest, plain, heldout)


def test_what_is_reported() -> None:
    """Catches too few tokens, and scales stored in another dtype than asked, without a word."""
    report = quantize_(llama(), Recipe(GPTQ), calibration=[torch.tensor([[1, 2, 3]])])
    assert ("model.layers.0.self_attn.q_proj", FEW) in report.notes
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1e-6)
    spec = WeightSpec(INT8, PerChannel(), scale_dtype=torch.float16)
    notes = dict(quantize_(model, Recipe(spec)).notes)
    stored = "scales don't fit torch.float16: stored as torch.float32"
    assert notes == {"model.layers.0.mlp.up_proj": stored}


FEW = "calibrated on 3 tokens for 32 inputs: expect it to overfit"


class Unused(nn.Module):
    """A Llama MLP whose up projection is never called."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.up_proj, self.down_proj, self.gate_proj = mlp.up_proj, mlp.down_proj, mlp.gate_proj

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(self.gate_proj(x))
        return result


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_layer_that_no_token_reaches(method: Method) -> None:
    """Catches 0/0 for an expert that was never chosen (bug log 21)."""
    model = llama()
    model.model.layers[0].mlp = Unused(model.model.layers[0].mlp)
    spec = WeightSpec(UINT4, PerGroup(16), "integer", method=method)
    weight = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    report = quantize_(model, Recipe(spec), calibration=token_ids())
    notes = [note for name, note in report.notes if name.endswith("0.mlp.up_proj")]
    assert "no calibration token reached it: rounded to nearest" in notes
    found = model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(found, quantize_weight(weight, spec).values)


def test_a_mixture_of_experts() -> None:
    """Catches a walk that needs a dense model, and stacked experts that are left alone."""
    config = Qwen2MoeConfig(
        **COMMON, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=32
    )
    report = quantize_(build(config), Recipe(GPTQ), calibration=token_ids())
    assert "model.layers.1.mlp.shared_expert.down_proj" in report.converted
    assert "model.layers.1.mlp.experts.3.down_proj" in report.converted


def test_missing_calibration() -> None:
    """Catches a calibrated recipe that falls back to nearest without inputs."""
    missing: list[list[Tensor] | None] = [None, []]
    for calibration in missing:
        with pytest.raises(ValueError, match="needs calibration inputs"):
            quantize_(llama(), Recipe(GPTQ), calibration=calibration)


def test_broken_numbers_name_the_layer() -> None:
    """Catches NaN that becomes code 0 and a finite, wrong model (bug log 39)."""
    for recipe in (Recipe(ROW8), Recipe(GPTQ)):
        model = llama()
        model.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.nan
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj: 1 weights aren't finite"):
            quantize_(model, recipe, calibration=token_ids())
    model = llama()
    model.model.layers[1].input_layernorm.weight.data[0] = torch.inf
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj: the activations"):
        quantize_(model, Recipe(GPTQ), calibration=token_ids())


def test_values_that_are_not_finite_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a method that makes NaN of finite weights, written into the model as they are."""

    def broken(layer: Layer, stats: object) -> tuple[QuantizedWeight, tuple[str, ...]]:
        made = quantize_weight(layer.weight, layer.spec)
        made.qparams.scales[0] = torch.nan
        return made, ()

    monkeypatch.setattr(calibrate, "quantize_layer", broken)
    with pytest.raises(ValueError, match=r"q_proj: 32 of its quantized weights aren't finite"):
        quantize_(llama(), Recipe(ROW8))
