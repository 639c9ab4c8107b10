"""The measuring harness on tiny models: its figures against float64, computed by hand."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.kernel_lab.references import tied_llama
from tests.monitor.tiny_models import byte_tokenizer
from torch import Tensor, nn

from quantwatch.errors import PromptError
from quantwatch.kernel_lab.measure import Yardstick, scored_logits
from quantwatch.kernel_lab.tables import group_size, memory
from quantwatch.kernel_lab.texts import Text, calibration_text, measured_text
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.calibrate import head_inputs
from quantwatch_kernels.quantize.recipe import Recipe


@pytest.fixture
def model() -> Any:
    return tied_llama(scale=4.0)


TEXT = Text(
    "t",
    tuple(
        torch.randint(0, 96, (1, n), generator=torch.Generator().manual_seed(n))
        for n in (20, 31, 8)
    ),
)


def by_hand(reference: Any, candidate: Any) -> tuple[list[list[float]], float, float, float]:
    """KL per window and token, PPL, same top-1 and accuracy, in float64 from the definitions."""
    kl, nll, same, right = [], [], [], []
    for window in TEXT.windows:
        length = window.shape[1]
        with torch.no_grad():
            z, y = (m(window, use_cache=False).logits[0].double() for m in (reference, candidate))
        p, q = z.log_softmax(-1), y.log_softmax(-1)
        row = []
        for place in range(length // 2, length - 1):
            target = window[0, place + 1]
            row.append((p[place].exp() * (p[place] - q[place])).sum().item())
            nll.append(-q[place, target].item())
            same.append(float(p[place].argmax() == q[place].argmax()))
            right.append(float(q[place].argmax() == target))
        kl.append(row)
    mean = [sum(x) / len(x) for x in (nll, same, right)]
    return kl, math.exp(mean[0]), mean[1], mean[2]


def test_figures_are_the_definitions(model: Any) -> None:
    """Catches first halves that are scored, a last position without a target, tokens off by one."""
    yardstick = Yardstick(model, TEXT, {})
    candidate, report = yardstick.quantized(Recipe.named("int4-g16"))
    found = yardstick.measure(candidate, report)
    kl, ppl, same, right = by_hand(model, candidate)
    flat = [value for row in kl for value in row]
    assert found.num_tokens == len(flat) == 9 + 15 + 3 == TEXT.num_scored
    mean = sum(flat) / len(flat)
    assert found.kl == pytest.approx(mean, rel=1e-5)
    assert found.kl_max == pytest.approx(max(flat), rel=1e-4)
    residuals = [sum(value - mean for value in row) for row in kl]
    se = math.sqrt(1.5 * sum(r * r for r in residuals)) / len(flat)
    assert found.kl_se == pytest.approx(se, rel=1e-4)
    assert found.ppl == pytest.approx(ppl, rel=1e-5)
    assert (found.same_top1, found.accuracy) == pytest.approx((same, right))
    assert found.bits_per_weight == report.bits_per_weight
    assert found.kl > 1e-3


def test_the_reference_against_itself_is_zero(model: Any) -> None:
    """Catches a harness that changes its own reference, and a size that isn't counted."""
    before = copy.deepcopy(model.state_dict())
    yardstick = Yardstick(model, TEXT, {})
    yardstick.try_recipe(Recipe.named("int8-channel"))
    found = yardstick.measure(model)
    assert (found.kl, found.kl_se, found.same_top1) == (0, 0, 1)
    assert found.ppl == found.ppl_reference
    assert found.accuracy == found.accuracy_reference
    assert found.bits_per_weight == pytest.approx(32, rel=0.01)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_one_broken_token_is_not_averaged_away(model: Any) -> None:
    """Catches a mean over the tokens that are left: NaN never passes as a good KL."""
    broken = copy.deepcopy(model)
    broken.model.norm.register_forward_hook(
        lambda _m, _i, h: torch.where(torch.arange(h.shape[1])[:, None] == 14, math.nan, h)
    )
    found = Yardstick(model, TEXT, {}).measure(broken)
    assert found.num_nonfinite == 1  # of position 14 only one window scores
    figures = ("kl", "kl_se", "kl_p99", "kl_max", "same_top1", "ppl", "accuracy", "kept", "kept_se")
    assert [name for name in figures if not math.isnan(getattr(found, name))] == []
    assert found.accuracy_reference == Yardstick(model, TEXT, {}).measure(model).accuracy


