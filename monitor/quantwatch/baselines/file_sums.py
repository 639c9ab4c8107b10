"""Prompt sums in an exported run: what paired tests need, as compressed float64 in base64."""

import base64
import binascii
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from quantwatch.baselines.paired import Matrix
from quantwatch.domain import Block, Scope
from quantwatch.errors import UserError

_LARGEST = 1 << 28
"""Bytes that one block may unpack to."""


@dataclass(frozen=True, slots=True)
class _Row:
    candidate: str
    metric: str
    scopes: list[str]
    num_prompts: int
    data: str


_ROWS = TypeAdapter(list[_Row])


def encode_sums(blocks: Iterable[Block]) -> list[dict[str, Any]]:
    """Return `per_prompt` blocks as JSON values."""
    return [
        {
            "candidate": block.candidate,
            "metric": block.metric,
            "scopes": list(block.scopes),
            "num_prompts": len(block.values),
            "data": base64.b64encode(zlib.compress(block.values.astype("<f8").tobytes())).decode(),
        }
        for block in blocks
    ]


def decode_sums(rows: Any, origin: str, num_prompts: int) -> tuple[Block, ...]:
    """Return the blocks that were encoded, of a run of so many prompts.

    Raises UserError on anything else.
    """
    try:
        found = _ROWS.validate_python(rows)
    except ValidationError as error:
        raise UserError(f"{origin}: prompt_sums: {error.errors()[0]['msg']}") from None
    for row in found:
        if row.num_prompts != num_prompts:
            raise UserError(
                f"{_what(row, origin)}: {row.num_prompts} prompts; its run has {num_prompts}"
            )
    return tuple(_block(row, origin) for row in found)


def _block(row: _Row, origin: str) -> Block:
    shape = (row.num_prompts, len(row.scopes), 4)
    what = _what(row, origin)
    wanted = math.prod(shape) * 8
    if not 0 <= wanted <= _LARGEST:
        raise UserError(f"{what}: {wanted} bytes are announced, {_LARGEST} are allowed")
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(row.data, validate=True), wanted + 1)
    except (binascii.Error, zlib.error) as error:
        raise UserError(f"{what}: can't be unpacked: {error}") from None
    if len(data) != wanted:
        raise UserError(f"{what}: {len(data)} bytes where {wanted} were announced")
    values = np.frombuffer(data, dtype="<f8").astype(np.float64).reshape(shape)
    if problem := _problem(values):
        raise UserError(f"{what}: {problem}")
    scopes = tuple(Scope(scope) for scope in row.scopes)
    return Block(row.candidate, "per_prompt", row.metric, None, scopes, values)


def _what(row: _Row, origin: str) -> str:
    return f"{origin}: prompt_sums of {row.metric}, candidate {row.candidate}"


def _problem(values: Matrix) -> str | None:
    """Say what no run measures: only the largest value of a prompt without any is no number."""
    n, sums = values[..., 0], values[..., :3]
    if not np.isfinite(sums).all():
        return "a count or a sum is not finite"
    if (n < 0).any() or (n % 1).any():
        return "a number of values is negative or not whole"
    return "a sum of squares is negative" if (values[..., 2] < 0).any() else None
