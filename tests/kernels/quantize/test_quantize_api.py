"""Quantizing whole models: what is converted, what is skipped, and what it weighs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2MoeConfig,
)

from quantwatch_kernels.formats import INT4, INT_FORMATS, IntFormat
from quantwatch_kernels.quantize.affine import fake_quantize
from quantwatch_kernels.quantize.api import Execution, model_size, quantize_
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.recipe import (
    ActivationSpec,
    PerChannel,
    PerGroup,
    PerTensor,
    Recipe,
    WeightSpec,
)
from quantwatch_kernels.registry import Fallback, fallbacks

EXECUTIONS: tuple[Execution, ...] = ("dequantized", "aten", "reference")
COMMON = {
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {**COMMON, "intermediate_size": 64, "num_hidden_layers": 1}


def llama(**changes: object) -> Any:
    return build(LlamaConfig(**COMMON, intermediate_size=96, num_hidden_layers=2, **changes))


def gpt2() -> Any:
    return build(GPT2Config(vocab_size=96, n_positions=64, n_embd=64, n_layer=2, n_head=4))


def mixtral() -> Any:
    return build(MixtralConfig(**EXPERTS, num_local_experts=4))


def qwen_moe() -> Any:
    experts = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    return build(Qwen2MoeConfig(**EXPERTS, **experts, num_experts=4))


def build(config: object) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(torch.arange(40).view(2, 20)).logits
    return result


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_tied_llama(execution: Execution) -> None:
    """Catches a tied head that is quantized, or untied silently (bug log 19)."""
    model = llama(tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight.detach().clone()
    report = quantize_(model, Recipe.named("int8-channel"), execution=execution)
    assert len(report.converted) == 14
    assert dict(report.skipped) == {
        "model.embed_tokens": "embeddings stay unless the recipe has a format for them",
        "head": "excluded by 'head'",
    }
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert torch.equal(model.get_input_embeddings().weight, embedding)


def test_tying_protects_without_exclusion() -> None:
    """Catches a recipe without exclusions that breaks the tie."""
    recipe = Recipe(WeightSpec(INT4, PerGroup(32)), exclude=())
    tied = dict(quantize_(llama(tie_word_embeddings=True), recipe).skipped)
    assert tied["head"] == "its weight is tied to model.embed_tokens"
    untied = quantize_(llama(tie_word_embeddings=False), recipe)
    assert "head" in untied.converted


@pytest.mark.parametrize("recipe", ["int8-channel", "int4-g32"])
def test_executions_agree(recipe: str) -> None:
    """Catches an execution that computes another model: within bfloat16 of each other."""
    results = {}
    for execution in EXECUTIONS:
        model = llama()
        quantize_(model, Recipe.named(recipe), execution=execution)
        results[execution] = logits(model)
    exact = results["reference"]
    assert (results["dequantized"] - exact).norm() / exact.norm() < 1e-6
    assert (results["aten"] - exact).norm() / exact.norm() < 1e-2


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_conv1d(execution: Execution) -> None:
    """Catches scales along the inputs of GPT-2's transposed weights, and a lost bias."""
    model, plain = gpt2(), gpt2()
    report = quantize_(model, Recipe.named("int8-channel"), execution=execution)
    assert "transformer.h.0.mlp.c_fc" in report.converted
    assert len(report.converted) == 8
    for module in plain.modules():
        if type(module).__name__ == "Conv1D":
            weight = module.get_parameter("weight").detach()
            weight.copy_(fake_quantize(weight.T, Recipe.named("int8-channel").weights).T)
    limit = 1e-2 if execution == "aten" else 1e-6
    assert (logits(model) - logits(plain)).norm() / logits(plain).norm() < limit


MOE: dict[str, tuple[Callable[[], Any], str]] = {
    "mixtral": (mixtral, "mlp.gate"),
    "qwen2-moe": (qwen_moe, "mlp.shared_expert_gate"),
}


@pytest.mark.parametrize("name", MOE)
def test_experts_are_converted_and_routers_reported(name: str) -> None:
    """Catches most of a mixture's weights being left alone, and a router that isn't (log 42, 45)."""
    make, router = MOE[name]
    report = quantize_(make(), Recipe.named("int4-g32"))
    reasons = dict(report.skipped)
    assert not [key for key in reasons if "experts" in key]
    assert [key for key in report.converted if "experts.0.down_proj" in key]
    assert [key for key in reasons if key.endswith(router)]
    assert not [key for key in report.converted if "gate" in key.split(".")[-1].split("_")[-1:]]


