"""How weights are quantized: a value, not a string and two booleans."""

import re
from dataclasses import dataclass

from quantwatch_kernels.formats import INT4, INT8, WeightFormat

__all__ = ["Granularity", "PerChannel", "PerGroup", "Recipe"]


@dataclass(frozen=True, slots=True)
class PerChannel:
    """One scale per output channel (row of the weight)."""

    def group_size(self, columns: int) -> int:
        """Return the number of inputs that share a scale."""
        return max(1, columns)


@dataclass(frozen=True, slots=True)
class PerGroup:
    """One scale per `size` neighbouring inputs of a row; the last group may be shorter."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ValueError(f"group size must be at least 2; it is {self.size}.")

    def group_size(self, columns: int) -> int:  # noqa: ARG002 — the same question as PerChannel's
        """Return the number of inputs that share a scale."""
        return self.size


Granularity = PerChannel | PerGroup


@dataclass(frozen=True, slots=True)
class Recipe:
    """Weight-only quantization of every linear layer that `exclude` doesn't match."""

    weights: WeightFormat
    granularity: Granularity
    exclude: tuple[str, ...] = ("head", "router")
    """Globs over scopes and over their last component. Norms and embeddings are never quantized."""

    @property
    def name(self) -> str:
        """Name that `named` understands: int8-channel, int4-g64."""
        channel = isinstance(self.granularity, PerChannel)
        suffix = "channel" if channel else f"g{self.granularity.group_size(0)}"
        return f"{self.weights.name}-{suffix}"

    @classmethod
    def named(cls, name: str) -> "Recipe":
        """Return the recipe called int8-channel, int4-channel, int8-gN or int4-gN.

        Raises ValueError naming what is allowed.
        """
        found = re.fullmatch(r"(int8|int4)-(?:channel|g(\d+))", name)
        if found is None:
            raise ValueError(
                f"unknown recipe {name!r}; allowed are int8-channel, int4-channel and "
                "int8-gN or int4-gN with a group size N, e.g. int4-g64."
            )
        weights = {"int8": INT8, "int4": INT4}[found[1]]
        return cls(weights, PerChannel() if found[2] is None else PerGroup(int(found[2])))

    def to_json(self) -> dict[str, object]:
        """Return what makes two recipes the same, the definition of the code range included."""
        channel = isinstance(self.granularity, PerChannel)
        return {
            "weights": self.weights.name,
            "range": [self.weights.qmin, self.weights.qmax],
            "granularity": "channel" if channel else "group",
            "group_size": None if channel else self.granularity.group_size(0),
            "exclude": list(self.exclude),
        }
