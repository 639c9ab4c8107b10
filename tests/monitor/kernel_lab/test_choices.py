"""The multiple-choice scorer against a loop in float64 that shares nothing with it."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor.tiny_models import byte_tokenizer, llama
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast

from quantwatch.errors import PromptError
from quantwatch.kernel_lab.choices import (
    ChoiceTask,
    EncodedItem,
    compare_scores,
    encode_item,
    option_scores,
)
from quantwatch.kernel_lab.kept import kept_share
from quantwatch.prompts.choices import ChoiceItem, read_choices


def item(question: str, *options: str, answer: int = 0) -> ChoiceItem:
    return ChoiceItem("mine.jsonl, line 1", question, options, answer)


ITEMS = (
    item("ab", "c", "de", "fgh", "i"),
    item("xy", "abcdefgh", "a", "abc", "ab", answer=1),
    item("a longer question that stands alone", "one", "two", "three", "four", answer=2),
    item("zz", "c", "d", "e", "f", answer=3),
    item("Is it so?", "yes", "no", "perhaps", "never"),
)


def slow_scores(model: Any, tokenizer: Any, items: tuple[ChoiceItem, ...]) -> np.ndarray:
    """Score each option in a pass of its own: whole text in float64, one softmax per token."""
    model = model.double()
    found = []
    for one in items:
        start = tokenizer(one.prompt, add_special_tokens=False)["input_ids"]
        for option in one.options:
            ids = tokenizer(f"{one.prompt} {option}", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([ids]), use_cache=False).logits[0]
            total = 0.0
            for position in range(len(start), len(ids)):
                row = logits[position - 1].tolist()
                top = max(row)
                norm = top + math.log(math.fsum(math.exp(value - top) for value in row))
                total += row[ids[position]] - norm
            found.append(total)
    return np.array(found).reshape(-1, 4)


def test_scores_are_those_of_a_slow_loop() -> None:
    """Catches a cache that is shared wrongly, padding that is seen, and items out of order."""
    tokenizer = byte_tokenizer()
    model = llama(256, scale=6.0)
    found = option_scores(model, [encode_item(one, tokenizer) for one in ITEMS])
    expected = slow_scores(model, tokenizer, ITEMS)
    assert np.abs(expected - expected.mean()).max() > 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


def test_more_than_a_batch_of_equal_length() -> None:
    """Catches items that the second batch of a length loses or repeats."""
    tokenizer = byte_tokenizer()
    items = tuple(item(f"q{n:02}", "a", "bb", "c", "dd") for n in range(19))
    model = llama(256, scale=6.0)
    found = option_scores(model, [encode_item(one, tokenizer) for one in items])
    np.testing.assert_allclose(found, slow_scores(model, tokenizer, items), rtol=0, atol=2e-4)


def merging_tokenizer(*, bos: bool = False) -> Any:
    """Return a tokenizer that joins "a b" into one token across the space, and may add specials."""
    vocabulary = {letter: n for n, letter in enumerate("ab cdx")}
    merges = [("a", " "), ("a ", "b")]
    vocabulary |= {"a ": 6, "a b": 7, "<s>": 8, "</s>": 9}
    built = Tokenizer(models.BPE(vocabulary, merges))
    built.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    if bos:
        built.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 8), ("</s>", 9)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=built, bos_token="<s>" if bos else None, eos_token="</s>" if bos else None
    )


def test_options_begin_where_their_tokens_do() -> None:
    """Catches a boundary counted from the question's own tokens: "a b" is one token here."""
    found = encode_item(item("xa", "b", "c", "bd", "d"), merging_tokenizer())
    assert found == EncodedItem((5,), ((7,), (6, 3), (7, 4), (6, 4)))


def test_a_bos_is_in_front_and_no_eos_is_scored() -> None:
    """Catches a score of the end that the tokenizer adds to every text."""
    found = encode_item(item("xa", "b", "c", "bd", "d"), merging_tokenizer(bos=True))
    assert found == EncodedItem((8, 5), ((7,), (6, 3), (7, 4), (6, 4)))


def test_an_item_without_a_common_token_is_refused() -> None:
    """Catches an option that is scored from nothing."""
    with pytest.raises(PromptError, match=r"mine\.jsonl, line 1: no token is common"):
        encode_item(item("a", "b", "c", "bd", "d"), merging_tokenizer())


