"""Suites as they were measured. The dashboard can't detokenize, so pieces are kept beside ids."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from quantwatch.domain import Prompt, Suite
from quantwatch.store.lookups import ids_by_key, insert_new
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


def save_suite(session: Session, suite: Suite, *, store_text: bool) -> int:
    """Return a suite's id; writes it if new, and its text if an earlier run had to leave it out.

    Without `store_text` only token counts and digests are kept: ids can be turned back into text.
    """
    rows = [{"hash": suite.hash, "name": suite.name}]
    suite_id = ids_by_key(session, SuiteRow, "hash", rows)[suite.hash]
    known = {
        row.idx: row.has_tokens
        for row in session.execute(
            select(
                SuitePromptRow.idx, SuitePromptRow.tokens.is_not(None).label("has_tokens")
            ).where(SuitePromptRow.suite_id == suite_id)
        )
    }
    new = [_row(suite_id, p, store_text) for p in suite.prompts if p.index not in known]
    if new:
        session.execute(insert_new(session, SuitePromptRow), new)
    if store_text:
        _add_texts(session, suite_id, [p for p in suite.prompts if known.get(p.index) is False])
    return suite_id


def _add_texts(session: Session, suite_id: int, prompts: list[Prompt]) -> None:
    for prompt in prompts:
        session.execute(
            update(SuitePromptRow)
            .where(SuitePromptRow.suite_id == suite_id, SuitePromptRow.idx == prompt.index)
            .values(_texts(prompt, store_text=True))
        )


def _row(suite_id: int, prompt: Prompt, store_text: bool) -> dict[str, Any]:
    return {
        "suite_id": suite_id,
        "idx": prompt.index,
        "category": prompt.category,
        "source": prompt.source,
        "num_tokens": len(prompt.token_ids),
        "score_start": prompt.score_start,
        "token_hash": canonical_sha(prompt.token_ids),
        **_texts(prompt, store_text=store_text),
    }


def _texts(prompt: Prompt, *, store_text: bool) -> dict[str, bytes | None]:
    if not store_text:
        return {"tokens": None, "text": None}
    # ASCII JSON keeps lone surrogates, which pieces of a character cut in two may contain.
    tokens = json.dumps({"ids": prompt.token_ids, "pieces": prompt.pieces}).encode()
    text = None if prompt.text is None else json.dumps(prompt.text).encode()
    return {"tokens": zlib.compress(tokens), "text": text and zlib.compress(text)}


def _stored(row: SuitePromptRow) -> StoredPrompt:
    tokens: Mapping[str, Any] = {}
    if row.tokens is not None:
        tokens = json.loads(zlib.decompress(row.tokens))
    ids, pieces = tokens.get("ids"), tokens.get("pieces")
    return StoredPrompt(
        index=row.idx,
        category=row.category,
        source=row.source,
        num_tokens=row.num_tokens,
        token_ids=None if ids is None else tuple(ids),
        pieces=tuple(pieces) if pieces else None,
        text=None if row.text is None else json.loads(zlib.decompress(row.text)),
        score_start=row.score_start,
    )
