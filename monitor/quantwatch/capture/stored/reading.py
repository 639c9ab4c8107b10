"""Read an entry; from the first damage on there is none."""

from quantwatch.capture.stored.damage import DamagedError
from quantwatch.capture.stored.manifest import Manifest
from quantwatch.capture.stored.packing import Packed
from quantwatch.capture.stored.parts import file_of
from quantwatch.capture.stored.shelf import Shelf
from quantwatch.capture.stored.use import Audit, Use


class Kept:
    """One complete entry that is being read. The caller holds it shared."""

    def __init__(self, shelf: Shelf, key: str, manifest: Manifest, use: Use) -> None:
        self.manifest = manifest
        self.is_whole = True
        self._shelf = shelf
        self._key = key
        self._use = use

    def read(self, part: str) -> Packed | None:
        """Return a part, None when it can't be had: the entry is dropped then, and why is noted."""
        if not self.is_whole:
            return None
        name = file_of(part)
        try:
            with self.manifest.open_file(self._shelf.folder / self._key, name) as file:
                return Packed.read(file)
        except DamagedError as error:
            self.damaged(f"{name}: {error}")
            return None

    def damaged(self, why: str) -> None:
        """Drop the entry and note why; what was read before was checked and counts."""
        self._drop(f"was damaged ({why}) and is dropped; the reference was run from there on")

    def differs(self, audit: Audit) -> None:
        """Drop the entry since an audit found other numbers than are stored."""
        self._drop(
            f"is not what this machine computes: {audit.num_differing:,} of "
            f"{audit.num_values:,} numbers of {audit.part} differ, by up to {audit.largest}, first "
            f"at {audit.first}. It is dropped and the reference was run"
        )

    def lacks_sketches(self) -> None:
        """Note, once, that a candidate's vocabulary is another one than the recorded night's."""
        why = "estimates of another number of ids than were recorded: sketched anew every night"
        if why not in self._use.notes:
            self._use.notes.append(why)

    def _drop(self, why: str) -> None:
        self.is_whole = False
        self._shelf.drop(self._key)
        self._use.warnings.append(f"the stored reference {self._key[:12]} {why}")
