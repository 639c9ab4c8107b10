"""Export in the compressed-tensors layout, read back through transformers on the CPU."""

import contextlib
import importlib.util
import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.kernels.quantize.checkpoints import IDS, SIZES, build
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config
from transformers.utils import logging as transformers_logging

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.compressed_tensors import (
    export_compressed_tensors,
    pack_int32,
    to_compressed,
)
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.recipe import LayerRule, PerChannel, PerGroup, Recipe, WeightSpec

_needs_package = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None,
    reason="compressed_tensors is not installed",
)
INT4, UINT4 = INT_FORMATS["int4"], INT_FORMATS["uint4"]
MIXED = Recipe(
    WeightSpec(INT4, PerGroup(32)),
    layers=(
        LayerRule("*down_proj", WeightSpec(INT_FORMATS["int8"], PerChannel())),
        LayerRule("*o_proj", None),
    ),
)


def packed(recipe: Recipe | str, tie: bool = False) -> Any:
    """A Qwen2, which has biases."""
    model = build(Qwen2Config(**SIZES, tie_word_embeddings=tie))
    wanted = Recipe.named(recipe) if isinstance(recipe, str) else recipe
    quantize_(model, wanted, execution="reference")
    return model


def read_back(folder: Path) -> Any:
    """Load through transformers, without telling it anything."""
    transformers_logging.disable_progress_bar()
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        with torch.no_grad():
            model(IDS)  # the package unpacks at the first forward pass
    transformers_logging.enable_progress_bar()
    assert not any(info.values()), info
    return model


CASES: dict[str, Recipe | str] = {
    "int4 groups": "int4-g32",
    "int4 rows": "int4-channel",
    "int4 matrix": "int4-tensor",
    "int8 rows": "int8-channel",
    "int8 groups": "int8-g16",
    "mixed": MIXED,
    "uint4 groups": "uint4-g16",
    "uint4 rows": "uint4-channel",
    "uint8 groups": "uint8-g32",
    "uint8 rows": "uint8-channel",
}