@pytest.mark.slow
def test_what_recipes_share_is_computed_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the head's inputs of other texts, and a forward pass for each recipe of a table."""
    spec = replace(Recipe.named("uint4-g16").weights, method="gptq")
    recipe, texts = Recipe(spec, embedding=spec), [list(TEXT.windows[:2]), list(TEXT.windows[1:])]
    asked: list[int] = []

    def counting(module: Any, inputs: Any) -> Any:
        asked.append(len(inputs))
        return head_inputs(module, inputs)

    monkeypatch.setattr("quantwatch.kernel_lab.measure.head_inputs", counting)
    yardstick = Yardstick(model, TEXT, {})
    order = (texts[0], texts[0], texts[1])
    found = [yardstick.quantized(recipe, calibration=each)[0] for each in order]
    assert len(asked) == 2
    for module, each in zip(found, order, strict=True):
        alone = copy.deepcopy(model)
        quantize_(alone, recipe, calibration=each)
        weights = [each.get_parameter("lm_head.weight") for each in (module, alone)]
        assert torch.equal(*weights)


def test_models_without_logits_to_keep(model: Any) -> None:
    """Catches a module of one's own, which returns bare logits at every position."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: Tensor) -> Tensor:
            logits: Tensor = self.inner(ids, use_cache=False).logits
            return logits

    window = TEXT.windows[1]
    own, direct = (scored_logits(m, TEXT, window) for m in (Own(), model))
    assert torch.allclose(own, direct, atol=1e-5)

    class Broken(Own):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids)[0]

    with pytest.raises(ValueError, match="Broken returned logits"):
        scored_logits(Broken(), TEXT, window)


def test_windows_of_a_text(tmp_path: Path) -> None:
    """Catches calibration on what is measured, and a text that is shorter than was asked for."""
    file = tmp_path / "text.txt"
    file.write_text("".join(chr(32 + (i * 7 + i // 90) % 90) for i in range(512 * 5 + 100)))
    measured = measured_text(byte_tokenizer(), file, windows=2)
    calibration = calibration_text(byte_tokenizer(), file, skip=2, windows=3)
    assert [w.shape for w in measured.windows] == [(1, 512)] * 2
    assert measured.num_scored == 2 * 255
    everything = torch.cat([*measured.windows, *calibration], 1)
    assert everything[0].tolist() == byte_tokenizer()(file.read_text())["input_ids"][: 5 * 512]
    assert len(measured_text(byte_tokenizer(), file, windows=None).windows) == 5
    with pytest.raises(PromptError, match="5 whole windows"):
        measured_text(byte_tokenizer(), file, windows=6)


def test_core_is_split() -> None:
    """Catches a prompt of core-v1 that is both measured and calibrated on."""
    measured = {tuple(w[0].tolist()) for w in measured_text(byte_tokenizer()).windows}
    calibration = {tuple(w[0].tolist()) for w in calibration_text(byte_tokenizer())}
    assert (len(measured), len(calibration)) == (34, 102)
    assert not measured & calibration


def test_the_memory_table_counts_everything(model: Any) -> None:
    """Catches norms counted as float32, a tied embedding counted twice, and free scales."""
    ledger = memory._Ledger(Yardstick(model, TEXT, {}))
    layers = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)
    norms, table = 5 * 32, 96 * 32
    buffers = sum(
        b.numel() * b.element_size() for b in copy.deepcopy(model).to(torch.bfloat16).buffers()
    )
    assert ledger.num_weights == layers + norms + table
    assert ledger.whole == 2 * ledger.num_weights + buffers
    plain = Recipe.named("uint4-g16").with_weights(scale_dtype=torch.bfloat16, method="gptq")
    per_group = 16 // 2 + 2
    zeros = sum(
        out * -(-(k // 16) * 4 // 8)  # a row ends on a whole byte
        for out, k in 2 * [(32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)]
    )
    assert (
        ledger.bytes_of(plain) == layers // 16 * per_group + zeros + 2 * (norms + table) + buffers
    )
    embedding = Recipe.named("int8-channel").weights
    both = replace(plain, embedding=embedding)
    assert ledger.bytes_of(plain) - ledger.bytes_of(both) == table - 4 * 96


def test_the_group_size_table_looks_at_what_changed(model: Any) -> None:
    """Catches an error over all weights, embedding included, which a group size doesn't change."""
    yardstick = Yardstick(model, TEXT, {})
    recipe = Recipe.named("uint4-g16")
    candidate, _ = yardstick.quantized(recipe)
    bits, error = group_size._weights(model, candidate, recipe.weights)
    # Three zeros of four bits a row of down_proj take two bytes.
    rest = 32 * 4 / (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32)
    assert bits == pytest.approx(4 + (32 + 4) / 16 + rest)
    assert 0.05 < error < 0.08
    with pytest.raises(ValueError, match="changed no weight"):
        group_size._weights(model, model, recipe.weights)
