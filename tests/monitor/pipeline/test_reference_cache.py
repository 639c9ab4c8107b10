"""`reference_cache = true`: from a check's setting to what is stored, reported and listed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor.tiny_models import save_word_model
from typer.testing import CliRunner

import quantwatch
from quantwatch.cli.app import app
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import Block
from quantwatch.errors import ConfigError
from quantwatch.models.streaming.stream import LayerStream
from quantwatch.pipeline import RunRequest, estimate, run_check
from quantwatch.pipeline.measure import measure_check
from quantwatch.report import document, html, markdown
from quantwatch.report.words import cache_words
from quantwatch.store.runs import get_result
from quantwatch.store.session import Database
from quantwatch_dashboard.components.facts import identity

GB = 10**9


class Quiet:
    def start(self, stage: str, total_tokens: int) -> None:
        pass

    def advance(self, tokens: int) -> None:
        pass


def _request(folder: Path, cache: Path, **settings: Any) -> RunRequest:
    given = {
        "reference": {"model": "tiny"},
        "candidates": [{"name": "int8", "model": "tiny", "recipe": "int8-channel"}],
        "suite": {"files": ["prompts.json"], "limit": 6},
        "isolated_fraction": 0.3,
        "reference_cache": True,
        **settings,
    }
    return RunRequest("nightly", CheckConfig.model_validate(given), folder, cache)


def _measured(request: RunRequest) -> tuple[list[Block], Any, Any]:
    with measure_check(request, Quiet()) as measured:
        return list(measured.blocks()), dict(measured.floor), measured.report.reference_cache


def _assert_same(ours: list[Block], theirs: list[Block]) -> None:
    assert len(ours) == len(theirs) > 20
    for one, other in zip(ours, theirs, strict=True):
        assert (one.kind, one.metric, one.prompt) == (other.kind, other.metric, other.prompt)
        np.testing.assert_array_equal(one.values, other.values, err_msg=one.metric)


def test_a_second_night_stores_the_same_rows(
    folder: Path, tmp_path: Path, database: Database
) -> None:
    """Catches a number, an alert or a baseline that depends on where the reference came from."""
    runs = [
        run_check(request, database=database, progress=Quiet())
        for request in (
            _request(folder, tmp_path, reference_cache=False),
            _request(folder, tmp_path),
            _request(folder, tmp_path),
        )
    ]
    live, recorded, read = (get_result(database, run.run_id) for run in runs)
    origins = [run.capture["reference_cache"]["origin"] for run in (live, recorded, read)]
    assert origins == ["live", "recorded", "cache"]
    for run in (recorded, read):
        assert run.candidates[0].measurements == live.candidates[0].measurements
        assert run.noise_floor == live.noise_floor
        assert run.verdict == live.verdict
        assert run.capture_sha == live.capture_sha
        assert run.capture["firings"] == live.capture["firings"]
        assert run.capture["observer_effect"] == live.capture["observer_effect"]
        assert run.capture["num_forwards"] == live.capture["num_forwards"]
    assert read.capture["reference_cache"]["floor_logit_kl"] == 0.0
    assert "recording" in recorded.timings_s
    assert "audit" in read.timings_s


def test_the_disk_is_estimated_beforehand(tmp_path: Path) -> None:
    """Catches a recording that fills the disk, of which nobody was told a size."""
    save_word_model(tmp_path / "tiny", 40, num_hidden_layers=4)
    texts = [" ".join(f"w{i * j % 40}" for i in range(60)) for j in range(1, 7)]
    (tmp_path / "prompts.json").write_text(json.dumps(texts))
    request = _request(tmp_path, tmp_path / "cache", isolated_fraction=0.0)
    expected = estimate(request).recorded_bytes
    assert expected is not None
    _measured(request)
    folder = tmp_path / "cache" / "reference"
    taken = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert expected == pytest.approx(taken, rel=0.05)
    isolated = estimate(_request(tmp_path, tmp_path / "cache", isolated_fraction=0.5))
    assert isolated.recorded_bytes == pytest.approx(1.35 * expected)
    chunked = estimate(_request(tmp_path, tmp_path / "cache", prefill_chunk=8))
    assert chunked.recorded_bytes == 0
    assert estimate(_request(tmp_path, tmp_path, reference_cache=False)).recorded_bytes is None


def test_reports_say_where_the_reference_came_from(
    folder: Path, tmp_path: Path, database: Database
) -> None:
    """Catches a cached night that nobody can tell from a live one, and noise where nobody asked."""
    wanted = _request(folder, tmp_path)
    recorded, read = (run_check(wanted, database=database, progress=Quiet()) for _ in range(2))
    assert "run live and recorded" in str(cache_words(recorded))
    words = str(cache_words(read))
    assert "read from the cache" in words
    assert "numbers are equal" in words
    for render in (markdown.render, html.render):
        assert "kB per token" in render(read)
    assert "read from the cache" in identity(read)
    assert document.document(read)["reference_cache"]["audit"]["num_differing"] == 0
    plain = run_check(
        _request(folder, tmp_path, reference_cache=False), database=database, progress=Quiet()
    )
    assert cache_words(plain) is None
    assert "hidden states" not in markdown.render(plain)
    assert "hidden states" not in identity(plain)


def test_damage_is_said_beside_the_reference(
    folder: Path, tmp_path: Path, database: Database
) -> None:
    """Catches a dropped entry that no page, no report and no document tells of."""
    wanted = _request(folder, tmp_path)
    run_check(wanted, database=database, progress=Quiet())
    (manifest,) = (tmp_path / "reference").glob("*/manifest.json")
    manifest.write_text("{}")
    run = run_check(wanted, database=database, progress=Quiet())
    assert run.reference is not None
    assert "damaged" in run.reference.warnings[0]
    assert "damaged" in markdown.render(run)


def test_a_streamed_reference_is_not_read_on_later_nights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches layers of a large reference that are read from the disk for nothing."""
    reads: list[int] = []
    real = LayerStream._read

    def read(self: LayerStream, index: int) -> None:
        reads.append(id(self))
        real(self, index)

    monkeypatch.setattr(LayerStream, "_read", read)
    request = _request(folder, tmp_path, memory="streamed")
    blocks, floor, used = _measured(request)
    assert used["origin"] == "recorded"
    first = len(reads)
    reads.clear()
    again, again_floor, used = _measured(request)
    assert used["origin"] == "cache"
    _assert_same(again, blocks)
    assert again_floor == floor
    by_model = sorted(reads.count(each) for each in set(reads))
    # The reference: one batch of the audit, its floor; the candidate all of them.
    assert len(reads) < 0.7 * first
    assert by_model[0] < by_model[1] / 2
    resident, _, used = _measured(_request(folder, tmp_path))
    assert used["origin"] == "cache"
    _assert_same(resident, blocks)


