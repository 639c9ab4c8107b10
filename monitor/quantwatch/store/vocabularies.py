"""The text of every token id, once per tokenizer.

A model may rank a token high that no prompt contains, and the dashboard can't detokenize.
"""

import hashlib

from sqlalchemy import select
from sqlalchemy.orm import Session

from quantwatch.errors import StoreError
from quantwatch.store.lookups import insert_new
from quantwatch.store.packing import pack, unpack
from quantwatch.store.session import Database
from quantwatch.store.tables import VocabularyRow


def get_vocabulary(db: Database, tokenizer_sha: str) -> tuple[str, ...]:
    """Return the text of each token id in order, () when it is not kept.

    Raises StoreError when its bytes are damaged.
    """
    with db.reader() as session:
        row = session.get(VocabularyRow, tokenizer_sha)
        if row is None:
            return ()
        data, sha256 = row.data, row.sha256
    if hashlib.sha256(data).hexdigest() != sha256:
        raise StoreError(
            f"Database {db.name}: the vocabulary of tokenizer {tokenizer_sha} is corrupt "
            "(its digest differs)."
        )
    return tuple(unpack(data))


def save_vocabulary(session: Session, tokenizer_sha: str, vocabulary: tuple[str, ...]) -> None:
    """Write a tokenizer's vocabulary unless it is there, or empty: without a tokenizer it is.

    Raises ValueError when a vocabulary has no tokenizer it could belong to.
    """
    if not vocabulary:
        return
    if not tokenizer_sha:
        raise ValueError(f"a vocabulary of {len(vocabulary)} tokens without a tokenizer's digest")
    known = select(VocabularyRow.tokenizer_sha)
    if session.scalar(known.where(VocabularyRow.tokenizer_sha == tokenizer_sha)) is not None:
        return
    data = pack(vocabulary)
    row = {
        "tokenizer_sha": tokenizer_sha,
        "num_tokens": len(vocabulary),
        "sha256": hashlib.sha256(data).hexdigest(),
        "data": data,
    }
    session.execute(insert_new(session, VocabularyRow), [row])
