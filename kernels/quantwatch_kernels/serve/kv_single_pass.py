"""A model that runs through a quantized KV cache, in one pass over each text.

Inside `quantized_kv(model, scheme)` every attention of the model is `mixed_attention`: its keys and
values are stored and restored chunk by chunk as a cache would, and each query reads codes or full
precision as it would find them. Hooks, batches and captures work as on the plain model.

The queries of a pass are taken as one text each, from its first token: padding on the left or a
cache given by the caller is refused, since positions would be others.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantwatch_kernels.serve.attend_through import (
    attend_through_,
    check_whole_texts,
    register,
    restored,
)
from quantwatch_kernels.serve.kv_attention import Score, mixed_attention, seen_keys
from quantwatch_kernels.serve.kv_errors import AttentionErrors
from quantwatch_kernels.serve.kv_gain import GainSums, KVGains, check_gains
from quantwatch_kernels.serve.kv_plane import PlaneScheme
from quantwatch_kernels.serve.kv_policy import KVScheme
from quantwatch_kernels.serve.kv_quant import restore, store
from quantwatch_kernels.serve.kv_reads import ONE_BY_ONE, Arrivals, reads_codes
from quantwatch_kernels.serve.kv_top_pages import chosen_keys

__all__ = [
    "attention_errors",
    "calibrate_gains",
    "head_features",
    "quantized_kv",
    "serve_through_",
    "through_codes",
]

NAME = "quantwatch_kv"


@dataclass(frozen=True, slots=True)
class _Served:
    """What an attention module is served through."""

    scheme: KVScheme
    arrivals: Arrivals
    gains: KVGains | None
    sums: GainSums | None = None
    errors: AttentionErrors | None = None
    """While gains are found or errors are taken: attention is plain then."""


_STATE = f"_{NAME}"
"""Attribute of an attention module: `_Served`. It goes along when a model is copied."""


def through_codes(x_BHTD: Tensor, plane: PlaneScheme, scheme: KVScheme) -> Tensor:
    """Return x as codes say it where a cache of this many tokens could ever hold codes.

    [B, H, T, D] in x's dtype, at least float32; sinks and the last tokens, which fill no flush, are
    as they are.
    """
    exact = x_BHTD.to(torch.promote_types(x_BHTD.dtype, torch.float32))
    first, end = _coded(scheme, x_BHTD.shape[-2])
    coded = restore(store(x_BHTD[..., first:end, :], plane), plane).to(exact.dtype)
    return torch.cat([exact[..., :first, :], coded, exact[..., end:, :]], -2)


def _coded(scheme: KVScheme, tokens: int) -> tuple[int, int]:
    """Return begin and end of what could ever be codes among this many tokens."""
    first = min(scheme.sinks, tokens)
    return first, first + (tokens - first) // scheme.flush * scheme.flush


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention in transformers' calling convention: [B, T, H, D] is returned."""
    check_whole_texts(module, query, key, mask, s_aux=kwargs.get("s_aux"))
    served: _Served = getattr(module, _STATE)
    exact = (key, value)
    coded = exact if module.layer_idx in served.scheme.high_layers else _said(module, exact)
    reads = _reads(served, query, key, mask)
    score = Score(kwargs.get("scaling"), kwargs.get("softcap"))
    out = mixed_attention(query, exact, coded, reads, mask, score)
    if served.errors is not None:
        served.errors.add_scores(query, (key, coded[0]), reads, seen_keys(mask, _first(reads))[0])
        found, out = out, mixed_attention(query, exact, exact, reads, mask, score)
        served.errors.add_outputs(found, out)
    return out.transpose(1, 2).contiguous(), None


register(NAME, _attention)


