"""Give every measured place of a causal language model one canonical name, whatever its class.

What Hugging Face states (`get_input_embeddings`, `get_output_embeddings`, `num_hidden_layers`) is
used first; names and shapes decide for the rest and for one's own modules. Nothing is run.
"""

import re
from collections import deque
from dataclasses import dataclass, field

from torch import nn

from quantwatch.domain import EMBEDDING, FINAL_NORM, HEAD, Scope
from quantwatch.errors import ModelError
from quantwatch.models.landmarks import (
    find_after_layers,
    find_embedding,
    find_head,
    find_layers,
    is_norm,
    linear_paths,
)
from quantwatch_kernels.quantize.routers import routing_paths

_ATTENTION = (
    *("self_attn", "attn", "attention", "self_attention", "linear_attn", "self_attn_layer"),
    *("mixer", "mamba", "temporal_block", "attn_layer", "attention_layer", "conv"),
)
_MLP = (
    *("mlp", "feed_forward", "block_sparse_moe", "moe", "ffn", "ff", "feedforward", "mlp_block"),
    *("ffn_layer", "moe_layer", "feed_forward_layer", "sparse_moe"),
)


@dataclass(frozen=True)
class Anatomy:
    """Where the taps of a model are: canonical scope → module path."""

    taps: dict[Scope, str]
    """Forward order: embedding, layers.0.attention, layers.0.mlp, layers.0, …, final_norm, head."""
    linears: dict[Scope, str]
    """Modules with a weight matrix inside the layers, e.g. ``layers.3.mlp.down_proj``."""
    num_layers: int
    missing: dict[Scope, str] = field(default_factory=dict)
    """Taps this model doesn't have, each with the reason."""
    routers: frozenset[Scope] = frozenset()
    """Those of `linears` that route tokens to experts."""
    routed: frozenset[Scope] = frozenset()
    """Those of `linears` inside a list of experts: they see only the tokens routed to them."""
    projection: str | None = None
    """Module between the final norm and the head (OPT-350m's `project_out`)."""

    def module_path(self, scope: str) -> str:
        """Return the model's own path of a tap or linear; raises ModelError when unknown."""
        path = self.taps.get(Scope(scope), self.linears.get(Scope(scope)))
        if path is None:
            reason = self.missing.get(Scope(scope), "no such tap or linear")
            raise ModelError(f"scope {scope!r} does not exist in this model: {reason}")
        return path

    @property
    def scopes_by_path(self) -> dict[str, Scope]:
        """Canonical scope of each module path, taps and linears."""
        places = {**self.linears, **self.taps}
        return {path: scope for scope, path in places.items()}


def resolve(module: nn.Module) -> Anatomy:
    """Find embedding, layers, attention, MLP, final norm and head of a causal language model.

    Raises:
        ModelError: no token embedding, no list of decoder layers, or no head.
    """
    embedding = find_embedding(module)
    layers = find_layers(module, embedding)
    head = find_head(module, embedding, layers)
    norm, projection = find_after_layers(module, layers)
    found = _Found({Scope(EMBEDDING): embedding})
    # named_children() would drop a layer that is listed twice.
    modules = dict(module.get_submodule(layers)._modules)
    for index, (name, layer) in enumerate(modules.items()):
        if layer is not None:
            _add_layer(found, index, f"{layers}.{name}", layer)
    if norm is None:
        found.missing[FINAL_NORM] = f"no norm-like module beside {layers!r}"
    else:
        found.taps[FINAL_NORM] = norm
    found.taps[HEAD] = head
    return Anatomy(
        found.taps,
        found.linears,
        len(modules),
        found.missing,
        frozenset(found.routers),
        frozenset(found.routed),
        projection,
    )


@dataclass
class _Found:
    taps: dict[Scope, str]
    linears: dict[Scope, str] = field(default_factory=dict)
    missing: dict[Scope, str] = field(default_factory=dict)
    routers: set[Scope] = field(default_factory=set)
    routed: set[Scope] = field(default_factory=set)


def _add_layer(found: _Found, index: int, path: str, layer: nn.Module) -> None:
    whole = Scope(f"layers.{index}")
    parts: dict[str, Scope] = {}
    for part, names in (("attention", _ATTENTION), ("mlp", _MLP)):
        scope, child = Scope(f"{whole}.{part}"), _descendant(layer, names)
        if child is None:
            kind = type(layer).__name__
            found.missing[scope] = f"{kind} has no child module that looks like its {part}"
        else:
            found.taps[scope] = f"{path}.{child}"
            parts[child] = scope
    found.taps[whole] = path
    routing = routing_paths(layer)
    for child in linear_paths(layer):
        scope = _canonical(child, whole, parts)
        _add_linear(found, f"{path}.{child}", scope, child in routing)


def _canonical(child: str, whole: Scope, parts: dict[str, Scope]) -> Scope:
    """Name a weight matrix of a layer."""
    for prefix, scope in parts.items():
        if child == prefix or child.startswith(f"{prefix}."):
            return Scope(f"{scope}{child[len(prefix) :]}")
    return Scope(f"{whole}.{child}")


def _add_linear(found: _Found, path: str, scope: Scope, routes: bool) -> None:
    if scope in found.taps:
        return
    found.linears[scope] = path
    if routes:
        found.routers.add(scope)
    if re.search(r"experts\.\d+(\.|$)", path):
        found.routed.add(scope)


def _descendant(layer: nn.Module, names: tuple[str, ...]) -> str | None:
    """Return the path of the nearest descendant with one of the names, in the names' order."""
    waiting = deque([("", layer)])
    while waiting:
        path, module = waiting.popleft()
        children = dict(module.named_children())
        for name in names:
            if name in children and not is_norm(name, children[name]):
                return f"{path}{name}"
        waiting.extend((f"{path}{name}.", child) for name, child in children.items())
    return None
