"""Checkpoints whose stored numbers are not the weights, and shards that contradict each other."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantwatch.config.schema import VariantConfig
from quantwatch.errors import ModelError
from quantwatch.models.loading import load_variant

Tensors = dict[str, torch.Tensor]
Read = Callable[[], Any]


@pytest.fixture(params=["resident", "streamed"])
def read(request: pytest.FixtureRequest, make_folder: Any, tmp_path: Path) -> Read:
    """Load the tiny folder resident and streamed: what one refuses, the other does."""
    config = VariantConfig(model=str(make_folder()))

    def load() -> Any:
        where: Any = {"base_dir": tmp_path, "cache_dir": tmp_path / "cache"}
        return load_variant("m", config, **where, streamed=request.param == "streamed")

    return load


def _rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def _scaled(dtype: torch.dtype, top: float, suffix: str) -> Callable[[Tensors], Tensors]:
    """Quantize projections by their largest value, as exporters do, the scale beside them."""

    def change(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            found[name] = tensor
            if name.endswith("_proj.weight"):
                scale = tensor.abs().max() / top
                codes = tensor / scale
                found[name] = (codes if dtype.is_floating_point else codes.round()).to(dtype)
                if suffix:
                    found[name.removesuffix(".weight") + suffix] = scale.reshape(1)
        return found

    return change


F8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("dtype", "top", "suffix", "words"),
    [
        (F8, 448.0, ".weight_scale_inv", "14 scales of quantized weights would not be used"),
        (F8, 448.0, ".weight_scale", "14 scales of quantized weights would not be used"),
        (F8, 448.0, ".scale", "14 scales of quantized weights would not be used"),
        (torch.float32, 127.0, ".weight.absmax", "14 scales of quantized weights would not be"),
        (torch.int8, 127.0, ".weight_scale", "down_proj.weight is stored as I8, and config.json"),
        (torch.int8, 127.0, ".SCB", "down_proj.weight is stored as I8, and config.json has no"),
        (torch.int8, 127.0, "", "down_proj.weight is stored as I8, and config.json has no"),
    ],
    ids=["deepseek", "modelopt", "scale", "absmax", "int8", "bitsandbytes", "codes alone"],
)
def test_codes_without_their_scales_are_refused(
    dtype: torch.dtype, top: float, suffix: str, words: str, read: Read, tmp_path: Path
) -> None:
    """Catches a quantized checkpoint without its configuration: it loads, and every figure of it
    is of garbage, with a note at most.
    """
    _rewrite(tmp_path / "tiny", _scaled(dtype, top, suffix))
    with pytest.raises(ModelError, match=words):
        read()


def test_floats_of_eight_bits_without_scales_are_weights(read: Read, tmp_path: Path) -> None:
    """Catches a cast that is taken for a quantized checkpoint."""
    folder = tmp_path / "tiny"
    kept = load_file(folder / "model.safetensors")
    short = {n: t.to(F8) if n.endswith("_proj.weight") else t for n, t in kept.items()}
    _rewrite(folder, lambda _: short)
    found = read()
    assert not [note for note in found.variant.notes if "not used" in note]
    with torch.no_grad():
        logits = found.module(torch.arange(8)[None], use_cache=False).logits
    _rewrite(folder, lambda _: {name: t.float() for name, t in short.items()})
    with torch.no_grad():
        again = read().module(torch.arange(8)[None], use_cache=False).logits
    torch.testing.assert_close(logits, again, rtol=0, atol=0)


def test_scales_of_layers_that_are_not_used_are_no_matter(read: Read, tmp_path: Path) -> None:
    """Catches a refusal for layers of a draft head that the configuration leaves out."""

    def change(tensors: Tensors) -> Tensors:
        extra = "model.layers.7.mlp.up_proj.weight"
        return tensors | {extra: torch.ones(2, 2), f"{extra}_scale": torch.ones(1)}

    _rewrite(tmp_path / "tiny", change)
    assert "2 weights of the checkpoint are not used" in read().variant.notes[0]


def _shards(folder: Path, one: Tensors, two: Tensors, named: dict[str, Any] | None = None) -> None:
    (folder / "model.safetensors").unlink()
    for name, tensors in (("a", one), ("b", two)):
        save_file(tensors, folder / f"{name}.safetensors", metadata={"format": "pt"})
    weight_map = named or dict.fromkeys(one, "a.safetensors") | dict.fromkeys(two, "b.safetensors")
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def _halves(folder: Path) -> tuple[Tensors, Tensors]:
    every = load_file(folder / "model.safetensors")
    names = sorted(every)
    return {n: every[n] for n in names[::2]}, {n: every[n] for n in names[1::2]}


def test_a_weight_of_two_shards_with_two_values_is_refused(read: Read, tmp_path: Path) -> None:
    """Catches an old shard beside new ones: whoever reads last wins, the index isn't asked."""
    folder = tmp_path / "tiny"
    one, two = _halves(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    (one if name in one else two)[name] = every = load_file(folder / "model.safetensors")[name]
    _shards(folder, one | {name: every}, two | {name: every + 1})
    with pytest.raises(ModelError, match=rf"{name} is in a\.safetensors and in b\.safetensors"):
        read()


@pytest.mark.parametrize("value", [None, float("nan")], ids=["a number", "not a number"])
def test_a_weight_of_two_shards_with_one_value_is_no_matter(
    value: float | None, read: Read, tmp_path: Path
) -> None:
    folder = tmp_path / "tiny"
    one, two = _halves(folder)
    if value is not None:
        next(iter(one.values())).view(-1)[0] = value
    _shards(folder, one, one | two)
    read()


def test_one_weight_in_two_types_is_two(read: Read, tmp_path: Path) -> None:
    """Catches a comparison that can't be made, and an old shard of another type."""
    folder = tmp_path / "tiny"
    one, two = _halves(folder)
    name = sorted(one)[0]
    _shards(folder, one, two | {name: one[name].bfloat16()})
    with pytest.raises(ModelError, match=rf"{name} is in a\.safetensors and in b\.safetensors"):
        read()


def test_a_tower_that_is_not_used_may_have_scales(read: Read, tmp_path: Path) -> None:
    """Catches a refusal for layer scales of another modality, which are weights themselves."""
    tower = {
        "vision.blocks.0.ls1.scale": torch.ones(4),
        "vision.blocks.0.ls1.scales": torch.ones(4),
    }
    _rewrite(tmp_path / "tiny", lambda tensors: tensors | tower)
    assert "2 weights of the checkpoint are not used" in read().variant.notes[0]


@pytest.mark.parametrize("file", [1, None, ["a.safetensors"], {}, ""])
def test_an_index_that_names_no_file_is_refused(file: Any, read: Read, tmp_path: Path) -> None:
    """Catches a traceback for a file that somebody wrote by hand."""
    folder = tmp_path / "tiny"
    one, two = _halves(folder)
    named = dict.fromkeys(one, "a.safetensors") | dict.fromkeys(two, "b.safetensors")
    _shards(folder, one, two, named | {"lm_head.weight": file})
    with pytest.raises(ModelError, match=r"index\.json: weight_map names files by text; one is"):
        read()
