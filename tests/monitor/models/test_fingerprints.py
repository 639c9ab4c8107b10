"""Each digest moves exactly when its thing does."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantwatch.config.recipes import RecipeConfig
from quantwatch.domain import Fingerprint
from quantwatch.models.fingerprints import (
    file_sha,
    files_sha,
    module_sha,
    recipe_sha,
    tensor_sha,
)
from quantwatch.models.loading import from_module


def _nudge(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] += 1e-6
    save_file(tensors, file, {"format": "pt"})


def _config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _template(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    values = {**json.loads(path.read_text()), "chat_template": "{{ messages }}"}
    path.write_text(json.dumps(values))


def _nothing(folder: Path) -> None:
    (folder / "README.md").write_text("another file")
    _config(folder, transformers_version="0", _name_or_path="elsewhere", dtype="bfloat16")


FAULT = {"scope": "final_norm", "scale": 2.0}
CHANGES: dict[str, tuple[Callable[[Path], None], dict[str, Any], set[str]]] = {
    "nothing that matters": (_nothing, {}, set()),
    "one weight": (_nudge, {}, {"weights_sha"}),
    "configuration": (lambda f: _config(f, rms_norm_eps=1e-5), {}, {"config_sha"}),
    "chat template": (_template, {}, {"tokenizer_sha"}),
    "dtype": (lambda _: None, {"dtype": "bfloat16"}, {"serve_sha"}),
    "attention": (lambda _: None, {"attention": "eager"}, {"serve_sha"}),
    "fault": (lambda _: None, {"faults": [FAULT]}, {"fault_sha"}),
    "recipe": (lambda _: None, {"recipe": "int8-channel"}, {"recipe_sha", "serve_sha"}),
}


def _moved(left: Fingerprint, right: Fingerprint) -> set[str]:
    return {name for name, value in asdict(left).items() if asdict(right)[name] != value}


@pytest.mark.parametrize(("change", "options", "wanted"), CHANGES.values(), ids=CHANGES.keys())
def test_digest_moves_with_its_thing(
    change: Callable[[Path], None],
    options: dict[str, Any],
    wanted: set[str],
    make_folder: Any,
    load: Any,
) -> None:
    """Catches a drift that is not noticed, or is blamed on the wrong cause."""
    folder = make_folder()
    before = load(folder).variant.fingerprint
    change(folder)
    after = load(folder, **options).variant.fingerprint
    assert _moved(before, after) == wanted
    assert (before.digest == after.digest) == (not wanted)


def test_absent_things_have_no_digest(make_folder: Any, load: Any) -> None:
    """Catches the digest of an empty thing standing in for "none"."""
    fingerprint = load(make_folder(tokenizer=None)).variant.fingerprint
    assert (fingerprint.tokenizer_sha, fingerprint.recipe_sha, fingerprint.fault_sha) == ("",) * 3


def test_recipe_by_name_and_by_table_are_the_same(make_folder: Any, load: Any) -> None:
    """Catches a digest of how the recipe was written."""
    folder = make_folder()
    table = {"weights": "int4", "granularity": "group", "group_size": 32}
    named, written = load(folder, recipe="int4-g32"), load(folder, recipe=table)
    assert named.variant.fingerprint == written.variant.fingerprint


CALIBRATED = RecipeConfig.model_validate(
    {
        "weights": "int4",
        "granularity": "channel",
        "method": "gptq",
        "calibration": {"suite": {"files": ["a.txt"], "window": 64}, "limit": 8},
    }
)
SOURCES: dict[str, dict[str, Any]] = {
    "path": {"suite": {"files": ["/elsewhere/b.txt"], "window": 64}},
    "limit": {"limit": 9},
    "skip": {"skip": 1},
    "selection": {"selection": "random", "limit": 8},
    "seed": {"selection": "random", "seed": 5},
    "suite": {"suite": "core-v1"},
}


@pytest.mark.parametrize("name", SOURCES)
def test_where_texts_came_from_is_no_part_of_a_recipe(name: str) -> None:
    """Catches a baseline that starts anew since the same texts lie in another folder."""
    said = CALIBRATED.model_dump(mode="json")
    said["calibration"] |= SOURCES[name]
    other = RecipeConfig.model_validate(said)
    assert recipe_sha(other, "ids") == recipe_sha(CALIBRATED, "ids")
    assert recipe_sha(other, "other ids") != recipe_sha(CALIBRATED, "ids")
    changed = other.model_copy(update={"clip": "mse"})
    assert recipe_sha(changed, "ids") != recipe_sha(CALIBRATED, "ids")


def test_same_weights_elsewhere_have_the_same_digest(
    make_folder: Any, load: Any, tmp_path: Path
) -> None:
    """Catches a path, a file time or the listing's order in the identity."""
    folder = make_folder("one", tokenizer=None)
    shutil.copytree(folder, tmp_path / "deep" / "two")
    assert load("one").variant.fingerprint == load("deep/two").variant.fingerprint
    files = [folder / "config.json", folder / "model.safetensors"]
    cache = tmp_path / "cache"
    assert files_sha(files, cache) == files_sha(reversed(files), cache)
    assert files_sha(files, cache) != files_sha(files[:1], cache)


def test_file_digest_is_remembered_until_the_file_changes(tmp_path: Path) -> None:
    """Catches a stale digest, and reading 98 MB at every load."""
    path, cache = tmp_path / "file", tmp_path / "cache"
    path.write_bytes(b"one")
    os.utime(path, (1_000_000_000, 1_000_000_000))
    first = file_sha(path, cache)
    (note,) = (cache / "shas").iterdir()
    note.write_text("f" * 64)
    assert file_sha(path, cache) == "f" * 64
    note.write_text("half a dig")
    assert file_sha(path, cache) == first
    path.write_bytes(b"two")
    os.utime(path, (1_000_000_001, 1_000_000_001))
    assert file_sha(path, cache) not in ("f" * 64, first)


def test_digest_of_a_file_just_written_is_not_remembered(tmp_path: Path) -> None:
    """Catches a second change within the clock's step, with equal size, going unseen."""
    path, cache = tmp_path / "file", tmp_path / "cache"
    path.write_bytes(b"one")
    file_sha(path, cache)
    assert not (cache / "shas").exists()


def test_module_digest_sees_bits_dtype_shape_and_buffers(make_llama: Any) -> None:
    """Catches a digest over values that equal each other (0 and −0) or over parameters only."""
    model, twin = make_llama(), make_llama()
    assert module_sha(model) == module_sha(twin)
    twin.model.rotary_emb.inv_freq[0] *= 2
    assert module_sha(model) != module_sha(twin)
    zero = torch.zeros(2)
    digests = {tensor_sha(t) for t in (zero, -zero, zero.half(), zero[None], zero[:1], zero[0])}
    assert len(digests) == 6


def test_module_in_hand_moves_its_weights_digest(make_llama: Any) -> None:
    """Catches two modules in hand that look the same."""
    model, other = make_llama(), make_llama(seed=1)
    wider = make_llama(intermediate_size=96)
    base = from_module("a", model).variant.fingerprint
    assert _moved(base, from_module("b", other).variant.fingerprint) == {"weights_sha"}
    moved = _moved(base, from_module("c", wider).variant.fingerprint)
    assert moved == {"weights_sha", "config_sha"}
