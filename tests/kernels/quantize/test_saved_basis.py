"""A rotated, smoothed or scaled model that was saved: what the comparison knows is still known."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.basis import (
    give_back,
    mark_from_json_,
    marks_to_json,
    residual_rotation,
    why_other_input,
    why_other_output,
)
from quantwatch_kernels.quantize.hf_quantizer import QuantwatchConfig, save_quantized
from quantwatch_kernels.quantize.recipe import PerChannel, Recipe, RotationSpec, WeightSpec
from quantwatch_kernels.quantize.unpack import unpack_

PLAIN = Recipe(WeightSpec(INT_FORMATS["int8"], PerChannel()))
AWQ = WeightSpec(INT_FORMATS["uint8"], PerChannel(), "integer", method="awq")
RECIPES = {
    "plain": PLAIN,
    "residual": replace(PLAIN, rotation=RotationSpec(seed=3, block=12)),
    "residual and values": replace(PLAIN, rotation=RotationSpec(values=True)),
    "smooth": replace(PLAIN, smooth=0.5),
    "awq": Recipe(AWQ),
}
IDS = torch.arange(2, 30)[None]

Decoder = Callable[[str], Any]


def saved(model: Any, recipe: Recipe, texts: list[Tensor], folder: Path, **settings: Any) -> Any:
    """Quantize, save, and return the model that is read back."""
    quantize_(
        model, recipe, execution="reference", calibration=texts if recipe.calibrated else None
    )
    save_quantized(model, folder, recipe=recipe)
    return AutoModelForCausalLM.from_pretrained(folder, **settings).eval()


def marks(model: Any) -> dict[str, tuple[str | None, str | None]]:
    return {p: (why_other_input(m), why_other_output(m)) for p, m in model.named_modules()}


def streams(model: Any) -> list[Tensor]:
    """Return every layer's output in the plain model's basis."""
    found: list[Tensor] = []

    def keep(module: Any, _inputs: Any, output: Any) -> None:
        plain = give_back(module, output[0] if isinstance(output, tuple) else output)
        assert isinstance(plain, Tensor)
        found.append(plain)

    handles = [layer.register_forward_hook(keep) for layer in model.model.layers]
    with torch.no_grad():
        model(IDS, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("unpacked", [False, True], ids=["packed", "unpacked"])
@pytest.mark.parametrize("name", RECIPES)
def test_marks_survive_a_checkpoint(
    decoder: Decoder, calibration: list[Tensor], name: str, unpacked: bool, tmp_path: Path
) -> None:
    """Catches a reloaded model that is compared in the rotated basis: layer errors of 140 %."""
    model = decoder("llama")
    again = saved(model, RECIPES[name], calibration, tmp_path)
    if unpacked:
        unpack_(again, torch.float32)
    assert marks(again) == marks(model)
    assert any(why for pair in marks(model).values() for why in pair) == (name != "plain")
    assert (residual_rotation(again) is not None) == name.startswith("residual")
    for ours, reference in zip(streams(again), streams(decoder("llama")), strict=True):
        assert float((ours - reference).norm() / reference.norm()) < 0.1


def test_marks_survive_a_second_save(
    decoder: Decoder, calibration: list[Tensor], tmp_path: Path
) -> None:
    """Catches marks that only the model which was rotated writes."""
    first = saved(decoder("llama"), RECIPES["residual"], calibration, tmp_path / "a")
    first.save_pretrained(tmp_path / "b")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert marks_to_json(again) == marks_to_json(first) != {}


BAD: dict[str, Any] = {
    "no such module": {"inputs": {"model.layers.9": "smoothed"}},
    "no rotation": {"rotated": {"model.layers.0": "rotated"}},
    "no width": {"rotation": {"seed": 1}},
    "impossible width": {"rotation": {"width": 48, "seed": 0, "block": 5}},
    "a list": {"inputs": ["model.layers.0"]},
}


@pytest.mark.parametrize("values", BAD.values(), ids=BAD)
def test_marks_that_are_not_understood(decoder: Decoder, values: Any) -> None:
    """Catches a description that is taken in part."""
    with pytest.raises(ValueError, match=r"other_basis = .* isn't understood"):
        mark_from_json_(decoder("llama"), values)


def test_a_checkpoint_that_says_nothing_of_its_basis_is_refused(
    decoder: Decoder, calibration: list[Tensor], tmp_path: Path
) -> None:
    """Catches a rotated checkpoint whose description lost the marks, read as a plain one."""
    saved(decoder("llama"), RECIPES["residual"], calibration, tmp_path)
    described = AutoModelForCausalLM.from_pretrained(tmp_path).config.quantization_config.to_dict()
    del described["other_basis"]
    with pytest.raises(ValueError, match="other_basis is None; allowed: a JSON object"):
        QuantwatchConfig(**described)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["plain", "residual", "smooth"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe"])
def test_a_router_keeps_its_bits(
    decoder: Decoder,
    calibration: list[Tensor],
    family: str,
    name: str,
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    """Catches float32 routers narrowed while they are read: experts flip (bug log 45)."""
    # Not `.to(dtype)`: that would narrow the rotary frequencies, too.
    decoder(family).save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=dtype)
    model.requires_grad_(False)
    again = saved(model, RECIPES[name], calibration, tmp_path / "packed", dtype=dtype)
    first, second = model.state_dict(), again.state_dict()
    assert first.keys() == second.keys()
    for path, tensor in first.items():
        assert tensor.dtype == second[path].dtype, path
        assert torch.equal(tensor, second[path]), path
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, again(IDS).logits)


def test_what_is_given_back_is_not_rounded_again(decoder: Decoder) -> None:
    """Catches a second rounding to 16 bits that shows as an error of the model."""
    model = decoder("llama").to(torch.bfloat16)
    quantize_(model, RECIPES["residual and values"])
    layer = model.model.layers[0]
    rotation = residual_rotation(model)
    assert rotation is not None
    hidden = torch.randn(7, 48, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    given = give_back(layer, hidden)
    assert isinstance(given, Tensor)
    assert given.dtype == torch.float32
    exact = hidden.double() @ rotation.matrix().T
    torch.testing.assert_close(given.double(), exact, rtol=1e-5, atol=1e-6)
