"""What an export in the compressed-tensors layout carries, refuses, and needs of its readers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.basis import marks_to_json
from quantwatch_kernels.quantize.compressed_tensors import (
    export_compressed_tensors,
    mark_loaded_,
    to_compressed,
)
from quantwatch_kernels.quantize.recipe import (
    ActivationSpec,
    PerChannel,
    PerGroup,
    Recipe,
    RotationSpec,
    WeightSpec,
)

pytest.importorskip("compressed_tensors", reason="compressed_tensors is not installed")

Decoder = Callable[[str], Any]
IDS = torch.arange(3, 40)[None]
INT8 = Recipe(WeightSpec(INT_FORMATS["int8"], PerChannel()))
CARRIED = {
    "residual": replace(INT8, rotation=RotationSpec(seed=3, block=12)),
    "residual and values": replace(INT8, rotation=RotationSpec(values=True)),
    "smooth": replace(INT8, smooth=0.5),
    "awq": Recipe(WeightSpec(INT_FORMATS["uint8"], PerChannel(), "integer", method="awq")),
}
REFUSED = {
    "down rotated online": (
        "llama",
        replace(INT8, rotation=RotationSpec(residual=False, down=True)),
        r"down_proj is a _TransformsInput: .*its input is transformed online, as by a rotation",
    ),
    "tied head": (
        "llama-tied",
        replace(INT8, rotation=RotationSpec()),
        r"embed_tokens is a _TransformsOutput: .*its output is transformed online",
    ),
    "residual dtype": (
        "llama",
        replace(INT8, residual_dtype=(("*", torch.float16),)),
        r"layers\.0 is a _RoundsStream: .*the residual stream is rounded: residual_dtype",
    ),
    "activations": (
        "llama",
        replace(INT8, activations=ActivationSpec(INT_FORMATS["int8"])),
        r"q_proj is a .*Linear: .*computes more than that",
    ),
}


def load(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        model(IDS)  # the package unpacks at the first forward pass
    return model


@pytest.mark.parametrize("name", CARRIED)
def test_marks_of_another_basis_are_carried(
    name: str, decoder: Decoder, calibration: list[Tensor], tmp_path: Path
) -> None:
    """Catches an exported rotated model that is compared as if its stream were the plain one."""
    model, recipe = decoder("llama"), CARRIED[name]
    texts = calibration if recipe.calibrated else None
    quantize_(model, recipe, execution="reference", calibration=texts)
    export_compressed_tensors(model, tmp_path)
    assert not hasattr(model.config, "quantwatch_other_basis")
    again = load(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(again(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    assert marks_to_json(again) == {}
    mark_loaded_(again)
    assert marks_to_json(again) == marks_to_json(model) != {}


def test_a_plain_export_says_nothing_of_a_basis(decoder: Decoder, tmp_path: Path) -> None:
    """Catches marks of nothing, and a description that is taken in part."""
    model = decoder("llama")
    quantize_(model, INT8, execution="reference")
    export_compressed_tensors(model, tmp_path)
    assert "quantwatch_other_basis" not in json.loads((tmp_path / "config.json").read_text())
    mark_loaded_(model)
    assert marks_to_json(model) == {}
    model.config.quantwatch_other_basis = ["rotated"]
    with pytest.raises(
        ValueError, match=r"quantwatch_other_basis is \['rotated'\]; allowed: a JSON"
    ):
        mark_loaded_(model)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_computed_beside_the_weights_is_refused(
    name: str, decoder: Decoder, tmp_path: Path
) -> None:
    """Catches a checkpoint that computes another model: without its rotation, or its rounding."""
    family, recipe, message = REFUSED[name]
    model = decoder(family)
    quantize_(model, recipe, execution="reference")
    with pytest.raises(ValueError, match=message):
        export_compressed_tensors(model, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("columns", [32, 96, 160])
@pytest.mark.parametrize("rows", [1, 5, 8, 33])
@pytest.mark.parametrize("size", [None, 16])
@pytest.mark.parametrize("kind", ["int4", "uint4", "int8", "uint8"])
def test_the_package_unpacks_our_codes(
    kind: str, size: int | None, rows: int, columns: int
) -> None:
    """Catches words that only our own reader understands: the package's, code for code."""
    from compressed_tensors.compressors.pack_quantized import unpack_from_int32

    fmt = INT_FORMATS[kind]
    torch.manual_seed(rows)
    weight = torch.randn(rows, columns) + torch.linspace(-2, 2, rows)[:, None]
    granularity = PerChannel() if size is None else PerGroup(size)
    spec = WeightSpec(fmt, granularity, "none" if fmt.symmetric else "integer")
    quantized = quantize_weight(weight, spec)
    tensors = to_compressed(quantized, "up")
    codes = unpack_from_int32(tensors["weight_packed"], fmt.bits, weight.shape)
    offset = 0 if fmt.symmetric else 1 << (fmt.bits - 1)
    assert torch.equal(codes.int() + offset, quantized.codes.int())
    values = codes.double()
    groups = tensors["weight_scale"].shape[1]
    if not fmt.symmetric:
        zeros = unpack_from_int32(
            tensors["weight_zero_point"], fmt.bits, (rows, groups), packed_dim=0
        )
        values = values - zeros.double().repeat_interleave(columns // groups, 1)
    scales = tensors["weight_scale"].double().repeat_interleave(columns // groups, 1)
    torch.testing.assert_close((values * scales).float(), quantized.values, rtol=1e-6, atol=0)


def test_why_asymmetric_exports_say_dequantize(decoder: Decoder, tmp_path: Path) -> None:
    """Pins the limit of compressed-tensors 0.20: gone when this fails, and so can the setting be.

    On the meta device it makes room for one zero point per row; stored are packed words.
    """
    model = decoder("llama")
    quantize_(model, Recipe.named("uint4-g16"), execution="reference")
    export_compressed_tensors(model, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config["quantization_config"].pop("dequantize") is True
    path.write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(tmp_path)
