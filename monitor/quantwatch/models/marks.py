"""What a model's files looked like when it was loaded: fingerprint and numbers are of these.

Weights on a CPU are not copied: torch computes in the file's mapping. Whoever writes into the file
afterwards (an export that goes to the same place) changes the model in the middle of a night, and
nothing else would say so. A file that is replaced by renaming leaves the mapping as it is, and may
be replaced while a model is measured, but not while it is loaded: which of the two was read, and
which was hashed?
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from quantwatch.errors import ModelError


class _Mark(NamedTuple):
    place: tuple[int, int]
    """Device and inode: another file has another one."""
    size: int
    written_ns: int

    @classmethod
    def of(cls, path: Path) -> "_Mark | None":
        """Return how a file looks now, None where there is none."""
        try:
            stat = path.stat()
        except OSError:
            return None
        return cls((stat.st_dev, stat.st_ino), stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Marks:
    """Files, and how they looked."""

    files: tuple[tuple[Path, _Mark | None], ...] = ()

    @classmethod
    def of(cls, paths: Iterable[Path]) -> Self:
        """Look at files that are about to be read."""
        return cls(tuple((path, _Mark.of(path)) for path in paths))

    def of_weights(self) -> Self:
        """Return those of weights: a configuration is read once."""
        return type(self)(tuple(each for each in self.files if each[0].suffix != ".json"))

    def require_same(self) -> None:
        """Raise ModelError naming a file that is not the one that it was, in whatever way."""
        for path, before in self.files:
            now = _Mark.of(path)
            # Some network file systems number one file anew: its inode alone says nothing.
            if (now and now[1:]) != (before and before[1:]):
                raise ModelError(f"{path} changed while it was loaded: run it again")

    def require_unwritten(self) -> None:
        """Raise ModelError naming a file that was written to; another in its place is none."""
        for path, before in self.files:
            now = _Mark.of(path)
            if before and now and now.place == before.place and now != before:
                raise ModelError(
                    f"{path} was written to while the model was measured, whose weights are in it: "
                    "run it again, and replace a checkpoint by renaming"
                )


NO_FILES = Marks()
