"""Checkpoints that are quantized on disk, loaded for real on the CPU."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.monitor.compressed_checkpoints import compressed

from quantwatch.config.schema import VariantConfig
from quantwatch.errors import ModelError
from quantwatch.models.estimate import estimate_bytes
from quantwatch.models.quiet import quiet

IDS = torch.arange(3, 40)[None]


def _needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


def _unpacked(stored: dict[str, torch.Tensor], layer: str) -> torch.Tensor:
    """Dequantize one layer from the stored bits alone: offset-binary nibbles, low one first."""
    scale = stored[f"{layer}.weight_scale"]
    packed = stored.get(f"{layer}.weight_packed")
    if packed is None:
        return stored[f"{layer}.weight"].float() * scale
    rows, columns = stored[f"{layer}.weight_shape"].tolist()
    nibbles = torch.stack([(packed >> shift) & 15 for shift in range(0, 32, 4)], -1)
    codes = nibbles.reshape(rows, -1)[:, :columns].float() - 8
    return codes * scale.repeat_interleave(columns // scale.shape[1], 1)


CASES = {"int4 group 16": (4, 16), "int8 channel": (8, None)}


@_needs("compressed_tensors")
@pytest.mark.parametrize(("bits", "group"), CASES.values(), ids=CASES.keys())
def test_compressed_tensors_is_computed_on_its_own_values(
    bits: int, group: int | None, tmp_path: Path, make_llama: Any, load: Any
) -> None:
    """Catches a checkpoint loaded as floats or with random weights, and a lazily changing module."""
    with quiet():
        folder = compressed(make_llama(), tmp_path / "ct", bits, group)
    model = load(folder)
    stored = load_file(folder / "model.safetensors")
    twin = make_llama()
    for name, module in twin.named_modules():
        if f"{name}.weight_scale" in stored:
            module.weight.data.copy_(_unpacked(stored, name))
    assert not torch.equal(twin(IDS).logits, make_llama()(IDS).logits)
    before = dict(model.module.state_dict())
    # The library multiplies in another order than codes × scale: one rounding step of float32.
    torch.testing.assert_close(model.module(IDS).logits, twin(IDS).logits, rtol=1e-5, atol=1e-6)
    assert set(before) == set(model.module.state_dict())
    assert model.variant.execution == "compressed-tensors"


@_needs("compressed_tensors")
@pytest.mark.parametrize(("bits", "group"), CASES.values(), ids=CASES.keys())
def test_compressed_tensors_reports_its_storage(
    bits: int, group: int | None, tmp_path: Path, make_llama: Any, load: Any
) -> None:
    """Catches sizes taken after unpacking, or packed words counted as weights."""
    with quiet():
        folder = compressed(make_llama(), tmp_path / "ct", bits, group)
    model = load(folder)
    stored = load_file(folder / "model.safetensors")
    weights = sum(parameter.numel() for parameter in make_llama().parameters())
    assert model.variant.size_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert model.variant.bits_per_weight == 8 * model.variant.size_bytes / weights
    # Unpacked weights lie beside the scales: no more than estimated, and not much less.
    loaded = sum(tensor.nbytes for tensor in model.module.state_dict().values())
    estimate = estimate_bytes(VariantConfig(model=str(folder)), tmp_path)
    assert estimate is not None
    assert loaded <= estimate.resident <= 1.2 * loaded


def _bitsandbytes(folder: Path, plain: Path, bits: int) -> Path:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    recipe = BitsAndBytesConfig(
        load_in_8bit=bits == 8,
        load_in_4bit=bits == 4,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
    )
    AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, quantization_config=recipe, device_map={"": "cpu"}
    ).save_pretrained(folder)
    return folder


@pytest.mark.slow
@_needs("bitsandbytes")
def test_bitsandbytes_nf4_is_computed_on_its_own_values(
    tmp_path: Path, make_folder: Any, load: Any
) -> None:
    """Catches 4-bit weights loaded wrongly: compared with codes × quant_map × absmax by hand."""
    from bitsandbytes.functional import dequantize_4bit

    plain = make_folder("plain", hidden_size=64, intermediate_size=128)
    with quiet():
        folder = _bitsandbytes(tmp_path / "nf4", plain, 4)
    model, twin = load(folder), load(plain).module
    stored = load_file(folder / "model.safetensors")
    for name, module in twin.named_modules():
        packed = stored.get(f"{name}.weight")
        if packed is not None and packed.dtype == torch.uint8:
            # High nibble first, 64 weights per scale.
            codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], -1).flatten()
            values = stored[f"{name}.weight.quant_map"][codes.long()].reshape(-1, 64)
            values = values * stored[f"{name}.weight.absmax"][:, None]
            module.weight.data.copy_(values.reshape(module.weight.shape))
            weight = model.module.get_submodule(name).weight
            assert torch.equal(dequantize_4bit(weight, weight.quant_state), module.weight)
    # Where the processor has AVX512-BF16 the library computes in bfloat16, and the notes say so.
    halved = any("in bfloat16 on this processor" in note for note in model.variant.notes)
    wanted, logits = twin(IDS).logits, model.module(IDS).logits
    assert (wanted - logits).abs().max() < (2e-2 if halved else 1e-5) * wanted.abs().max()
    assert model.variant.execution == "bitsandbytes"
    weights = sum(parameter.numel() for parameter in twin.parameters())
    size = sum(tensor.nbytes for tensor in stored.values())
    assert model.variant.size_bytes == pytest.approx(size, rel=0.01)
    assert model.variant.bits_per_weight == 8 * model.variant.size_bytes / weights


@_needs("bitsandbytes")
def test_bitsandbytes_int8_loads_and_stays_quiet(
    tmp_path: Path, make_folder: Any, load: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches int8 weights that become floats, and a line on stderr per layer and forward."""
    plain = make_folder("plain", hidden_size=64, intermediate_size=128)
    with quiet():
        folder = _bitsandbytes(tmp_path / "int8", plain, 8)
    model, wanted = load(folder), load(plain).module(IDS).logits
    capfd.readouterr()
    logits = model.module(IDS).logits
    assert capfd.readouterr() == ("", "")
    assert model.module.model.layers[0].mlp.down_proj.weight.dtype == torch.int8
    assert 0 < (logits - wanted).abs().max() < 0.05
    assert any("cast to float16" in note for note in model.variant.notes)
    assert model.variant.bits_per_weight < 32


