"""From files to a suite: BOS, chat, windows, limits, identity."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwatch.config.schema import SuiteConfig
from quantwatch.domain import Suite
from quantwatch.errors import PromptError
from quantwatch.prompts.loading import load_suite, suite_from_token_ids
from quantwatch.prompts.tokens import single_bos

ONE_CHAT = {"messages": [{"role": "user", "content": "the cat"}]}


def _load(folder: Path, content: Any, tokenizer: Any, **settings: Any) -> Suite:
    """Load one file: text, a list for .json, or a tuple of records for .jsonl."""
    context = {key: settings.pop(key, None) for key in ("max_positions", "num_tokens")}
    beyond = settings.pop("allow_beyond_context", False)
    if isinstance(content, str):
        name, text = "a.txt", content
    elif isinstance(content, list):
        name, text = "a.json", json.dumps(content)
    else:
        name, text = "a.jsonl", "\n".join(map(json.dumps, content))
    (folder / name).write_text(text, encoding="utf-8")
    config = SuiteConfig(files=(name,), **settings)
    return load_suite(config, tokenizer, base_dir=folder, allow_beyond_context=beyond, **context)


def _leading_bos(suite: Suite, tokenizer: Any) -> list[int]:
    """Count the BOS tokens that each prompt begins with."""
    runs = [
        re.match(r"b*", "".join("b" if i == tokenizer.bos_token_id else "." for i in p.token_ids))
        for p in suite.prompts
    ]
    return [len(run[0]) for run in runs if run]


@pytest.mark.parametrize(
    ("kind", "content", "expected"),
    [
        ("plain", ["the cat"], [0]),
        ("plain", ["<s>the cat"], [1]),
        ("plain", ["<s><s>the cat"], [1]),
        ("plain", (ONE_CHAT,), [1]),
        ("plain", "the cat sat", [0, 0]),
        ("with_bos", ["the cat"], [1]),
        ("with_bos", ["<s>the cat"], [1]),
        ("with_bos", (ONE_CHAT,), [1]),
        ("with_bos", "the cat sat on", [1, 1, 1]),
        ("with_bos", "<s>the cat sat on", [1, 1, 1]),
        ("with_bos", "the cat<s><s> sat on", [1, 1, 1]),
    ],
    ids=[
        "tokenizer adds none",
        "text has one",
        "text has two",
        "template has one",
        "windows",
        "tokenizer adds one",
        "both add one",
        "both add one, chat",
        "windows with BOS",
        "windows of a text that has one",
        "windows of a text with two inside",
    ],
)
def test_never_more_than_one_bos(
    kind: str, content: Any, expected: list[int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Catches a doubled BOS (perplexity inflated) and a missing one (nonsense)."""
    tokenizer = request.getfixturevalue(kind)
    window = {"window": 3} if isinstance(content, str) else {}
    suite = _load(tmp_path, content, tokenizer, **window)
    assert set(_leading_bos(suite, tokenizer)) == set(expected)


@given(ids=st.lists(st.integers(0, 2), max_size=8))
def test_single_bos_only_touches_the_beginning(ids: list[int]) -> None:
    """Catches tokens lost behind the first one that isn't BOS."""
    kept = single_bos(ids, 0)
    assert ids[len(ids) - len(kept) :] == kept
    assert set(ids[: len(ids) - len(kept)]) <= {0}
    assert kept[:2] != [0, 0]
    assert single_bos(ids, None) == ids


def test_text_prompts_follow_the_tokenizer(plain: Any, tmp_path: Path) -> None:
    """Catches token ids, texts or labels that differ from what the tokenizer says."""
    suite = _load(tmp_path, ["the cat sat", "你好 😀"], plain)
    assert [list(p.token_ids) for p in suite.prompts] == [
        plain("the cat sat")["input_ids"],
        plain("你好 😀")["input_ids"],
    ]
    assert [p.text for p in suite.prompts] == ["the cat sat", "你好 😀"]
    assert ["".join(p.pieces) for p in suite.prompts] == ["the cat sat", "你好 😀"]
    assert [p.index for p in suite.prompts] == [0, 1]
    assert suite.notes == ()


