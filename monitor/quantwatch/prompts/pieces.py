"""The text of each single token, so that a page can label a heatmap without a tokenizer.

The pieces of a prompt join to its decoded text. A character whose bytes are spread over several
tokens belongs to the token that completes it, the ones before have an empty piece. Bytes that are
no UTF-8 at all are shown as ``<0xE4>``.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return byte-level BPE's alphabet: printable bytes stand for themselves, others follow."""
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    return {chr(byte): byte for byte in _PRINTABLE} | {
        chr(256 + rank): byte for rank, byte in enumerate(others)
    }


_BYTES = _byte_alphabet()


class TokenTexts:
    """Cuts prompts into the texts of their tokens; without a tokenizer the ids are the texts."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._raw: dict[int, bytes] = {}
        self._whole: dict[int, str | None] = {}
        if tokenizer is not None:
            self._added = {number: text for text, number in tokenizer.get_added_vocab().items()}
            self._byte_level = _is_byte_level(tokenizer)

    @property
    def readable(self) -> bool:
        """Say whether the pieces are text and not just numbers."""
        return self._tokenizer is not None

    def pieces(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Return one text per token."""
        if self._tokenizer is None:
            return tuple(map(str, ids))
        self._learn(set(ids) - self._raw.keys())
        # A token that is valid text alone can't hold a part of a character that was split,
        # so only the runs of the others have to be put together.
        runs = groupby(ids, key=lambda token_id: self._whole[token_id] is not None)
        return tuple(chain.from_iterable(self._run(whole, run) for whole, run in runs))

    def vocabulary(self) -> tuple[str, ...]:
        """Return the text of every id standing alone; bytes of split characters as <0xE4>."""
        if self._tokenizer is None:
            return ()
        count = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self._learn(set(range(count)) - self._raw.keys())
        return tuple(
            whole if whole is not None else _spread([self._raw[token_id]])[0]
            for token_id in range(count)
            for whole in (self._whole[token_id],)
        )

    def _run(self, whole: bool, run: Iterable[int]) -> Iterable[str]:
        if whole:
            return [self._whole[token_id] or "" for token_id in run]
        return _spread([self._raw[token_id] for token_id in run])

    def _learn(self, unknown: set[int]) -> None:
        assert self._tokenizer is not None
        numbers = sorted(unknown)
        tokens = self._tokenizer.convert_ids_to_tokens(numbers)
        for token_id, token in zip(numbers, tokens, strict=True):
            raw = self._bytes(token_id, token)
            self._raw[token_id] = raw
            self._whole[token_id] = _text_or_none(raw)

    def _bytes(self, token_id: int, token: str | bytes | None) -> bytes:
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        if token is None:  # a gap in the vocabulary
            return f"<id {token_id}>".encode()
        if isinstance(token, bytes):
            return token
        if self._byte_level and all(char in _BYTES for char in token):
            return bytes(_BYTES[char] for char in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _is_byte_level(tokenizer: Any) -> bool:
    """Ask the decoder: in the alphabet of byte-level BPE, Ġ stands for a space."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    return decoder is not None and bool(decoder.decode(["Ġ"]) == " ")


def _text_or_none(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _spread(parts: Sequence[bytes]) -> list[str]:
    """Give every character to the part that holds its last byte."""
    owner = [index for index, part in enumerate(parts) for _ in part]
    pieces = [""] * len(parts)
    for end, char in _characters(b"".join(parts)):
        pieces[owner[end - 1]] += char
    return pieces


def _characters(data: bytes) -> Iterator[tuple[int, str]]:
    """Yield each character with the offset of its end; a byte that is no UTF-8 as <0x..>."""
    end = 0
    for char in data.decode(errors="surrogateescape"):
        if "\udc80" <= char <= "\udcff":
            end += 1
            yield end, f"<0x{ord(char) - 0xDC00:02X}>"
        else:
            end += len(char.encode())
            yield end, char
