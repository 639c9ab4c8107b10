"""Observations as a pack and back: the noise floor's, which the reference alone gives."""

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantwatch.capture.stored.packing import Packed
from quantwatch.domain import (
    ExpertLoad,
    Json,
    NonFinite,
    Observation,
    Scope,
    TokenMatrix,
    TopLogits,
)

_TOP = tuple(each.name for each in fields(TopLogits))


def pack_seen(seen: list[Observation], said: Json) -> Packed:
    """Return observations, and what else is said of them, as what is written."""
    packed = Packed()
    records = [_record(packed, f"{n}", observation) for n, observation in enumerate(seen)]
    packed.structure = {"seen": records, "said": said}
    return packed


def unpack_seen(packed: Packed) -> tuple[list[Observation], Json]:
    """Return what was packed."""
    records = packed.structure["seen"]
    seen = [_observation(packed, f"{n}", record) for n, record in enumerate(records)]
    return seen, packed.structure["said"]


def _record(packed: Packed, at: str, seen: Observation) -> Json:
    for name in _TOP if seen.top is not None else ():
        _add(packed, f"{at} {name}", getattr(seen.top, name))
    for number, load in enumerate(seen.loads):
        _add(packed, f"{at} load {number} reference", load.reference)
        _add(packed, f"{at} load {number} candidate", load.candidate)
    born = seen.first_nonfinite
    return {
        "candidate": seen.candidate,
        "prompt": seen.prompt,
        "matrices": [_matrix(packed, f"{at} {n}", m) for n, m in enumerate(seen.matrices)],
        "top": seen.top is not None,
        "nonfinite": None if born is None else [born.scope, born.prompt, born.position],
        "loads": [load.scope for load in seen.loads],
        "offset": seen.offset,
    }


def _matrix(packed: Packed, at: str, matrix: TokenMatrix) -> Json:
    _add(packed, f"{at} values", matrix.values)
    if matrix.positions is not None:
        _add(packed, f"{at} positions", matrix.positions)
    return {
        "metric": matrix.metric,
        "scopes": list(matrix.scopes),
        "role": matrix.role,
        "positions": matrix.positions is not None,
        "num_missing": matrix.num_missing,
    }


def _add(packed: Packed, name: str, values: NDArray[Any]) -> None:
    # Copied: torch wants memory that may be written to.
    packed.add(name, torch.from_numpy(np.array(values)))


def _observation(packed: Packed, at: str, record: Json) -> Observation:
    born = record["nonfinite"]
    return Observation(
        record["candidate"],
        record["prompt"],
        tuple(_restored(packed, f"{at} {n}", m) for n, m in enumerate(record["matrices"])),
        TopLogits(*(packed[f"{at} {name}"].numpy() for name in _TOP)) if record["top"] else None,
        None if born is None else NonFinite(Scope(born[0]), born[1], born[2]),
        tuple(
            ExpertLoad(
                Scope(scope),
                packed[f"{at} load {n} reference"].numpy(),
                packed[f"{at} load {n} candidate"].numpy(),
            )
            for n, scope in enumerate(record["loads"])
        ),
        record["offset"],
    )


def _restored(packed: Packed, at: str, record: Json) -> TokenMatrix:
    return TokenMatrix(
        record["metric"],
        tuple(Scope(scope) for scope in record["scopes"]),
        packed[f"{at} values"].numpy(),
        packed[f"{at} positions"].numpy() if record["positions"] else None,
        record["role"],
        record["num_missing"],
    )
