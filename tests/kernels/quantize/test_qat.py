"""Training quantized layers: gradients as the whole model has them, exports as they were trained."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize import lesson as lesson_module
from quantwatch_kernels.quantize.affine import quantize, quantize_weight
from quantwatch_kernels.quantize.latent import (
    Latent,
    Learn,
    Start,
    inside_cells,
    quantize_to_start,
)
from quantwatch_kernels.quantize.lesson import Suffix, prepare_lesson
from quantwatch_kernels.quantize.qat import QatOptions, QatRecord, train_quantized
from quantwatch_kernels.quantize.recipe import PerChannel, PerGroup, PerTensor, Recipe, WeightSpec
from quantwatch_kernels.quantize.selection import Layer, scope_names, select

Build = Callable[[str], Any]
LEARN: tuple[Learn, ...] = ("weights", "scales", "both")
LAST = "model.layers.1."
SPECS = {
    "nearest": WeightSpec(INT_FORMATS["uint3"], PerGroup(16), "integer"),
    "gptq-float": WeightSpec(INT_FORMATS["uint3"], PerGroup(16), "float", method="gptq"),
    "symmetric-mse": WeightSpec(INT_FORMATS["int4"], PerChannel(), clip="mse"),
    "tensor": WeightSpec(INT_FORMATS["int4"], PerTensor()),
    "bf16-scales": WeightSpec(
        INT_FORMATS["uint3"], PerGroup(32), "float", scale_dtype=torch.bfloat16, method="hqq"
    ),
}


def layers_of(model: nn.Module, spec: WeightSpec, inside: str = LAST) -> list[Layer]:
    found = select(model, Recipe(spec), scope_names(model, {})).layers
    return [layer for layer in found if layer.path.startswith(inside)]


def prepared(
    teacher: nn.Module, spec: WeightSpec, inputs: list[Tensor], inside: str = LAST
) -> tuple[nn.Module, list[Start]]:
    student = copy.deepcopy(teacher)
    return student, quantize_to_start(student, layers_of(student, spec, inside), inputs)


def kl_of(said: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean KL(wanted ‖ said) of logits, float64."""
    p, q = wanted.double().log_softmax(-1), said.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


@pytest.mark.parametrize("learn", LEARN)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_starts_with_what_the_quantizer_gave(
    decoder: Build, calibration: list[Tensor], spec: WeightSpec, learn: Learn
) -> None:
    """Catches a first step that throws GPTQ's codes away, and scales off by one rounding."""
    _, starts = prepared(decoder("llama"), spec, calibration)
    for start in starts:
        latent = Latent(start, learn)
        assert torch.equal(latent.values(), start.quantized.values)
        exported = latent.export()
        assert torch.equal(exported.codes, start.quantized.codes)
        assert torch.equal(exported.qparams.scales, start.quantized.qparams.scales)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_weights_start_towards_where_they_were(spec: WeightSpec) -> None:
    """Catches weights that start outside their cell or at its edge, and unmoved ones that are moved."""
    weight = torch.randn(8, 48)
    quantized = quantize_weight(weight, replace(spec, method="nearest", clip="none"))
    assert torch.equal(inside_cells(weight, quantized), weight)
    codes = (quantized.codes + torch.randint(-1, 2, weight.shape)).clamp(
        spec.format.qmin, spec.format.qmax
    )
    other = replace(quantized, codes=codes.to(quantized.codes.dtype))
    inside = inside_cells(weight, other)
    assert torch.equal(quantize(inside, other.qparams, spec), other.codes)
    kept = other.codes == quantized.codes
    assert 0 < int(kept.sum()) < kept.numel()
    assert torch.equal(inside[kept], weight[kept])
    size = spec.granularity.group_size(48)
    steps = (inside - other.values) / other.qparams.scales.float().repeat_interleave(size, 1)[
        :, :48
    ]
    torch.testing.assert_close(steps[~kept].abs(), torch.full_like(steps[~kept], 0.25))
    nearer = (inside - weight).abs() < (other.values - weight).abs()
    assert nearer[~kept].all()


