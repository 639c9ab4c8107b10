"""The transformers plug-in: quantized while loading, saved packed, loaded again bit for bit."""

import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.kernels.quantize.checkpoints import IDS, SIZES, build, logits
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config
from transformers.utils import logging as transformers_logging

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.api import linear_op, quantize_
from quantwatch_kernels.quantize.checkpoint import describe
from quantwatch_kernels.quantize.hf_quantizer import QuantwatchConfig, save_quantized
from quantwatch_kernels.quantize.interpose import add_input_transform
from quantwatch_kernels.quantize.packed_embedding import (
    PackedEmbedding,
    TiedHead,
    install_embedding,
)
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.recipe import (
    ActivationSpec,
    LayerRule,
    PerChannel,
    PerGroup,
    Recipe,
    RotationSpec,
    WeightSpec,
)
from quantwatch_kernels.quantize.unpack import unpack_
from quantwatch_kernels.registry import fallbacks

INT4 = INT_FORMATS["int4"]
MIXED = Recipe(
    WeightSpec(INT_FORMATS["uint4"], PerGroup(32), "float", scale_dtype=torch.float16),
    layers=(
        LayerRule("*down_proj", WeightSpec(INT_FORMATS["int5"], PerGroup(48))),
        LayerRule("*layers.1.*k_proj", WeightSpec(INT_FORMATS["uint3"], PerGroup(40), "integer")),
        LayerRule("*o_proj", None),
    ),
    embedding=WeightSpec(INT_FORMATS["int6"], PerChannel()),
)


GPT2_NAMES = {
    "*down_proj": "*mlp.c_proj",
    "*layers.1.*k_proj": "*h.1.*c_attn",
    "*o_proj": "*n.c_proj",
}


def fitting(recipe: Any, name: str) -> Any:
    """Name GPT-2's matrices in the mixed recipe: a rule that matches nothing is refused."""
    if recipe is not MIXED or not name.startswith("gpt2"):
        return recipe
    rules = (replace(rule, match=GPT2_NAMES[rule.match]) for rule in MIXED.layers)
    return replace(MIXED, layers=tuple(rules))


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.enable_progress_bar()


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: build(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "llama-tied": lambda: build(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen2-biases": lambda: build(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "gpt2-conv1d": lambda: build(
        GPT2Config(vocab_size=96, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    ),
}


def load(folder: Path, recipe: Any = None, **settings: Any) -> Any:
    if recipe is not None:
        settings["quantization_config"] = QuantwatchConfig(recipe)
    return AutoModelForCausalLM.from_pretrained(folder, **settings)


def assert_same(a: Any, b: Any) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name
    assert torch.equal(logits(a), logits(b))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    parts = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for part in parts for name, tensor in part.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["int8-channel", "uint4-g32", MIXED], ids=["8", "4", "mixed"])
@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name: str, recipe: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """Catches bits, scales or dtypes that change on disk, a lost bias, and a mixed-up layer."""
    MODELS[name]().save_pretrained(tmp_path / "plain")
    first = load(tmp_path / "plain", fitting(recipe, name), dtype=dtype)
    assert first.hf_quantizer.report.converted
    first.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed", dtype=dtype)
    assert_same(first, again)
    again.save_pretrained(tmp_path / "again")
    assert_same(first, load(tmp_path / "again", dtype=dtype))
    assert logits(again).dtype == dtype


@pytest.mark.parametrize("name", MODELS)
def test_loading_gives_what_quantize_gives(name: str, tmp_path: Path) -> None:
    """Catches a plug-in that quantizes otherwise than `quantize_`."""
    MODELS[name]().save_pretrained(tmp_path)
    recipe = fitting(MIXED, name)
    packed, plain = load(tmp_path, recipe), MODELS[name]()
    quantize_(plain, recipe)
    assert not torch.equal(logits(plain), logits(MODELS[name]()))
    # The same values; only Conv1D multiplies in another order.
    torch.testing.assert_close(logits(packed), logits(plain), rtol=1e-5, atol=1e-6)


NO_DATA = {
    "mse": WeightSpec(INT4, PerGroup(32), clip="mse"),
    "hqq": WeightSpec(INT_FORMATS["uint3"], PerGroup(16), "float", method="hqq"),
}


