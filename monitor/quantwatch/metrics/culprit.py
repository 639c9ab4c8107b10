"""Name the culprit: the finest scope whose isolated error stands out, and say it in words.

Propagated error says how bad it is at a place, isolated error says whose fault it is (design §5).
The search goes down: the worst of embedding, layers, final norm and head; inside a layer the worst
of attention and MLP; inside those the worst linear. A fault in a layer's own norm leaves all
children clean, so the layer itself is named.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from quantwatch.domain import HEAD, Culprit, Measurement, NonFinite, Scope, is_layer

OUTLIER = 3.0
"""Times the median of its peers from which a place stands out, as in `isolated-error-outlier`."""
Floor = Mapping[tuple[str, str], float]


def find_culprit(
    measurements: Sequence[Measurement],
    *,
    floor: Floor,
    first_nonfinite: NonFinite | None = None,
    bit_equal: bool = False,
    head_rows: tuple[int, ...] = (),
) -> Culprit:
    """Return a candidate's culprit; scope None when no isolated error is beyond its noise floor."""
    if bit_equal:
        return Culprit(None, None, None, "Bit-equal: every tap and every logit is identical.")
    isolated = {m.scope: _size(m) for m in measurements if m.metric == "isolated_error"}
    beyond = {s: v for s, v in isolated.items() if v > floor.get(("isolated_error", s), 0.0)}
    scope = _descend(beyond)
    first = first_difference(measurements)
    words = _words(scope, isolated, first, head_rows if scope == HEAD else ())
    words = f"{_birth(first_nonfinite)}{words}"
    value = None if scope is None or not math.isfinite(isolated[scope]) else isolated[scope]
    return Culprit(scope, value, first, words, head_rows if scope == HEAD else ())


def unseen_culprit(why: str, first_nonfinite: NonFinite | None) -> Culprit:
    """Return that nobody can be blamed, and why: the layers can't be looked into."""
    return Culprit(None, None, None, f"{_birth(first_nonfinite)}Layers: {why}.")


def first_difference(measurements: Iterable[Measurement]) -> Scope | None:
    """Return the first tap, in forward order, at which the hidden states differ at all."""
    for m in measurements:
        if m.metric == "rel_error" and (m.num_nonfinite or (m.max is not None and m.max > 0)):
            return m.scope
    return None


def rank_layers(measurements: Iterable[Measurement]) -> list[tuple[Scope, float]]:
    """Return the whole layers by mean isolated error, worst first; non-finite errors lead."""
    layers = [
        (m.scope, _size(m))
        for m in measurements
        if m.metric == "isolated_error" and is_layer(m.scope)
    ]
    return sorted(layers, key=lambda pair: -pair[1])


def _birth(found: NonFinite | None) -> str:
    if found is None:
        return ""
    return (
        f"First non-finite value: {found.scope}, prompt {found.prompt}, position {found.position}. "
    )


def _size(m: Measurement) -> float:
    """A module with any non-finite isolated error is worse than every finite one."""
    return math.inf if m.num_nonfinite or m.mean is None else m.mean


def _descend(beyond: Mapping[Scope, float]) -> Scope | None:
    scope: Scope | None = None
    candidates = [s for s in beyond if s.count(".") == (1 if s.startswith("layers.") else 0)]
    while candidates:
        scope = max(candidates, key=lambda s: beyond[s])
        prefix = f"{scope}."
        depth = min((s.count(".") for s in beyond if s.startswith(prefix)), default=-1)
        candidates = [s for s in beyond if s.startswith(prefix) and s.count(".") == depth]
    return scope


def _words(
    scope: Scope | None, isolated: Mapping[Scope, float], first: Scope | None, rows: tuple[int, ...]
) -> str:
    if scope is None:
        where = f" The first tap that differs is {first}." if first else ""
        if not isolated:
            return f"No isolated error was measured, so no module is named.{where}"
        return f"No module's isolated error is beyond its noise floor.{where}"
    sentence = f"{scope}: isolated error {_number(isolated[scope])}{_compared(scope, isolated)}."
    if scope == HEAD and first in (None, HEAD):
        which = f" in rows {', '.join(map(str, rows))}" if rows else ""
        return f"Hidden states equal through final_norm; head differs{which}. {sentence}"
    return f"{sentence} The first tap that differs is {first}." if first else sentence


def _compared(scope: Scope, isolated: Mapping[Scope, float]) -> str:
    """Compare with the same place in the other layers, if there is one and it is not zero."""
    parts = scope.split(".", 2)
    if parts[0] != "layers":
        return ""
    tail = parts[2:]
    peers = [
        v
        for s, v in isolated.items()
        if s.startswith("layers.") and s.split(".", 2)[2:] == tail and s != scope
    ]
    middle = median(peers) if peers else math.nan
    if middle == 0:
        return (
            ", exactly 0 in most other layers" if any(peers) else ", exactly 0 in every other layer"
        )
    ratio = isolated[scope] / middle
    if not math.isfinite(ratio):
        return ""
    # Something is the largest in every quantized model; named it is, as the place to look first.
    ordinary = "" if ratio >= OUTLIER else ": none stands out"
    return f", {ratio:.3g} × the median of the same place in the other layers{ordinary}"


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "not finite"
