"""Entries on disk: complete or absent, checked when read, never in each other's way."""

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.side_by_side import Subject, capture
from quantwatch.capture.stored.checked import CheckedFile
from quantwatch.capture.stored.damage import DamagedError
from quantwatch.capture.stored.lock import locked
from quantwatch.capture.stored.manifest import NAME
from quantwatch.capture.stored.packing import Packed
from quantwatch.capture.stored.recorder import Recorder
from quantwatch.capture.stored.shelf import Entry, Shelf, note_uses

PLAN = CapturePlan(batch_tokens=16, isolated_fraction=0.3, floor_tokens=4, condition_tokens=0)
SOME = {"what": "test"}
ABOUT = {"reference": "tiny", "dtype": "float32", "suite": "test", "num_tokens": 10}


@pytest.fixture
def night(kit: Any, tmp_path: Path) -> Callable[..., Any]:
    """Measure a tiny pair with a shelf; the reference's use, and what reached the sinks."""
    reference = kit.load(kit.build("llama", num_hidden_layers=1), "reference")
    models = {"reference": reference, "one": kit.load(kit.perturb(reference.module), "one")}

    def run(shelf: Shelf | None) -> tuple[dict[str, Any], list[float]]:
        sink, floor = kit.memory(), kit.memory()
        report = capture(
            Subject(models, kit.suite([7, 9, 6]), PLAN, shelf), sink, floor, kit.steps()
        )
        seen = [*sink.observations, *floor.observations]
        values = [m.values for o in seen for m in o.matrices]
        return dict(report.reference_cache), [value for v in values for value in v.ravel().tolist()]

    return run


def _only(shelf: Shelf) -> Entry:
    (entry,) = shelf.entries()
    return entry


def _cut(entry: Entry) -> None:
    os.truncate(entry.folder / "batch-00001.safetensors", 100)


def _longer(entry: Entry) -> None:
    with (entry.folder / "batch-00001.safetensors").open("ab") as file:
        file.write(b"!")


def _flip(entry: Entry, name: str = "batch-00001.safetensors") -> None:
    path = entry.folder / name
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def _swap(entry: Entry) -> None:
    shutil.copy(entry.folder / "batch-00000.safetensors", entry.folder / "batch-00001.safetensors")


def _other_manifest(entry: Entry) -> None:
    manifest = entry.manifest()
    other = {**manifest.ingredients, "suite": "another"}
    text = type(manifest)(other, manifest.about, manifest.facts, manifest.files).text()
    (entry.folder / NAME).write_text(text)


def _plausible_manifest(entry: Entry) -> None:
    path = entry.folder / NAME
    path.write_text(path.read_text().replace('"num_forwards":', '"num_forwards":1'))


