"""Digests, ids and the record of the environment."""

import errno
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantwatch.errors import ResourceError, UserError
from quantwatch.telemetry import (
    canonical_sha,
    check_writable,
    environment,
    gpus,
    new_run_id,
    write_whole,
)


def test_digests_ignore_the_order_of_keys_and_nothing_else() -> None:
    """Catches a digest that drifts with dict order, or that two values share."""
    assert canonical_sha({"a": 1, "b": [2.5, None]}) == canonical_sha({"b": [2.5, None], "a": 1})
    assert canonical_sha({"a": 1}) != canonical_sha({"a": "1"})
    # printf '"ä"' | sha256sum
    assert canonical_sha("ä") == "1e5f2b0a7756f4b45eed5d71769ae579e023f70efba74bd855057914c7e16d40"


def test_nan_has_no_digest() -> None:
    """Catches NaN in a canonical form: no other JSON reader would accept it."""
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_sha(float("nan"))


def test_run_ids_sort_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ids that sort wrongly when the random part decides."""
    monkeypatch.setattr(os, "urandom", lambda n: b"\xff" * n)
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    early = new_run_id()
    monkeypatch.setattr(os, "urandom", lambda n: b"\x00" * n)
    monkeypatch.setattr(time, "time_ns", lambda: 10**18 + 10**6)
    assert early < new_run_id()
    assert len(early) == 26
    # 10¹² in base 32, ten digits: the millisecond of the fake clock.
    assert early == "00X3AAA400" + "Z" * 16


def test_the_environment_is_plain_json() -> None:
    """Catches a record that can't be stored."""
    record = environment()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["libraries"]["transformers"].startswith("5.")


class FakeNvml:
    """NVML as it fails in the field: no library, not supported, or two good GPUs."""

    class NVMLError(Exception):
        pass

    def __init__(self, fails_at: str | None = None) -> None:
        self.fails_at = fails_at
        self.shut = False

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> object:
            if name == self.fails_at:
                raise self.NVMLError("Not Supported")
            if name == "nvmlShutdown":
                self.shut = True
            return 2 if name == "nvmlDeviceGetCount" else f"{name}{arguments}"

        return call


@pytest.mark.parametrize(
    "fails_at",
    ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName", "nvmlSystemGetDriverVersion"],
)
def test_gpu_trouble_is_a_reason_not_a_failure(
    monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    """Catches a check that dies, or a 0, because telemetry is not supported."""
    fake = FakeNvml(fails_at)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert gpus() == "not available: Not Supported"
    assert fake.shut == (fails_at != "nvmlInit")


def test_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches indices taken for identities: GPUs are told apart by UUID."""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    found = gpus()
    assert isinstance(found, list)
    assert len({gpu["uuid"] for gpu in found}) == 2


def test_a_missing_library_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an ImportError on machines without the package."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert str(gpus()).startswith("not available: ")


def test_cpu_record_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches torch imported for a record."""
    fake = SimpleNamespace(
        backends=SimpleNamespace(cpu=SimpleNamespace(get_cpu_capability=lambda: "AVX2")),
        get_num_threads=lambda: 3,
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert (environment()["cpu"]["capability"], environment()["cpu"]["threads"]) == ("AVX2", 3)
    monkeypatch.delitem(sys.modules, "torch")
    assert "threads" not in environment()["cpu"]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (errno.ENOSPC, ResourceError),
        (errno.EDQUOT, ResourceError),
        (errno.EFBIG, ResourceError),
        (errno.EROFS, UserError),
        (errno.EACCES, UserError),
    ],
)
def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
) -> None:
    """Catches half a report after a full disk, and a disk limit taken for a wrong path."""
    path = tmp_path / "report.md"
    write_whole(path, "before")

    def fail(self: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(error, match=r"report\.md: cannot be written: "):
            write_whole(path, "after")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.md"]
    assert path.read_text() == "before"


def test_a_link_is_followed_and_kept(tmp_path: Path) -> None:
    """Catches a link that is replaced by a file, which its owner then never sees change."""
    (tmp_path / "real.md").write_text("before")
    link = tmp_path / "link.md"
    link.symlink_to("real.md")
    check_writable(link)
    write_whole(link, "after")
    assert link.is_symlink()
    assert (tmp_path / "real.md").read_text() == "after"
