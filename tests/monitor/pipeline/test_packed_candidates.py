"""Checkpoints of the plug-in and of compressed-tensors as candidates of a whole check."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.monitor.tiny_models import byte_tokenizer, llama

import quantwatch
from quantwatch.cli import main
from quantwatch.models.quiet import quiet
from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.compressed_tensors import export_compressed_tensors
from quantwatch_kernels.quantize.hf_quantizer import save_quantized
from quantwatch_kernels.quantize.packed_linear import PackedLinear
from quantwatch_kernels.quantize.recipe import PerChannel, PerGroup, Recipe, WeightSpec

INT4 = WeightSpec(INT_FORMATS["int4"], PerGroup(16))
TIED = Recipe(INT4, embedding=WeightSpec(INT_FORMATS["int6"], PerChannel()))


def tiny() -> Any:
    return llama(300, tie_word_embeddings=True)


def packed(recipe: Recipe) -> Any:
    model = tiny()
    quantize_(model, recipe, execution="reference")
    return model


TEXT = "The light at Hallin would be automated. " * 10
WINDOW = 64


def measured(place: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `quantwatch compare plain candidate` says about the candidate."""
    (place / "text.txt").write_text(TEXT)
    for name in ("plain", "candidate"):
        byte_tokenizer().save_pretrained(place / name)
    words = ["compare", str(place / "plain"), str(place / "candidate")]
    more = ["--text", str(place / "text.txt"), "--window", str(WINDOW), "--no-store", "--json"]
    with pytest.raises(SystemExit) as ended:
        main([*words, *more, "--yes"])
    told = capsys.readouterr()
    assert ended.value.code in (0, 1), told.err
    (found,) = json.loads(told.out)["candidates"]
    return dict(found)


def windows() -> list[list[int]]:
    """The same prompts as `measured` makes."""
    ids: list[int] = byte_tokenizer()(TEXT)["input_ids"]
    return [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]


def written(model: Any, folder: Path, write: Any) -> int:
    """Write a checkpoint and return the bytes of its tensors."""
    with quiet():
        write(model, folder)
    return sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())


WRITERS = {"quantwatch": (save_quantized, TIED)}
if importlib.util.find_spec("compressed_tensors") is not None:
    WRITERS["compressed-tensors"] = (export_compressed_tensors, Recipe(INT4))


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITERS)
def test_a_packed_folder_is_a_candidate(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a packed checkpoint that a check refuses, or measures as another model."""
    write, recipe = WRITERS[kind]
    with quiet():
        tiny().save_pretrained(tmp_path / "plain")
    size = written(packed(recipe), tmp_path / "candidate", write)
    found = measured(tmp_path, capsys)
    assert found["execution"] == kind
    weights = sum(parameter.numel() for parameter in tiny().parameters())
    assert found["bits_per_weight"] == 8 * size / weights
    # The same distance as of the model in memory: float64 there, float32 here.
    run = quantwatch.compare(tiny(), packed(recipe), windows())
    measurement = run.candidates[0].find("logit_kl")
    assert measurement is not None
    assert measurement is not None
    kl = measurement.mean
    assert kl is not None
    assert kl > 1e-6
    assert found["logit_kl"]["mean"] == pytest.approx(kl, rel=1e-2)


def test_a_packed_model_in_memory_is_left_as_it_was() -> None:
    """Catches a caller's model that is unpacked under their hands."""
    model = packed(TIED)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run = quantwatch.compare(tiny(), model, [list(range(3, 60))])
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert isinstance(model.model.layers[0].mlp.up_proj, PackedLinear)
    variant = run.candidates[0].variant
    assert variant is not None
    assert variant.size_bytes == sum(t.nbytes for t in after.values())