INNER_ROUTERS = {
    "hunyuan": ["mlp.gate.wg"],
    "jetmoe": ["mlp.router.layer", "self_attention.experts.router.layer"],
}


@pytest.mark.parametrize("family", INNER_ROUTERS)
def test_a_matrix_inside_a_router_is_a_router(family: str, decoder: Callable[[str], Any]) -> None:
    """Catches routers that are quantized because they lie one level down (bug log 42)."""
    report = quantize_(decoder(family), Recipe.named("int8-channel"))
    paths = [f"model.layers.{i}.{place}" for i in (0, 1) for place in INNER_ROUTERS[family]]
    assert {path: dict(report.skipped).get(path) for path in paths} == dict.fromkeys(
        paths, "excluded by 'router'"
    )
    assert not set(paths) & set(report.converted)


HUGE = {
    torch.float32: torch.finfo(torch.float32).max,
    torch.float16: 65504.0,
    torch.bfloat16: torch.finfo(torch.bfloat16).max,
}


@pytest.mark.parametrize("dtype", HUGE, ids=str)
@pytest.mark.parametrize("recipe", ["int8-channel", "uint8-channel", "int4-g32", "uint4-g32"])
@pytest.mark.parametrize("execution", ["dequantized", "reference"])
def test_weights_at_the_end_of_the_range_stay_finite(
    execution: Execution, recipe: str, dtype: torch.dtype
) -> None:
    """Catches the outermost grid point, beyond what the dtype holds, written as an infinity."""
    linear = nn.Linear(32, 4, bias=False, dtype=dtype)
    model = nn.Sequential(linear)
    with torch.no_grad():
        linear.weight[0, :2] = torch.tensor([HUGE[dtype], -HUGE[dtype]])
    quantize_(model, Recipe.named(recipe), execution=execution)
    layer = model[0]
    found = layer.quantized().values if isinstance(layer, PackedLinear) else linear.weight
    assert torch.isfinite(found).all()
    assert found[0, 0].item() >= 0.87 * HUGE[dtype]
    with torch.no_grad():
        assert torch.isfinite(layer(torch.full((1, 32), 2.0**-9, dtype=dtype))).all()


def test_scopes_name_and_exclude() -> None:
    """Catches globs matched against module paths only, and reports in another vocabulary."""
    scopes = {"model.layers.1.mlp.down_proj": "layers.1.mlp.down_proj"}
    recipe = Recipe(WeightSpec(INT4, PerGroup(32)), exclude=("head", "layers.1.*"))
    report = quantize_(llama(), recipe, scopes=scopes)
    assert dict(report.skipped)["layers.1.mlp.down_proj"] == "excluded by 'layers.1.*'"
    assert "model.layers.1.mlp.up_proj" in report.converted


def test_fallbacks_are_named_and_counted() -> None:
    """Catches a native candidate that is float in places nobody knows of."""
    model = llama()
    report = quantize_(model, Recipe.named("int4-g64"), execution="aten")
    reason = "in_features 96 is not divisible by the group size 64"
    assert dict(report.fallbacks) == {f"model.layers.{i}.mlp.down_proj": reason for i in (0, 1)}
    assert fallbacks() == {Fallback("int4_linear", "aten", "dequantized", reason): 2}
    assert torch.isfinite(logits(model)).all()