def test_what_growth_and_shift_mean(decoder: Build, calibration: list[Tensor]) -> None:
    """Catches a scale that can turn negative, and a zero that moves the other way."""
    _, starts = prepared(decoder("llama"), SPECS["gptq-float"], calibration)
    qparams = starts[0].quantized.qparams
    latent = Latent(starts[0], "scales")
    assert latent.growth is not None
    assert latent.shift is not None
    with torch.no_grad():
        latent.growth.fill_(-2.0)
        latent.shift.fill_(0.5)
    moved = latent.export().qparams
    torch.testing.assert_close(moved.scales, qparams.scales * torch.tensor(-2.0).exp())
    assert moved.zeros is not None
    assert qparams.zeros is not None
    torch.testing.assert_close(moved.zeros, qparams.zeros + 3.5)
    assert torch.equal(latent.values(), latent.export().values)


@pytest.mark.parametrize("learn", LEARN)
@pytest.mark.parametrize(
    ("family", "inside"),
    [("llama-tied", LAST), ("gpt2", "transformer.h.1."), ("mixtral", LAST), ("llama", "model.")],
)
def test_training_helps_and_touches_nothing_else(
    decoder: Build, calibration: list[Tensor], family: str, inside: str, learn: Learn
) -> None:
    """Catches an update that goes the wrong way, a transposed gradient, and weights left unfrozen."""
    teacher = decoder(family)
    spec = SPECS["nearest"]
    student, starts = prepared(teacher, spec, calibration, inside)
    lesson = prepare_lesson(teacher, calibration)
    trained = {layer.layer.path for layer in starts}
    options = QatOptions(learn, steps=16, lr=1e-3, range_lr=2e-3)
    record = train_quantized(student, starts, lesson, options)
    assert record.final_loss < 0.95 * record.steps[0].loss
    assert set(record.weights) == {start.layer.key for start in starts}
    for start in starts:
        assert torch.equal(start.layer.weight, record.weights[start.layer.key].values)
    for name, parameter in student.named_parameters():
        assert not parameter.requires_grad
        assert parameter.grad is None
        if not any(name.startswith(path) for path in trained):
            assert torch.equal(parameter, teacher.get_parameter(name)), name
    said = [student(ids, use_cache=False).logits for ids in calibration]
    wanted = [teacher(ids, use_cache=False).logits for ids in calibration]
    mean = sum(kl_of(a, b).item() for a, b in zip(said, wanted, strict=True)) / len(said)
    assert record.final_loss == pytest.approx(mean, rel=1e-4)


def whole_model_gradients(
    teacher: nn.Module, student: nn.Module, latents: list[Latent], ids: Tensor
) -> tuple[float, list[Tensor]]:
    """Return loss and gradients by one plain graph through the whole student, KL in float64."""
    values = {f"{la.layer.path}.weight": la.values() for la in latents}
    with torch.no_grad():
        wanted = teacher(ids, use_cache=False).logits
    said = functional_call(student, values, (ids,), {"use_cache": False}).logits
    loss = kl_of(said, wanted)
    return loss.item(), list(
        torch.autograd.grad(loss, [p for la in latents for p in la.parameters()])
    )