def test_chat_goes_through_the_template(with_bos: Any, tmp_path: Path) -> None:
    """Catches a chat that is tokenized differently from apply_chat_template itself."""
    suite = _load(tmp_path, (ONE_CHAT,), with_bos)
    expected = with_bos.apply_chat_template(ONE_CHAT["messages"], tokenize=True, return_dict=False)
    assert list(suite.prompts[0].token_ids) == expected
    assert suite.prompts[0].text == "<s>[user]the cat\n"


def test_a_template_that_refuses_is_named(plain: Any, tmp_path: Path) -> None:
    """Catches a template's own error shown as a traceback."""
    chat = {"messages": [{"role": "system", "content": "be kind"}]}
    with pytest.raises(PromptError, match=r"a\.jsonl, line 1: the chat template.*no system role"):
        _load(tmp_path, (chat,), plain)


def test_own_chats_need_a_template(no_chat: Any, tmp_path: Path) -> None:
    """Catches a silent fallback to some made-up chat format."""
    with pytest.raises(PromptError, match="line 1: the tokenizer has no chat template"):
        _load(tmp_path, (ONE_CHAT,), no_chat)


def test_windows_hold_every_token_once(plain: Any, tmp_path: Path) -> None:
    """Catches tokens lost, doubled or moved at the borders of windows."""
    text = "the cat sat on the mat and the dog sat on the log 你好 " * 5 + "mat sat"
    ids = plain(text, add_special_tokens=False)["input_ids"]
    suite = _load(tmp_path, text, plain, window=7)
    assert [i for p in suite.prompts for i in p.token_ids] == ids
    assert {len(p.token_ids) for p in suite.prompts[:-1]} == {7}
    assert suite.prompts[1].source == f"a.txt, window 2 of {len(suite.prompts)}"
    assert "".join(p.text or "" for p in suite.prompts).startswith("the cat sat on")


def test_windows_with_bos_hold_every_token_once(with_bos: Any, tmp_path: Path) -> None:
    """Catches llama.cpp's way, in which BOS replaces the first token of each window."""
    text = "the cat sat on the mat and the dog"
    ids = with_bos(text, add_special_tokens=False)["input_ids"]
    suite = _load(tmp_path, text, with_bos, window=4)
    assert [i for p in suite.prompts for i in p.token_ids[1:]] == ids
    assert {p.token_ids[0] for p in suite.prompts} == {with_bos.bos_token_id}
    assert max(len(p.token_ids) for p in suite.prompts) == 4


def test_windows_are_512_when_nothing_is_said(plain: Any, tmp_path: Path) -> None:
    """Catches a default that isn't the documented one."""
    suite = _load(tmp_path, "xyz" * 400, plain)
    assert [len(p.token_ids) for p in suite.prompts] == [512, 512, 176]


@pytest.mark.parametrize(
    ("num_chars", "score_start", "lengths", "left_out"),
    [
        (10, 0, [4, 4, 2], None),
        (9, 0, [4, 4], "its last window, 1 tokens, is left out"),
        (10, 2, [4, 4], "its last window, 2 tokens, is left out"),
        (8, 2, [4, 4], None),
        (12, 2, [4, 4, 4], None),
        (1, 0, [1], None),
    ],
    ids=["kept", "one token", "nothing scored", "no rest", "full", "a single token is all"],
)
def test_the_last_window(
    fallback: Any,
    tmp_path: Path,
    num_chars: int,
    score_start: int,
    lengths: list[int],
    left_out: str | None,
) -> None:
    """Catches a rest that is dropped in silence."""
    suite = _load(tmp_path, "a" * num_chars, fallback, window=4, score_start=score_start)
    assert [len(p.token_ids) for p in suite.prompts] == lengths
    assert bool(suite.notes) == (left_out is not None)
    if left_out is not None:
        assert left_out in suite.notes[0]
        assert left_out in suite.prompts[-1].source


def test_json_prompts_stay_whole_whatever_the_window(plain: Any, tmp_path: Path) -> None:
    """Catches prompts that are cut by an option meant for plain text, and silence about it."""
    suite = _load(tmp_path, ["the cat sat on the mat"], plain, window=3)
    assert len(suite.prompts) == 1
    assert suite.notes == ("window = 3 only applies to plain text; prompts stay whole",)
    assert _load(tmp_path, ["the cat sat on the mat"], plain, window=512).notes == ()


