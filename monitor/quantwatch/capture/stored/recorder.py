"""Write an entry while the reference runs; whatever goes wrong, the run goes on without it."""

import hashlib
import shutil
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

from quantwatch.capture.stored.checked import CheckedFile
from quantwatch.capture.stored.damage import DamagedError
from quantwatch.capture.stored.manifest import NAME, Manifest
from quantwatch.capture.stored.packing import Packed, difference
from quantwatch.capture.stored.shelf import Shelf
from quantwatch.domain import Json
from quantwatch.telemetry import disk_is_full

_TELLING = 0.1
"""Share of the tokens from which on the rest is reckoned from them: isolated ones take more."""


class Recorder:
    """One entry that is being written. The caller holds it exclusively."""

    def __init__(self, shelf: Shelf, key: str, ingredients: Json, about: Json) -> None:
        self.key = key
        self.given_up: str | None = None
        """Why nothing is recorded any more."""
        self.is_complete = False
        self.read_back: Packed | None = None
        """The first file as it came back from the disk, equal bit for bit."""
        self.num_bytes = 0
        self.seconds = 0.0
        self._shelf = shelf
        self._record = ingredients, about
        self._files: dict[str, tuple[str, int]] = {}
        self._work: Path | None = None

    def put(self, name: str, packed: Packed, share: float) -> None:
        """Write a file; with it, `share` of all tokens are done."""
        if self.given_up is not None:
            return
        start = perf_counter()
        try:
            self._put(name, packed, share)
        except OSError as error:
            self._fail(error)
        except DamagedError as error:
            self.abandon(f"it does not read back as it was written: {error}")
        finally:
            self.seconds += perf_counter() - start

    def commit(self, facts: Json) -> None:
        """Write the manifest and make the entry appear."""
        if self.given_up is not None or self._work is None:
            return
        ingredients, about = self._record
        about = {**about, "recorded_at": datetime.now(UTC).isoformat(timespec="seconds")}
        manifest = Manifest(ingredients, about, facts, self._files)
        try:
            self._write(self._work / NAME, [manifest.text().encode()])
            self._shelf.publish(self._work, self.key)
            self._work, self.is_complete = None, True
        except OSError as error:
            self._fail(error)

    def abandon(self, reason: str) -> None:
        """Remove what was written, unless the entry is complete."""
        if self.given_up is None and not self.is_complete:
            self.given_up = reason
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)
            self._work = None

    def _put(self, name: str, packed: Packed, share: float) -> None:
        if self._work is None:
            self._work = self._shelf.begin(self.key)
        size = packed.num_bytes
        expected = self.num_bytes + size
        if share >= _TELLING:
            expected = int(expected / share)
        if (reason := self._no_room(expected, size)) is not None:
            self.abandon(reason)
            return
        path = self._work / name
        self._files[name] = self._write(path, packed.pieces())
        self.num_bytes += self._files[name][1]
        if len(self._files) == 1:
            with CheckedFile(path, *self._files[name]) as file:
                self.read_back = Packed.read(file)
            if (lost := difference(packed, self.read_back)).num_differing:
                raise DamagedError(f"{lost.first} in {name}")

    def _no_room(self, expected: int, now: int) -> str | None:
        limit = self._shelf.limit_bytes
        if not self._shelf.make_room(expected):
            return f"it would take about {_mb(expected)}, the limit is {_mb(limit)}"
        if self._shelf.free_bytes() < max(now, expected - self.num_bytes):
            return f"it would take about {_mb(expected)}, and the disk is nearly full"
        return None

    def _fail(self, error: OSError) -> None:
        words = "the disk is full" if disk_is_full(error) else f"{error.strerror or error}"
        self.abandon(f"it could not be written: {words}")

    def _write(self, path: Path, pieces: Iterable[bytes | memoryview]) -> tuple[str, int]:
        """Write a file and return its SHA-256 and bytes."""
        digest, size = hashlib.sha256(), 0
        with path.open("xb") as file:
            path.chmod(0o600)
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                size += len(piece)
        return digest.hexdigest(), size


def _mb(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
