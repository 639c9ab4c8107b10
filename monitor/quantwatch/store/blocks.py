"""Matrices as blobs: encoded before the transaction, read one by one, checked by their digest."""

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any, Literal, Self, cast

import numpy as np
from sqlalchemy import Select, insert, select
from sqlalchemy.orm import Session

from quantwatch.domain import Block, Scope
from quantwatch.errors import StoreError
from quantwatch.store import lookups
from quantwatch.store.codec import Missing, Values, codec_for, decode, decode_column, encode
from quantwatch.store.records import BlockInfo
from quantwatch.store.session import Database
from quantwatch.store.tables import BlockRow, MetricRow, RunCandidateRow, ScopeListRow

Kind = Literal["per_prompt", "per_token", "topk"]
Query = Select[*tuple[Any, ...]]
Shape = tuple[int, ...]
Decoded = tuple[Values, Missing | None]

ALL_PROMPTS = -1
_BATCH = 64
"""Blocks per INSERT: a few megabytes at a time."""
_IN_MEMORY_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class _Header:
    """A block without its values, and where its bytes lie in the spool."""

    candidate: str
    kind: str
    metric: str
    prompt: int
    scopes: tuple[Scope, ...]
    codec: str
    shape: tuple[int, ...]
    sha256: str
    num_bytes: int


class EncodedBlocks:
    """All blocks of a run, compressed into a temporary file.

    Compressing inside the transaction would hold the database's only write lock for seconds, and
    keeping all bytes would make memory grow with the suite. A context manager.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._spool = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115
        self.headers: list[_Header] = []
        try:
            for block in blocks:
                self._append(block)
        except BaseException:
            self._spool.close()
            raise

    def __iter__(self) -> Iterator[tuple[_Header, bytes]]:
        self._spool.seek(0)
        for header in self.headers:
            yield header, self._spool.read(header.num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._spool.close()

    def _append(self, block: Block) -> None:
        codec = codec_for(block.kind, block.values)
        payload = encode(block.values, block.missing, codec)
        try:
            self._spool.write(payload)
        except OSError as error:
            folder = tempfile.gettempdir()
            raise StoreError(f"Blocks can't be collected in folder {folder}: {error}.") from error
        self.headers.append(
            _Header(
                candidate=block.candidate,
                kind=block.kind,
                metric=block.metric,
                prompt=ALL_PROMPTS if block.prompt is None else block.prompt,
                scopes=block.scopes,
                codec=codec,
                shape=block.values.shape,
                sha256=hashlib.sha256(payload).hexdigest(),
                num_bytes=len(payload),
            )
        )


def insert_blocks(session: Session, blocks: EncodedBlocks, candidates: dict[str, int]) -> None:
    """Write all blocks. `candidates` maps names to ids; raises ValueError on another name."""
    strangers = {header.candidate for header in blocks.headers} - candidates.keys()
    if strangers:
        raise ValueError(f"blocks of {sorted(strangers)}, which are no candidates of the run")
    metrics = lookups.metric_ids(session, {header.metric for header in blocks.headers})
    lists = lookups.scope_list_ids(session, (header.scopes for header in blocks.headers))
    rows = (
        _row(header, payload, (candidates[header.candidate], metrics[header.metric]), lists)
        for header, payload in blocks
    )
    while batch := list(islice(rows, _BATCH)):
        session.execute(insert(BlockRow), batch)


def get_block(
    db: Database, run_id: str, candidate: str, kind: str, metric: str, prompt: int | None = None
) -> Block | None:
    """Return one block, None when it was not stored. Raises StoreError when its bytes are damaged.

    Cells that were not measured are NaN in `values` and marked in `missing`.
    """
    return _get(db, (run_id, candidate, kind, metric, prompt), decode)


def get_column(
    db: Database, run_id: str, candidate: str, metric: str, prompt: int, place: Callable[[int], int]
) -> Block | None:
    """Return one column of a matrix over tokens; `place` says which, from the number of columns.

    None when there is no such matrix or column. Raises StoreError when its bytes are damaged.
    """

    def column(payload: bytes, shape: Shape, codec: str) -> Decoded | None:
        at = place(shape[1])
        return decode_column(payload, shape, codec, at) if 0 <= at < shape[1] else None

    return _get(db, (run_id, candidate, "per_token", metric, prompt), column)


def _get(
    db: Database,
    key: tuple[str, str, str, str, int | None],
    decoder: Callable[[bytes, Shape, str], Decoded | None],
) -> Block | None:
    run_id, candidate, kind, metric, prompt = key
    wanted = ALL_PROMPTS if prompt is None else prompt
    query = (
        _of_candidate(select(BlockRow, ScopeListRow.names), run_id, candidate)
        .join(ScopeListRow, ScopeListRow.id == BlockRow.scope_list_id)
        .where(BlockRow.kind == kind, MetricRow.slug == metric, BlockRow.prompt == wanted)
    )
    with db.reader() as session:
        found = session.execute(query).first()
    if found is None:
        return None
    row, names = found
    what = f"{kind} block of {metric}, candidate {candidate}, prompt {prompt}, run {run_id}"
    decoded = _decoded(row, decoder, f"Database {db.name}: the {what}")
    if decoded is None:
        return None
    values, missing = np.ascontiguousarray(decoded[0]), decoded[1]
    return Block(candidate, cast(Kind, row.kind), metric, prompt, tuple(names), values, missing)


def list_blocks(db: Database, run_id: str, candidate: str) -> list[BlockInfo]:
    """Return what is stored of a candidate, with sizes, by kind, metric and prompt."""
    columns = select(BlockRow.kind, MetricRow.slug, BlockRow.prompt, BlockRow.num_bytes)
    query = _of_candidate(columns, run_id, candidate).order_by(
        BlockRow.kind, MetricRow.slug, BlockRow.prompt
    )
    with db.reader() as session:
        return [
            BlockInfo(kind, metric, None if prompt == ALL_PROMPTS else prompt, num_bytes)
            for kind, metric, prompt, num_bytes in session.execute(query)
        ]


def _of_candidate(query: Query, run_id: str, candidate: str) -> Query:
    return (
        query.select_from(BlockRow)
        .join(RunCandidateRow, RunCandidateRow.id == BlockRow.run_candidate_id)
        .join(MetricRow, MetricRow.id == BlockRow.metric_id)
        .where(RunCandidateRow.run_id == run_id, RunCandidateRow.name == candidate)
    )


def _row(
    header: _Header, payload: bytes, ids: tuple[int, int], lists: dict[tuple[Scope, ...], int]
) -> dict[str, Any]:
    return {
        "run_candidate_id": ids[0],
        "metric_id": ids[1],
        "kind": header.kind,
        "prompt": header.prompt,
        "scope_list_id": lists[header.scopes],
        "codec": header.codec,
        "shape": header.shape,
        "sha256": header.sha256,
        "num_bytes": header.num_bytes,
        "payload": payload,
    }


def _decoded(
    row: BlockRow, decoder: Callable[[bytes, Shape, str], Decoded | None], what: str
) -> Decoded | None:
    if hashlib.sha256(row.payload).hexdigest() != row.sha256:
        raise StoreError(f"{what} is corrupt (its digest differs).")
    try:
        return decoder(row.payload, tuple(row.shape), row.codec)
    except ValueError as error:
        raise StoreError(f"{what} can't be decoded: {error}.") from error