@pytest.mark.parametrize("learn", LEARN)
def test_gradients_are_those_of_the_whole_model(
    decoder: Build, calibration: list[Tensor], monkeypatch: pytest.MonkeyPatch, learn: Learn
) -> None:
    """Catches pieces of the head that are lost or doubled, and a variance of something else."""
    monkeypatch.setattr(lesson_module, "_POSITIONS", 7)
    teacher = decoder("llama")
    student, starts = prepared(teacher, SPECS["gptq-float"], calibration)
    lesson = prepare_lesson(teacher, calibration)
    latents = [Latent(start, learn) for start in starts]
    found = [whole_model_gradients(teacher, student, latents, ids) for ids in calibration]
    means = [(a + b).double() / 2 for a, b in zip(found[0][1], found[1][1], strict=True)]
    spread = sum(
        (a - b).double().square().sum().item()
        for a, b in zip(found[0][1], found[1][1], strict=True)
    )
    options = QatOptions(learn, steps=1, clip_norm=torch.inf, optimizer="sgd")
    (step,) = train_quantized(student, starts, lesson, options).steps
    assert step.loss == pytest.approx(
        (found[0][0] + found[1][0]) / 2, abs=1e-7
    )  # log-probabilities are float32
    norm = sum(g.square().sum().item() for g in means) ** 0.5
    assert step.gradient_norm == pytest.approx(norm, rel=1e-4)
    assert step.gradient_variance == pytest.approx(spread / 2, rel=1e-3)


def growth_of(record: QatRecord, starts: list[Start]) -> list[Tensor]:
    """Return θ of each layer, from what was exported."""
    return [
        (record.weights[s.layer.key].qparams.scales / s.quantized.qparams.scales).log()
        for s in starts
    ]


def test_gradients_are_clipped_together(decoder: Build, calibration: list[Tensor]) -> None:
    """Catches clipping tensor by tensor, which turns the gradient's direction."""
    teacher = decoder("llama")
    student, starts = prepared(teacher, SPECS["nearest"], calibration)
    lesson = prepare_lesson(teacher, calibration)
    free = QatOptions("scales", steps=1, optimizer="sgd", range_lr=1.0, clip_norm=torch.inf)
    first = train_quantized(student, starts, lesson, free)
    norm = first.steps[0].gradient_norm
    clipped = replace(free, clip_norm=0.25 * norm)
    second = train_quantized(student, starts, lesson, clipped)
    assert second.steps[0].gradient_norm == norm
    whole = 0.0
    for plain, small in zip(growth_of(first, starts), growth_of(second, starts), strict=True):
        torch.testing.assert_close(small, 0.25 * plain, rtol=0.02, atol=1e-6)
        whole += small.double().square().sum().item()
    assert whole**0.5 == pytest.approx(0.25 * norm, rel=0.01)


def test_row_scaling(decoder: Build, calibration: list[Tensor]) -> None:
    """Catches factors of another layer's rows, and clipping before they are applied."""
    teacher = decoder("llama")
    student, starts = prepared(teacher, SPECS["symmetric-mse"], calibration)
    latents = [Latent(start, "weights") for start in starts]
    found = [whole_model_gradients(teacher, student, latents, ids)[1] for ids in calibration]
    squares = 0.0
    for number, start in enumerate(starts):
        scales = start.quantized.qparams.scales.double()
        factors = scales.square() / scales.square().mean()
        squares += ((found[0][number] + found[1][number]) / 2 * factors).square().sum().item()
    options = QatOptions("weights", steps=1, optimizer="sgd", row_scaling=True)
    lesson = prepare_lesson(teacher, calibration)
    step = train_quantized(student, starts, lesson, options).steps[0]
    assert step.gradient_norm == pytest.approx(squares**0.5, rel=1e-4)


def test_a_seed_decides_everything(decoder: Build, calibration: list[Tensor]) -> None:
    """Catches a run that can't be repeated, and a seed that changes nothing."""
    teacher = decoder("llama")
    student, starts = prepared(teacher, SPECS["nearest"], calibration)
    lesson = prepare_lesson(teacher, [*calibration, calibration[0] + 1], entering=[1])
    options = QatOptions(steps=5, inputs_per_step=1)
    runs = [
        train_quantized(student, starts, lesson, replace(options, seed=seed), shared_prefix=shared)
        for seed, shared in ((0, False), (0, True), (1, False))
    ]
    losses = [[step.loss for step in run.steps] for run in runs]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    assert runs[0].final_loss == runs[1].final_loss
    for key, weight in runs[0].weights.items():
        assert torch.equal(weight.values, runs[1].weights[key].values)
    assert all(step.gradient_variance != step.gradient_variance for step in runs[0].steps)
    # Every input once in each pass.
    assert len(set(losses[0][:3])) == 3