ZEROS = ("integer", "float")
WHOLE = (PerTensor, PerChannel)
SIZES = {"int8-channel": 8, "int4-g32": 4}


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", SIZES)
def test_size_counts_everything(name: str, execution: Execution) -> None:
    """Catches "4-bit" sizes without scales, embeddings counted twice, and dequantized ones as float."""
    model = llama(tie_word_embeddings=True)
    recipe = Recipe.named(name)
    linears = [m.weight for m in model.model.layers.modules() if isinstance(m, nn.Linear)]
    _, num_weights = model_size(model)
    quantized = sum(w.numel() for w in linears)
    scales = sum(len(w) * (1 if name == "int8-channel" else w.shape[1] // 32) for w in linears)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    report = quantize_(model, recipe, execution=execution)
    packed = quantized * SIZES[name] // 8 + 4 * scales
    assert report.size_bytes == packed + 4 * (num_weights - quantized) + buffers
    assert report.bits_per_weight == pytest.approx(8 * report.size_bytes / num_weights)


PARTS = [
    *((name, PerGroup(32), zero) for name in ("uint4", "uint3", "uint8") for zero in ZEROS),
    *((name, each(), zero) for name in ("uint4", "uint5") for each in WHOLE for zero in ZEROS),
    *((name, each, "none") for name in ("int8", "int6") for each in (PerTensor(), PerGroup(48))),
]


@pytest.mark.parametrize("execution", ["reference", "aten"])
@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "granularity", "zero"), PARTS, ids=str)
def test_size_is_what_the_model_holds(
    name: str, granularity: Any, zero: Any, scale: torch.dtype, execution: Execution
) -> None:
    """Catches zeros packed across rows, or scales counted once, where a layer stores more."""
    spec = WeightSpec(INT_FORMATS[name], granularity, zero, scale_dtype=scale)
    model = llama(tie_word_embeddings=False)
    shapes = [m.weight.shape for m in model.model.layers.modules() if isinstance(m, nn.Linear)]
    other = model_size(model)[0] - 4 * sum(shape.numel() for shape in shapes)
    activations = ActivationSpec(INT_FORMATS["uint8"], PerTensor(), static=True)
    recipe = Recipe(spec, activations=activations)
    report = quantize_(model, recipe, execution=execution, calibration=[torch.arange(40)[None]])
    static = 14 * (4 + 1)
    assert report.size_bytes == other + sum(spec.num_bytes(*shape) for shape in shapes) + static
    if not report.fallbacks:  # those hold floats, and are counted as packed
        assert report.size_bytes == model_size(model)[0]


def test_model_size_counts_shared_memory_once() -> None:
    """Catches a tied embedding that is paid for twice."""
    tied, untied = llama(tie_word_embeddings=True), llama(tie_word_embeddings=False)
    assert model_size(untied)[1] - model_size(tied)[1] == 96 * 64


def test_bfloat16_models_stay_bfloat16() -> None:
    """Catches a candidate that silently computes in another dtype than it was loaded in."""
    model = llama().to(torch.bfloat16)
    quantize_(model, Recipe.named("int8-channel"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_packed_layers_replace_the_linear_ones() -> None:
    """Catches codes and float weights kept side by side."""
    model = llama()
    quantize_(model, Recipe.named("int8-channel"), execution="aten")
    assert isinstance(model.get_submodule("model.layers.0.self_attn.q_proj"), PackedLinear)
    assert len([m for m in model.modules() if isinstance(m, nn.Linear)]) == 1


def test_nothing_to_convert_is_an_error() -> None:
    """Catches a typo in `exclude` that leaves the whole model in full precision."""
    with pytest.raises(ValueError, match=r"would convert no layer.*excluded by '\*'"):
        quantize_(llama(), Recipe(WeightSpec(INT4, PerChannel()), exclude=("*",)))
    with pytest.raises(ValueError, match="execution"):
        quantize_(llama(), Recipe.named("int8-channel"), execution="fast")  # type: ignore[arg-type]


RECIPES = {
    "int8-channel": ("int8", "channel", None),
    "int4-channel": ("int4", "channel", None),
    "int4-g64": ("int4", "group", 64),
    "int8-g32": ("int8", "group", 32),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_by_name(name: str) -> None:
    """Catches a name that means another recipe than its JSON."""
    recipe = Recipe.named(name)
    assert recipe.name == name
    json = recipe.to_json()
    assert (json["weights"], json["granularity"], json["group_size"]) == RECIPES[name]
    assert json["exclude"] == ["head", "router"]


@pytest.mark.parametrize("name", ["int4", "int9-g64", "int4-g", "int8-channel ", "fp8"])
def test_unknown_recipes_are_refused(name: str) -> None:
    """Catches a misspelt recipe taken for another one."""
    with pytest.raises(ValueError, match="allowed"):
        Recipe.named(name)


def test_impossible_values_are_refused() -> None:
    """Catches formats and groups that can't exist."""
    with pytest.raises(ValueError, match="group size"):
        PerGroup(1)
    with pytest.raises(ValueError, match="symmetric"):
        IntFormat("int4", 4, -8, 7)
    with pytest.raises(ValueError, match="bits must be"):
        IntFormat("int9", 9, -255, 255)
