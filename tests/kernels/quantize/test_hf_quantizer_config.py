"""Configurations of the plug-in that are wrong, and descriptions that don't fit their tensors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.quantize.checkpoints import IDS, SIZES, build
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig
from transformers.utils import logging as transformers_logging

from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.hf_quantizer import QuantwatchConfig, save_quantized
from quantwatch_kernels.quantize.recipe import Recipe

W = {"weights": "int4", "granularity": "group", "group_size": 32}
FORMATS = "int2, uint2, int3, uint3, int4"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "recipe a number": ({"recipe": 4}, "recipe must be a JSON object; it is 4"),
    "recipe a list": ({"recipe": ["int4-g32"]}, "recipe must be a JSON object"),
    "unknown format": ({"recipe": W | {"weights": "int9"}}, f"weights is 'int9'; allowed: {FORMATS}"),
    "format a number": ({"recipe": W | {"weights": 4}}, f"weights is 4; allowed: {FORMATS}"),
    "no granularity": ({"recipe": {"weights": "int4"}}, "recipe lacks 'granularity'"),
    "group a fraction": ({"recipe": W | {"group_size": 32.0}}, "group_size is 32.0; allowed: a whole"),
    "group a text": ({"recipe": W | {"group_size": "32"}}, "group_size is '32'; allowed: a whole"),
    "group a flag": ({"recipe": W | {"group_size": True}}, "group_size is True; allowed: a whole"),
    "group of none": ({"recipe": W | {"group_size": 0}}, "group size must be at least 2; it is 0"),
    "negative group": ({"recipe": W | {"group_size": -1}}, "must be at least 2; it is -1"),
    "rows and groups": (
        {"recipe": W | {"granularity": "channel"}},
        "group_size is 32; allowed: null with granularity channel",
    ),
    "symmetric with zeros": ({"recipe": W | {"zero": "integer"}}, "int4 goes with zero none"),
    "asymmetric without": (
        {"recipe": W | {"weights": "uint4", "zero": "none"}},
        "uint4 goes with zero integer or float",
    ),
    "exclude a text": ({"recipe": W | {"exclude": "head"}}, "exclude is 'head'; allowed: a list"),
    "layers an object": ({"recipe": W | {"layers": {}}}, "layers is {}; allowed: a list"),
    "embedding a name": ({"recipe": W | {"embedding": "int8"}}, "embedding must be a JSON object"),
    "float64 scales": ({"recipe": W | {"scale_dtype": "float64"}}, "scale_dtype is 'float64'; allow"),
    "no execution": ({"recipe": W, "execution": None}, "execution is None; allowed: dequantized"),
    "modules a text": (
        {"recipe": W, "modules_to_not_convert": "lm_head"},
        "modules_to_not_convert is 'lm_head'; allowed: a list of module paths",
    ),
    "modules numbers": ({"recipe": W, "modules_to_not_convert": [3]}, r"is \[3\]; allowed: a list"),
    "an empty module": ({"recipe": W, "modules_to_not_convert": [""]}, r"is \[''\]; allowed: a list"),
    "another method": ({"recipe": W, "quant_method": "gptq"}, "quant_method is 'gptq'; allowed: 'qu"),
    "ties without layers": ({"recipe": W, "tied": {}}, "tied is given without layers"),
    "version without layers": ({"recipe": W, "format_version": 1}, "format_version is given without layers"),
    "version a flag": ({"layers": {}, "format_version": True}, "format_version is True; allowed: 1"),
    "version a text": ({"layers": {}, "format_version": "1"}, "format_version is '1'; allowed: 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_settings(name: str) -> None:
    """Catches a value that is dropped or read as another one."""
    settings, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        QuantwatchConfig(**settings)


UP = "model.layers.0.mlp.up_proj"
Edit = Callable[[dict[str, Any]], object]
HEAD = {**W, "shape": [96, 64], "stored_scales": "float32"}
UNFIT: dict[str, tuple[Edit, str]] = {
    "a layer less": (
        lambda c: c["layers"].pop(UP),
        rf"{UP}\.\w+ is stored \(.*\), but not described",
    ),
    "a layer more": (
        lambda c: c["layers"].update(lm_head=HEAD),
        r"lm_head\.weight_packed is not stored; the description says U8 \[96, 32\]",
    ),
    "zeros forgotten": (
        lambda c: c["layers"][UP].update(weights="int4", zero="none", range=[-7, 7]),
        rf"{UP}\.zeros is stored \(U8 \[96, 1\]\), but not described",
    ),
    "other zeros": (
        lambda c: c["layers"][UP].update(zero="float"),
        r"zeros is U8 \[96, 1\]; the description says F32 \[96, 2\]",
    ),
    "other groups": (
        lambda c: c["layers"][UP].update(group_size=16),
        r"scales is F32 \[96, 2\]; the description says F32 \[96, 4\]",
    ),
    "other width": (
        lambda c: c["layers"][UP].update(weights="uint8", range=[0, 255]),
        r"weight_packed is U8 \[96, 32\]; the description says U8 \[96, 64\]",
    ),
    "narrower scales": (
        lambda c: c["layers"][UP].update(stored_scales="float16"),
        r"scales is F32 \[96, 2\]; the description says F16 \[96, 2\]",
    ),
    "no such embedding": (
        lambda c: c["tied"].update(lm_head="model.nowhere"),
        "lm_head is tied to model.nowhere, which is no packed embedding",
    ),
    "a tie to a number": (lambda c: c["tied"].update(lm_head=3), r"tied\['lm_head'\] is 3"),
    "a layer that is a number": (lambda c: c["layers"].update({UP: 7}), "must be a JSON object; it is"),
}  # fmt: skip


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    model = build(LlamaConfig(**SIZES))
    quantize_(model, Recipe.named("uint4-g32"), execution="reference")
    save_quantized(model, folder)
    return folder


@pytest.mark.parametrize("name", UNFIT)
def test_a_description_of_other_tensors(name: str, packed: Path) -> None:
    """Catches uninitialised weights, random layers and narrowed scales: transformers only warns."""
    edit, message = UNFIT[name]
    path = packed / "config.json"
    before = path.read_text()
    config = json.loads(before)
    edit(config["quantization_config"])
    path.write_text(json.dumps(config))
    try:
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(packed)
    finally:
        path.write_text(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shards", [None, "20KB"], ids=["one file", "sharded"])
def test_stacked_experts_and_what_stands_beside_come_back(
    shards: str | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Catches experts that are stored before they are quantized, or renamed layers refused."""
    transformers_logging.disable_progress_bar()
    build(MixtralConfig(**SIZES | {"num_local_experts": 4})).save_pretrained(tmp_path / "plain")
    config = QuantwatchConfig("int4-g32")
    first = AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=config, dtype=dtype
    )
    first.save_pretrained(tmp_path / "a", **({} if shards is None else {"max_shard_size": shards}))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=dtype)
    one, two = first.state_dict(), again.state_dict()
    assert one.keys() == two.keys()
    assert all(
        torch.equal(tensor, two[key]) and tensor.dtype == two[key].dtype
        for key, tensor in one.items()
    )
    plain = build(MixtralConfig(**SIZES | {"num_local_experts": 4}))
    down = "model.layers.0.mlp.experts.down_proj"
    assert not torch.equal(plain.state_dict()[down].to(dtype), two[down])
    with torch.no_grad():
        assert torch.equal(first(IDS).logits, again(IDS).logits)
    transformers_logging.enable_progress_bar()