def test_a_factory_is_not_recorded(folder: Path, tmp_path: Path) -> None:
    """Catches numbers of yesterday's code: a factory's code is no part of its fingerprint."""
    code = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"def build():\n    place = {str(folder / 'tiny')!r}\n"
        "    model = AutoModelForCausalLM.from_pretrained(place)\n"
        "    return model, AutoTokenizer.from_pretrained(place)\n"
    )
    (folder / "made_here.py").write_text(code)
    made = {"factory": "made_here:build", "allow_code": True}
    candidate = {"name": "c", **made}
    _, _, used = _measured(_request(folder, tmp_path, reference=made, candidates=[candidate]))
    assert used["origin"] == "live"
    assert "code of a factory" in used["notes"][0]
    assert not (tmp_path / "reference").exists()


def test_modules_in_memory_are_not_recorded() -> None:
    """Catches the same for `quantwatch.compare`."""
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="reference_cache is no setting"):
        quantwatch.compare(linear, linear, [[1]], reference_cache=True)


def test_the_command_lists_and_clears(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches disk that nobody finds again, and a list without its limit."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quantwatch.toml").write_text("schema_version = 1\n[cache]\nreference_gb = 3\n")
    _measured(_request(folder, tmp_path / "quantwatch"))
    _measured(_request(folder, tmp_path / "quantwatch"))
    command = CliRunner()
    found = json.loads(command.invoke(app, ["cache", "list", "--json"]).stdout)
    assert found["limit_bytes"] == 3 * GB
    (entry,) = found["entries"]
    assert (entry["reference"], entry["uses"], entry["damage"]) == ("tiny", 1, None)
    assert entry["num_bytes"] > 10_000
    shown = command.invoke(app, ["cache", "list"]).stdout
    assert entry["key"][:12] in shown
    assert "of 3 GB in" in shown
    assert command.invoke(app, ["cache", "clear", "ffff0000"]).exit_code != 0
    cleared = command.invoke(app, ["cache", "clear", entry["key"][:8]])
    assert (cleared.exit_code, "removed" in cleared.stdout) == (0, True)
    assert json.loads(command.invoke(app, ["cache", "list", "--json"]).stdout)["entries"] == []


def test_an_entry_that_cant_be_read_is_listed(tmp_path: Path) -> None:
    """Catches a list that fails because of one damaged entry."""
    from quantwatch.capture.stored.shelf import Shelf, note_uses
    from quantwatch.cli.cache import _texts, described

    (tmp_path / "ab").mkdir()
    note_uses(tmp_path / "ab", 2)
    (entry,) = Shelf(tmp_path).entries()
    assert "No such file" in described(entry)["damage"]
    assert _texts(described(entry))[1].startswith("damaged: ")
