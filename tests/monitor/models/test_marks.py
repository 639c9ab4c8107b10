"""Checkpoints that somebody writes to while they are read, hashed, converted or measured."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor.tiny_models import save_word_model

from quantwatch.config.schema import CheckConfig, VariantConfig
from quantwatch.errors import ModelError
from quantwatch.models import gguf_cache, opening, pretrained
from quantwatch.models.loading import load_variant
from quantwatch.models.marks import Marks
from quantwatch.pipeline import RunRequest
from quantwatch.pipeline.attribution import Wish, attribute_shares
from quantwatch.pipeline.measure import measure_check
from quantwatch.pipeline.reasons import explain
from quantwatch.pipeline.reloading import choose_candidate, reload
from quantwatch.pipeline.run import run_check

Change = Callable[[Path], None]


def _written(path: Path) -> None:
    """As `save_file` does, and `cp`: the same file with other bytes, its length kept."""
    data = bytearray(path.read_bytes())
    if data.endswith(b"}\n"):
        data[-2:] = b"\n}"
    else:
        middle = len(data) * 6 // 10
        data[middle : middle + 4] = bytes(byte ^ 1 for byte in data[middle : middle + 4])
    with path.open("r+b") as file:
        file.write(data)
    _later(path)


def _replaced(path: Path) -> None:
    """As a careful export does."""
    twin = path.with_name("new")
    shutil.copyfile(path, twin)
    _written(twin)
    twin.replace(path)


def _later(path: Path) -> None:
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))


@pytest.mark.parametrize("memory", ["resident", "streamed"])
@pytest.mark.parametrize("change", [_written, _replaced])
@pytest.mark.parametrize("name", ["config.json", "model-00002-of-00002.safetensors"])
def test_a_folder_that_changes_while_it_is_loaded_is_refused(
    name: str,
    change: Change,
    memory: str,
    make_folder: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches the fingerprint of one checkpoint beside the numbers of another."""
    folder = make_folder()
    _split(folder)
    seen = pretrained.refuse_incomplete

    def meanwhile(location: str, info: dict[str, Any]) -> Any:
        change(folder / name)
        return seen(location, info)

    def load() -> None:
        config, cache = VariantConfig(model=str(folder)), tmp_path / "cache"
        where: Any = {"base_dir": tmp_path, "cache_dir": cache}
        load_variant("m", config, **where, streamed=memory == "streamed")

    load()
    monkeypatch.setattr(pretrained, "refuse_incomplete", meanwhile)
    with pytest.raises(ModelError, match=rf"{name} changed while it was loaded"):
        load()


