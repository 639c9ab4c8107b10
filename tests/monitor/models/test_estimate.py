"""Estimates equal what loading takes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quantwatch.config.schema import VariantConfig
from quantwatch.errors import ModelError
from quantwatch.models.estimate import estimate_bytes


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
