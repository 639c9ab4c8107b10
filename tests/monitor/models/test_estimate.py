"""Estimates equal what loading takes."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.compressed_checkpoints import compressed

from quantwatch.config.schema import VariantConfig
from quantwatch.errors import ModelError
from quantwatch.models.checkpoint import tensor_shapes
from quantwatch.models.declared import DeclaredSizes, declared_sizes
from quantwatch.models.estimate import estimate_bytes
from quantwatch.models.loading import load_variant
from quantwatch.models.quiet import quiet
from quantwatch.models.text import load_text_side
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.hf_quantizer import save_quantized
from quantwatch_kernels.quantize.recipe import Recipe


def _loaded(load: Any, **kw: Any) -> int:
    module = load(**kw).module
    return sum(parameter.nbytes for parameter in module.parameters())


def _whole(config: VariantConfig, folder: Path) -> int:
    found = estimate_bytes(config, folder)
    assert found is not None
    return found.resident


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_folder(dtype: str, stored: str, make_llama: Any, tmp_path: Path, load: Any) -> None:
    """Catches the file's size taken for the memory: a bf16 file doubles in float32."""
    make_llama().to(getattr(torch, stored)).save_pretrained(tmp_path / "m")
    config = VariantConfig.model_validate({"model": "m", "dtype": dtype})
    assert _whole(config, tmp_path) == _loaded(load, model="m", dtype=dtype)


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_gguf(kind: str, make_gguf: Any, tmp_path: Path, load: Any) -> None:
    """Catches the quantized size taken for the memory of the dequantized model."""
    path = make_gguf(kind=kind)
    config = VariantConfig(model=str(path), dtype="bfloat16")
    assert _whole(config, tmp_path) == _loaded(load, model=path, dtype="bfloat16")


def test_bin(make_llama: Any, tmp_path: Path, load: Any) -> None:
    """Catches pickled checkpoints without an estimate."""
    model = make_llama()
    model.config.save_pretrained(tmp_path / "m")
    torch.save(model.half().state_dict(), tmp_path / "m" / "pytorch_model.bin")
    assert _whole(VariantConfig(model="m"), tmp_path) == _loaded(load, model="m")


def _save_ours(folder: Path, execution: str, model: Any) -> None:
    quantize_(model, Recipe.named("int4-g16"), execution="reference")
    save_quantized(model, folder)
    path = folder / "config.json"
    said = json.loads(path.read_text())
    said["quantization_config"]["execution"] = execution
    path.write_text(json.dumps(said))


def _save_compressed(folder: Path, model: Any) -> None:
    pytest.importorskip("compressed_tensors")
    compressed(model, folder, 4, 16)


def _save_plain(folder: Path, model: Any) -> None:
    model.save_pretrained(folder)


def _bytes(module: Any) -> int:
    held = {id(t): t for t in module.state_dict(keep_vars=True).values()}
    return sum(tensor.nbytes for tensor in held.values() if not tensor.is_meta)


CHECKPOINTS = {
    "plain": _save_plain,
    "compressed-tensors": _save_compressed,
    "ours, unpacked": partial(_save_ours, execution="dequantized"),
    "ours, packed": partial(_save_ours, execution="reference"),
}


