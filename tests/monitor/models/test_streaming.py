"""Checkpoints whose layers are read one at a time: kinds, refusals, files that change."""

import gc
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.compressed_checkpoints import compressed

from quantwatch.config.schema import VariantConfig
from quantwatch.errors import ModelError
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.loading import load_variant
from quantwatch.models.quiet import quiet
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.hf_quantizer import save_quantized
from quantwatch_kernels.quantize.recipe import Recipe

IDS = torch.arange(3, 40)[None]


@pytest.fixture
def stream(tmp_path: Path) -> Any:
    """Load a variant with its layers streamed."""

    def run(model: Path, **settings: Any) -> LoadedModel:
        config = VariantConfig(model=str(model), **settings)
        return load_variant(
            "m", config, base_dir=tmp_path, cache_dir=tmp_path / "cache", streamed=True
        )

    return run


def _logits(model: LoadedModel) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.module(IDS).logits
    return logits


def _assert_same(streamed: LoadedModel, resident: LoadedModel) -> None:
    """Compare logits (twice: a layer is read again) and what is stored about a variant."""
    wanted = _logits(resident)
    assert torch.equal(_logits(streamed), wanted)
    assert torch.equal(_logits(streamed), wanted)
    ours, theirs = streamed.variant, resident.variant
    assert ours.fingerprint == theirs.fingerprint
    assert (ours.size_bytes, ours.bits_per_weight) == (theirs.size_bytes, theirs.bits_per_weight)
    assert (ours.execution, ours.skipped) == (theirs.execution, theirs.skipped)
    assert set(theirs.notes) < set(ours.notes)


def _with_values(model: LoadedModel) -> int:
    """Count the layers that have values."""
    layers = [model.module.get_submodule(f"model.layers.{n}") for n in range(4)]
    return sum(any(not p.is_meta for p in layer.parameters()) for layer in layers)


RECIPES = {
    "none": {},
    "float16": {"dtype": "float16"},
    "int8": {"recipe": "int8-channel"},
    "int4 with float16": {"recipe": "int4-g32", "dtype": "float16"},
    "mse, rounded inputs, embedding": {
        "recipe": {
            "weights": "int4",
            "granularity": "group",
            "group_size": 16,
            "clip": "mse",
            "activations": {"format": "int8", "granularity": "token"},
        }
    },
    "faults in and outside layers": {
        "faults": [
            {"scope": "layers.1.mlp.down_proj", "scale": 1.5},
            {"scope": "final_norm", "scale": 0.5},
        ]
    },
    "a fault behind a recipe": {
        "recipe": "int8-channel",
        "faults": [{"scope": "layers.0.mlp.up_proj", "scale": 2.0}],
    },
}


@pytest.mark.parametrize("settings", RECIPES.values(), ids=RECIPES.keys())
def test_streamed_is_resident_bit_for_bit(
    settings: dict[str, Any], make_folder: Any, load: Any, stream: Any
) -> None:
    """Catches a layer quantized otherwise, twice, or not at all when it is read again."""
    folder = make_folder(num_hidden_layers=4)
    _assert_same(stream(folder, **settings), load(folder, **settings))


@pytest.mark.parametrize("execution", ["dequantized", "reference"])
def test_packed_checkpoint(
    execution: Any, tmp_path: Path, make_llama: Any, load: Any, stream: Any
) -> None:
    """Catches packed layers that lose their codes, and floats that stay when they are dropped."""
    model = make_llama(num_hidden_layers=4, tie_word_embeddings=True, attention_bias=True)
    quantize_(model, Recipe.named("int4-g16"), execution="reference")
    with quiet():
        save_quantized(model, tmp_path / "packed")
    text = (tmp_path / "packed" / "config.json").read_text()
    changed = text.replace('"execution": "reference"', f'"execution": "{execution}"')
    (tmp_path / "packed" / "config.json").write_text(changed)
    streamed = stream(tmp_path / "packed")
    _assert_same(streamed, load(tmp_path / "packed"))
    assert _with_values(streamed) == 0


@pytest.mark.parametrize(("bits", "group"), [(4, 16), (8, None)], ids=["int4 group", "int8"])
def test_compressed_tensors_checkpoint(
    bits: int, group: int | None, tmp_path: Path, make_llama: Any, load: Any, stream: Any
) -> None:
    """Catches a layer that stays unpacked, or is unpacked twice."""
    pytest.importorskip("compressed_tensors")
    with quiet():
        folder = compressed(make_llama(num_hidden_layers=4), tmp_path / "ct", bits, group)
    streamed = stream(folder)
    _assert_same(streamed, load(folder))
    assert _with_values(streamed) == 0