@_needs("bitsandbytes")
def test_recipe_on_top_of_a_quantized_checkpoint_is_refused(
    tmp_path: Path, make_folder: Any, load: Any
) -> None:
    """Catches quantizing twice, which would blame the recipe for the checkpoint's error."""
    plain = make_folder("plain", hidden_size=64, intermediate_size=128)
    with quiet():
        folder = _bitsandbytes(tmp_path / "int8", plain, 8)
    with pytest.raises(ModelError, match="already quantized with bitsandbytes: a recipe can't"):
        load(folder, recipe="int8-channel")
    fault = {"scope": "layers.0.mlp.down_proj", "scale": 2.0}
    with pytest.raises(ModelError, match=r"its weight is packed \(torch.int8\)"):
        load(folder, faults=[fault])


def test_missing_library_names_the_extra(
    make_folder: Any, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an ImportError of transformers instead of what to install."""
    import json

    folder = make_folder()
    path = folder / "config.json"
    quantization = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "quantization_config": quantization})
    )
    monkeypatch.setattr("quantwatch.models.quantized._is_installed", lambda _: False)
    with pytest.raises(ModelError, match=r"run `pip install 'quantwatch\[bitsandbytes\]'`"):
        load(folder)


def _ours(make_folder: Any, tmp_path: Path, execution: str = "dequantized") -> Path:
    """A checkpoint of the plug-in: int5 linears, int6 embedding with its tied head."""
    from transformers import AutoModelForCausalLM

    from quantwatch_kernels.formats import INT_FORMATS
    from quantwatch_kernels.quantize.hf_quantizer import QuantwatchConfig
    from quantwatch_kernels.quantize.recipe import PerChannel, PerGroup, Recipe, WeightSpec

    plain = make_folder("plain", tie_word_embeddings=True)
    recipe = Recipe(
        WeightSpec(INT_FORMATS["int5"], PerGroup(16)),
        embedding=WeightSpec(INT_FORMATS["int6"], PerChannel()),
    )
    config = QuantwatchConfig(recipe, execution)  # type: ignore[arg-type]
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config)
        model.save_pretrained(tmp_path / "ours")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "ours" / name).write_bytes((plain / name).read_bytes())
    return tmp_path / "ours"


def test_our_own_checkpoint_is_computed_on_its_own_values(
    tmp_path: Path, make_folder: Any, load: Any
) -> None:
    """Catches our format refused, read as floats, untied, or unpacked at every forward pass."""
    folder = _ours(make_folder, tmp_path)
    model = load(folder)
    from quantwatch_kernels.formats import INT_FORMATS
    from quantwatch_kernels.quantize.packing import unpack

    stored, twin = load_file(folder / "model.safetensors"), load(tmp_path / "plain").module
    for name, module in twin.named_modules():
        packed = stored.get(f"{name}.weight_packed")
        if packed is None:
            continue
        fmt = INT_FORMATS["int6" if name.endswith("embed_tokens") else "int5"]
        columns = module.weight.shape[1]
        scales = stored[f"{name}.scales"]
        codes = unpack(packed, fmt, columns).float()
        module.weight.data.copy_(codes * scales.repeat_interleave(columns // scales.shape[1], 1))
    assert torch.equal(model.module(IDS).logits, twin(IDS).logits)
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight
    assert model.variant.execution == "quantwatch"
    assert "packed weights are unpacked in memory and computed in floats" in model.variant.notes
    weights = sum(parameter.numel() for parameter in twin.parameters())
    assert model.variant.size_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert model.variant.bits_per_weight == 8 * model.variant.size_bytes / weights
    loaded = sum(tensor.nbytes for tensor in {id(t): t for t in model.module.parameters()}.values())
    estimate = estimate_bytes(VariantConfig(model=str(folder)), tmp_path)
    assert estimate is not None
    assert loaded <= estimate.resident <= 1.3 * loaded
    with pytest.raises(ModelError, match="already quantized with quantwatch: a recipe can't"):
        load(folder, recipe="int8-channel")


def test_our_own_checkpoint_keeps_its_kernels(tmp_path: Path, make_folder: Any, load: Any) -> None:
    """Catches a checkpoint for native kernels that is measured in floats without a word."""
    model = load(_ours(make_folder, tmp_path, "aten"))
    assert "packed weights are computed by the back end 'aten'" in model.variant.notes
    assert model.module.model.layers[0].mlp.up_proj.weight_packed.dtype == torch.uint8
    estimate = estimate_bytes(VariantConfig(model=str(tmp_path / "ours")), tmp_path)
    assert estimate is not None
    assert estimate.resident == model.variant.size_bytes


def test_a_broken_description_of_our_own_is_explained(
    tmp_path: Path, make_folder: Any, load: Any
) -> None:
    """Catches a traceback where the description doesn't fit the model."""
    import json

    path = _ours(make_folder, tmp_path) / "config.json"
    config = json.loads(path.read_text())
    layers = config["quantization_config"]["layers"]
    layers["model.layers.9.mlp.up_proj"] = layers["model.layers.0.mlp.up_proj"]
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"has no layer 'model\.layers\.9\.mlp\.up_proj'"):
        load(path.parent)
