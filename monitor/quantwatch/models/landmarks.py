"""Find the landmarks of a causal language model: embedding, list of layers, head, final norm."""

import re
from collections.abc import Iterator

from torch import nn

from quantwatch.errors import ModelError

_FINAL_NORM = (
    *("norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm", "norm_f", "ln_final"),
    *("layer_norm", "ln_out", "ln"),
)
_HEAD = ("lm_head", "embed_out", "output", "head", "unembed", "output_layer", "out_proj")
_PROJECTION = ("project_out",)


def linear_paths(module: nn.Module) -> Iterator[str]:
    """Yield the paths of the modules that hold a weight matrix themselves, packed or not."""
    for name, child in module.named_modules():
        inside = isinstance(child, nn.Embedding) or not _is_linear(child)
        if name and not inside:
            yield name


def _is_linear(module: nn.Module) -> bool:
    if isinstance(module, nn.Linear):
        return True
    if next(module.children(), None) is not None or is_norm("", module):
        return False
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(tensor.ndim >= 2 for tensor in own)


def is_norm(name: str, module: nn.Module) -> bool:
    """Say whether a child looks like a normalisation, by its class or its name."""
    return "norm" in type(module).__name__.lower() or re.search(r"norm|^ln(_|$)", name) is not None


def _path_of(module: nn.Module, wanted: nn.Module) -> str | None:
    return next((path for path, child in module.named_modules() if child is wanted), None)


def _stated(module: nn.Module, getter: str) -> nn.Module | None:
    """Ask a Hugging Face getter; None when there is none or it isn't implemented."""
    try:
        found = getattr(module, getter, lambda: None)()
    except (NotImplementedError, AttributeError):
        return None
    return found if isinstance(found, nn.Module) else None


def find_embedding(module: nn.Module) -> str:
    """Return the path of the token embedding; raises ModelError when there is none."""
    stated = _stated(module, "get_input_embeddings")
    if stated is not None and (path := _path_of(module, stated)):
        return path
    tables: list[tuple[str, nn.Embedding]] = [
        (path, m) for path, m in module.named_modules() if isinstance(m, nn.Embedding)
    ]
    if not tables:
        raise ModelError(f"{type(module).__name__} has no token embedding (no nn.Embedding)")
    widths = {getattr(m, "out_features", None) for m in module.modules()}
    # A table of positions may come first: the token table is as long as some head is wide.
    fitting = [path for path, table in tables if table.num_embeddings in widths]
    return (fitting or [tables[0][0]])[0]


def find_layers(module: nn.Module, embedding: str) -> str:
    """Return the path of the list of decoder layers; raises ModelError when there is none."""
    lists = _outermost(module, nn.ModuleList) or _outermost(module, nn.Sequential)
    stated = _config_value(module, "num_hidden_layers")
    wanted = max(lists.values(), default=None) if stated is None else stated
    choices = [path for path, length in lists.items() if length == wanted != 0]
    if not choices:
        length = "" if stated is None else f" of length num_hidden_layers = {stated}"
        raise ModelError(f"{type(module).__name__} has no list of decoder layers{length}")
    # A vision tower may have as many layers: the decoder shares more path with the embedding.
    return max(choices, key=lambda path: (_shared(path, embedding), -path.count(".")))


def _outermost(module: nn.Module, kind: type[nn.Module]) -> dict[str, int]:
    """Return path → length of the lists that lie in no other list (experts do)."""
    found: dict[str, int] = {}
    for path, child in module.named_modules():
        nested = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(child, kind) and path and not nested:
            found[path] = len(child._modules)  # children() would count a shared layer once
    return found


def _config_value(module: nn.Module, key: str) -> int | None:
    config = getattr(module, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    value = getattr(text, key, None)
    return value if isinstance(value, int) else None


def _shared(one: str, other: str) -> int:
    """Count the leading path parts that two paths have in common."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), 0)


def find_head(module: nn.Module, embedding: str, layers: str) -> str:
    """Return the path of the module that makes logits; raises ModelError when there is none."""
    stated = _stated(module, "get_output_embeddings")
    if stated is not None and (path := _path_of(module, stated)):
        return path
    table = module.get_submodule(embedding)
    widths = {_config_value(module, "vocab_size"), getattr(table, "num_embeddings", None)} - {None}
    outside = [
        path
        for path in linear_paths(module)
        if path != embedding and not path.startswith(f"{layers}.")
    ]
    named = [path for path in outside if path.rsplit(".", 1)[-1] in _HEAD]
    wide = [
        path
        for path in outside
        if getattr(module.get_submodule(path), "out_features", None) in widths
    ]
    for choices in ([path for path in named if path in wide], wide, named):
        if choices:
            return choices[-1]
    sizes = " or ".join(str(width) for width in sorted(w for w in widths if w is not None))
    raise ModelError(f"{type(module).__name__} has no head: no linear module with {sizes} outputs")


def find_after_layers(module: nn.Module, layers: str) -> tuple[str | None, str | None]:
    """Return the paths of the final norm and of a projection behind it, None where missing."""
    parent = layers.rpartition(".")[0]
    siblings = dict(module.get_submodule(parent).named_children())
    names = list(siblings)
    after = names[names.index(layers.rpartition(".")[2]) + 1 :]
    norms = [name for name in _FINAL_NORM if name in siblings]
    norms += [name for name in after if is_norm(name, siblings[name])]
    projections = [name for name in _PROJECTION if name in siblings]
    prefix = f"{parent}." if parent else ""
    return (
        f"{prefix}{norms[0]}" if norms else None,
        f"{prefix}{projections[0]}" if projections else None,
    )
