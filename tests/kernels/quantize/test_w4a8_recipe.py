"""Recipes with 4-bit weights and 8-bit activations per token run as W4A8, and say when not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantwatch_kernels.formats import INT8, INT_FORMATS
from quantwatch_kernels.numerics import relative_rmse
from quantwatch_kernels.quantize.affine import (
    QuantizedWeight,
    dequantize,
    quantize,
    quantize_weight,
)
from quantwatch_kernels.quantize.api import model_size, quantize_
from quantwatch_kernels.quantize.checkpoint import describe
from quantwatch_kernels.quantize.gptq import gptq, output_error
from quantwatch_kernels.quantize.mse import mse_qparams
from quantwatch_kernels.quantize.qparams import choose_qparams
from quantwatch_kernels.quantize.recipe import (
    ActivationSpec,
    Granularity,
    LayerRule,
    PerChannel,
    PerGroup,
    PerTensor,
    Recipe,
    RotationSpec,
    WeightSpec,
)
from quantwatch_kernels.quantize.recipe_json import recipe_from_json
from quantwatch_kernels.quantize.stepped import with_steps
from quantwatch_kernels.quantize.w4a8_linear import W4A8Linear
from quantwatch_kernels.quantize.w8a8_linear import W8A8Linear
from quantwatch_kernels.registry import fallbacks


def weights(fmt: str, granularity: Granularity, **more: Any) -> WeightSpec:
    stepped = "stepped" if isinstance(granularity, PerGroup) else "free"
    zero: Any = "none" if INT_FORMATS[fmt].symmetric else "integer"
    return WeightSpec(INT_FORMATS[fmt], granularity, zero, **{"scales": stepped, **more})


def recipe(spec: WeightSpec, inputs: str = "int8", **more: Any) -> Recipe:
    return Recipe(spec, activations=ActivationSpec(INT_FORMATS[inputs]), **more)


# The decoders are 48 and 80 wide: groups of 16 divide both, groups of 32 leave a short one.
WEIGHTS = {
    "int4-channel": weights("int4", PerChannel()),
    "uint4-channel": weights("uint4", PerChannel()),
    "int4-tensor": weights("int4", PerTensor()),
    "int4-g16": weights("int4", PerGroup(16)),
    "uint4-g32": weights("uint4", PerGroup(32)),
    "uint4-g16-mse": weights("uint4", PerGroup(16), clip="mse", scale_dtype=torch.bfloat16),
    "uint4-g32-gptq": weights("uint4", PerGroup(32), method="gptq", clip="mse"),
    "int4-g32-awq": weights("int4", PerGroup(32), method="awq", scale_dtype=torch.float16),
}
TOKENS = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(4))
CALIBRATION = [torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(5))]


def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(tokens).logits
    return result


def integer_layers(model: Any) -> list[W4A8Linear]:
    return [module for module in model.modules() if isinstance(module, W4A8Linear)]


def as_stored(layer: W4A8Linear) -> Tensor:
    """Read a layer's buffers bit by bit in Python; float64 [out, in]."""
    rows, columns = layer.out_features, layer.in_features
    signed = layer.spec.format.symmetric

    def nibble(packed: Tensor, row: int, column: int) -> int:
        byte = int(packed[row, column // 2])
        value = byte >> 4 if column % 2 else byte & 15
        return value - 16 if signed and value > 7 else value

    width = layer.spec.granularity.group_size(columns)
    made = torch.zeros(rows, columns, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            group = column // width
            zero = 0 if layer.zeros is None else nibble(layer.zeros, row, group)
            code = nibble(layer.weight_packed, row, column) - zero
            step = 1 if layer.steps is None else int(layer.steps[row, group])
            made[row, column] = code * step * layer.scales[row, 0].double()
    return made


def rounded_rows(x: Tensor, fmt: str) -> Tensor:
    """Round inputs per token by the declared rules; float64."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    if fmt == "int8":
        scale = torch.maximum(-low, high) / 127
        return (x / scale).round().double() * scale.double()
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    scale = high / 255 - low / 255
    zero = (-low / scale).round()
    return (((x / scale).round() + zero).clamp(0, 255) - zero).double() * scale.double()


@pytest.mark.parametrize("execution", ["aten", "reference"])
@pytest.mark.parametrize("inputs", ["int8", "uint8"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_integers_are_the_rounded_floats(
    decoder: Callable[[str], Any], name: str, inputs: str, execution: Any
) -> None:
    """Catches other codes than those that were chosen, and inputs rounded twice or not at all."""
    made = recipe(WEIGHTS[name], inputs)
    family = "qwen2" if name.endswith(("mse", "channel")) else "llama"
    floats, integers = decoder(family), decoder(family)
    quantize_(floats, made, calibration=CALIBRATION)
    report = quantize_(integers, made, execution=execution, calibration=CALIBRATION)
    assert len(integer_layers(integers)) == len(report.converted) == 14
    assert not report.fallbacks
    assert not fallbacks()
    assert not [note for _, note in report.notes if "in floats" in note]
    # A product that rounds otherwise can turn a tie of the next layer's codes, a step of 1/127.
    error = relative_rmse(logits(integers), logits(floats))
    plain = relative_rmse(logits(decoder(family)), logits(floats))
    print(f"{name} {inputs} {execution}: {error:.1e}, without quantization {plain:.1e}")
    assert error <= 0.02 * plain


@pytest.mark.parametrize("inputs", ["int8", "uint8"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_layer_against_its_float64_twin(
    decoder: Callable[[str], Any], name: str, inputs: str
) -> None:
    """Catches nibbles, steps or zero points of a neighbour, a bias that is forgotten or doubled."""
    model = decoder("qwen2")
    quantize_(model, recipe(WEIGHTS[name], inputs), execution="aten", calibration=CALIBRATION)
    for layer in (integer_layers(model)[0], integer_layers(model)[-1]):
        x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(6)) + 0.3
        expected = rounded_rows(x, inputs) @ as_stored(layer).T
        if layer.bias is not None:
            expected = expected + layer.bias.detach().double()
        assert relative_rmse(layer(x), expected) <= 5e-7
    assert integer_layers(model)[0].bias is not None


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_values_are_those_of_the_dequantized_model(
    decoder: Callable[[str], Any], name: str
) -> None:
    """Catches scales that are rounded to steps only when layers are replaced."""
    floats, integers = decoder("llama"), decoder("llama")
    quantize_(floats, recipe(WEIGHTS[name]), calibration=CALIBRATION)
    quantize_(integers, recipe(WEIGHTS[name]), execution="aten", calibration=CALIBRATION)
    exact = WEIGHTS[name].scale_dtype != torch.float32
    for path, layer in integers.named_modules():
        if isinstance(layer, W4A8Linear):
            found, expected = as_stored(layer), floats.get_submodule(path).weight.double()
            assert relative_rmse(found, expected) <= (0 if exact else 6e-8), path


@pytest.mark.parametrize("name", WEIGHTS)
def test_size_is_what_the_model_holds(decoder: Callable[[str], Any], name: str) -> None:
    """Catches steps that aren't counted, or float scales per group that are."""
    model = decoder("llama")
    shapes = [
        module.weight.shape
        for path, module in model.named_modules()
        if ".layers." in path and isinstance(module, torch.nn.Linear)
    ]
    others = model_size(model)[0] - 4 * sum(shape.numel() for shape in shapes)
    report = quantize_(model, recipe(WEIGHTS[name]), execution="aten", calibration=CALIBRATION)
    spec = WEIGHTS[name]
    size = others + sum(spec.num_bytes(*shape) for shape in shapes)
    assert model_size(model)[0] == size
    assert report.size_bytes == size


REFUSED: dict[str, tuple[WeightSpec, ActivationSpec, str]] = {
    "free groups": (
        replace(WEIGHTS["int4-g16"], scales="free"), ActivationSpec(INT8), "multiples of one per",
    ),
    "float zeros": (
        WeightSpec(INT_FORMATS["uint4"], PerChannel(), "float"), ActivationSpec(INT8),
        "uint4 with integer zeros",
    ),
    "4-bit inputs": (
        WEIGHTS["int4-channel"], ActivationSpec(INT_FORMATS["int4"]), "dynamic in 8 bits",
    ),
    "whole inputs": (
        WEIGHTS["int4-channel"], ActivationSpec(INT8, PerTensor()), "a scale per token",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_stays_in_floats_is_told(decoder: Callable[[str], Any], name: str) -> None:
    """Catches a recipe that looks like W4A8 and isn't, without a word; and other values."""
    spec, inputs, words = REFUSED[name]
    floats, model = decoder("llama"), decoder("llama")
    quantize_(floats, Recipe(spec, activations=inputs))
    report = quantize_(model, Recipe(spec, activations=inputs), execution="aten")
    assert not integer_layers(model)
    told = [note for _, note in report.notes if "multiplied in floats" in note]
    assert len(told) == len(report.converted)
    assert all(words in note for note in told)
    assert relative_rmse(logits(model), logits(floats)) <= 0.05


def test_a_cpu_that_saturates_multiplies_floats(
    decoder: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches inputs that are no longer rounded where integers can't be multiplied (log 16)."""
    monkeypatch.setattr("quantwatch_kernels.quantize.api.int_mm_why_not", lambda: "saturates")
    floats, refused = decoder("llama"), decoder("llama")
    made = recipe(WEIGHTS["uint4-g32"])
    quantize_(floats, made)
    report = quantize_(refused, made, execution="aten")
    assert {reason for _, reason in report.fallbacks} == {"saturates"}
    assert {(each.op, each.used) for each in fallbacks()} == {("w4a8_linear", "dequantized")}
    assert torch.equal(logits(refused), logits(floats))


@pytest.mark.parametrize("execution", ["aten", "reference"])
def test_stacked_experts_stay_in_floats(decoder: Callable[[str], Any], execution: Any) -> None:
    """Catches experts whose stepped scales are kept by a layer that can't."""
    floats, model = decoder("mixtral"), decoder("mixtral")
    made = recipe(WEIGHTS["int4-g16"])
    quantize_(floats, made)
    report = quantize_(model, made, execution=execution)
    attention = [name for name in report.converted if "self_attn" in name]
    assert len(integer_layers(model)) == len(attention) == 8
    experts = set(report.converted) - set(attention)
    assert experts
    assert {name for name, _ in report.fallbacks} == experts
    assert {why for _, why in report.fallbacks} == {
        "only layers that multiply integers keep stepped scales"
    }
    assert relative_rmse(logits(model), logits(floats)) <= 0.02


def test_a_rotated_model(decoder: Callable[[str], Any]) -> None:
    """Catches an online rotation that is lost with the layer that it stood before."""
    rotation = RotationSpec(residual=True, values=True, down=True, block=16)
    made = recipe(WEIGHTS["uint4-g32"], rotation=rotation)
    floats, integers = decoder("llama"), decoder("llama")
    quantize_(floats, made)
    quantize_(integers, made, execution="aten")
    assert len(integer_layers(integers)) == 14
    assert relative_rmse(logits(integers), logits(floats)) <= 0.02


def test_rows_do_not_depend_on_the_batch(decoder: Callable[[str], Any]) -> None:
    """Catches a layer that scales the whole batch: a row alone has the same bits."""
    model = decoder("llama")
    quantize_(model, recipe(WEIGHTS["uint4-g32"], "uint8"), execution="aten")
    layer = integer_layers(model)[-1]
    x = torch.randn(33, layer.in_features, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layer(x)[:1], layer(x[:1]))


@pytest.mark.parametrize("name", ["int4-channel", "int4-g16", "uint4-g32", "int8 (W8A8)"])
def test_it_is_saved_where_w8a8_is(decoder: Callable[[str], Any], name: str, tmp_path: Any) -> None:
    """Catches a state that lacks a buffer, int8 codes kept from before, and a lossy checkpoint."""
    spec = WEIGHTS.get(name, Recipe.named("int8-channel").weights)
    saved, other = decoder("llama"), decoder("llama")
    for parameter in other.parameters():
        parameter.data.mul_(0.7)
        parameter.data += 0.01
    for model in (saved, other):
        quantize_(model, recipe(spec, "uint8"), execution="aten")
    before = logits(other)  # its native weights exist from here on
    torch.save(saved.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert not torch.equal(logits(saved), before)
    assert torch.equal(logits(other), logits(saved))
    kind = "W8A8Linear" if name.startswith("int8") else "W4A8Linear"
    with pytest.raises(ValueError, match=f"is a {kind}: a checkpoint holds packed weights"):
        describe(saved)


def quantized(
    rows: int, columns: int, seed: int, spec: WeightSpec
) -> tuple[Tensor, QuantizedWeight]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.rand(rows, columns, generator=generator) ** 3
    return weight, quantize_weight(weight, spec)


@given(
    st.integers(1, 4), st.integers(1, 70), st.integers(2, 40), st.integers(0, 99),
    st.sampled_from(["int4", "uint4"]), st.sampled_from([torch.float32, torch.float16]),
)  # fmt: skip
@settings(max_examples=80)
def test_laws_of_stepped_scales(
    rows: int, columns: int, group: int, seed: int, fmt: str, dtype: torch.dtype
) -> None:
    """Products stay int8; scales are multiples; a value is off by half a step, or clipped."""
    spec = weights(fmt, PerGroup(group), scale_dtype=dtype)
    weight, made = quantized(rows, columns, seed, spec)
    base = made.qparams.base
    assert base is not None
    assert base.shape == (rows, 1)
    steps = made.qparams.scales.double() / base.double()
    assert float((steps - steps.round()).abs().max()) <= 1e-6
    layer = W4A8Linear(made, None)
    found = layer.progressive()
    assert found.steps is not None
    assert torch.equal(found.steps.double(), steps.round())
    assert torch.equal(found.codes, made.codes)
    zeros = torch.zeros_like(steps) if found.zeros is None else found.zeros.double()
    width = spec.granularity.group_size(columns)
    spread = [t.repeat_interleave(width, 1)[:, :columns] for t in (steps.round(), zeros)]
    shifted = made.codes.double() - spread[1]
    assert float((shifted * spread[0]).abs().max()) <= 127
    assert torch.equal(layer.quantized().codes.double(), shifted * spread[0])
    size = spread[0] * base.double()
    off = (weight.double() - shifted * size).abs()
    low, high = (0, 15) if fmt == "uint4" else (-7, 7)
    clipped = (made.codes == low) | (made.codes == high)
    assert bool(((off <= size / 2 * (1 + 1e-5)) | clipped).all())


@pytest.mark.parametrize("fmt", ["int4", "uint4"])
@pytest.mark.parametrize(("columns", "group"), [(84, 32), (64, 16), (65, 16)])
def test_the_better_multiple_is_taken(fmt: str, columns: int, group: int) -> None:
    """Catches steps rounded the wrong way, and a short group judged on its padding."""
    spec = weights(fmt, PerGroup(group))
    weight, made = quantized(128, columns, 3, spec)
    free = quantize_weight(weight, replace(spec, scales="free")).qparams
    assert made.qparams.base is not None
    for index, start in enumerate(range(0, columns, group)):
        part = weight[:, start : start + group].double()
        zero = 0.0 if free.zeros is None else free.zeros[:, index : index + 1].double()
        reach = torch.tensor(7.0) if free.zeros is None else torch.maximum(zero, 15 - zero)  # type: ignore[arg-type]
        limit = torch.floor(127 / reach)
        ends = (0, 15) if fmt == "uint4" else (-7, 7)
        multiple = free.scales[:, index : index + 1] / made.qparams.base
        costs = []
        for step in (multiple.floor(), multiple.ceil()):
            size = step.clamp(min=1).double().minimum(limit) * made.qparams.base.double()
            codes = ((part / size).round() + zero).clamp(*ends) - zero
            costs.append((part - codes * size).square().sum(1))
        found = (part - made.values[:, start : start + group].double()).square().sum(1)
        assert (found <= torch.minimum(*costs) * (1 + 1e-4) + 1e-12).all()


@pytest.mark.parametrize("fmt", ["int4", "uint4"])
def test_the_error_is_close_to_free_scales(fmt: str) -> None:
    """Catches a base that is too large for the row: groups of very different width.

    The smaller of two multiples clips, so whole ranges even gain; ranges by MSE lose a little.
    """
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(64, 512, generator=generator)
    weight *= (0.25 + torch.rand(64, 8, generator=generator)).repeat_interleave(64, 1)
    spec = weights(fmt, PerGroup(64))
    free = replace(spec, scales="free")
    for choose, most in ((choose_qparams, 1.0), (mse_qparams, 1.03)):
        errors = []
        for each in (free, spec):
            made = with_steps(weight, choose(weight, each), each)
            codes = quantize(weight, made, each)
            errors.append(relative_rmse(dequantize(codes, made, each), weight))
        print(f"{fmt} {choose.__name__}: free {errors[0]:.4f}, stepped {errors[1]:.4f}")
        assert errors[1] <= most * errors[0]


def test_gptq_keeps_its_promise_on_stepped_scales() -> None:
    """Catches GPTQ that rounds with other scales than it returns: never worse than nearest."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 64, generator=generator)
    x = torch.randn(400, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    hessian = 2 / 400 * x.T @ x
    spec = weights("uint4", PerGroup(16), method="gptq")
    made, notes = gptq(weight, spec, hessian)
    nearest = quantize_weight(weight, replace(spec, method="nearest"))
    assert not notes
    assert made.qparams.base is not None
    assert torch.equal(W4A8Linear(made, None).progressive().codes, made.codes)
    errors = [output_error(weight, each.values, hessian) for each in (made, nearest)]
    assert errors[0] < 0.7 * errors[1]


def test_odd_groups() -> None:
    """Catches zeros that become NaN or widen the row's grid (bug log 3), constants, huge ones."""
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    weight[0] = 0.0
    weight[1, :32] = 0.0
    weight[2, :32] = 3.25
    weight[3] *= 1e-40
    weight[4] *= 1e35
    weight[5] *= 1e-3
    weight[5, :16] = 0.0
    for fmt in ("int4", "uint4"):
        made = quantize_weight(weight, weights(fmt, PerGroup(16)))
        layer = W4A8Linear(made, None)
        assert not made.values[0].any()
        assert not made.values[1, :32].any()
        for row, most in ((1, 0.2), (2, 0.2), (4, 0.2), (5, 0.2)):
            assert relative_rmse(made.values[row], weight[row]) < most, (fmt, row)
        assert torch.isfinite(layer(torch.randn(2, 64) * 1e-2)).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": INT_FORMATS["int8"]}, "int4 and uint4 in groups"),
        ({"granularity": PerChannel()}, "int4 and uint4 in groups"),
        ({"format": INT_FORMATS["uint4"], "zero": "float"}, "zero none or integer"),
        ({"rounding": "stochastic"}, "may clip"),
    ],
    ids=["8 bits", "channel", "float zero", "stochastic"],
)
def test_impossible_stepped_scales_are_refused(changes: dict[str, Any], words: str) -> None:
    """Catches a spec whose products leave int8."""
    with pytest.raises(ValueError, match=words):
        replace(WEIGHTS["int4-g16"], **changes)


@pytest.mark.parametrize(
    "inputs",
    [
        None,
        ActivationSpec(INT_FORMATS["int4"]),
        ActivationSpec(INT8, PerGroup(16)),
        ActivationSpec(INT8, PerTensor()),
        ActivationSpec(INT8, PerTensor(), static=True),
    ],
    ids=["none", "4 bits", "groups", "whole", "static"],
)
def test_stepped_scales_without_their_use_are_refused(inputs: ActivationSpec | None) -> None:
    """Catches scales that are coarse for nothing."""
    with pytest.raises(ValueError, match="stepped scales are for products in integers"):
        Recipe(WEIGHTS["int4-g16"], activations=inputs)
    rule = LayerRule("*.up_proj", WEIGHTS["int4-g16"])
    with pytest.raises(ValueError, match="stepped scales are for products in integers"):
        Recipe(WEIGHTS["int4-channel"], layers=(rule,), activations=inputs)


def test_an_embedding_has_no_stepped_scales() -> None:
    """Catches a table of rows that no integer layer reads."""
    with pytest.raises(ValueError, match="embedding is looked up"):
        recipe(WEIGHTS["int4-channel"], embedding=WEIGHTS["int4-g16"])


def test_a_recipe_says_so() -> None:
    """Catches two recipes with other values and one description."""
    made = recipe(WEIGHTS["uint4-g32"], layers=(LayerRule("*.up_proj", WEIGHTS["int4-g16"]),))
    assert made.to_json()["scales"] == "stepped"
    assert recipe_from_json(made.to_json()) == made
    assert "scales" not in recipe(WEIGHTS["int4-channel"]).to_json()


def test_a_free_group_is_refused_by_the_layer() -> None:
    """Catches a layer that rounds scales which were chosen otherwise."""
    spec = WEIGHTS["int4-g16"]
    free = quantize_weight(torch.randn(3, 32), replace(spec, scales="free"))
    with pytest.raises(ValueError, match=r"w4a8_linear: .*stepped"):
        W4A8Linear(free, None)
    with pytest.raises(ValueError, match=r"w4a8_linear: .*stepped"):
        W4A8Linear(QuantizedWeight(free.codes, free.qparams, spec), None)
    eight = quantize_weight(torch.randn(3, 32), Recipe.named("int8-channel").weights)
    with pytest.raises(ValueError, match="must be int4"):
        W4A8Linear(eight, None)
    assert isinstance(W4A8Linear(quantize_weight(torch.randn(3, 32), spec), None), W8A8Linear)
