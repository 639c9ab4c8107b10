"""A tiny model and its prompts, for runs from models to verdicts."""

import json
from pathlib import Path

import pytest
from tests.monitor.tiny_models import save_word_model

from quantwatch.store.session import Database

WORDS = [f"w{i}" for i in range(96)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and sixteen prompts."""
    folder = tmp_path_factory.mktemp("models")
    save_word_model(folder / "tiny", len(WORDS), scale=5.0)
    texts = [" ".join(WORDS[(i * 5) % 70 : (i * 5) % 70 + 6 + i]) for i in range(16)]
    (folder / "prompts.json").write_text(json.dumps(texts))
    return folder


@pytest.fixture
def database(sqlite_db: Database) -> Database:
    """Where a run is stored: what is measured doesn't depend on the kind of database."""
    return sqlite_db
