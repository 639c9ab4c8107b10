"""A reference over bytes, as a checkpoint with a text, for tables that are built from end to end."""

from pathlib import Path

import pytest
from tests.monitor.kernel_lab.references import WINDOW, byte_text, tied_llama
from tests.monitor.tiny_models import byte_tokenizer

from quantwatch.kernel_lab.tables.model import TableRequest


@pytest.fixture(scope="session")
def byte_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers over bytes."""
    folder = tmp_path_factory.mktemp("bytes") / "model"
    model = tied_llama(vocab_size=256, scale=4.0, max_position_embeddings=WINDOW)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_request(byte_checkpoint: Path, tmp_path: Path) -> TableRequest:
    """A text of 19 windows, of which 2 are measured."""
    text = tmp_path / "text.txt"
    text.write_text(byte_text(19))
    return TableRequest(tmp_path, str(byte_checkpoint), text, windows=2, quick=True)