@pytest.mark.parametrize("method", NO_DATA)
def test_methods_without_data_work_on_load(method: str, tmp_path: Path) -> None:
    """Catches a method that is dropped on load: other weights than `quantize_` makes, or nearest."""
    MODELS["llama"]().save_pretrained(tmp_path / "plain")
    first, twin = load(tmp_path / "plain", Recipe(NO_DATA[method])), MODELS["llama"]()
    quantize_(twin, Recipe(NO_DATA[method]), execution="reference")
    assert_same_bits(first, twin)
    nearest = MODELS["llama"]()
    plain = replace(NO_DATA[method], clip="none", method="nearest")
    quantize_(nearest, Recipe(plain), execution="reference")
    assert not torch.equal(logits(nearest), logits(first))
    first.save_pretrained(tmp_path / "packed")
    assert_same(first, load(tmp_path / "packed"))


def assert_same_bits(a: Any, b: Any) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


CALIBRATED = {
    "gptq": Recipe(WeightSpec(INT4, PerGroup(32), method="gptq"), embedding=MIXED.embedding),
    "awq": Recipe(WeightSpec(INT_FORMATS["uint4"], PerGroup(32), "integer", method="awq")),
    "smooth": Recipe(WeightSpec(INT_FORMATS["int8"], PerChannel()), smooth=0.5),
}


@pytest.mark.parametrize("method", CALIBRATED)
def test_save_quantized_after_calibration(method: str, tmp_path: Path) -> None:
    """Catches scales folded into norms, or codes chosen by GPTQ, that a checkpoint loses."""
    model = MODELS["llama-tied"]()
    texts = [torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(5))]
    quantize_(model, CALIBRATED[method], execution="reference", calibration=texts)
    before = logits(model)
    assert not torch.equal(before, logits(MODELS["llama-tied"]()))
    save_quantized(model, tmp_path, recipe=CALIBRATED[method])
    assert_same(model, load(tmp_path))


def test_mixed_bits_are_stored_packed(tmp_path: Path) -> None:
    """Catches rules that are lost, float weights beside packed ones, and a width that is padded."""
    MODELS["llama"]().save_pretrained(tmp_path / "plain")
    load(tmp_path / "plain", MIXED).save_pretrained(tmp_path / "packed")
    tensors = stored(tmp_path / "packed")
    layer = "model.layers.1.self_attn"
    assert tensors["model.layers.0.mlp.down_proj.weight_packed"].shape == (64, 60)
    assert tensors["model.layers.0.mlp.down_proj.scales"].dtype == torch.float32
    assert tensors[f"{layer}.k_proj.weight_packed"].shape == (32, 24)
    assert tensors[f"{layer}.k_proj.zeros"].shape == (32, 1)
    assert tensors[f"{layer}.q_proj.scales"].dtype == torch.float16
    assert tensors[f"{layer}.o_proj.weight"].shape == (64, 64)
    assert tensors["model.embed_tokens.weight_packed"].shape == (96, 48)
    assert f"{layer}.q_proj.weight" not in tensors


@pytest.mark.parametrize("embedding", [None, MIXED.embedding], ids=["kept", "packed"])
def test_a_tied_head_stays_tied_and_is_stored_once(embedding: Any, tmp_path: Path) -> None:
    """Catches a tied matrix that is quantized twice, untied or stored twice (bug log 19, T5)."""
    MODELS["llama-tied"]().save_pretrained(tmp_path / "plain")
    recipe = Recipe(WeightSpec(INT4, PerGroup(32)), exclude=(), embedding=embedding)
    load(tmp_path / "plain", recipe).save_pretrained(tmp_path / "packed")
    assert not [name for name in stored(tmp_path / "packed") if name.startswith("lm_head")]
    model = load(tmp_path / "packed")
    assert model.config.tie_word_embeddings
    head, inputs = model.get_output_embeddings(), model.get_input_embeddings()
    if embedding is None:
        assert head.weight is inputs.weight
        return
    assert isinstance(head, TiedHead)
    assert head.embedding is inputs
    model.tie_weights()  # what every resize and every wrapper calls
    assert model.get_output_embeddings() is head
    twin = copy.deepcopy(model)
    assert twin.get_output_embeddings().embedding is twin.get_input_embeddings()
    weight = MODELS["llama-tied"]().get_input_embeddings().weight.detach()
    values = quantize_weight(weight, embedding).values
    assert torch.equal(inputs(IDS), values[IDS])
    x = torch.randn(3, 64)
    assert torch.equal(head(x), nn.functional.linear(x, values))


