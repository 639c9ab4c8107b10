"""What bounds a kernel: memory, compute or latency, over measured ceilings.

A kernel of F FLOPs and B bytes that takes t seconds reaches B ÷ t of the measured bandwidth and
F ÷ t of the measured FLOP rate. If neither share reaches 60 % (`THRESHOLD`, the tool's own guide),
it waits: latency-bound, whatever its intensity. Otherwise the larger share names the bound; equal
shares lie on the ridge and count as memory-bound, as there more bandwidth helps first. Two classes
without the third would call every small launch memory-bound.

attainable = min(peak, F ÷ B · bandwidth) is the roof; `roof_share` is what was reached of it. Time
is measured, bytes are counted (Nsight) or the least possible (profiler traces), never guessed from
time. Shares beyond 110 % mean ceilings that were not measured on this machine and are refused; but
for bytes that a cache may have served (`cached`), whose share may be any number.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite
from typing import Literal, NamedTuple

__all__ = ["THRESHOLD", "Bound", "Ceilings", "KernelTime", "Verdict", "classify", "merged"]

THRESHOLD = 0.6
_IMPOSSIBLE = 1.1
Bound = Literal["memory", "compute", "latency"]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured bytes and FLOPs per second. Raises ValueError unless both are positive."""

    bytes_per_s: float
    flops_per_s: float

    def __post_init__(self) -> None:
        """Check both."""
        for name in self.__slots__:
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite; it is {value!r}.")

    @property
    def ridge(self) -> float:
        """FLOPs per byte from which on a kernel can reach the FLOP rate."""
        return self.flops_per_s / self.bytes_per_s


class KernelTime(NamedTuple):
    """The launches of one kernel on one shape, summed."""

    name: str
    seconds: float
    num_bytes: float
    flops: float
    launches: int = 1
    shape: str = ""
    """What tells launches of one name apart: a grid, or the inputs' shapes."""


class Verdict(NamedTuple):
    """What bounds a kernel and how near it comes to each ceiling."""

    kernel: KernelTime
    bound: Bound
    memory_share: float
    compute_share: float
    intensity: float
    """FLOPs per byte; infinite without bytes."""
    roof_share: float


def classify(
    kernel: KernelTime, ceilings: Ceilings, threshold: float = THRESHOLD, *, cached: bool = False
) -> Verdict:
    """Return what bounds a kernel. `cached`: its bytes may have come from a cache, not from memory.

    Raises ValueError naming the kernel for no time, negative work, or more than the ceilings allow.
    """
    name, seconds, num_bytes, flops = kernel[:4]
    if not 0 < threshold < 1:
        raise ValueError(f"the threshold must be in 0 … 1; it is {threshold!r}.")
    if not (isfinite(seconds) and seconds > 0):
        raise ValueError(f"{name}: its time must be positive, not {seconds!r} s.")
    if not (0 <= num_bytes < inf and 0 <= flops < inf):
        raise ValueError(f"{name}: bytes and FLOPs must be 0 or more: {num_bytes!r}, {flops!r}.")
    memory = num_bytes / seconds / ceilings.bytes_per_s
    compute = flops / seconds / ceilings.flops_per_s
    if max(0.0 if cached else memory, compute) > _IMPOSSIBLE:
        raise ValueError(
            f"{name}: {memory:.0%} of the bandwidth and {compute:.0%} of the FLOP rate; "
            "the ceilings are too low: measure them on the machine that ran it."
        )
    bound: Bound = "memory" if memory >= compute else "compute"
    if max(memory, compute) < threshold:
        bound = "latency"
    # At the roof the binding share is 1: the larger share is what was reached of the roof.
    return Verdict(
        kernel,
        bound,
        memory,
        compute,
        flops / num_bytes if num_bytes else inf,
        max(memory, compute),
    )


def merged(kernels: Iterable[KernelTime]) -> list[KernelTime]:
    """Sum the launches of each name and shape, the longest first.

    By name alone a product of one row and one of a thousand would share a verdict.
    """
    sums: dict[tuple[str, str], KernelTime] = {}
    for kernel in kernels:
        key = (kernel.name, kernel.shape)
        before = sums.get(key, KernelTime(kernel.name, 0.0, 0.0, 0.0, 0, kernel.shape))
        sums[key] = KernelTime(
            kernel.name,
            before.seconds + kernel.seconds,
            before.num_bytes + kernel.num_bytes,
            before.flops + kernel.flops,
            before.launches + kernel.launches,
            kernel.shape,
        )
    return sorted(sums.values(), key=lambda k: (-k.seconds, k.name, k.shape))