def test_gguf_file_is_converted_and_streamed(make_gguf: Any, load: Any, stream: Any) -> None:
    """Catches a GGUF file that is measured on other values than when it is resident."""
    path = make_gguf()
    _assert_same(stream(path), load(path))


def test_shards(tmp_path: Path, make_llama: Any, make_tokenizer: Any, stream: Any) -> None:
    """Catches a layer that is looked for in the first file alone."""
    model = make_llama(num_hidden_layers=4)
    with quiet():
        model.save_pretrained(tmp_path / "m", max_shard_size="60KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    assert torch.equal(_logits(stream(tmp_path / "m")), model(IDS).logits)


def test_one_layer_and_the_next_have_values(make_folder: Any, stream: Any) -> None:
    """Catches layers that pile up, during a pass, after it, and after one that broke off."""
    model = stream(make_folder(num_hidden_layers=4))
    seen: list[int] = []
    for n in range(4):
        layer = model.module.get_submodule(f"model.layers.{n}")
        layer.register_forward_hook(lambda *_: seen.append(_with_values(model)))
    wanted = _logits(model)
    assert len(seen) == 4
    assert set(seen) <= {1, 2}
    assert _with_values(model) == 0

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.module.get_submodule("model.layers.2").register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        _logits(model)
    hook.remove()
    assert torch.equal(_logits(model), wanted)
    assert _with_values(model) == 0


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _write_into(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\x00" * 8)


@pytest.mark.parametrize("change", [_cut, _write_into], ids=["cut", "written to"])
def test_a_file_that_changes_is_named(change: Any, make_folder: Any, stream: Any) -> None:
    """Catches numbers of two checkpoints mixed, and a process that dies of a shorter file."""
    folder = make_folder(num_hidden_layers=4)
    model = stream(folder)
    before = _logits(model)
    change(folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors changed while it was streamed"):
        _logits(model)
    assert before.isfinite().all()


def test_a_file_that_is_replaced_is_still_the_one_that_was_opened(
    make_folder: Any, stream: Any
) -> None:
    """Catches a new checkpoint, put in place by renaming, that is measured halfway."""
    folder, other = make_folder(), make_folder("other", seed=1)
    model = stream(folder)
    before = _logits(model)
    shutil.copy(other / "model.safetensors", folder / "new")
    (folder / "new").rename(folder / "model.safetensors")
    assert torch.equal(_logits(model), before)


def test_a_truncated_file_is_named_when_it_is_loaded(make_folder: Any, stream: Any) -> None:
    folder = make_folder()
    _cut(folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or corrupt"):
        stream(folder)


def test_missing_weights_of_a_layer_are_named(tmp_path: Path, make_llama: Any, stream: Any) -> None:
    """Catches a layer made at random because nobody looked at it while loading."""
    model = make_llama()
    state = model.state_dict()
    del state["model.layers.1.mlp.down_proj.weight"]
    with quiet():
        model.save_pretrained(tmp_path / "m", state_dict=state)
    with pytest.raises(ModelError, match=r"lacks 1 weights.*layers\.1\.mlp\.down_proj\.weight"):
        stream(tmp_path / "m")


def test_weights_of_another_shape_are_named(tmp_path: Path, make_llama: Any, stream: Any) -> None:
    model = make_llama()
    state = model.state_dict()
    state["model.layers.1.mlp.down_proj.weight"] = torch.zeros(32, 60)
    with quiet():
        model.save_pretrained(tmp_path / "m", state_dict=state)
    with pytest.raises(ModelError, match=r"down_proj\.weight is \(32, 60\) in the file"):
        stream(tmp_path / "m")


REFUSED = {
    "gptq": (
        {"weights": "int4", "granularity": "group", "group_size": 16, "method": "gptq"}
        | {"calibration": {"suite": "core-v1"}},
        r"recipe int4-g16-gptq can't be streamed: it is calibrated on the activations",
    ),
    "rotation": (
        {"weights": "int8", "granularity": "channel", "rotation": {}},
        r"can't be streamed: a rotation changes all layers",
    ),
}


@pytest.mark.parametrize(("recipe", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_recipe_that_needs_the_whole_model_is_refused(
    recipe: dict[str, Any], words: str, make_folder: Any, stream: Any
) -> None:
    with pytest.raises(ModelError, match=words):
        stream(make_folder(), recipe=recipe)


def test_packing_recipe_is_refused(make_folder: Any, stream: Any) -> None:
    with pytest.raises(ModelError, match=r'int8-channel can\'t be streamed: execution = "aten"'):
        stream(make_folder(), recipe="int8-channel", execution="aten")


@pytest.mark.parametrize(
    ("serve", "words"),
    [
        ({"experts": "int4"}, r"serve\.experts = 'int4' can't be streamed"),
        (
            {
                "kv_cache": "int2+gain",
                "calibration": {"suite": {"name": "core-v1"}},
            },
            r"serve\.kv_cache = 'int2\+gain' can't be streamed: its gains",
        ),
    ],
    ids=["experts", "gains"],
)
def test_serving_that_needs_the_whole_model_is_refused(
    make_folder: Any, stream: Any, serve: dict[str, Any], words: str
) -> None:
    """Catches experts quantized, or gains calibrated, on layers that have no values yet."""
    with pytest.raises(ModelError, match=words):
        stream(make_folder("llama"), serve=serve)


def test_a_streamed_model_is_served_through_a_cache(make_folder: Any, stream: Any) -> None:
    """Catches an attention that is replaced in the resident model only."""
    folder = make_folder("llama")
    plain, served = stream(folder), stream(folder, serve={"kv_cache": "int4-plain"})
    assert not torch.equal(_logits(plain), _logits(served))


def test_factory_is_refused(tmp_path: Path) -> None:
    config = VariantConfig(factory="some.code:build", allow_code=True)
    with pytest.raises(ModelError, match=r"some\.code:build.*in memory already"):
        load_variant("m", config, base_dir=tmp_path, cache_dir=tmp_path, streamed=True)


def test_adapter_is_refused(make_folder: Any, stream: Any) -> None:
    folder = make_folder()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}')
    with pytest.raises(ModelError, match="is an adapter"):
        stream(folder)


def test_pickled_weights_are_refused(make_folder: Any, make_llama: Any, stream: Any) -> None:
    folder = make_folder()
    (folder / "model.safetensors").unlink()
    torch.save(make_llama().state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is no safetensors file"):
        stream(folder)


def _readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("quantwatch-layers")]


def _forget() -> None:
    gc.collect()
    for thread in _readers():
        thread.join(5)


def test_threads_end_with_the_model(make_folder: Any, stream: Any) -> None:
    """Catches a reading thread, and an open file, per model that was ever loaded."""
    folder = make_folder()
    _forget()
    before = len(os.listdir("/proc/self/fd"))
    model = stream(folder)
    _logits(model)
    assert _readers()
    del model
    _forget()
    assert not _readers()
    assert len(os.listdir("/proc/self/fd")) == before


def _fills(monkeypatch: pytest.MonkeyPatch, kind: Any) -> list[set[str]]:
    """Note which tensors each step of filling a model of a kind brings."""
    found: list[set[str]] = []
    fill = kind._load_pretrained_model

    def noted(model: Any, tensors: Any, *more: Any) -> Any:
        found.append(set(tensors))
        return fill(model, tensors, *more)

    monkeypatch.setattr(kind, "_load_pretrained_model", staticmethod(noted))
    return found


@pytest.mark.parametrize(
    ("limit", "steps"), [(1 << 26, 1), (0, 4)], ids=["small layers", "large layers"]
)
def test_layers_are_checked_in_few_steps(
    limit: int,
    steps: int,
    tmp_path: Path,
    make_llama: Any,
    stream: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a step per layer, each through the whole model, and packed layers read all at once."""
    model = make_llama(num_hidden_layers=4)
    fills = _fills(monkeypatch, type(model))
    monkeypatch.setattr("quantwatch.models.streaming.skeleton._READ_BYTES", limit)
    with quiet():
        model.save_pretrained(tmp_path / "plain")
        quantize_(model, Recipe.named("int4-g16"), execution="reference")
        save_quantized(model, tmp_path / "packed")
    stream(tmp_path / "plain")
    assert len(fills) == 2
    plain = fills[1]
    assert len(plain) == 4 * 9
    fills.clear()
    stream(tmp_path / "packed")
    assert len(fills) == 1 + steps
    assert sum(map(len, fills[1:])) == len(set.union(*fills[1:])) > len(plain)
