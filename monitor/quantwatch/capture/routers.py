"""Watch where a model's routers send tokens: hooks on them, and what they chose of each batch.

Found by name and structure (`quantize.routers`); what a module of that class does is known by its
family (`serve.moe_families`). A router that isn't known, returns something else, or fires more or
less than once per forward is not measured, and says why. Places are whole layers, of which each has
at most one.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantwatch.capture.batches import Batch
from quantwatch.domain import Scope, is_layer
from quantwatch.models.loaded import LoadedModel
from quantwatch_kernels.compare.routing import Routing
from quantwatch_kernels.quantize.routers import choosing_matrices, unrouted_experts
from quantwatch_kernels.serve.moe_families import family_rule, read_choice
from quantwatch_kernels.serve.moe_margin import Routed, decided_choices
from quantwatch_kernels.serve.moe_router import AnyRouter


@dataclass(slots=True)
class Choices:
    """What the routers did on one batch, or why it isn't known. R measured rows."""

    routings: dict[Scope, Routing] = field(default_factory=dict)
    """Layer → where its tokens [R] went."""
    unknown: dict[Scope, str] = field(default_factory=dict)
    """Layer (or the path of what lies in none) → why its choices aren't known."""

    def first(self, count: int) -> "Choices":
        """Return those of the first `count` rows."""
        return Choices({s: r.first(count) for s, r in self.routings.items()}, self.unknown)


class RouterWatch:
    """The routers of one model."""

    def __init__(self, model: LoadedModel) -> None:
        self.margins = False
        """Whether it is found out which choices rounding could have made otherwise."""
        self.paths: dict[Scope, str] = {}
        """Layer → module path of its router."""
        self._module = model.module
        self._known: set[Scope] = set()
        self._unknown: dict[Scope, str] = {}
        self._batch: Batch | None = None
        self._choices = Choices()
        self._firings: Counter[Scope] = Counter()
        layers = {path: s for s, path in model.anatomy.taps.items() if is_layer(s)}
        for path, _ in choosing_matrices(model.module):
            self._add(_layer_of(path, layers), path)
        for path in unrouted_experts(model.module):
            self._unknown.setdefault(_layer_of(path, layers), f"no router was found of {path}")

    def _add(self, scope: Scope, path: str) -> None:
        rule = family_rule(self._module.get_submodule(path))
        if scope in self.paths:
            self._unknown[scope] = f"two routers: {self.paths[scope]} and {path}"
        elif not is_layer(scope):
            self._unknown[scope] = "it lies in no decoder layer"
        elif isinstance(rule, str):
            self._unknown[scope] = rule
        else:
            self._known.add(scope)
        self.paths.setdefault(scope, path)

    def hook(self) -> Iterator[RemovableHandle]:
        """Hook every router whose rule is known."""
        for scope in self._known - self._unknown.keys():
            module = self._module.get_submodule(self.paths[scope])
            yield module.register_forward_hook(partial(self._see, scope), with_kwargs=True)

    @contextmanager
    def watching(self, batch: Batch) -> Iterator[Choices]:
        """Inside, fill what is yielded; it is complete when the context ends."""
        self._batch, self._firings = batch, Counter()
        self._choices = choices = Choices(unknown=dict(self._unknown))
        try:
            yield choices
        finally:
            self._batch = None
        for scope in self._known - self._unknown.keys():
            if self._firings[scope] != 1:
                self._forget(scope, f"it fires {self._firings[scope]} times in one forward")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is watched: what runs again is no part of the forward."""
        batch, self._batch = self._batch, None
        try:
            yield
        finally:
            self._batch = batch

    def _see(
        self, scope: Scope, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        if self._batch is None:
            return
        self._firings[scope] += 1
        found = read_choice(output)
        given = next(iter((*args, *kwargs.values())), None)
        if found is None or not self._batch.fits(found[2]) or not isinstance(given, Tensor):
            self._forget(scope, f"{type(module).__name__} doesn't return one choice per token")
            return
        logits, weights, ids = (self._batch.copy(each) for each in found)
        decided = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        if self.margins:
            x = self._batch.select(given.reshape(-1, given.shape[-1]))
            try:
                seen = Routed(x, module.get_parameter("weight"), logits)
                # Read now: a streamed layer has values only while it runs.
                decided = decided_choices(seen, ids, cast(AnyRouter, family_rule(module)))
            except (ValueError, AttributeError) as error:
                self._forget(scope, str(error))
                return
        self._choices.routings[scope] = Routing(ids, weights, logits.shape[1], decided)

    def _forget(self, scope: Scope, why: str) -> None:
        self._choices.unknown[scope] = why
        self._choices.routings.pop(scope, None)


def _layer_of(path: str, layers: dict[str, Scope]) -> Scope:
    """Return the layer in which a module lies; its own path if it lies in none."""
    found = (scope for place, scope in layers.items() if path.startswith(f"{place}."))
    return next(found, Scope(path))