def _said(module: Any, exact: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return what codes say of keys and values, or those themselves while gains are found."""
    served: _Served = getattr(module, _STATE)
    scheme, planes = served.scheme, (served.scheme.keys, served.scheme.values)
    keys, values = (through_codes(x, p, scheme) for x, p in zip(exact, planes, strict=True))
    span = slice(*_coded(scheme, keys.shape[-2]))
    coded = keys[..., span, :], values[..., span, :]
    if served.sums is not None:
        served.sums.add(module.layer_idx, (exact[0][..., span, :], exact[1][..., span, :]), coded)
        return exact
    if served.gains is not None:
        gained = served.gains.apply(module.layer_idx, coded)
        keys[..., span, :], values[..., span, :] = gained
    return keys, values


def _reads(
    served: _Served, query: Tensor, key: Tensor, mask: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    scheme = served.scheme
    reads = reads_codes(scheme, query.shape[-2], key.shape[-2], served.arrivals).to(query.device)
    if not scheme.top_pages:
        return reads
    seen = seen_keys(mask, reads)[0]
    return reads & ~chosen_keys(query, key, scheme, reads, seen), reads


def _first(reads: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return reads[0] if isinstance(reads, tuple) else reads


def head_features(model: Any) -> int:
    """Return the width of one head, of a transformers model."""
    text = model.config.get_text_config(decoder=True)
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def serve_through_(
    model: Any,
    scheme: KVScheme,
    arrivals: Arrivals = ONE_BY_ONE,
    gains: KVGains | None = None,
) -> None:
    """Make `model` attend through a cache of this scheme from now on, texts coming as said.

    Raises ValueError for a model whose attention can't be replaced or that caches latents in place
    of keys and values, for high layers that it doesn't have, and for a scheme with a gain and no
    gains.
    """
    check_gains(scheme, gains)
    _serve(model, _Served(scheme, arrivals, gains))


def _serve(model: Any, served: _Served) -> None:
    layers = served.scheme.high_layers
    count = _num_layers(model) if layers else 0
    if any(layer >= count for layer in layers):
        raise ValueError(f"layers {list(layers)} are to stay high; the model has {count}.")
    # Their keys and values are expanded anew in every step and never cached.
    latent = next((m for m in model.modules() if hasattr(m, "kv_lora_rank")), None)
    if latent is not None:
        raise ValueError(f"{type(latent).__name__} caches latents, not keys and values.")
    attend_through_(model, NAME, served)


def _num_layers(model: Any) -> int:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise ValueError(f"{type(model).__name__} is no model of transformers.")
    return int(config.get_text_config(decoder=True).num_hidden_layers)


@contextmanager
def quantized_kv(
    model: Any,
    scheme: KVScheme,
    arrivals: Arrivals = ONE_BY_ONE,
    gains: KVGains | None = None,
) -> Iterator[None]:
    """Inside, `model` attends through a cache of this scheme; see `serve_through_`."""
    check_gains(scheme, gains)
    with _serving(model, _Served(scheme, arrivals, gains)):
        yield


@contextmanager
def _serving(model: Any, served: _Served) -> Iterator[None]:
    with restored(model, NAME):
        _serve(model, served)
        yield


def calibrate_gains(model: Any, scheme: KVScheme, texts: Sequence[Tensor]) -> KVGains:
    """Return the gains that repair `scheme` best on texts of token ids [1, T]; see `kv_gain`.

    The model runs as it is, so that all layers' sums are of its own numbers. Raises ValueError for
    a scheme without a gain, and when no text is long enough for a code to be stored.
    """
    if not scheme.gain:
        raise ValueError("the scheme has no gain that could be calibrated.")
    sums = GainSums()
    served = _Served(replace(scheme, top_pages=0), ONE_BY_ONE, None, sums=sums)
    with torch.inference_mode(), _serving(model, served):
        for ids in texts:
            if scheme.stored_end(ids.shape[-1]) > scheme.sinks:
                model(ids, use_cache=False)
    return sums.gains(_num_layers(model))


def attention_errors(
    model: Any,
    scheme: KVScheme,
    texts: Sequence[Tensor],
    arrivals: Arrivals = ONE_BY_ONE,
    gains: KVGains | None = None,
) -> AttentionErrors:
    """Return what a cache does to each layer's attention, with the plain model's inputs to it.

    Texts are token ids [1, T]. Raises ValueError as `serve_through_` does.
    """
    check_gains(scheme, gains)
    errors = AttentionErrors()
    with (
        torch.inference_mode(),
        _serving(model, _Served(scheme, arrivals, gains, errors=errors)),
    ):
        for ids in texts:
            model(ids, use_cache=False)
    return errors
