"""What an entry consists of: `manifest.json`, with the checksum of every file and of itself."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantwatch.capture.stored.checked import CheckedFile
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

    def open_file(self, folder: Path, name: str) -> CheckedFile:
        """Open a file to be read whole. Raises DamagedError when it isn't there."""
        if name not in self.files:
            raise DamagedError("it is not in the manifest")
        return CheckedFile(folder / name, *self.files[name])