def test_every_shipped_item_can_be_encoded() -> None:
    """Catches an option that a tokenizer of bytes can't tell from its question."""
    encoded = [encode_item(one, byte_tokenizer()) for one in read_choices()]
    assert all(len(set(one.options)) == 4 for one in encoded)


SCORES = np.array([[-1.0, -2, -3, -4], [-5, -4, -4, -9], [-2, -1, -3, -8], [-7, -7, -1, -2]])
WAS = np.array([[-1.0, -3, -3, -4], [-5, -3, -4, -9], [-1, -2, -3, -8], [-6, -7, -1, -2]])
ANSWERS = np.array([0, 1, 0, 2])
LENGTHS = np.array([[1, 1, 1, 8], [1, 1, 1, 1], [4, 1, 1, 1], [1, 1, 1, 4]])


def test_figures_of_known_scores() -> None:
    """Catches a tie that goes another way, and a margin against the wrong option."""
    figures = compare_scores(SCORES, WAS, ANSWERS, LENGTHS)
    assert (figures.accuracy, figures.same_choice, figures.num_ties) == (0.75, 0.75, 1)
    assert figures.kept.share == 0.75
    # Normed: −4/8 wins in row 0, −2/4 in row 2, −2/4 in row 3.
    assert figures.accuracy_norm == 0.5
    assert figures.margin_change == pytest.approx(((1 - 2) + (0 - 1) + (-1 - 1) + (1 - 1)) / 4)
    assert figures.num_nonfinite == 0


def test_a_score_that_isnt_finite_leaves_no_figure() -> None:
    """Catches NaN that compares false and counts as a wrong answer."""
    broken = SCORES.copy()
    broken[1, 2] = math.nan
    figures = compare_scores(broken, WAS, ANSWERS, LENGTHS)
    assert figures.num_nonfinite == 1
    assert all(math.isnan(v) for v in (figures.accuracy, figures.kept.share, figures.same_choice))


def test_a_model_beside_itself_keeps_everything() -> None:
    """Catches a reference that another model is held against."""
    tokenizer, model = byte_tokenizer(), llama(256, scale=6.0)
    task = ChoiceTask(model, tokenizer, ITEMS)
    figures = task.measure(model)
    expected = slow_scores(model, tokenizer, ITEMS).argmax(1)
    assert figures.accuracy == np.mean(expected == [one.answer for one in ITEMS])
    assert (figures.same_choice, figures.margin_change) == (1.0, 0.0)


class Cacheless(nn.Module):
    def forward(self, ids: torch.Tensor, use_cache: bool) -> Any:
        logits = torch.zeros(*ids.shape, 300)
        return type("Output", (), {"logits": logits})


def test_a_model_without_a_cache_is_refused() -> None:
    """Catches options that are scored without their question."""
    with pytest.raises(ValueError, match="Cacheless has no cache that can be handed on"):
        option_scores(Cacheless(), [encode_item(ITEMS[0], byte_tokenizer())])


def test_a_kept_share_and_its_error() -> None:
    """Catches an unpaired error: by hand, (y − r·x)/x̄ summed per cluster."""
    candidate = [np.array([1, 0, 1], bool), np.array([1, 1], bool), np.array([0], bool)]
    reference = [np.array([1, 1, 1], bool), np.array([0, 1], bool), np.array([1], bool)]
    kept = kept_share(candidate, reference)
    ratio = 4 / 5
    sums = [2 - 3 * ratio, 2 - 1 * ratio, 0 - 1 * ratio]
    assert kept.share == ratio
    assert kept.se == pytest.approx(math.sqrt(3 / 2 * sum(s * s for s in sums)) / 5, rel=1e-12)
    assert kept_share(reference, reference) == kept_share(candidate, candidate)
    assert kept_share(reference, reference).se == 0


def test_kept_shares_that_arent_defined() -> None:
    """Catches 0 ÷ 0 that is shown as a number, and questions that don't belong together."""
    wrong, right = [np.array([False])], [np.array([True])]
    assert math.isnan(kept_share(right, wrong).share)
    assert math.isnan(kept_share(right, right).se)
    with pytest.raises(ValueError, match=r"has \[1\] per cluster, the reference \[1, 1\]"):
        kept_share(wrong, [*wrong, *wrong])
    with pytest.raises(ValueError, match="at least one"):
        kept_share([], [])