def test_a_mixture_in_bfloat16_keeps_its_router_in_float32(tmp_path: Path) -> None:
    """Catches a reloaded router in bfloat16 (bug log 45), and one that is stored packed."""
    sizes = SIZES | {"intermediate_size": 32, "num_hidden_layers": 1, "num_local_experts": 4}
    build(MixtralConfig(**sizes)).save_pretrained(tmp_path / "plain")
    first = load(tmp_path / "plain", "int8-channel", dtype=torch.bfloat16)
    first.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed", dtype=torch.bfloat16)
    assert again.model.layers[0].mlp.gate.weight.dtype == torch.float32
    assert isinstance(again.model.layers[0].self_attn.q_proj, PackedLinear)
    assert_same(first, again)


def test_a_head_without_its_embedding_is_refused(tmp_path: Path) -> None:
    """Catches a head saved without its matrix after the embedding was exchanged."""
    model = MODELS["llama-tied"]()
    quantize_(model, MIXED, execution="reference")
    model.set_input_embeddings(nn.Embedding(96, 64))
    with pytest.raises(ValueError, match="lm_head is tied to an embedding that is no longer"):
        save_quantized(model, tmp_path)


def test_sharded_checkpoints(tmp_path: Path) -> None:
    """Catches a layer whose tensors are split over files being read in part."""
    MODELS["llama-tied"]().save_pretrained(tmp_path / "plain")
    first = load(tmp_path / "plain", MIXED)
    first.save_pretrained(tmp_path / "packed", max_shard_size="10KB")
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) > 3
    assert_same(first, load(tmp_path / "packed"))


def test_save_quantized_needs_no_recipe(tmp_path: Path) -> None:
    """Catches a model packed by `quantize_` that comes back otherwise, or is changed by saving."""
    model = MODELS["llama-tied"]()
    quantize_(model, MIXED, execution="reference")
    before = logits(model)
    save_quantized(model, tmp_path, max_shard_size="20KB")
    assert not hasattr(model.config, "quantization_config")
    assert not hasattr(model, "hf_quantizer")
    assert torch.equal(before, logits(model))
    again = load(tmp_path)
    assert_same(model, again)
    assert "recipe" not in json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    save_quantized(again, tmp_path / "second", recipe=MIXED)
    described = json.loads((tmp_path / "second" / "config.json").read_text())
    assert described["quantization_config"]["recipe"] == json.loads(json.dumps(MIXED.to_json()))
    assert again.hf_quantizer.quantization_config.recipe is None


def test_aten_execution_is_kept(tmp_path: Path) -> None:
    """Catches a reloaded model that is computed otherwise than the saved one, or says nothing."""
    MODELS["llama"]().save_pretrained(tmp_path / "plain")
    config = QuantwatchConfig(MIXED, execution="aten")
    first = load(tmp_path / "plain", quantization_config=config)
    first.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed")
    assert_same(first, again)
    layer = again.model.layers[0]
    assert layer.self_attn.q_proj.backend == "aten"
    assert layer.mlp.down_proj.backend == "dequantized"
    assert any(f.reason == "this width has no native kernel" for f in fallbacks())


def test_a_scale_keeps_its_dtype_in_a_bfloat16_model(tmp_path: Path) -> None:
    """Catches scales rounded to the model's dtype while loading: other weights than stored."""
    MODELS["llama"]().save_pretrained(tmp_path / "plain")
    load(tmp_path / "plain", "int4-g32").save_pretrained(tmp_path / "packed")
    model = load(tmp_path / "packed", dtype=torch.bfloat16)
    assert model.model.layers[0].mlp.up_proj.scales.dtype == torch.float32
    assert model.model.norm.weight.dtype == torch.bfloat16


def test_unpacked_is_the_same_model(tmp_path: Path) -> None:
    """Catches an unpacked layer with other values, a lost bias, or an untied head."""
    for name, make in MODELS.items():
        make().save_pretrained(tmp_path / name)
        packed, plain = (load(tmp_path / name, fitting(MIXED, name)) for _ in range(2))
        unpack_(plain, torch.float32)
        assert not [m for m in plain.modules() if isinstance(m, PackedLinear | TiedHead)]
        assert torch.equal(logits(plain), logits(packed))
        tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
        assert tied is plain.config.tie_word_embeddings


