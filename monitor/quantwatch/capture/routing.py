"""Compare where the routers of two models sent the same tokens. S layers, R measured rows."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from quantwatch.capture.layout import Layout
from quantwatch.capture.routers import Choices
from quantwatch.domain import ExpertLoad, Scope
from quantwatch_kernels.compare.routing import (
    Agreement,
    Routing,
    expert_loads,
    routing_agreement,
)

Matrices = dict[str, tuple[tuple[Scope, ...], NDArray[np.float64]]]


def both(
    reference: Choices, candidate: Choices
) -> tuple[dict[Scope, tuple[Routing, Routing]], dict[Scope, str]]:
    """Return the layers whose choices are known in both models, and what is wrong with others."""
    pairs, wrong = {}, {}
    for scope, theirs in reference.routings.items():
        ours = candidate.routings.get(scope)
        if ours is None:
            wrong[scope] = candidate.unknown.get(scope, "no router was found there")
        elif ours.experts != theirs.experts:
            wrong[scope] = f"it has {ours.experts} experts, the reference's {theirs.experts}"
        else:
            pairs[scope] = (theirs, ours)
    return pairs, wrong


def router_matrices(pairs: Mapping[Scope, tuple[Routing, Routing]]) -> Matrices:
    """Return metric → layers and values [S, R]."""
    if not pairs:
        return {}
    found = [routing_agreement(*pair) for pair in pairs.values()]
    return {
        f"router_{name}": (tuple(pairs), torch.stack([column.cpu() for column in columns]).numpy())
        for name, columns in zip(Agreement._fields, zip(*found, strict=True), strict=True)
    }


def router_loads(
    pairs: Mapping[Scope, tuple[Routing, Routing]], layout: Layout, number: int
) -> Iterator[ExpertLoad]:
    """Yield the slots of each expert over the scored tokens of the batch's prompt `number`.

    A token that isn't finite in one of the models is counted in neither.
    """
    span = layout.batch.slices[number]
    start = span.start + layout.batch.prompts[number].score_start
    for scope, (theirs, ours) in pairs.items():
        counted = theirs.finite.cpu() & ours.finite.cpu()
        counted[:start] = counted[span.stop :] = False
        loads = [
            expert_loads(each, counted.to(each.ids.device)).cpu().numpy() for each in (theirs, ours)
        ]
        yield ExpertLoad(scope, *loads)