@pytest.mark.parametrize("save", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_streamed_layers_count_as_they_compute(save: Any, make_llama: Any, tmp_path: Path) -> None:
    """Catches packed bytes taken for those of a layer that is unpacked before it computes."""
    with quiet():
        save(folder=tmp_path / "m", model=make_llama(num_hidden_layers=4))
    config = VariantConfig(model="m")
    loaded = load_variant("m", config, base_dir=tmp_path, cache_dir=tmp_path, streamed=True)
    model: Any = loaded.module
    layer, live = model.model.layers[1], [0]
    hook = layer.mlp.register_forward_hook(lambda *_: live.append(_bytes(layer)))
    with torch.no_grad():
        model(torch.arange(3, 40)[None])
    hook.remove()
    truth = _bytes(model) + 3 * max(live)
    found = estimate_bytes(config, tmp_path)
    assert found is not None
    assert truth <= found.streamed <= 1.3 * truth


def test_headers_are_read_once(
    make_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a pass over all headers per figure: a large model has hundreds of files."""
    with quiet():
        make_llama(num_hidden_layers=4).save_pretrained(tmp_path / "m", max_shard_size="60KB")
    read: list[Path] = []

    def counted(path: Path) -> Any:
        read.append(path)
        return tensor_shapes(path)

    monkeypatch.setattr("quantwatch.models.estimate.tensor_shapes", counted)
    estimate_bytes(VariantConfig(model="m"), tmp_path)
    assert sorted(read) == sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(read) > 2


def test_unknown_and_wrong(tmp_path: Path) -> None:
    """Catches a made-up figure, and an estimate for something that isn't there."""
    factory = VariantConfig(factory="a:b", allow_code=True)
    assert estimate_bytes(factory, tmp_path) is None
    assert estimate_bytes(VariantConfig(model="acme/not-in-the-cache"), tmp_path) is None
    with pytest.raises(ModelError, match="no file or folder"):
        estimate_bytes(VariantConfig(model="./nowhere"), tmp_path)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"quantization_config": "x"}, id="quantization is text"),
        pytest.param({"quantization_config": [1]}, id="quantization is a list"),
        pytest.param(
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": [1]}},
            id="groups are a list",
        ),
        pytest.param({"text_config": "x"}, id="text settings are text"),
        pytest.param({"max_position_embeddings": "abc"}, id="context is text"),
        pytest.param({"max_position_embeddings": [1]}, id="context is a list"),
        pytest.param({"num_attention_heads": 0}, id="no heads"),
    ],
)
def test_settings_of_another_kind_are_the_users_error(
    values: dict[str, Any], make_folder: Any, tmp_path: Path
) -> None:
    """Catches an AttributeError (exit 3, our bug) for a config.json that somebody garbled."""
    path = make_folder() / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    config = VariantConfig(model="tiny")

    def read() -> None:
        estimate_bytes(config, tmp_path)
        load_text_side(config, base_dir=tmp_path, cache_dir=tmp_path / "cache")

    with pytest.raises(ModelError, match="tiny") as caught:
        read()
    assert "\n" not in str(caught.value)


def test_a_name_that_no_repository_can_have(tmp_path: Path) -> None:
    """Catches the hub library's own error for a name that is too long."""
    with pytest.raises(ModelError, match=r"hub model 'x+': Repo id must"):
        estimate_bytes(VariantConfig(model="x" * 200), tmp_path)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 8},
            DeclaredSizes(3, 64, 2 * 64),
        ),
        (
            {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 8}
            | {"num_key_value_heads": 2, "head_dim": 16},
            DeclaredSizes(3, 64, 2 * 2 * 16),
        ),
        ({"n_layer": 2, "n_embd": 32, "n_head": 4}, DeclaredSizes(2, 32, 2 * 32)),
        (
            {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 8}
            | {"kv_lora_rank": 512},
            None,
        ),
        ({"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": [8, 4, 4]}, None),
        ({}, None),
    ],
    ids=["plain", "shared keys", "GPT-2", "latents", "another per layer", "nothing"],
)
def test_declared_sizes(settings: dict[str, Any], expected: DeclaredSizes | None) -> None:
    """Catches a size that is made up where a configuration doesn't say it."""
    assert declared_sizes(settings) == expected


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_declared_sizes_are_those_of_a_cache(
    make_llama: Any, tmp_path: Path, kv_heads: int
) -> None:
    """Catches a KV cache of all heads where keys are shared."""
    model = make_llama(num_key_value_heads=kv_heads)
    model.save_pretrained(tmp_path / "m")
    found = declared_sizes(json.loads((tmp_path / "m" / "config.json").read_text()))
    with torch.no_grad():
        cache = model(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
    values = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert found is not None
    assert 3 * found.cached_values == values
