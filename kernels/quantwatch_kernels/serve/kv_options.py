"""Names of KV schemes: `NAME`, or `NAME+option+option`. `config.serving` reads the same.

high0,1     the cache of layers 0 and 1 stays in full precision
sinks4      so do the first 4 tokens of a sequence
window32    and at least the newest 32
top4        keys of the 4 pages of 16 tokens that a query's attention chooses, in 16 bits
r4          the rounding error as a product of rank 4
gain        what is restored is multiplied by a calibrated gain
"""

import re
from typing import Any, NamedTuple

__all__ = ["OPTIONS", "KVName", "parse_name"]

OPTIONS = "highN,M…, sinksN, windowN, topN, rN or gain"
_OPTION = re.compile(r"(high)(\d+(?:,\d+)*)|(sinks|window|top|r)(\d+)|(gain)", re.ASCII)


class KVName(NamedTuple):
    """A name taken apart. Numbers that aren't said are None."""

    base: str
    high: tuple[int, ...] | None = None
    sinks: int | None = None
    window: int | None = None
    top: int | None = None
    rank: int | None = None
    gain: bool = False


def parse_name(name: str) -> KVName:
    """Take a name apart; the base isn't looked up. Raises ValueError naming what is allowed."""
    base, *options = name.split("+")
    said = KVName(base)
    seen = set[str]()
    for option in options:
        found = _OPTION.fullmatch(option)
        if found is None:
            raise ValueError(f"{name!r}: after + comes {OPTIONS}; not {option!r}")
        kind = next(filter(None, (found[1], found[3], found[5])))
        if kind in seen:
            raise ValueError(f"{name!r}: {kind} is said twice")
        seen.add(kind)
        said = _with(said, kind, found[2] or found[4] or "")
    return said


def _with(said: KVName, kind: str, number: str) -> KVName:
    if kind == "high":
        return said._replace(high=tuple(sorted({int(n) for n in number.split(",")})))
    if kind == "gain":
        return said._replace(gain=True)
    if int(number) == 0 and kind in ("top", "r"):
        raise ValueError(f"{kind}0 chooses nothing; leave it out")
    counted: dict[str, Any] = {"rank" if kind == "r" else kind: int(number)}
    return said._replace(**counted)
