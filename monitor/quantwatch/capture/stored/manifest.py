"""What an entry consists of: `manifest.json`, with the checksum of every file and of itself."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantwatch.capture.stored.damage import DamagedError
from quantwatch.domain import Json
from quantwatch.telemetry import canonical_json, canonical_sha

NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record of one entry."""

    ingredients: Json
    """What the numbers depend on; the entry's name is the digest of it."""
    about: Json
    """For people: which reference and suite, how many tokens and batches, when."""
    facts: Json
    """What a run reports of its reference besides the traces."""
    files: dict[str, tuple[str, int]]
    """File name → SHA-256 and bytes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files but this one."""
        return sum(size for _, size in self.files.values())

    def text(self) -> str:
        """Return the file's content."""
        content = json.loads(canonical_json(asdict(self)))
        return canonical_json({"sha256": canonical_sha(content), "content": content})

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read an entry's manifest. Raises DamagedError when it isn't what was written."""
        try:
            found: Any = json.loads((folder / NAME).read_text("utf-8"))
            content = found["content"]
            if found["sha256"] != canonical_sha(content):
                raise DamagedError(f"{NAME} is not what was written: its checksum differs")
            files = {name: (sha, size) for name, (sha, size) in content.pop("files").items()}
            return cls(files=files, **content)
        except OSError as error:
            raise DamagedError(f"{NAME}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{NAME} is garbled") from error

    def refuse_missing(self, folder: Path) -> None:
        """Raise DamagedError when a file isn't there or has another size; nothing is read."""
        for name, (_, size) in self.files.items():
            try:
                found = (folder / name).stat().st_size
            except OSError as error:
                raise DamagedError(f"{name}: {error.strerror}") from error
            if found != size:
                raise DamagedError(f"{name} has {found} bytes, {size} were written")

    def read_file(self, folder: Path, name: str) -> NDArray[np.uint8]:
        """Return a file's bytes, which are those the checksum was taken of.

        Raises DamagedError when they differ from what was written.
        """
        if name not in self.files:
            raise DamagedError(f"{name} is not in the manifest")
        sha, size = self.files[name]
        data = np.empty(size, np.uint8)
        try:
            with (folder / name).open("rb", buffering=0) as file:
                got = _fill(file, data.data)
                more = file.read(1)
        except OSError as error:
            raise DamagedError(f"{name}: {error.strerror}") from error
        if got != size or more:
            raise DamagedError(f"{name} has {'more' if more else got} bytes, {size} were written")
        if hashlib.sha256(data.data).hexdigest() != sha:
            raise DamagedError(f"{name} is not what was written: its checksum differs")
        return data


def _fill(file: Any, room: memoryview) -> int:
    """Read until the memory is full or the file ends: one call may bring less."""
    got = 0
    while got < len(room) and (count := file.readinto(room[got:])):
        got += count
    return got
