"""Multiple-choice files: what is shipped is sound, and a wrong line is refused by its number."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quantwatch.errors import PromptError
from quantwatch.prompts.choices import MIN_ITEMS, ChoiceItem, read_choices

GOOD = {
    "question": "Two and two are",
    "A": "four",
    "B": "five",
    "C": "six",
    "D": "one",
    "answer": "A",
}


def write(folder: Path, *lines: Any) -> Path:
    file = folder / "mine.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return file


def test_the_shipped_items_are_sound() -> None:
    """Catches a letter that wins by being guessed, an item that comes twice, and too few of them."""
    items = read_choices()
    assert len(items) >= MIN_ITEMS >= 100
    answers = Counter(item.answer for item in items)
    assert len(set(answers.values())) == 1
    assert set(answers) == {0, 1, 2, 3}
    assert len({item.question.casefold() for item in items}) == len(items)
    assert all(item.question.isascii() or item.question for item in items)
    # The right option isn't told by its length: longest about as often as chance has it.
    longest = [item.options[item.answer] == max(item.options, key=len) for item in items]
    assert 0.1 < sum(longest) / len(items) < 0.45


def test_a_file_is_read_in_order(tmp_path: Path) -> None:
    """Catches answers of other letters, and blank lines that shift line numbers."""
    second = {**GOOD, "question": "What is one and one?", "answer": "C", "C": "two"}
    items = read_choices(write(tmp_path, GOOD, "", second), at_least=2)
    assert items[0] == ChoiceItem(
        "mine.jsonl, line 1", "Two and two are", ("four", "five", "six", "one"), 0
    )
    assert (items[1].where, items[1].answer) == ("mine.jsonl, line 3", 2)
    assert items[0].prompt == "Two and two are"
    assert items[1].prompt == "Question: What is one and one?\nAnswer:"


WITHOUT_B = {key: value for key, value in GOOD.items() if key != "B"}
BAD = {
    "no JSON": ('{"question": ', "line 1, column 14: not valid JSON"),
    "a key twice": ('{"A": "x", "A": "y"}', "line 1: not usable JSON: key 'A' is given twice"),
    "no object": ([1], "line 1: expected an object with the keys question, A, B, C, D, answer"),
    "key missing": (WITHOUT_B, "line 1: no key 'B'; allowed: question, A, B, C, D, answer"),
    "key unknown": ({**GOOD, "E": "x"}, "line 1: unknown key 'E'; allowed: question, A, B, C"),
    "letter": ({**GOOD, "answer": "E"}, "line 1: answer 'E'; allowed: A, B, C, D"),
    "small letter": ({**GOOD, "answer": "a"}, "line 1: answer 'a'; allowed: A, B, C, D"),
    "answer a number": ({**GOOD, "answer": 0}, "line 1: answer 0; allowed: A, B, C, D"),
    "answer a list": ({**GOOD, "answer": ["A"]}, r"line 1: answer \['A'\]; allowed: A, B, C, D"),
    "option empty": ({**GOOD, "C": ""}, "line 1, C: '' is empty"),
    "option blank": ({**GOOD, "C": " "}, "line 1, C: ' ' is empty"),
    "option a number": ({**GOOD, "D": 4}, "line 1, D: expected a string, got an integer"),
    "option spaced": ({**GOOD, "D": " one"}, "line 1, D: ' one' begins or ends with white space"),
    "question empty": ({**GOOD, "question": ""}, "line 1, question: '' is empty"),
    "options alike": ({**GOOD, "D": "Four"}, "line 1: options A and D are the same, 'Four'"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_refused(tmp_path: Path, case: str) -> None:
    """Catches an item that is scored although nobody can get it right."""
    line, message = BAD[case]
    with pytest.raises(PromptError, match=f"mine.jsonl, {message}"):
        read_choices(write(tmp_path, line), at_least=1)


def test_a_question_that_comes_twice_is_refused(tmp_path: Path) -> None:
    """Catches an item that counts double, also with other letters and other options."""
    again = {**GOOD, "question": "two  AND two are", "A": "4"}
    with pytest.raises(
        PromptError,
        match=r"mine\.jsonl, line 2: question .two  AND two are. was asked in mine\.jsonl, line 1",
    ):
        read_choices(write(tmp_path, GOOD, again), at_least=1)


def test_too_few_items_are_refused(tmp_path: Path) -> None:
    """Catches an accuracy over a handful of items."""
    with pytest.raises(PromptError, match=r"mine\.jsonl: 1 items; at least 100 are needed"):
        read_choices(write(tmp_path, GOOD))


def test_files_that_cant_be_read_are_named(tmp_path: Path) -> None:
    """Catches a traceback for a wrong name."""
    with pytest.raises(PromptError, match=r"nowhere\.jsonl doesn't exist"):
        read_choices(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(PromptError, match=r"empty\.jsonl is empty"):
        read_choices(tmp_path / "empty.jsonl")
