"""Schemes of a KV cache by name, and the options that a name can carry (`kv_options`).

What a scheme is made of: `kv_plane` (codes of keys or values), `kv_policy` (tokens, layers and
compensation). What each costs: docs/kernels.md.
"""

from dataclasses import replace

from quantwatch_kernels.serve.kv_options import KVName, parse_name
from quantwatch_kernels.serve.kv_plane import PlaneScheme
from quantwatch_kernels.serve.kv_policy import KVScheme

__all__ = ["SCHEMES", "KVScheme", "PlaneScheme", "scheme_named"]


def _both(plane: PlaneScheme, sinks: int = 0, window: int = 0) -> KVScheme:
    return KVScheme(plane, plane, sinks, window)


def _kivi(bits: int, rank: int = 0, window: int = 0) -> KVScheme:
    keys = PlaneScheme(bits, "channel", 32, rank=rank)
    return KVScheme(keys, PlaneScheme(bits, "token", 32, rank=rank), window=window)


_HADAMARD4 = PlaneScheme(4, group=32, hadamard=True, clip="mse")
_KEYS2 = PlaneScheme(2, "channel", 32, clip="mse", rank=4, chunk=64)
_VALUES2 = PlaneScheme(2, "token", 32, hadamard=True, clip="mse")
_INT8_CHUNK = PlaneScheme(8, "chunk", symmetric=True)
_INT8_R4 = PlaneScheme(8, symmetric=True, rank=4)
SCHEMES: dict[str, KVScheme] = {
    "float16": _both(PlaneScheme(16, floats="float16")),
    "bfloat16": _both(PlaneScheme(16, floats="bfloat16")),
    "int8": _both(PlaneScheme(8, hadamard=True)),
    "int8-centered": KVScheme(
        PlaneScheme(8, hadamard=True, center=True), PlaneScheme(8, hadamard=True)
    ),
    "int8-symmetric": _both(PlaneScheme(8, symmetric=True)),
    "int8-plain": _both(PlaneScheme(8)),
    "int8-chunk": _both(_INT8_CHUNK),
    "int8-chunk-r4": _both(replace(_INT8_CHUNK, rank=4)),
    "int8-r4": _both(_INT8_R4),
    "int8-policy": KVScheme(_INT8_R4, _INT8_R4, sinks=4, high_layers=(0,)),
    "kivi8": _kivi(8),
    "int4-symmetric": _both(PlaneScheme(4, symmetric=True)),
    "int4-plain": _both(PlaneScheme(4)),
    "int4-g32": _both(PlaneScheme(4, group=32)),
    "int4-hadamard": _both(PlaneScheme(4, hadamard=True)),
    "int4": _both(_HADAMARD4),
    "int4-centered": KVScheme(replace(_HADAMARD4, center=True), _HADAMARD4),
    "k5v4": KVScheme(
        PlaneScheme(5, hadamard=True, clip="mse", center=True), replace(_HADAMARD4, group=None)
    ),
    "int4-window": _both(_HADAMARD4, sinks=4, window=32),
    "kivi4": _kivi(4),
    "kivi4-window": _kivi(4, window=32),
    "kivi4-r4": _kivi(4, rank=4),
    "kivi2": _kivi(2),
    "kivi2-r4": _kivi(2, rank=4),
    "int2": KVScheme(_KEYS2, _VALUES2, sinks=4),
    "int2-plain": _both(PlaneScheme(2)),
}
"""By name, as a check or a table says it; what each costs is in docs/kernels.md."""


def scheme_named(name: str) -> KVScheme:
    """Return a scheme, `NAME` or `NAME+option+…`.

    Raises ValueError naming what is allowed.
    """
    said = parse_name(name)
    if said.base not in SCHEMES:
        raise ValueError(f"unknown KV scheme {said.base!r}; allowed are {', '.join(SCHEMES)}.")
    scheme = SCHEMES[said.base]
    if said == KVName(said.base):
        return scheme
    if said.rank is not None:
        keys, values = (replace(p, rank=said.rank) for p in (scheme.keys, scheme.values))
        scheme = replace(scheme, keys=keys, values=values)
    return replace(
        scheme,
        sinks=scheme.sinks if said.sinks is None else said.sinks,
        window=scheme.window if said.window is None else said.window,
        high_layers=scheme.high_layers if said.high is None else said.high,
        top_pages=scheme.top_pages if said.top is None else said.top,
        gain=scheme.gain or said.gain,
    )
