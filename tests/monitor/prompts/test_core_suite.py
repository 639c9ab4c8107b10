"""The shipped suite: what it promises, in any tokenizer and in SmolLM2's."""

import json
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quantwatch.config.suites import SUITES as CONFIGURABLE
from quantwatch.config.suites import SuiteConfig
from quantwatch.domain import Suite
from quantwatch.errors import PromptError
from quantwatch.prompts.loading import load_suite
from quantwatch.prompts.shipped import SUITES, shipped_suite

CATEGORIES = (
    "prose_en",
    "code",
    "chinese",
    "mathematics",
    "tool_calls",
    "chat",
    "long_document",
    "mixed_scripts",
    "structured",
)


def _core(tokenizer: Any, name: str = "core-v1", **settings: Any) -> Suite:
    config = SuiteConfig(name=name, **settings)
    return load_suite(config, tokenizer, base_dir=Path(), max_positions=8192)


def test_at_least_128_prompts_in_nine_categories() -> None:
    """Catches prompts lost from the data file."""
    counts = Counter(raw.category for raw in shipped_suite("core-v1"))
    assert tuple(counts) == CATEGORIES
    assert counts.total() >= 128
    assert min(count for category, count in counts.items() if category != "long_document") >= 16


def test_the_demo_is_16_of_them_in_every_category() -> None:
    """Catches a demo that leaves a category out or holds prompts of its own."""
    demo = shipped_suite("core-v1:demo")
    assert len(demo) == 16
    assert {raw.category for raw in demo} == set(CATEGORIES)
    core = {raw.source: raw for raw in shipped_suite("core-v1")}
    assert len({raw.source for raw in demo}) == 16
    assert all(core[raw.source] == raw for raw in demo)


def test_prompts_are_distinct_and_storable() -> None:
    """Catches copies, broken characters, and NUL, which PostgreSQL can't keep in a text."""
    raws = shipped_suite("core-v1")
    texts = [raw.text or json.dumps(raw.messages, ensure_ascii=False) for raw in raws]
    assert len(set(texts)) == len(texts)
    assert not [raw.source for raw, text in zip(raws, texts, strict=True) if "\ufffd" in text]
    assert not [raw.source for raw, text in zip(raws, texts, strict=True) if "\0" in text]


def test_mixed_scripts_are_mixed() -> None:
    """Catches a text editor that normalises or drops the rare characters."""
    text = "".join(
        raw.text or "" for raw in shipped_suite("core-v1") if raw.category == "mixed_scripts"
    )
    names = " ".join(unicodedata.name(char, "") for char in set(text))
    scripts = ("CYRILLIC", "GREEK", "ARABIC", "DEVANAGARI", "HIRAGANA", "HANGUL", "HEBREW", "THAI")
    assert [script for script in scripts if script not in names] == []
    rare = "\u200b\u200d\u202e\ufeff\u0301\uff21\U0001f3f4"
    assert [hex(ord(char)) for char in rare if char not in text] == []


def test_chats_alternate_and_have_no_system_message() -> None:
    """Catches chats that templates without a system role (Gemma's) would refuse."""
    for raw in shipped_suite("core-v1"):
        if raw.messages is not None:
            roles = [message["role"] for message in raw.messages]
            assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"] * (len(roles) % 2)


def test_names_that_exist() -> None:
    """Catches a configuration that allows other names than are shipped."""
    assert tuple(SUITES) == tuple(CONFIGURABLE)
    with pytest.raises(
        PromptError, match="unknown suite 'core-v9'; shipped: core-v1, core-v1:demo"
    ):
        shipped_suite("core-v9")


def test_without_a_chat_template_the_chats_are_plain_and_say_so(no_chat: Any) -> None:
    """Catches a base model that can't run the shipped suite, and a silent fallback."""
    suite = _core(no_chat)
    chats = [prompt for prompt in suite.prompts if prompt.category == "chat"]
    assert chats[0].text is not None
    assert chats[0].text.startswith("user: I have half a cabbage")
    assert all("no chat template" in prompt.source for prompt in chats)
    assert suite.notes == (
        'core-v1/chat-001 and 15 more: rendered as lines of "role: content", as the tokenizer has '
        "no chat template",
    )


def test_a_limited_suite_is_its_beginning(plain: Any) -> None:
    """Catches a limit that shuffles the shipped suite."""
    suite = _core(plain, limit=3)
    assert [p.source for p in suite.prompts] == [f"core-v1/prose_en-00{n}" for n in (1, 2, 3)]
    assert suite.name == "core-v1"


@pytest.mark.model
def test_token_counts(smollm2: Any) -> None:
    """Catches a suite that grew or shrank out of its budget, or out of balance."""
    suite = _core(smollm2)
    assert 20_000 <= suite.num_tokens <= 40_000
    per_category: Counter[str] = Counter()
    for prompt in suite.prompts:
        per_category[prompt.category] += len(prompt.token_ids)
    assert 2_500 <= min(per_category.values()) <= max(per_category.values()) <= 5_000
    assert max(len(prompt.token_ids) for prompt in suite.prompts) <= 2_000


@pytest.mark.model
def test_demo_token_counts(smollm2: Any) -> None:
    """Catches a demo that no longer fits its four minutes."""
    suite = _core(smollm2, "core-v1:demo")
    lengths = [len(prompt.token_ids) for prompt in suite.prompts]
    assert 2_500 <= sum(lengths) <= 4_096
    assert min(lengths) < 140
    assert max(lengths) > 900


@pytest.mark.model
def test_pieces_are_the_real_texts(smollm2: Any) -> None:
    """Catches labels that differ from what the real tokenizer decodes."""
    for prompt in _core(smollm2).prompts:
        joined = "".join(prompt.pieces)
        assert joined == prompt.text == smollm2.decode(prompt.token_ids)
        assert "\ufffd" not in joined


@pytest.mark.model
def test_real_chats_are_the_templates(smollm2: Any) -> None:
    """Catches a second BOS or another rendering than the model was trained with."""
    suite = _core(smollm2)
    for raw, prompt in zip(shipped_suite("core-v1"), suite.prompts, strict=True):
        if raw.messages is not None:
            ids = smollm2.apply_chat_template(list(raw.messages), tokenize=True, return_dict=False)
            assert list(prompt.token_ids) == ids
            assert ids[0] == smollm2.bos_token_id != ids[1]
        else:
            assert list(prompt.token_ids) == smollm2(raw.text)["input_ids"]


@pytest.mark.model
def test_the_suite_is_what_it_was(smollm2: Any) -> None:
    """Catches an edit of a shipped suite, which would silently break every baseline."""
    assert _core(smollm2).hash == (
        "f0aff64d79692bca223c6dc4d58cb4d54f8956c6ec5221f694b89443cbdb072c"
    )
