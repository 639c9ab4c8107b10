"""Sketches as a pack and back: what the lens saw of the reference, beside the trace it saw it in.

They come to be while candidates are measured, so they have a file of their own. An audit makes
those of its batch again: they follow from the trace, by a product that no key describes in full
(the compiler that built the native lens is none of its ingredients).
"""

from quantwatch.capture.sketches import LayerSketch
from quantwatch.capture.stored.damage import DamagedError
from quantwatch.capture.stored.packing import Packed
from quantwatch.domain import Scope
from quantwatch_kernels.compare.sketch import PER_ROW, Sketch


def pack_sketches(sketches: dict[int, LayerSketch]) -> Packed:
    """Return sketches, by the number of ids they are over, as what is written."""
    packed = Packed()
    for width, each in sketches.items():
        for name in PER_ROW:
            packed.add(f"{name} of {width}", getattr(each.sketch, name))
    packed.structure = {
        "sketches": [
            [w, s.sketch.num_top, s.sketch.width, list(s.scopes)] for w, s in sketches.items()
        ]
    }
    return packed


def unpack_sketches(packed: Packed) -> dict[int, LayerSketch]:
    """Return what was packed. Raises DamagedError when it is something else."""
    try:
        records = packed.structure["sketches"]
        return {width: _sketch(packed, width, *rest) for width, *rest in records}
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError("it holds no sketches") from error


def _sketch(packed: Packed, width: int, num_top: int, ids: int, scopes: list[str]) -> LayerSketch:
    columns = {name: packed[f"{name} of {width}"] for name in PER_ROW}
    return LayerSketch(tuple(map(Scope, scopes)), Sketch(**columns, num_top=num_top, width=ids))
