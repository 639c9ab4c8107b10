"""What a container may use: memory, processor time, processes. Version 2 of cgroups, and 1."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_ENDLESS = 1 << 60
"""Version 1 says "no limit" by a number that no machine has."""


@dataclass(frozen=True, slots=True)
class Limits:
    """None: not limited, or not known."""

    memory_bytes: int | None
    cpus: float | None
    pids: int | None


def limits(root: Path = ROOT) -> Limits:
    """Return what this container may use."""
    memory = _number(root / "memory.max", root / "memory/memory.limit_in_bytes")
    pids = _number(root / "pids.max", root / "pids/pids.max")
    return Limits(memory, _cpus(root), pids)


def _cpus(root: Path) -> float | None:
    """Return how many processors' time: the quota over its period."""
    both = _words(root / "cpu.max")
    if len(both) == 2 and both[0] != "max":
        return int(both[0]) / int(both[1])
    quota = _number(root / "cpu/cpu.cfs_quota_us")
    period = _number(root / "cpu/cpu.cfs_period_us")
    return quota / period if quota and period and quota > 0 else None


def _number(*places: Path) -> int | None:
    for place in places:
        words = _words(place)
        if words and words[0].lstrip("-").isdecimal() and int(words[0]) < _ENDLESS:
            return int(words[0])
    return None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
