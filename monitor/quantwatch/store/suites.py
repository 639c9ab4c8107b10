"""Suites as they were measured. The dashboard can't detokenize, so pieces are kept beside ids."""

from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from quantwatch.domain import Prompt, Suite
from quantwatch.store.lookups import ids_by_key, insert_new
from quantwatch.store.packing import pack, unpack
from quantwatch.store.records import StoredPrompt
from quantwatch.store.session import Database
from quantwatch.store.tables import SuitePromptRow, SuiteRow
from quantwatch.telemetry import canonical_sha


def get_prompts(db: Database, suite_hash: str) -> list[StoredPrompt]:
    """Return the prompts of a suite in order, an empty list when the suite is unknown."""
    query = (
        select(SuitePromptRow)
        .join(SuiteRow, SuiteRow.id == SuitePromptRow.suite_id)
        .where(SuiteRow.hash == suite_hash)
        .order_by(SuitePromptRow.idx)
    )
    with db.reader() as session:
        return [_stored(row) for row in session.scalars(query)]


def save_suite(session: Session, suite: Suite) -> int:
    """Return a suite's id; writes it if new, and its text if an earlier run had to leave it out."""
    rows = [{"hash": suite.hash, "name": suite.name}]
    suite_id = ids_by_key(session, SuiteRow, "hash", rows)[suite.hash]
    readable = SuitePromptRow.pieces.is_not(None)
    rows_there = select(SuitePromptRow.idx, readable).where(SuitePromptRow.suite_id == suite_id)
    known = {row[0]: row[1] for row in session.execute(rows_there)}
    new = [_row(suite_id, prompt) for prompt in suite.prompts if prompt.index not in known]
    if new:
        session.execute(insert_new(session, SuitePromptRow), new)
    for prompt in suite.prompts:
        if prompt.pieces and known.get(prompt.index) is False:
            _add_text(session, suite_id, prompt)
    return suite_id


def _add_text(session: Session, suite_id: int, prompt: Prompt) -> None:
    session.execute(
        update(SuitePromptRow)
        .where(SuitePromptRow.suite_id == suite_id, SuitePromptRow.idx == prompt.index)
        .values(_texts(prompt))
    )


def _row(suite_id: int, prompt: Prompt) -> dict[str, Any]:
    return {
        "suite_id": suite_id,
        "idx": prompt.index,
        "category": prompt.category,
        "source": prompt.source,
        "num_tokens": len(prompt.token_ids),
        "score_start": prompt.score_start,
        "token_hash": canonical_sha(prompt.token_ids),
        "tokens": pack(prompt.token_ids),
        **_texts(prompt),
    }


def _texts(prompt: Prompt) -> dict[str, bytes | None]:
    return {
        "pieces": pack(prompt.pieces) if prompt.pieces else None,
        "text": None if prompt.text is None else pack(prompt.text),
    }


def _stored(row: SuitePromptRow) -> StoredPrompt:
    return StoredPrompt(
        index=row.idx,
        category=row.category,
        source=row.source,
        num_tokens=row.num_tokens,
        token_ids=tuple(unpack(row.tokens)),
        pieces=None if row.pieces is None else tuple(unpack(row.pieces)),
        text=None if row.text is None else unpack(row.text),
        score_start=row.score_start,
    )
