"""Globs over scopes.

`*` stands for one whole component, or a part of it: `layers.*` means whole layers only,
`layers.*.mlp` their MLPs, `layers.*.mlp.*` the linears in there. A lone `*` means every scope.
"""

from fnmatch import fnmatchcase

from quantwatch.metrics.registry import METRICS

_OUTSIDE = ("embedding", "final_norm", "head", "model")
_MOST_LAYERS = 1024
_CANONICAL = {"att": "attention", "mlp": "mlp", "ffn": "mlp", "feed_forward": "mlp"}
"""What a name inside a layer that contains the key is called here, on every architecture."""


def as_globs(scope: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return a rule's scope as a tuple of globs."""
    return (scope,) if isinstance(scope, str) else scope


def matches(globs: str | tuple[str, ...], scope: str) -> bool:
    """Say whether a scope matches any of the globs."""
    return any(_matches_one(glob, scope) for glob in as_globs(globs))


def scope_problem(glob: str, metric: str | None = None) -> str | None:
    """Say why a glob can match no scope (of a metric), None when it can."""
    parts = glob.split(".")
    if not _possible(parts):
        return (
            f"{glob!r} can never match a scope; scopes are embedding, layers.N, "
            "layers.N.attention, layers.N.mlp, their linears (layers.N.mlp.down_proj), "
            "final_norm, head and model; * stands for one component"
        )
    if metric is not None and not _measured_at(parts, metric):
        return f"{metric} is never measured at {glob!r}; it is measured at {_places(metric)}"
    return None


def _matches_one(glob: str, scope: str) -> bool:
    if glob == "*":
        return True
    parts, names = glob.split("."), scope.split(".")
    return len(parts) == len(names) and all(map(fnmatchcase, names, parts))


def _possible(parts: list[str]) -> bool:
    if len(parts) == 1:
        return any(fnmatchcase(name, parts[0]) for name in _OUTSIDE)
    layer, number, *inner = parts
    return (
        fnmatchcase("layers", layer)
        and any(fnmatchcase(str(index), number) for index in range(_MOST_LAYERS))
        and all(inner)
        and (not inner or _canonical(inner[0]))
    )


def _canonical(child: str) -> bool:
    """Linears of a layer may have any name; its attention and MLP have only one each."""
    if "*" in child or child in _CANONICAL.values():
        return True
    return not any(part in child for part in _CANONICAL)


def _measured_at(parts: list[str], metric: str) -> bool:
    where = METRICS[metric].where
    if parts == ["*"]:
        return True
    if len(parts) > 1:
        return where in ("tap", "isolated") or (where in ("layer", "router") and len(parts) == 2)
    return any(fnmatchcase(name, parts[0]) for name in _outside(metric))


def _outside(metric: str) -> tuple[str, ...]:
    """Return where a metric may be measured outside the layers."""
    where = METRICS[metric].where
    if where == "model":
        return ("model",)
    if where == "router":
        return ()
    if where == "layer":
        through_lens = ("embedding", "final_norm")
        return (*through_lens, "model") if metric.startswith("topk_") else through_lens
    return ("embedding", "final_norm", "head")


def _places(metric: str) -> str:
    where = METRICS[metric].where
    if where == "model":
        return "model"
    if where == "router":
        return "layers.*"
    inside = "layers.*" if where == "layer" else "layers.*, layers.*.attention, layers.*.mlp"
    return f"{inside}, {', '.join(_outside(metric))}"
