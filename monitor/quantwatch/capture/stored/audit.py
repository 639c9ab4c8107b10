"""The self-audit: each night that reads computes one part again, in turn, and compares the bits.

Checksums find what a disk does. This finds what they can't: a machine, a driver or a library that
computes something else although everything in the key is equal.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from quantwatch.capture.batches import Batch
from quantwatch.capture.conditions import Kept
from quantwatch.capture.course import Course
from quantwatch.capture.floor import Floor
from quantwatch.capture.layout import Layout, lay_out
from quantwatch.capture.outputs import Head
from quantwatch.capture.probe import Probe
from quantwatch.capture.sketches import sketch_layers
from quantwatch.capture.stored.packing import Difference, Packed, difference
from quantwatch.capture.stored.parts import CONDITIONS, batch_part
from quantwatch.capture.stored.seen import pack_seen
from quantwatch.capture.stored.sketches import pack_sketches, unpack_sketches
from quantwatch.capture.stored.traces import pack_trace, unpack_trace
from quantwatch.capture.stored.use import Audit
from quantwatch.capture.trace import LiveTraceSource, Trace
from quantwatch.models.loaded import LoadedModel
from quantwatch_kernels.compare.output import output_statistics

_HEAD_ROWS = 8


class Auditor:
    """Computes parts of a night live, under hooks of its own: no count of the run sees it."""

    def __init__(self, probe: Probe, course: Course) -> None:
        self._course = course
        self._source = LiveTraceSource(probe)
        self._floor = Floor(probe, course)

    @classmethod
    @contextmanager
    def of(cls, name: str, model: LoadedModel, course: Course) -> Iterator["Auditor"]:
        """Hook a model for as long as the body lasts."""
        with Probe(name, model) as probe:
            yield cls(probe, course)

    def turn(self, uses: int) -> int | None:
        """Return whose turn it is after so many uses: a batch's number, None for the conditions."""
        count = len(self._course.batches)
        number = uses % (count + (self._course.conditions is not None))
        return number if number < count else None

    def conditions(self, stored: Packed) -> Audit:
        """Hold the noise floor's other conditions against what was stored."""
        seen = Kept()
        said = self._floor.conditions(seen)
        return _audit(CONDITIONS, [difference(pack_seen(seen.observations, said), stored)])

    def batch(
        self, number: int, stored: Packed, floor: Packed | None, sketches: Packed | None
    ) -> tuple[Audit, float]:
        """Hold a batch, with its noise floor and sketches if it has any, against what was stored.

        Return the store's floor, too: the largest KL in nats at some scored positions.
        """
        course, batch = self._course, self._course.batches[number]
        layout = lay_out(batch, course.suite.hash, course.plan)
        rows = course.linear_rows(batch, layout)
        trace = self._source.trace(batch, rows)
        found = [difference(pack_trace(trace, rows), stored)]
        if floor is not None:
            seen = Kept()
            said = self._floor.beside(trace, seen)
            found.append(difference(pack_seen(seen.observations, said), floor))
        if sketches is not None:
            found.append(difference(self._sketched(trace, layout, sketches), sketches))
        kl = self._store_floor(trace, unpack_trace(stored, batch, rows), layout)
        return _audit(_name(number, batch), found), kl

    def _sketched(self, trace: Trace, layout: Layout, stored: Packed) -> Packed:
        """Read the batch's layers in full again, over as many ids as is stored."""
        readout = self._source.head(trace.head_input).readout
        made = {
            width: sketch_layers(
                replace(readout, width=width), trace.taps, layout, self._course.plan
            )
            for width in unpack_sketches(stored)
        }
        return pack_sketches(made)

    def _store_floor(self, live: Trace, stored: Trace, layout: Layout) -> float:
        """Return the largest KL between logits of the live and of the stored head input."""
        ours, theirs = self._source.head(live.head_input), self._source.head(stored.head_input)
        return head_floor(ours, theirs, layout)


def head_floor(live: Head, stored: Head, layout: Layout) -> float:
    """Return the largest KL in nats at some scored rows, infinite where one isn't a number."""
    step = max(1, len(layout.rows) // _HEAD_ROWS)
    rows, targets = layout.rows[::step], layout.targets[::step]
    one = live.logits(rows, into="reference logits")
    other = stored.logits(rows, into="candidate logits")
    if _same(one, other):  # not finite either side, perhaps: nothing is lost all the same
        return 0.0
    found = output_statistics(
        one, other, targets.to(one.device), reference_dtype=live.dtype, candidate_dtype=live.dtype
    )
    return float(found.logit_kl.nan_to_num(nan=math.inf).max())


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _name(number: int, batch: Batch) -> str:
    isolated = ", isolated" if batch.isolated else ""
    return f"{batch_part(number)} ({batch.num_tokens} tokens{isolated})"


def _audit(part: str, found: list[Difference]) -> Audit:
    largest = max(each.largest for each in found)
    return Audit(
        part,
        sum(each.num_values for each in found),
        sum(each.num_differing for each in found),
        largest if math.isfinite(largest) else "not finite",
        next((each.first for each in found if each.first is not None), None),
    )
