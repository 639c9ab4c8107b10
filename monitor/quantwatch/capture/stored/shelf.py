"""The folder of all entries: who holds which, how much they take, which one goes first.

Torch is not needed here: `quantwatch cache` looks at it, too. An entry is complete or absent: it is
written under another name and renamed. Whoever is killed leaves a folder `.unfinished-…`, which the
next one to record removes.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from quantwatch.capture.stored.damage import DamagedError
from quantwatch.capture.stored.lock import Lock, locked
from quantwatch.capture.stored.manifest import NAME, Manifest

DEFAULT_LIMIT_BYTES = 20 * 10**9
SPARE_BYTES = 2 * 10**9
"""What stays free of the disk: below it nothing is measured at all (`store.disk`)."""
_USES = "uses"
_UNFINISHED, _DROPPED = ".unfinished-", ".dropped-"


@dataclass(frozen=True, slots=True)
class Entry:
    """One complete entry."""

    key: str
    folder: Path
    num_bytes: int
    """On disk, of all its files."""
    used_ns: int
    """When it was read or written last, nanoseconds since 1970."""

    @property
    def uses(self) -> int:
        """How many nights have read it."""
        with suppress(OSError, ValueError):
            return int((self.folder / _USES).read_text("ascii"))
        return 0

    def manifest(self) -> Manifest:
        """Read its manifest. Raises DamagedError."""
        return Manifest.read(self.folder)


@dataclass(frozen=True, slots=True)
class Shelf:
    """Where the entries are, and how many bytes they may take together."""

    folder: Path
    limit_bytes: int = DEFAULT_LIMIT_BYTES

    @contextmanager
    def held(self, key: str) -> Iterator[Lock]:
        """Lock an entry, whether it exists or not. Raises OSError when nothing can be written."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(self.folder / f"{key}.lock") as lock:
            yield lock

    def find(self, key: str) -> Entry | None:
        """Return an entry, None when it isn't there or not readable."""
        folder = self.folder / key
        try:
            sizes = [path.stat().st_size for path in folder.iterdir()]
            used = folder / _USES
            return Entry(key, folder, sum(sizes), used.stat().st_mtime_ns)
        except OSError:
            # Without the note of its uses it was not ours, or goes right now.
            return None

    def entries(self) -> list[Entry]:
        """Return all entries, the least recently used first."""
        with suppress(OSError):
            names = [path.name for path in self.folder.iterdir() if path.is_dir()]
            found = [self.find(name) for name in names if not name.startswith(".")]
            return sorted((e for e in found if e is not None), key=lambda e: (e.used_ns, e.key))
        return []

    def begin(self, key: str) -> Path:
        """Return a new folder to write in, after removing what killed processes left behind.

        The caller holds the entry exclusively.
        """
        self._sweep(key)
        return Path(tempfile.mkdtemp(prefix=f"{_UNFINISHED}{key}-", dir=self.folder))

    def publish(self, work: Path, key: str) -> None:
        """Make a folder that is complete the entry. Raises OSError."""
        note_uses(work, 0)
        # Not synced to the disk: what a loss of power spoils has another checksum.
        work.rename(self.folder / key)

    def drop(self, key: str) -> None:
        """Remove an entry; whoever reads it right now finds its files missing."""
        aside = self.folder / f"{_DROPPED}{key}-{os.getpid()}"
        with suppress(OSError):
            (self.folder / key).rename(aside)
        for path in (aside, self.folder / key):
            shutil.rmtree(path, ignore_errors=True)

    def make_room(self, wanted: int) -> bool:
        """Drop the least recently used until `wanted` bytes fit; False if they can't."""
        if wanted > self.limit_bytes:
            return False
        entries = self.entries()
        taken = sum(entry.num_bytes for entry in entries)
        for entry in entries:
            if taken + wanted <= self.limit_bytes:
                break
            if self.remove(entry.key):
                taken -= entry.num_bytes
        return taken + wanted <= self.limit_bytes

    def remove(self, key: str) -> bool:
        """Drop an entry unless somebody reads or writes it; say whether it is gone."""
        with self.held(key) as lock:
            if lock.mode != "exclusive":
                return False
            self.drop(key)
        return not (self.folder / key).exists()

    def free_bytes(self) -> int:
        """Return what may still be written to the disk, beyond what must stay free."""
        return shutil.disk_usage(self.folder).free - SPARE_BYTES

    def _sweep(self, ours: str) -> None:
        for path in self.folder.glob(f"{_DROPPED}*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            key = path.name.removeprefix(_UNFINISHED).rpartition("-")[0]
            if key == ours:
                shutil.rmtree(path, ignore_errors=True)
                continue
            with suppress(OSError), locked(self.folder / f"{key}.lock") as lock:
                if lock.mode == "exclusive":
                    shutil.rmtree(path, ignore_errors=True)


def note_uses(folder: Path, count: int) -> None:
    """Write down how often an entry was used, and by the file's time when. Raises OSError."""
    beside = folder / f"{_USES}.{os.getpid()}"
    beside.write_text(f"{count}\n", "ascii")
    beside.chmod(0o600)
    beside.replace(folder / _USES)


def refuse_foreign(manifest: Manifest, ingredients: object, folder: Path) -> None:
    """Raise DamagedError when an entry was recorded of something else, or lacks a file."""
    if manifest.ingredients != ingredients:
        raise DamagedError(f"{NAME} is of another reference, suite, plan or machine")
    manifest.refuse_missing(folder)
