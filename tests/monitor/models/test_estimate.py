"""Estimates equal what loading takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quantwatch.config.schema import VariantConfig
from quantwatch.errors import ModelError
from quantwatch.models.estimate import estimate_bytes
from quantwatch.models.text import load_text_side


def _loaded(load: Any, **kw: Any) -> int:
    module = load(**kw).module
    return sum(parameter.nbytes for parameter in module.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_folder(dtype: str, stored: str, make_llama: Any, tmp_path: Path, load: Any) -> None:
    """Catches the file's size taken for the memory: a bf16 file doubles in float32."""
    make_llama().to(getattr(torch, stored)).save_pretrained(tmp_path / "m")
    config = VariantConfig.model_validate({"model": "m", "dtype": dtype})
    assert estimate_bytes(config, tmp_path) == _loaded(load, model="m", dtype=dtype)


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_gguf(kind: str, make_gguf: Any, tmp_path: Path, load: Any) -> None:
    """Catches the quantized size taken for the memory of the dequantized model."""
    path = make_gguf(kind=kind)
    config = VariantConfig(model=str(path), dtype="bfloat16")
    assert estimate_bytes(config, tmp_path) == _loaded(load, model=path, dtype="bfloat16")


def test_bin(make_llama: Any, tmp_path: Path, load: Any) -> None:
    """Catches pickled checkpoints without an estimate."""
    model = make_llama()
    model.config.save_pretrained(tmp_path / "m")
    torch.save(model.half().state_dict(), tmp_path / "m" / "pytorch_model.bin")
    assert estimate_bytes(VariantConfig(model="m"), tmp_path) == _loaded(load, model="m")


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