def test_limit_keeps_the_first_and_says_so(plain: Any, tmp_path: Path) -> None:
    """Catches a limit that picks others, or that nobody is told about."""
    suite = _load(tmp_path, ["the", "cat", "sat"], plain, limit=2)
    assert [p.text for p in suite.prompts] == ["the", "cat"]
    assert suite.notes == ("limit = 2: the first 2 of 3 prompts are used",)
    assert _load(tmp_path, ["the", "cat"], plain, limit=2).notes == ()


def test_score_start_is_kept(fallback: Any, tmp_path: Path) -> None:
    """Catches llama.cpp's protocol scored from the first position on."""
    suite = _load(tmp_path, ["abcdef"], fallback, score_start=4)
    assert (suite.prompts[0].score_start, suite.prompts[0].num_scored) == (4, 2)


@pytest.mark.parametrize("content", [["abcdefgh", "abcd"], "abcd"], ids=["prompt", "text"])
def test_a_prompt_in_which_nothing_is_scored(fallback: Any, tmp_path: Path, content: Any) -> None:
    """Catches a prompt that silently contributes nothing."""
    with pytest.raises(PromptError, match="has 4 tokens: score_start = 4 leaves nothing"):
        _load(tmp_path, content, fallback, score_start=4)


def test_the_context_is_respected(fallback: Any, tmp_path: Path) -> None:
    """Catches prompts fed beyond the trained positions; equal to the context is allowed."""
    prompts = ["abcd", "abcde", "abcdef"]
    with pytest.raises(PromptError, match=r"a\.json\[1\] \(and 1 more\) has 5 .* context is 4"):
        _load(tmp_path, prompts, fallback, max_positions=4)
    allowed = _load(tmp_path, prompts, fallback, max_positions=4, allow_beyond_context=True)
    assert [len(p.token_ids) for p in allowed.prompts] == [4, 5, 6]
    assert len(_load(tmp_path, prompts, fallback, max_positions=4, limit=1).prompts) == 1
    assert len(_load(tmp_path, prompts, fallback, max_positions=6).prompts) == 3


def test_a_window_beyond_the_context(fallback: Any, tmp_path: Path) -> None:
    """Catches the default window on a model with a smaller context, without a hint."""
    with pytest.raises(PromptError, match=r"a\.txt, window 1 of 2.*take a smaller window"):
        _load(tmp_path, "a" * 600, fallback, max_positions=256)


def test_text_needs_a_tokenizer_and_ids_do_not(tmp_path: Path) -> None:
    """Catches an AttributeError on None."""
    with pytest.raises(PromptError, match="the reference has no tokenizer; give token_ids"):
        _load(tmp_path, ["the"], None)
    suite = _load(tmp_path, ({"token_ids": [3, 1, 2]},), None)
    assert suite.prompts[0].token_ids == (3, 1, 2)
    assert suite.prompts[0].pieces == ("3", "1", "2")
    assert suite.prompts[0].text is None


def test_token_ids_are_taken_as_they_are(with_bos: Any, tmp_path: Path) -> None:
    """Catches a BOS added to, or an id changed in, what the user gave as ids."""
    ids = with_bos("the cat", add_special_tokens=False)["input_ids"]
    suite = _load(tmp_path, ({"token_ids": ids},), with_bos)
    assert list(suite.prompts[0].token_ids) == ids
    assert suite.prompts[0].text == "the cat"


@pytest.mark.parametrize(
    ("ids", "num_tokens", "words"),
    [
        ([1, 999_999], None, "token id 999999 at position 1 is out of range; allowed: 0 to"),
        ([1, -1], None, "token id -1 at position 1"),
        ([1, 50, 60], 60, "token id 60 at position 2 is out of range; allowed: 0 to 59"),
    ],
    ids=["beyond the tokenizer", "negative", "beyond the model"],
)
def test_ids_out_of_range(
    plain: Any, tmp_path: Path, ids: list[int], num_tokens: int | None, words: str
) -> None:
    """Catches an index error deep inside the embedding."""
    with pytest.raises(PromptError, match=f"line 1: {words}"):
        _load(tmp_path, ({"token_ids": ids},), plain, num_tokens=num_tokens)
    with pytest.raises(PromptError, match="out of range"):
        _load(tmp_path, ({"token_ids": ids},), None, num_tokens=num_tokens or 1000)