DAMAGES: dict[str, tuple[Callable[[Entry], object], str]] = {
    "cut": (_cut, "has 100 bytes"),
    "longer": (_longer, "were written"),
    "one bit": (_flip, "its checksum differs"),
    "one bit of the noise floor": (
        lambda e: _flip(e, next(p.name for p in e.folder.glob("floor-*"))),
        "its checksum differs",
    ),
    "missing": (lambda e: (e.folder / "batch-00001.safetensors").unlink(), "No such file"),
    "another batch's file": (_swap, "batch-00001"),
    "no manifest": (lambda e: (e.folder / NAME).unlink(), "No such file"),
    "garbled manifest": (lambda e: (e.folder / NAME).write_text('{"sha256": 1}'), "is garbled"),
    "binary manifest": (lambda e: (e.folder / NAME).write_bytes(b"\xff\xfe"), "is garbled"),
    "changed manifest": (_plausible_manifest, "its checksum differs"),
    "somebody else's": (_other_manifest, "another reference"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_told_and_costs_nothing_but_time(
    kind: str, night: Callable[..., Any], tmp_path: Path
) -> None:
    """Catches a wrong number out of a damaged file, and a night that fails because of one."""
    shelf = Shelf(tmp_path / "s")
    _, live = night(None)
    night(shelf)
    damage, words = DAMAGES[kind]
    damage(_only(shelf))
    used, values = night(shelf)
    assert values == live
    (warning,) = used["warnings"]
    assert words in warning
    assert "dropped" in warning
    again, values = night(shelf)
    assert values == live
    # What was found before the night began was recorded anew by that very night.
    assert again["origin"] == ("cache" if used["origin"] == "recorded" else "recorded")
    assert again["warnings"] == []


def test_damage_that_shows_late_leaves_the_earlier_batches(
    night: Callable[..., Any], tmp_path: Path
) -> None:
    """Catches a night that reads on in a dropped entry: from the damage on the reference is run."""
    shelf = Shelf(tmp_path)
    night(shelf)
    entry = _only(shelf)
    last = max(path.name for path in entry.folder.glob("batch-*"))
    assert last >= "batch-00001.safetensors"
    _flip(entry, last)
    used, values = night(shelf)
    assert used["origin"] == "cache"
    assert "from there on" in used["warnings"][0]
    assert values == night(None)[1]
    assert shelf.entries() == []


@pytest.mark.parametrize("checksum", ["right", "wrong"])
def test_a_file_that_is_no_pack_is_damage(checksum: str, tmp_path: Path) -> None:
    """Catches an exception of a library, or memory for a made-up length, where a word was wanted."""
    good = Packed()
    good.add("a", torch.ones(3))
    data = b"".join(good.pieces())
    path = tmp_path / "x"
    swapped = (b"structure", b"sTructure"), (b"F32", b"Q32"), (b"[3]", b"[9]"), (b"[3]", b"[{]")
    bad = [b"", b"\x00" * 7, b"\xff" * 40, data[:20], *(data.replace(a, b) for a, b in swapped)]
    for content in bad:
        path.write_bytes(content)
        sha = hashlib.sha256(content if checksum == "right" else b"?").hexdigest()
        words = "no file of ours" if checksum == "right" else "checksum differs"
        with CheckedFile(path, sha, len(content)) as file, pytest.raises(DamagedError, match=words):
            Packed.read(file)


def _write(shelf: Shelf, key: str, size: int = 1000) -> Recorder:
    with shelf.held(key) as lock:
        assert lock.mode == "exclusive"
        writing = Recorder(shelf, key, SOME, ABOUT)
        packed = Packed()
        packed.add("x", torch.zeros(size // 4))
        writing.put("batch-00000.safetensors", packed, 1.0)
        writing.commit({})
    return writing


def test_files_are_private(tmp_path: Path) -> None:
    """Catches hidden states of private prompts that others can read."""
    os.umask(0o022)
    shelf = Shelf(tmp_path / "s")
    _write(shelf, "ab")
    entry = _only(shelf)
    assert shelf.folder.stat().st_mode & 0o777 == 0o700
    assert entry.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in entry.folder.iterdir()} == {0o600}
    assert (shelf.folder / "ab.lock").stat().st_mode & 0o777 == 0o600


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    """Catches eviction by age, by name or of what is in use."""
    shelf = Shelf(tmp_path, 12_000)
    for key in ("a", "b", "c"):
        _write(shelf, key, 3000)
    assert [entry.key for entry in shelf.entries()] == ["a", "b", "c"]
    note_uses(tmp_path / "a", 1)
    _write(shelf, "d", 3000)
    assert [entry.key for entry in shelf.entries()] == ["c", "a", "d"]
    with locked(tmp_path / "c.lock"):  # somebody reads it
        _write(shelf, "e", 3000)
    assert [entry.key for entry in shelf.entries()] == ["c", "d", "e"]
    assert sum(entry.num_bytes for entry in shelf.entries()) <= 12_000


def test_more_than_the_limit_is_never_kept(tmp_path: Path, night: Callable[..., Any]) -> None:
    """Catches everything else being thrown out for an entry that can't fit anyway."""
    shelf = Shelf(tmp_path, 5000)
    _write(shelf, "a", 2000)
    writing = _write(shelf, "b", 9000)
    assert "the limit is 0.0 MB" in str(writing.given_up)
    assert [entry.key for entry in shelf.entries()] == ["a"]
    used, values = night(shelf)
    assert used["origin"] == "live"
    assert "the limit is" in used["notes"][0]
    assert values == night(None)[1]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["a"]


def _full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("when", ["first file", "second file", "manifest", "rename", "before"])
def test_a_full_disk_costs_the_entry_only(
    when: str, night: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that fails, or half an entry, because the cache's disk is full."""
    real, count = Recorder._write, {"n": 0}

    def write(self: Recorder, path: Path, pieces: Any) -> tuple[str, int]:
        count["n"] += 1
        due = {"first file": count["n"] == 1, "second file": count["n"] == 2}
        if due.get(when, when == "manifest" and path.name == NAME):
            path.write_bytes(b"half")
            _full()
        return real(self, path, pieces)

    monkeypatch.setattr(Recorder, "_write", write)
    if when == "rename":
        monkeypatch.setattr(Shelf, "publish", _full)
    if when == "before":
        monkeypatch.setattr(Shelf, "free_bytes", lambda _: 100)
    shelf = Shelf(tmp_path)
    used, values = night(shelf)
    assert values == night(None)[1]
    assert used["origin"] == "live"
    words = "disk is nearly full" if when == "before" else "the disk is full"
    assert words in used["notes"][0]
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_folder_that_cant_be_written_is_told(night: Callable[..., Any], tmp_path: Path) -> None:
    """Catches a run that fails since its cache's place is a file."""
    place = tmp_path / "file"
    place.write_text("")
    used, _ = night(Shelf(place / "s"))
    assert used["origin"] == "live"
    assert "nothing can be kept" in used["notes"][0]


def test_what_reads_back_otherwise_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a store that is believed without ever having been read."""
    real = Packed.pieces

    def lossy(self: Packed) -> Any:
        halved = Packed(structure=self.structure)
        for name, tensor in self.tensors.items():
            halved.add(name, tensor.bfloat16().float())
        return real(halved)

    monkeypatch.setattr(Packed, "pieces", lossy)
    packed = Packed()
    packed.add("x", torch.full((4,), 1.0001))
    shelf = Shelf(tmp_path)
    with shelf.held("a"):
        writing = Recorder(shelf, "a", SOME, ABOUT)
        writing.put("batch-00000.safetensors", packed, 1.0)
    assert "does not read back" in str(writing.given_up)
    assert shelf.entries() == []


def test_who_writes_keeps_others_running_live(night: Callable[..., Any], tmp_path: Path) -> None:
    """Catches two writers of one entry, and a run that waits for another one for hours."""
    shelf = Shelf(tmp_path)
    key = night(shelf)[0]["key"]
    shelf.drop(key)
    with shelf.held(key) as lock:
        assert lock.mode == "exclusive"
        used, values = night(shelf)
    assert used["origin"] == "live"
    assert "another process records" in used["notes"][0]
    assert values == night(None)[1]


def test_readers_share_and_keep_an_entry(night: Callable[..., Any], tmp_path: Path) -> None:
    """Catches an eviction under a reader, and a reader that locks others out."""
    shelf = Shelf(tmp_path)
    key = night(shelf)[0]["key"]
    with shelf.held(key) as lock:
        lock.share()
        assert night(shelf)[0]["origin"] == "cache"
        assert not shelf.remove(key)
    assert shelf.remove(key)
    assert shelf.entries() == []


RECORD = """
    import sys, time
    from pathlib import Path
    import torch
    from quantwatch.capture.stored.packing import Packed
    from quantwatch.capture.stored.recorder import Recorder
    from quantwatch.capture.stored.shelf import Shelf

    shelf = Shelf(Path(sys.argv[1]))
    with shelf.held("a") as lock:
        recorder = Recorder(shelf, "a", {"what": "test"}, {})
        packed = Packed()
        packed.add("x", torch.zeros(100))
        recorder.put("batch-00000.safetensors", packed, 0.5)
        print(lock.mode, flush=True)
        time.sleep(60)
"""


def test_a_killed_writer_leaves_no_lock_and_no_entry(tmp_path: Path) -> None:
    """Catches an entry without its last batches, a lock for ever, and disk that nobody frees."""
    shelf = Shelf(tmp_path)
    command = [sys.executable, "-c", textwrap.dedent(RECORD), str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "exclusive\n"
        with shelf.held("a") as lock:
            assert lock.mode == "busy"
        child.send_signal(signal.SIGKILL)
        child.wait()
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    assert shelf.entries() == []
    assert list(tmp_path.glob(".unfinished-a-*"))
    _write(shelf, "b")  # another entry: the swept folder need not be its own
    assert not list(tmp_path.glob(".unfinished-*"))
    _write(shelf, "a")
    assert {entry.key for entry in shelf.entries()} == {"a", "b"}


def test_uses_and_time_of_use_are_kept(tmp_path: Path) -> None:
    """Catches an audit that starts over each night, and an order by names."""
    shelf = Shelf(tmp_path)
    _write(shelf, "a")
    before = _only(shelf).used_ns
    time.sleep(0.02)
    note_uses(tmp_path / "a", 7)
    assert _only(shelf).uses == 7
    assert _only(shelf).used_ns > before
    (tmp_path / "a" / "uses").write_text("many")
    assert _only(shelf).uses == 0


def test_folders_of_somebody_else_are_left_alone(tmp_path: Path) -> None:
    """Catches a cache that counts, or deletes, what it did not write."""
    (tmp_path / "photos").mkdir()
    shelf = Shelf(tmp_path, 100)
    assert shelf.entries() == []
    assert not shelf.make_room(200)
    assert (tmp_path / "photos").is_dir()
