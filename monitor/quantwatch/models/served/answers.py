"""What a server says of one position, read with suspicion.

An entry is a token id and its log-probability in nats. Position t of a prompt of n tokens is what
the model thinks follows its first t + 1 tokens; the target is the prompt's own next token. A
position that can't be trusted is `missing`, with a reason; it never becomes a number.

vLLM can't write −∞ into JSON and says −9999 instead. With prefix caching, positions that came from
the cache were zeros or an earlier request's values in some of its versions (#42019): fewer than k
different ids, or probabilities that add to more than 1, are found here.

Two laws hold for the k likeliest of any distribution over V ids: whatever isn't told is at most as
likely as the k-th, so Σ q + (V − k)·q_k ≥ 1; and the token that came is among them with the value
that is told of it apart, or behind them all. Logits, logarithms of another base and a sampler's
choice of ids break the first, tables of other positions the second.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quantwatch.models.served.trouble import UnusableServerError

UNKNOWN = -1
"""An entry whose token can't be told: its probability belongs to the rest."""
_ROUNDING = 1e-6
"""How far above 0 rounding alone takes a log-probability."""
_MOST_MASS = 1e-3
"""How far from 1 rounding (of 16-bit logits, at worst) takes the sum of the probabilities."""
_SAME = 1e-3
"""How far apart two texts of one log-probability are that was rounded in each."""
_NO_INFINITY = -9999.0
_MOST_ID = 2**31


@dataclass(frozen=True, slots=True)
class Position:
    """The k likeliest next tokens, likeliest first, and the target's log-probability."""

    ids: tuple[int, ...]
    """`UNKNOWN` where the server's text stands for no single id."""
    logprobs: tuple[float, ...]
    target: float | None
    """None when the server doesn't tell it: beyond the top k of a server that tells only those."""


Positions = tuple[Position | str, ...]
"""Each position, or why it is missing."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What an answer says of who made it, and when. None where it says nothing."""

    model: str | None = None
    fingerprint: str | None = None
    """Of the system or the weights: `system_fingerprint`, `weight_version`."""
    created: float | None = None
    request: str | None = None
    """Its own id, unique per answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server says of a prompt from its first scored position on: n − 1 − first positions."""

    positions: Positions
    stamp: Stamp = Stamp()


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt whose log-probabilities are wanted."""

    model: str
    ids: tuple[int, ...]
    first: int
    """First position that is scored; those before are not needed."""
    top_k: int
    texts: Sequence[str] = ()
    """Text of every token id, for servers that tell texts and no ids."""
    most_ids: int | None = None
    """How many ids the server's vocabulary has at most."""

    @property
    def targets(self) -> range:
        """Indices of the tokens that are targets."""
        return range(self.first + 1, len(self.ids))


def position(
    entries: Iterable[tuple[Any, Any]],
    top_k: int,
    target: float | str | None,
    *,
    hidden: int = 0,
    most_ids: int | None = None,
) -> Position | str:
    """Return a position from its entries (id, log-probability) in any order, or why it is missing.

    The target's log-probability may be among them, beyond the top k, as one more; a str says why it
    can't be read. Of the likeliest, `hidden` were not told: each is ranked where it is at most.
    """
    pairs = _pairs(entries)
    wrong = next((one for one in (pairs, target) if isinstance(one, str)), None)
    if wrong is not None or isinstance(pairs, str) or isinstance(target, str):
        return str(wrong)
    if len(pairs) + hidden < top_k:
        return f"{len(pairs)} of {top_k} log-probabilities"
    if math.fsum(math.exp(value) for _, value in _likeliest(pairs, top_k)) > 1 + _MOST_MASS:
        return "probabilities that add to more than 1"
    if most_ids is not None and not hidden and _most(pairs, top_k, most_ids) < 1 - _MOST_MASS:
        return f"no {top_k} likeliest of a distribution: less than 1 whatever the others have"
    kept = _likeliest([*pairs, *_at_most(pairs, hidden)], top_k)
    ids, logprobs = zip(*kept, strict=True)
    return Position(ids, logprobs, target)


def require_one_row(found: Sequence[Position | str], ids: Sequence[int]) -> None:
    """Raise UnusableServerError where a table and the token's own value are of two positions.

    `found` are those of a prompt's second token on, scored or not: one wrong table by itself may
    fit by chance. A table with ids that can't be told, which may be the target's, decides nothing.
    """
    for at, (one, token) in enumerate(zip(found, ids[1:], strict=True), 1):
        if isinstance(one, str) or one.target is None or _is_one_row(one, token):
            continue
        table = dict(zip(one.ids, one.logprobs, strict=True)).get(token)
        told = f"below {one.logprobs[-1]:.4g}" if table is None else f"{table:.4g}"
        raise UnusableServerError(
            f"the server's table and the token that it scored are not of one position: of token "
            f"{token} at position {at} it says {one.target:.4g}, its table {told}"
        )


def _is_one_row(one: Position, token: int) -> bool:
    assert one.target is not None
    known = dict(zip(one.ids, one.logprobs, strict=True))
    if token in known:  # both may be −∞
        return one.target == known[token] or abs(one.target - known[token]) <= _SAME
    return UNKNOWN in known or one.target <= one.logprobs[-1] + _SAME


def _most(pairs: list[tuple[int, float]], top_k: int, most_ids: int) -> float:
    """Return the most that all ids have together: none that isn't told beats the k-th."""
    told = [math.exp(value) for _, value in _likeliest(pairs, top_k)]
    return math.fsum(told) + max(0, most_ids - top_k) * told[-1]


def _likeliest(pairs: list[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count]


def _at_most(pairs: list[tuple[int, float]], hidden: int) -> list[tuple[int, float]]:
    """Return entries that weren't told, as likely as what is left over allows: the j-th of them
    has a j-th of it at most.
    """
    left = max(0.0, 1 - math.fsum(math.exp(value) for _, value in pairs)) + _ROUNDING
    return [(UNKNOWN, min(0.0, math.log(left / rank))) for rank in range(1, hidden + 1)]


def _pairs(entries: Iterable[tuple[Any, Any]]) -> list[tuple[int, float]] | str:
    """Return different ids and their log-probabilities, or what is wrong with them."""
    found: dict[int, float] = {}
    unknown: list[float] = []
    for token, value in entries:
        logprob = log_probability(value)
        if isinstance(logprob, str):
            return logprob
        if not _is_id(token):
            return f"a token id is {str(token)[:20]!r}"
        if token == UNKNOWN:
            unknown.append(logprob)
        elif found.setdefault(token, logprob) != logprob:
            return "one token id has two log-probabilities"
    return [*found.items(), *((UNKNOWN, value) for value in unknown)]


def log_probability(value: Any) -> float | str:
    """Return a log-probability ≤ 0, −∞ for vLLM's −9999, or what is wrong with it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "a log-probability is no number"
    if math.isnan(value):
        return "a log-probability is NaN"
    if value > _ROUNDING:
        return "a log-probability is above 0"
    return -math.inf if value <= _NO_INFINITY else min(float(value), 0.0)


def _is_id(token: Any) -> bool:
    whole = isinstance(token, int) and not isinstance(token, bool)
    return whole and UNKNOWN <= token < _MOST_ID