@_needs_package
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", CASES)
def test_transformers_reads_the_same_values(name: str, tie: bool, tmp_path: Path) -> None:
    """Catches shifted codes, another bit order, wrong groups or zeros, a lost bias or tie."""
    model = packed(CASES[name], tie)
    export_compressed_tensors(model, tmp_path)
    assert not hasattr(model.config, "quantization_config")
    again = read_back(tmp_path)
    modules = dict(again.named_modules())
    layers = {path: m for path, m in model.named_modules() if isinstance(m, PackedLinear)}
    assert layers
    for path, layer in layers.items():
        assert torch.equal(modules[path].weight, layer.quantized().values), path
    floats = {k: v for k, v in model.state_dict().items() if k.rpartition(".")[0] not in layers}
    state = again.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in floats.items())
    assert torch.equal(state["model.layers.0.self_attn.q_proj.bias"],
                       model.model.layers[0].self_attn.q_proj.bias)  # fmt: skip
    # "reference" multiplies in float64, the package's layers in float32.
    with torch.no_grad():
        torch.testing.assert_close(again(IDS).logits, model(IDS).logits, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("bits", range(2, 9))
@_needs_package
def test_words_are_the_packages(bits: int) -> None:
    """Catches a word order of our own: against the package's packing, odd sizes too."""
    from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32

    torch.manual_seed(bits)
    codes = torch.randint(0, 2**bits, (5, 37))
    words = pack_int32(codes, bits)
    signed = (codes - 2 ** (bits - 1)).to(torch.int8)
    assert torch.equal(words, pack_to_int32(signed, bits))
    assert torch.equal(unpack_from_int32(words, bits, codes.shape), signed)


def test_golden_words() -> None:
    """Catches nibbles from the high end, and codes without their offset of 8 (bug log 11)."""
    weight = torch.tensor([[7.0, -7, 1, -1, 2, -2, 3, -3, 4]])
    spec = WeightSpec(INT4, PerChannel())
    tensors = to_compressed(quantize_weight(weight, spec), "up")
    assert tensors["weight_packed"].tolist() == [[0x5B6A791F, 0xC]]
    assert tensors["weight_scale"].tolist() == [[1.0]]
    assert tensors["weight_shape"].tolist() == [1, 9]
    assert "weight_zero_point" not in tensors


def test_golden_zeros() -> None:
    """Catches zeros that are packed along the groups instead of down the rows."""
    weight = torch.tensor([[0.0, 15, -15, 0], [-3.0, 12, -1, 14]])
    spec = WeightSpec(UINT4, PerGroup(2), "integer")
    quantized = quantize_weight(weight, spec)
    assert quantized.qparams.zeros is not None
    assert quantized.qparams.zeros.tolist() == [[0, 15], [3, 1]]
    tensors = to_compressed(quantized, "up")
    assert tensors["weight_zero_point"].tolist() == [[0x30, 0x1F]]
    assert tensors["weight_packed"].tolist() == [[0xF0F0], [0xF0F0]]


def test_the_description_names_what_is_packed(tmp_path: Path) -> None:
    """Catches a reader that is told the wrong width, or to unpack what was kept."""
    export_compressed_tensors(packed(MIXED, tie=True), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    four, eight = config["config_groups"].values()
    assert four["weights"]["num_bits"] == 4
    assert four["weights"]["group_size"] == 32
    assert "model.layers.0.mlp.up_proj" in four["targets"]
    assert eight["targets"] == [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]
    assert eight["weights"]["strategy"] == "channel"
    assert config["ignore"] == [*(f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)), "lm_head"]
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.1.mlp.up_proj.weight_packed"].dtype == torch.int32
    assert not [name for name in tensors if name.endswith((".scales", ".zeros"))]
    assert "lm_head.weight" not in tensors


def test_sharded_export(tmp_path: Path) -> None:
    """Catches a layer whose words and scales lie in different files being left out."""
    export_compressed_tensors(packed("int4-g32"), tmp_path / "parts", max_shard_size="20KB")
    export_compressed_tensors(packed("int4-g32"), tmp_path / "whole")
    parts = {path.name: load_file(path) for path in (tmp_path / "parts").glob("*.safetensors")}
    assert len(parts) > 2
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    places = {name: file for file, tensors in parts.items() for name in tensors}
    assert index["weight_map"] == places
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert places.keys() == whole.keys()
    assert all(torch.equal(parts[places[name]][name], tensor) for name, tensor in whole.items())


UP = r"model\.layers\.0\.mlp\.up_proj"
REFUSED: dict[str, tuple[Recipe | str, str]] = {
    "3 bits": ("int3-g32", r"q_proj has 3-bit weights \(int3\); .* has 4 or 8 bits"),
    "6 bits in one layer": (
        Recipe(
            WeightSpec(INT4, PerGroup(32)),
            layers=(LayerRule("*up_proj", WeightSpec(INT_FORMATS["uint6"], PerChannel(), "integer")),),
        ),
        UP + r" has 6-bit weights \(uint6\)",
    ),
    "float zeros": (
        Recipe(WeightSpec(UINT4, PerGroup(32), "float")),
        "q_proj has float zero points; compressed-tensors allows none, or whole codes",
    ),
    "short group": ("int4-g48", "q_proj has groups of 48 in rows of 64, the last one short"),
    "embedding": (
        Recipe(WeightSpec(INT4, PerGroup(32)), embedding=WeightSpec(INT4, PerGroup(32))),
        r"model\.embed_tokens is an embedding",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_layout_can_not_express(name: str, tmp_path: Path) -> None:
    """Catches a checkpoint that readers unpack into something else (bug log 1 for groups)."""
    recipe, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        export_compressed_tensors(packed(recipe), tmp_path)
    assert not list(tmp_path.iterdir())


def test_conv1d_is_refused(tmp_path: Path) -> None:
    """Catches GPT-2's transposed weights written as if they were linear layers'."""
    model = build(GPT2Config(vocab_size=96, n_positions=64, n_embd=64, n_layer=1, n_head=4))
    quantize_(model, Recipe.named("int8-channel"), execution="reference")
    with pytest.raises(ValueError, match=r"c_attn is a Conv1D in this architecture; allowed: Lin"):
        export_compressed_tensors(model, tmp_path)


def test_nothing_packed_is_refused(tmp_path: Path) -> None:
    """Catches a float checkpoint that says it is compressed."""
    model = build(LlamaConfig(**SIZES))
    quantize_(model, Recipe.named("int8-channel"))
    with pytest.raises(ValueError, match="no layer of this LlamaForCausalLM is packed"):
        export_compressed_tensors(model, tmp_path)
