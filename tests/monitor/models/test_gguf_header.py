"""A GGUF header by itself, written field by field."""

import struct
from pathlib import Path

import pytest

from quantwatch.errors import ModelError
from quantwatch.models.gguf_header import read_gguf_header


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def strings(*values: str) -> bytes:
    return struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(text, values))


def write(path: Path, *, alignment: bytes, weights: int = 32) -> Path:
    """Write a header of two tokens and one float32 tensor."""
    pairs = {
        "general.architecture": struct.pack("<I", 8) + text("llama"),
        "tokenizer.ggml.tokens": strings("a", "a longer token"),
        "general.alignment": alignment,
    }
    body = b"".join(text(key) + value for key, value in pairs.items())
    tensor = text("token_embd.weight") + struct.pack("<IQIQ", 1, weights, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs))
    path.write_bytes(head + body + tensor + bytes(4 * weights + 64))
    return path


def test_strings_are_stepped_over(tmp_path: Path) -> None:
    """Catches lengths that are read at another place than the texts end."""
    found = read_gguf_header(write(tmp_path / "x.gguf", alignment=struct.pack("<II", 4, 32)))
    assert (found.architecture, found.num_weights, found.types) == ("llama", 32, ("F32",))
    assert "general.alignment" in found.keys


@pytest.mark.parametrize(
    ("alignment", "weights", "said"),
    [
        (struct.pack("<I", 8) + text("abc"), 32, "corrupt: general.alignment is 'abc'"),
        (struct.pack("<II", 4, 32), 0, "holds no weights"),
        (strings("a", "b")[:-1], 32, "cut or garbled|unknown"),
    ],
    ids=["alignment", "no weights", "garbled"],
)
def test_what_is_wrong_is_named(alignment: bytes, weights: int, said: str, tmp_path: Path) -> None:
    """Catches a ValueError or a division by zero of ours for somebody's file."""
    path = write(tmp_path / "x.gguf", alignment=alignment, weights=weights)
    with pytest.raises(ModelError, match=said):
        read_gguf_header(path)