def test_an_own_prefix_is_run(decoder: Build, calibration: list[Tensor]) -> None:
    """Catches a quantized prefix that is taken for the teacher's."""
    teacher = decoder("llama")
    student, _ = prepared(teacher, SPECS["nearest"], calibration)
    with torch.no_grad():
        student.get_parameter("model.layers.0.mlp.down_proj.weight").mul_(1.5)
        wanted = [
            kl_of(student(x, use_cache=False).logits, teacher(x, use_cache=False).logits).item()
            for x in calibration
        ]
    lesson = prepare_lesson(teacher, calibration, entering=[1])
    own = Suffix(student, lesson, 1)
    assert own.mean_loss() == pytest.approx(sum(wanted) / 2, rel=1e-4)
    shared = Suffix(student, lesson, 1, shared_prefix=True)
    assert shared.mean_loss() != pytest.approx(sum(wanted) / 2, rel=1e-2)
    with pytest.raises(ValueError, match="doesn't hold what enters decoder layer 0"):
        Suffix(student, lesson, 0, shared_prefix=True)


def test_a_half_precision_student(decoder: Build, calibration: list[Tensor]) -> None:
    """Catches updates that bfloat16 weights are too coarse for: what is learned is float32."""
    teacher = decoder("llama").to(torch.bfloat16)
    student, starts = prepared(teacher, SPECS["nearest"], calibration)
    record = train_quantized(
        student, starts, prepare_lesson(teacher, calibration), QatOptions(steps=10, lr=1e-3)
    )
    assert record.final_loss < record.steps[0].loss
    for start in starts:
        values = record.weights[start.layer.key].values
        assert torch.equal(start.layer.weight, values.to(torch.bfloat16))


def test_bad_input_is_refused(decoder: Build, calibration: list[Tensor]) -> None:
    """Catches a layer that is quietly not trained, and a loss of NaN that goes on."""
    teacher = decoder("llama")
    student, starts = prepared(teacher, SPECS["nearest"], calibration)
    lesson = prepare_lesson(teacher, calibration)
    head = Layer("lm_head", "head", student.lm_head, SPECS["nearest"])  # type: ignore[arg-type]
    outside = Start(head, starts[0].quantized, starts[0].unrounded)
    with pytest.raises(ValueError, match="head is in no decoder layer"):
        train_quantized(student, [outside], lesson, QatOptions())
    with pytest.raises(ValueError, match="no layer to train"):
        train_quantized(student, [], lesson, QatOptions())
    with pytest.raises(ValueError, match="takes 3 inputs; the lesson has 2"):
        train_quantized(student, starts, lesson, QatOptions(inputs_per_step=3))
    broken = replace(lesson, log_probs=tuple(x * torch.nan for x in lesson.log_probs))
    with pytest.raises(ValueError, match="step 0: loss nan"):
        train_quantized(student, starts, broken, QatOptions())
    assert not any(parameter.requires_grad for parameter in student.parameters())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"learn": "codes"}, "learn is weights, scales or both; it is 'codes'"),
        ({"optimizer": "adam"}, "they are 'adam' and 'cosine'"),
        ({"schedule": "linear"}, "they are 'adamw' and 'linear'"),
        ({"steps": 0}, "steps must be positive; it is 0"),
        ({"lr": float("nan")}, "lr must be positive; it is nan"),
        ({"clip_norm": -1.0}, "clip_norm must be positive"),
    ],
    ids=str,
)
def test_bad_options_are_refused(wrong: dict[str, Any], message: str) -> None:
    """Catches an unknown word that means the default."""
    with pytest.raises(ValueError, match=message):
        QatOptions(**wrong)