def test_modules_to_not_convert(tmp_path: Path) -> None:
    """Catches a name that is ignored, or one that takes more than it says."""
    MODELS["llama"]().save_pretrained(tmp_path)

    def packed(*names: str) -> set[str]:
        config = QuantwatchConfig(MIXED, modules_to_not_convert=[*names])
        model = load(tmp_path, quantization_config=config)
        return {name for name, m in model.named_modules() if isinstance(m, PackedLinear)}

    everything = packed()
    assert everything - packed("up_proj") == {f"model.layers.{i}.mlp.up_proj" for i in (0, 1)}
    inside = {name for name in everything if name.startswith("model.layers.1.")}
    assert everything - packed("model.layers.1") == inside
    assert everything - packed("model.layers.1", "norm", "input_layernorm") == inside
    assert everything - packed("embed_tokens") == {"model.embed_tokens"}
    with pytest.raises(ValueError, match="modules_to_not_convert: the model has no module 'up'"):
        packed("up")


SPEC = WeightSpec(INT4, PerGroup(32))
REFUSED = {
    "gptq": (Recipe(WeightSpec(INT4, PerGroup(32), method="gptq")), "needs calibration inputs"),
    "smooth": (Recipe(SPEC, smooth=0.5), "needs calibration inputs"),
    "activations": (
        Recipe(SPEC, activations=ActivationSpec(INT_FORMATS["int8"])),
        "would lose its activations",
    ),
    "rotation": (Recipe(SPEC, rotation=RotationSpec()), "would lose its rotation"),
    "residual": (
        Recipe(SPEC, residual_dtype=(("*", torch.float16),)),
        "would lose its residual_dtype",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_recipes_that_need_more_than_weights(name: str, tmp_path: Path) -> None:
    """Catches GPTQ without data, or a checkpoint that computes another model than was quantized."""
    MODELS["llama"]().save_pretrained(tmp_path)
    recipe, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"can't be applied while loading: .*{message}"):
        load(tmp_path, recipe)


def test_settings_that_are_not_understood(tmp_path: Path) -> None:
    """Catches a misspelt setting that is dropped, and a device map that would be ignored."""
    with pytest.raises(ValueError, match=r"no setting 'recipes' \(= 'int4'\); allowed: recipe,"):
        QuantwatchConfig(recipes="int4")
    with pytest.raises(ValueError, match="execution is 'fast'; allowed: dequantized, aten, refer"):
        QuantwatchConfig("int4-g32", execution="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown recipe 'int4'"):
        QuantwatchConfig("int4")
    MODELS["llama"]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="needs a recipe to quantize"):
        load(tmp_path, quantization_config=QuantwatchConfig())
    with pytest.raises(ValueError, match=r"onto one device; device_map is .*'disk'"):
        load(tmp_path, "int4-g32", device_map={"model": "cpu", "lm_head": "disk"})


def edited(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config["quantization_config"])
    path.write_text(json.dumps(config))
    return folder