def test_two_bos_in_token_ids_are_refused(with_bos: Any, tmp_path: Path) -> None:
    """Catches a doubled BOS that comes in through the back door."""
    bos = with_bos.bos_token_id
    with pytest.raises(PromptError, match=r"begin with BOS .* more than once"):
        _load(tmp_path, ({"token_ids": [bos, bos, 5]},), with_bos)


def test_a_text_that_gives_no_tokens(tmp_path: Path, make_byte_level: Any) -> None:
    """Catches an empty prompt that only the tokenizer can know of."""
    from tokenizers import normalizers

    tokenizer = make_byte_level(adds_bos=False)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("x", "")
    with pytest.raises(PromptError, match="has 0 tokens"):
        _load(tmp_path, ["xxx"], tokenizer)
    with pytest.raises(PromptError, match="nothing to measure: 0 tokens"):
        _load(tmp_path, "xxx", tokenizer)


def test_the_hash_is_of_tokens_and_score_starts_alone(plain: Any, tmp_path: Path) -> None:
    """Catches a suite whose identity changes with its name, or doesn't with its tokens."""
    first = _load(tmp_path, ["the cat", "sat"], plain)
    records = tuple({"token_ids": p.token_ids, "id": p.source} for p in first.prompts)
    assert _load(tmp_path, records, plain).hash == first.hash
    assert _load(tmp_path, records, None).hash == first.hash
    flat = [[0, list(p.token_ids)] for p in first.prompts]
    written = json.dumps(flat, separators=(",", ":")).encode()
    assert first.hash == hashlib.sha256(written).hexdigest()
    others = [["sat", "the cat"], ["the cat sat"], ["the cat"]]
    hashes = {_load(tmp_path, other, plain).hash for other in others}
    hashes.add(_load(tmp_path, ["the cat", "satt"], plain, score_start=1).hash)
    hashes.add(_load(tmp_path, ["the cat", "satt"], plain).hash)
    assert len(hashes | {first.hash}) == 6


@pytest.mark.parametrize(
    "ids",
    [[[1, 2], [3]], ((1, 2), (3,)), [np.array([1, 2]), np.array([3])], [[np.int64(1), 2], [3]]],
    ids=["lists", "tuples", "arrays", "numpy integers"],
)
def test_suite_from_token_ids(ids: Any) -> None:
    """Catches the Python entrance giving another suite than a file would."""
    suite = suite_from_token_ids(ids)
    assert [p.token_ids for p in suite.prompts] == [(1, 2), (3,)]
    assert all(type(i) is int for p in suite.prompts for i in p.token_ids)
    assert suite.name == "tokens"
    assert {p.category for p in suite.prompts} == {"tokens"}


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "no token ids were given"),
        ([[]], r"tokens\[0\]: token_ids is empty"),
        ([1, 2], r"tokens\[0\]: expected a sequence of token ids, got 1"),
        ([[1], "ab"], r"tokens\[1\]: expected a sequence"),
        ([[1.5]], r"token_ids\[0\] must be an integer"),
        ([[True]], r"token_ids\[0\] must be an integer"),
        ([[-1]], r"token id -1 at position 0 is out of range; allowed: 0 or more"),
        ([[1, 2, 3, 4, 5]], "has 5 tokens, the model's context is 4"),
        ([[7]], "allowed: 0 to 6"),
    ],
    ids=[
        "none",
        "empty",
        "flat",
        "string",
        "float",
        "bool",
        "negative",
        "too long",
        "out of range",
    ],
)
def test_suite_from_bad_token_ids(ids: Any, words: str) -> None:
    """Catches wrong shapes that would fail deep inside torch."""
    with pytest.raises(PromptError, match=words):
        suite_from_token_ids(ids, max_positions=4, num_tokens=None if ids == [[-1]] else 7)


def test_this_package_needs_no_torch() -> None:
    """Catches an import that makes reading prompts as slow as loading a model."""
    import subprocess
    import sys

    code = "import sys, quantwatch.prompts.loading as l; print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
