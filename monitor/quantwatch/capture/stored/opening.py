"""Decide whether tonight's reference is read, recorded or only run."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from quantwatch.capture.course import Course
from quantwatch.capture.report import CaptureReport
from quantwatch.capture.stored.audit import Auditor
from quantwatch.capture.stored.damage import DamagedError
from quantwatch.capture.stored.key import ingredients
from quantwatch.capture.stored.lock import Lock
from quantwatch.capture.stored.manifest import Manifest
from quantwatch.capture.stored.parts import CONDITIONS, batch_part, file_of, floor_part, sketch_part
from quantwatch.capture.stored.reading import Kept
from quantwatch.capture.stored.recorder import Recorder
from quantwatch.capture.stored.shelf import Entry, Shelf, note_uses, refuse_foreign
from quantwatch.capture.stored.use import Use
from quantwatch.domain import Json
from quantwatch.models.loaded import LoadedModel
from quantwatch.telemetry import canonical_sha


@dataclass(frozen=True, slots=True)
class Night:
    """What an entry is opened for."""

    name: str
    """Of the reference."""
    reference: LoadedModel
    course: Course
    report: CaptureReport
    use: Use


@contextmanager
def opened(shelf: Shelf | str | None, night: Night) -> Iterator[Kept | Recorder | None]:
    """Hold the entry of a night: to read, to record, or None when the reference is only run.

    An entry is audited before it is given out. What was recorded is removed unless it was
    completed inside.
    """
    night.use.is_wanted = shelf is not None
    if isinstance(shelf, Shelf) and night.course.long:
        shelf = "prompts that go in chunks are not kept: an audit could compute no chunk alone"
    if not isinstance(shelf, Shelf):
        night.use.notes += [] if shelf is None else [shelf]
        yield None
        return
    with ExitStack() as stack:
        found = _open(shelf, night, stack)
        try:
            yield found
        finally:
            if isinstance(found, Recorder):
                found.abandon("the run ended before it was complete")
                _note_recorded(found, night)


def _open(shelf: Shelf, night: Night, stack: ExitStack) -> Kept | Recorder | None:
    depends_on = ingredients(night.reference, night.course)
    key = night.use.key = canonical_sha(depends_on)
    try:
        lock = stack.enter_context(shelf.held(key))
    except OSError as error:
        night.use.notes.append(f"nothing can be kept in {shelf.folder}: {error.strerror}")
        return None
    if lock.mode == "busy":
        night.use.notes.append("another process records this reference right now")
        return None
    entry = shelf.find(key)
    if entry is not None:
        try:
            return _read(shelf, entry, night, depends_on, lock)
        except DamagedError as error:
            shelf.drop(key)
            why = f"the stored reference {key[:12]} was damaged ({error}) and is dropped"
            night.use.warnings.append(why)
    elif lock.mode == "exclusive":
        shelf.drop(key)  # half an entry, or somebody else's folder under its name
    if lock.mode != "exclusive":
        night.use.notes.append("others may be reading this entry: nothing is recorded tonight")
        return None
    return Recorder(shelf, key, depends_on, about(night))


def _read(shelf: Shelf, entry: Entry, night: Night, depends_on: Json, lock: Lock) -> Kept | None:
    """Return an entry whose audit found nothing; None when it is dropped, or somebody writes it."""
    manifest = Manifest.read(entry.folder)
    refuse_foreign(manifest, depends_on, entry.folder)
    if lock.mode == "exclusive":
        lock.share()
    if lock.mode == "busy":
        night.use.notes.append("another process took the stored reference just now")
        return None
    kept, uses = Kept(shelf, entry.key, manifest, night.use), entry.uses
    with night.report.timed("audit"):
        _audit(kept, night, uses)
    if not kept.is_whole:
        return None
    with suppress(OSError):  # a folder that can be read only is read all the same
        note_uses(entry.folder, uses + 1)
    night.use.origin, night.use.uses = "cache", uses + 1
    night.use.num_bytes, night.use.num_tokens = manifest.num_bytes, manifest.about["num_tokens"]
    night.use.recorded_at = manifest.about["recorded_at"]
    return kept


def _audit(kept: Kept, night: Night, uses: int) -> None:
    """Compute a part again before anything is measured; a difference drops the entry."""
    with Auditor.of(night.name, night.reference, night.course) as auditor:
        number = auditor.turn(uses)
        stored = kept.read(CONDITIONS if number is None else batch_part(number))
        if stored is None:
            return
        if number is None:
            night.use.audit = auditor.conditions(stored)
        else:
            has_floor = night.course.has_floor(night.course.batches[number])
            floor = kept.read(floor_part(number)) if has_floor else None
            sketch = sketch_part(number)
            sketches = kept.read(sketch) if file_of(sketch) in kept.manifest.files else None
            if not kept.is_whole:
                return
            found = auditor.batch(number, stored, floor, sketches)
            night.use.audit, night.use.floor_logit_kl = found
    if not night.use.audit.is_equal:
        kept.differs(night.use.audit)


def _note_recorded(recorder: Recorder, night: Night) -> None:
    if not recorder.is_complete:
        night.use.notes.append(f"not recorded: {recorder.given_up}")
        return
    night.use.origin, night.use.uses = "recorded", 0
    night.use.num_bytes, night.use.num_tokens = recorder.num_bytes, night.course.suite.num_tokens


def about(night: Night) -> Json:
    """Return what people are told of an entry."""
    source, suite = night.reference.variant.source, night.course.suite
    return {
        "reference": source.get("model") or source.get("factory") or night.reference.variant.name,
        "dtype": str(night.reference.dtype).removeprefix("torch."),
        "suite": suite.name,
        "num_tokens": suite.num_tokens,
        "num_batches": len(night.course.batches),
    }
