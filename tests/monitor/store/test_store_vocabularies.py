"""The text of every token id: kept once per tokenizer, exactly, whoever writes first."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from quantwatch.domain import RunResult, Suite
from quantwatch.errors import StoreError
from quantwatch.store import latest, runs
from quantwatch.store.packing import pack, unpack
from quantwatch.store.runs import finish_run, list_runs
from quantwatch.store.session import Database
from quantwatch.store.tables import VocabularyRow
from quantwatch.store.vocabularies import get_vocabulary

Make = Callable[..., RunResult]
Begin = Callable[[Database, RunResult], None]
Finish = Callable[..., RunResult]

SHA = "c" * 64
WORDS = ("<s>", "", " ", "\0", "a\0b", "<0xE4>", "\ud83d", "数", "😀", "<id 9>")


def _count(db: Database) -> int:
    with db.reader() as session:
        return session.scalar(select(func.count()).select_from(VocabularyRow)) or 0


@pytest.fixture
def finish(db: Database, make_result: Make, begin: Begin, suite: Suite) -> Finish:
    """Save a run whose tokenizer has this digest and this vocabulary."""

    def save(vocabulary: tuple[str, ...], sha: str = SHA, **fields: Any) -> RunResult:
        result = _with_tokenizer(make_result(**fields), sha)
        begin(db, result)
        finish_run(db, result, replace(suite, vocabulary=vocabulary), ())
        return result

    return save


def _with_tokenizer(result: RunResult, sha: str) -> RunResult:
    assert result.reference is not None
    fingerprint = replace(result.reference.fingerprint, tokenizer_sha=sha)
    return replace(result, reference=replace(result.reference, fingerprint=fingerprint))


def test_a_vocabulary_comes_back(db: Database, finish: Finish) -> None:
    """Catches NUL or half a character that PostgreSQL refuses, and an order that is lost."""
    finish(WORDS)
    assert get_vocabulary(db, SHA) == WORDS
    assert get_vocabulary(db, "unknown") == ()


@given(st.lists(st.text(st.characters(exclude_categories=()), max_size=5), max_size=20))
def test_any_text_can_be_packed(texts: list[str]) -> None:
    """Catches a text that comes back changed: surrogates, controls, line ends."""
    assert unpack(pack(texts)) == texts


def test_a_whole_vocabulary_is_small(db: Database, finish: Finish) -> None:
    """Catches one that is kept uncompressed, or cut: 128,256 ids as a Llama has them."""
    words = tuple(f"▁word{number % 977}" for number in range(128_256))
    finish(words)
    assert get_vocabulary(db, SHA) == words
    with db.reader() as session:
        row = session.get_one(VocabularyRow, SHA)
        assert row.num_tokens == len(words)
        assert len(row.data) < 600_000


def test_a_vocabulary_is_written_once(db: Database, finish: Finish) -> None:
    """Catches megabytes that are written every night, and names that change under old runs."""
    finish(WORDS)
    finish((*WORDS, "new"), check="other")
    assert get_vocabulary(db, SHA) == WORDS
    assert _count(db) == 1


def test_each_tokenizer_has_its_own(db: Database, finish: Finish) -> None:
    """Catches ids named by another model's tokenizer."""
    finish(WORDS)
    finish(WORDS[::-1], sha="d" * 64)
    assert get_vocabulary(db, SHA) == WORDS
    assert get_vocabulary(db, "d" * 64) == WORDS[::-1]


def test_without_a_tokenizer_nothing_is_kept(db: Database, finish: Finish) -> None:
    """Catches an empty vocabulary that hides the real one of a later run."""
    finish(())
    finish((), sha="")
    assert _count(db) == 0
    finish(WORDS)
    assert get_vocabulary(db, SHA) == WORDS


def test_a_result_without_a_reference_or_a_suite_can_be_saved(
    db: Database, make_result: Make, begin: Begin, suite: Suite
) -> None:
    """Catches a crash on a run that stopped early, and on one that came from a file."""
    stopped, imported = make_result(reference=None), make_result(days=1)
    for result, given_suite in ((stopped, replace(suite, vocabulary=WORDS)), (imported, None)):
        begin(db, result)
        finish_run(db, result, given_suite, ())
    assert _count(db) == 0


def test_a_vocabulary_needs_its_tokenizer(db: Database, finish: Finish) -> None:
    """Catches vocabularies of all unnamed tokenizers under one key."""
    with pytest.raises(ValueError, match="10 tokens without a tokenizer's digest"):
        finish(WORDS, sha="")
    assert _count(db) == 0


def test_damaged_bytes_are_noticed(db: Database, finish: Finish) -> None:
    """Catches wrong words under a heatmap after a disk error."""
    finish(WORDS)
    with db.writer() as session:
        session.execute(update(VocabularyRow).values(data=pack(WORDS[::-1])))
    with pytest.raises(StoreError, match=rf"vocabulary of tokenizer {SHA} is corrupt"):
        get_vocabulary(db, SHA)


@pytest.mark.slow
def test_two_first_runs_at_once(
    db: Database, finish: Finish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a unique violation, a deadlock or "database is locked" when both write it.

    The first run has written it and not committed when the second one finds none and writes too.
    """
    # Everything else is there already, so that nothing but the vocabulary can keep them waiting.
    names = ("first", "second")
    for name in names:
        finish((), check=name)
    written, release = threading.Event(), threading.Event()

    def pause(session: Session, *rest: Any) -> None:
        latest.note_ended(session, *rest)
        if not written.is_set():
            written.set()
            assert release.wait(20)

    monkeypatch.setattr(runs, "note_ended", pause)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(finish, WORDS, check="first", days=1)
        assert written.wait(20)
        second = pool.submit(finish, WORDS, check="second", days=1)
        try:
            assert second not in wait([second], timeout=0.5).done
        finally:
            release.set()
        first.result()
        second.result()
    assert get_vocabulary(db, SHA) == WORDS
    assert _count(db) == 1
    assert [run.num_alerts for run in list_runs(db)] == [1, 1, 1, 1]