UP = "model.layers.0.mlp.up_proj"
BROKEN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (lambda c: c.update(format_version=2), "format_version is 2; allowed: 1"),
    "no layers": (lambda c: c.pop("layers"), "doesn't describe its packed layers"),
    "absent layer": (
        lambda c: c["layers"].update({"model.up": c["layers"].pop(UP)}),
        "has no layer 'model.up'",
    ),
    "other shape": (
        lambda c: c["layers"][UP].update(shape=[96, 32]),
        rf"{UP} is \[96, 64\] in the model and \[96, 32\] in the checkpoint",
    ),
    "shape": (lambda c: c["layers"][UP].update(shape=96), r"shape is 96; allowed: two positive"),
    "scales": (lambda c: c["layers"][UP].update(stored_scales="f64"), "stored_scales is 'f64'"),
    "spec": (lambda c: c["layers"][UP].update(bits=4), "has the unknown key 'bits' = 4"),
    "a norm": (
        lambda c: c["layers"].update({"model.norm": c["layers"][UP]}),
        "model.norm is a LlamaRMSNorm; allowed: Linear, Conv1D, Embedding",
    ),
    "tie": (
        lambda c: c["tied"].update({"lm_head": UP}),
        f"lm_head is tied to {UP}, which is no packed embedding",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_description_that_does_not_fit(name: str, tmp_path: Path) -> None:
    """Catches a checkpoint read by a description that isn't its own."""
    edit, message = BROKEN[name]
    MODELS["llama"]().save_pretrained(tmp_path / "plain")
    load(tmp_path / "plain", "int4-g32").save_pretrained(tmp_path / "packed")
    with pytest.raises(ValueError, match=message):
        load(edited(tmp_path / "packed", edit))


class Quieter(PackedLinear):
    """A layer of ours that computes more than its weights say."""


Quieter.__module__ = "quantwatch_kernels.quantize.elsewhere"


def halve(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    del module, args


halve.__module__ = "quantwatch_kernels.quantize.elsewhere"


def test_what_weights_alone_do_not_hold_is_refused(tmp_path: Path) -> None:
    """Catches activations or hooks that are silently left out of a checkpoint."""
    with pytest.raises(ValueError, match="no layer of this LlamaForCausalLM is packed"):
        save_quantized(MODELS["llama"](), tmp_path)
    model = MODELS["llama"]()
    quantize_(model, Recipe.named("int4-g32"), execution="reference")
    handle = model.model.layers[0].register_forward_pre_hook(halve)
    with pytest.raises(ValueError, match=r"model\.layers\.0 runs a hook of the recipe"):
        describe(model)
    handle.remove()
    model.model.layers[0].mlp.up_proj.__class__ = Quieter
    with pytest.raises(ValueError, match=f"{UP} is a Quieter: a checkpoint holds packed weights"):
        describe(model)


def test_interposed_forwards_are_refused() -> None:
    """Catches a forward that hides behind the module's own class name."""
    model = MODELS["llama"]()
    quantize_(model, Recipe.named("int4-g32"), execution="reference")
    add_input_transform(model.model.layers[0].mlp.up_proj, nn.Identity())
    with pytest.raises(ValueError, match=f"{UP} is a _TransformsInput: a checkpoint holds"):
        describe(model)


INT8 = WeightSpec(INT_FORMATS["int8"], PerChannel())
MORE_THAN_WEIGHTS = {
    "activations": Recipe(INT8, activations=ActivationSpec(INT_FORMATS["int8"])),
    "rotation of down": Recipe(INT8, rotation=RotationSpec(residual=False, down=True)),
    "residual dtype": Recipe(INT8, residual_dtype=(("*", torch.float16),)),
}


@pytest.mark.parametrize("name", MORE_THAN_WEIGHTS)
def test_a_recipe_that_does_more_than_weights_can_not_be_saved(name: str, tmp_path: Path) -> None:
    """Catches a reloaded model that computes with float activations, or without its rotation."""
    model = MODELS["llama"]()
    quantize_(model, MORE_THAN_WEIGHTS[name], execution="reference")
    with pytest.raises(ValueError, match="computes more than that"):
        save_quantized(model, tmp_path)
    assert not list(tmp_path.iterdir())


class Scaled(nn.Embedding):
    """As Gemma's: its forward isn't a plain lookup."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 8


def test_an_embedding_with_its_own_forward_stays_float() -> None:
    """Catches a scaled embedding that is replaced by a plain lookup."""
    model = MODELS["llama"]()
    model.model.embed_tokens.__class__ = Scaled
    report = quantize_(model, MIXED, execution="reference")
    assert dict(report.fallbacks) == {"model.embed_tokens": "Scaled does more than look rows up"}
    assert isinstance(model.model.embed_tokens, Scaled)
    plain = MODELS["llama"]()
    plain.model.embed_tokens.__class__ = Scaled
    quantize_(plain, MIXED)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", ["uint3-g16", "int8-channel", "uint6-channel"])
def test_a_packed_embedding_looks_up_the_quantized_rows(recipe: str) -> None:
    """Catches rows, groups or zeros of other ids, also with no ids at all (bug log 20)."""
    torch.manual_seed(0)
    weight, spec = torch.randn(50, 33), Recipe.named(recipe).weights
    quantized = quantize_weight(weight, spec)
    model = nn.Sequential(nn.Embedding(50, 33))
    model[0].get_parameter("weight").data.copy_(weight)
    made = PackedEmbedding(quantized, linear_op(spec), "reference", torch.float32)
    install_embedding(model, "0", made)
    assert model[0] is made
    assert (made.num_embeddings, made.embedding_dim) == (50, 33)
    ids = torch.tensor([[49, 0, 7], [7, 7, 31]])
    assert torch.equal(made(ids), quantized.values[ids])
    assert made(ids[:0]).shape == (0, 3, 33)
    assert made.to(torch.bfloat16)(ids).dtype == torch.bfloat16


def test_recipe_on_top_of_a_packed_checkpoint_is_not_applied(tmp_path: Path) -> None:
    """Catches quantizing twice: transformers warns and keeps the checkpoint's own."""
    MODELS["llama"]().save_pretrained(tmp_path / "plain")
    first = load(tmp_path / "plain", "int8-channel")
    first.save_pretrained(tmp_path / "packed")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = load(tmp_path / "packed", "int4-g32")
    assert any("already has a `quantization_config`" in str(w.message) for w in caught)
    assert_same(first, again)
