"""What pictures of lines and points are given: one candidate each, chosen by `index` in color."""

from collections.abc import Sequence
from dataclasses import dataclass, field

Value = float | None
"""None is "not measured"; NaN and infinities were measured."""


@dataclass(frozen=True, slots=True)
class LayerLine:
    """One candidate's value per place."""

    name: str
    index: int
    values: Sequence[Value]
    strong: bool = False
    marked: frozenset[int] = field(default_factory=frozenset)
    """Places with an alert: drawn with a red ring."""
    culprit: int | None = None
    """The place that gets the annotation `label`."""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Guides:
    """Places that a picture over the layers points out: what broke, and what the reader chose."""

    culprit: str | None = None
    chosen: str | None = None


NO_GUIDES = Guides()


@dataclass(frozen=True, slots=True)
class Blamed:
    """One candidate's places, with both errors of each."""

    name: str
    index: int
    places: Sequence[str]
    isolated: Sequence[Value]
    propagated: Sequence[Value]
    strong: bool = False
    culprit: int | None = None


@dataclass(frozen=True, slots=True)
class Sparkline:
    """One candidate's value per run, oldest first; None where the run has none."""

    index: int
    values: Sequence[Value]


@dataclass(frozen=True, slots=True)
class Guide:
    """What one candidate is compared with: a dashed line, and the band of what counts as equal.

    All three are values of the metric on the picture, in its unit.
    """

    index: int
    baseline: float
    low: float
    high: float