def _split(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    module.save_pretrained(folder, max_shard_size=module.num_parameters() * 2 + 4096)
    assert (folder / "model-00002-of-00002.safetensors").is_file()


@pytest.mark.parametrize("change", [_written, _replaced])
def test_a_gguf_that_changes_while_it_is_converted_is_not_kept(
    change: Change, make_gguf: Any, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a cache that gives another file's weights under this one's digest, for ever."""
    path, convert = make_gguf(), gguf_cache._convert
    kept = path.read_bytes()

    def meanwhile(gguf: Path, header: Any, work: Path) -> None:
        change(gguf)
        convert(gguf, header, work)

    with monkeypatch.context() as patch:
        patch.setattr(gguf_cache, "_convert", meanwhile)
        with pytest.raises(ModelError, match="changed while it was converted"):
            load(path)
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []
    new = load(path)
    path.write_bytes(kept)
    _later(path)
    old = load(path)
    assert new.variant.fingerprint.weights_sha != old.variant.fingerprint.weights_sha
    pairs = zip(new.module.parameters(), old.module.parameters(), strict=True)
    assert not all(torch.equal(one, other) for one, other in pairs)


def test_a_gguf_is_the_one_that_was_converted(
    make_gguf: Any, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a digest that is taken once more, when the file may be another one."""
    path = make_gguf()
    before = load(path).variant.fingerprint
    folder_of = gguf_cache.converted_folder

    def replaced_behind(*args: Any) -> Path:
        folder = folder_of(*args)
        _replaced(path)
        return folder

    monkeypatch.setattr(opening, "converted_folder", replaced_behind)
    assert load(path).variant.fingerprint == before


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints and twelve prompts."""
    save_word_model(tmp_path / "ours", 96, scale=5.0)
    shutil.copytree(tmp_path / "ours", tmp_path / "theirs")
    texts = [" ".join(f"w{(5 * i + j) % 70}" for j in range(6 + i)) for i in range(12)]
    (tmp_path / "prompts.json").write_text(json.dumps(texts))
    return tmp_path


def _request(folder: Path, **settings: Any) -> RunRequest:
    check = {
        "reference": {"model": "ours"},
        "candidates": [{"name": "theirs", "model": "theirs", "recipe": "int8-channel"}],
        "suite": {"files": ["prompts.json"]},
        "rules": [],
        "isolated_fraction": 0.3,
        "batch_tokens": 40,
        "threads": 1,
        **settings,
    }
    return RunRequest("c", CheckConfig.model_validate(check), folder, folder / "cache")


class At:
    """A progress that does something once a while was measured."""

    def __init__(self, what: Callable[[], None], at: int) -> None:
        self._what, self._left, self._measuring = what, at, False

    def start(self, stage: str, total_tokens: int) -> None:
        self._measuring = stage == "measure"

    def advance(self, tokens: int) -> None:
        self._left -= self._measuring
        if self._measuring and self._left == 0:
            self._what()


@pytest.mark.parametrize("name", ["ours", "theirs"])
@pytest.mark.parametrize("settings", [{}, {"reference_cache": True}], ids=["plain", "cached"])
@pytest.mark.parametrize("at", [1, 6])
def test_weights_that_are_written_to_end_the_run(
    name: str, settings: dict[str, Any], at: int, folder: Path
) -> None:
    """Catches a night of which half is another model's: torch computes in the file itself."""
    path = folder / name / "model.safetensors"
    with (
        pytest.raises(ModelError, match=rf"{name}/model.safetensors was written to") as raised,
        measure_check(_request(folder, **settings), At(lambda: _written(path), at)),
    ):
        pass
    assert explain(raised.value).retryable, "the next attempt reads one checkpoint"
    kept = [each for each in (folder / "cache").glob("reference/*") if each.is_dir()]
    assert not [each for each in kept if (each / "manifest.json").is_file()]


def test_a_checkpoint_that_is_replaced_does_not_disturb(folder: Path) -> None:
    """Catches an error for the right way to put a new one in place."""
    path = folder / "ours" / "model.safetensors"
    with measure_check(_request(folder), At(lambda: None, 0)) as measured:
        before = [block.values for block in measured.blocks()]
    with measure_check(_request(folder), At(lambda: _replaced(path), 2)) as measured:
        after = [block.values for block in measured.blocks()]
    assert path.read_bytes() != (folder / "theirs" / "model.safetensors").read_bytes()
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_configuration_that_is_touched_does_not_disturb(folder: Path) -> None:
    """Catches a run that ends by a file which was read once, before anything was measured."""
    path = folder / "ours" / "config.json"
    with measure_check(_request(folder), At(lambda: _written(path), 2)) as measured:
        assert list(measured.blocks())


def test_shares_of_weights_that_are_written_to_are_none(folder: Path) -> None:
    run = run_check(_request(folder), database=None, progress=At(lambda: None, 0))
    models = reload(run, choose_candidate(run, None), folder, folder / "cache")
    path = folder / "ours" / "model.safetensors"
    told: list[str] = []

    def tell(words: str) -> None:
        if not told:
            _written(path)
        told.append(words)

    with pytest.raises(ModelError, match="was written to while"):
        attribute_shares(models, Wish(tokens=60, tell=tell))


def test_a_file_that_is_gone_was_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"a")
    marks = Marks.of([path])
    marks.require_same()
    path.unlink()
    marks.require_unwritten()
    with pytest.raises(ModelError, match="changed while it was loaded"):
        marks.require_same()
