"""Token texts: readable, exact, one per token."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwatch.prompts.pieces import TokenTexts

TEXTS = {
    "ascii": "the cat sat",
    "chinese": "清晨五点半,你好。",
    "emoji": "ok 🚲💨 👨‍👩‍👧‍👦 🏴󠁧󠁢󠁷󠁬󠁳󠁿",
    "arabic and hindi": "وصلت الرسالة बरसात",
    "controls": "a\tb\n\r\n\x00\x7f\u200b\u2028",
    "combining": "e\u0301 Z\u0337a\u0337",
    "looks like a byte": "<0xE4> and Ġ and ▁",
    "accents": "naïve café ÿ Ā",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
@pytest.mark.parametrize("kind", ["plain", "with_bos", "fallback"])
def test_pieces_join_to_the_text(text: str, kind: str, request: pytest.FixtureRequest) -> None:
    """Catches characters that are lost, doubled or shown as � where tokens split them."""
    if kind == "fallback" and "▁" in text:
        text = text.replace("▁", "")  # in this kind of tokenizer ▁ *is* the space
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = TokenTexts(tokenizer).pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text == tokenizer.decode(ids)


@given(text=st.text(max_size=40))
def test_pieces_join_to_any_text(plain: Any, text: str) -> None:
    """Catches characters that the table of examples forgot."""
    ids = plain.backend_tokenizer.encode(text, add_special_tokens=False).ids
    if plain.bos_token not in text:
        assert "".join(TokenTexts(plain).pieces(ids)) == text


def _byte_ids(tokenizer: Any, data: bytes) -> list[int]:
    alphabet = {byte: char for char, byte in _alphabet().items()}
    return [int(tokenizer.convert_tokens_to_ids(alphabet[byte])) for byte in data]


def _alphabet() -> dict[str, int]:
    from quantwatch.prompts import pieces

    return pieces._BYTES


def test_byte_alphabet_is_the_tokenizers() -> None:
    """Catches a shifted alphabet: the tokenizers library maps each byte to the same character."""
    from tokenizers import pre_tokenizers

    assert set(_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for code in [*range(0x80), *range(0xA0, 0x800, 7), 0x4F60, 0x1F6B2]:
        [(shown, _)] = splitter.pre_tokenize_str(chr(code))
        assert bytes(_alphabet()[char] for char in shown) == chr(code).encode()


def test_a_split_character_belongs_to_the_token_that_completes_it(plain: Any) -> None:
    """Catches a character shown too early, before its bytes are complete."""
    ids = _byte_ids(plain, "😀a".encode())
    assert TokenTexts(plain).pieces(ids) == ("", "", "", "😀", "a")


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        (b"\xe4", ("<0xE4>",)),
        (b"\xe4\xbda", ("<0xE4>", "<0xBD>", "a")),
        (b"\xffa\xe4\xbd\xa0\xbd", ("<0xFF>", "a", "", "", "你", "<0xBD>")),
        (b"\xc3\xc3\xa9", ("<0xC3>", "", "é")),
    ],
    ids=["cut at the end", "cut by a letter", "around a whole character", "lead byte twice"],
)
def test_bytes_that_are_no_text_are_shown(plain: Any, data: bytes, pieces: tuple[str, ...]) -> None:
    """Catches � in place of bytes, and bytes that drift to a neighbouring token."""
    assert TokenTexts(plain).pieces(_byte_ids(plain, data)) == pieces


def test_undecodable_byte_tokens_of_a_fallback_tokenizer(fallback: Any) -> None:
    """Catches byte tokens that are shown although they form a character, or hidden if they don't."""
    ids = fallback.convert_tokens_to_ids(["<0xE4>", "<0xBD>", "<0xA0>", "▁", "<0xE4>", "a"])
    assert TokenTexts(fallback).pieces(ids) == ("", "", "你", " ", "<0xE4>", "a")


def test_special_tokens_are_shown_as_they_are(with_bos: Any) -> None:
    """Catches special tokens that disappear from the labels."""
    ids = with_bos("the")["input_ids"]
    assert TokenTexts(with_bos).pieces(ids)[0] == "<s>"


def test_an_added_token_is_literal(make_byte_level: Callable[..., Any]) -> None:
    """Catches ｜ and ▁ in special tokens being read through the byte alphabet or as spaces."""
    tokenizer = make_byte_level(adds_bos=True, bos="<｜begin▁of▁text｜>")
    assert TokenTexts(tokenizer).pieces(tokenizer("a")["input_ids"])[0] == "<｜begin▁of▁text｜>"


def test_ids_without_a_tokenizer() -> None:
    """Catches an empty heatmap axis when there is nothing but ids."""
    assert TokenTexts(None).pieces([5, 17]) == ("5", "17")


def test_a_gap_in_the_vocabulary_has_a_label(plain: Any) -> None:
    """Catches a crash on ids of a padded vocabulary."""
    assert TokenTexts(plain).pieces([len(plain) + 3]) == (f"<id {len(plain) + 3}>",)


class _BytesTokenizer:
    """A tokenizer without a backend whose tokens are bytes, as tiktoken-based ones have them."""

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[bytes]:
        return [bytes([number]) for number in ids]


def test_a_tokenizer_whose_tokens_are_bytes() -> None:
    """Catches tokenizers that bring their own code being read through the wrong alphabet."""
    ids = list("Ġ你".encode())
    assert TokenTexts(_BytesTokenizer()).pieces(ids) == ("", "Ġ", "", "", "你")


def test_the_vocabulary_names_every_id(plain: Any) -> None:
    """Catches top tokens without a name: most of them occur in no prompt."""
    texts = TokenTexts(plain)
    names = texts.vocabulary()
    assert len(names) == max(plain.get_vocab().values()) + 1
    for token_id in (0, len(names) // 2, len(names) - 1):
        assert names[token_id] == "".join(texts.pieces([token_id]))
    assert TokenTexts(None).vocabulary() == ()
