"""The multiple-choice task on the real model and tokenizer."""

from pathlib import Path

import numpy as np
import platformdirs
import pytest
import torch

from quantwatch.kernel_lab.choices import encode_item, option_scores
from quantwatch.kernel_lab.references import load_reference
from quantwatch.prompts.choices import read_choices

pytestmark = [pytest.mark.model, pytest.mark.slow]
CACHE = Path(platformdirs.user_cache_dir("quantwatch"))


def test_real_scores_are_those_of_whole_texts() -> None:
    """Catches a boundary, a cache or a batch that only a byte tokenizer and a tiny model get right.

    Each option in a pass of its own, log-softmax in float64; far above chance on the first items.
    """
    loaded = load_reference("smollm2-135m", CACHE, off_grid_seed=None)
    assert loaded.tokenizer is not None
    items = read_choices()
    encoded = [encode_item(item, loaded.tokenizer) for item in items]
    for item, one in zip(items, encoded, strict=True):
        own = loaded.tokenizer(item.prompt, add_special_tokens=False)["input_ids"]
        assert list(one.prefix) == own
    chosen = [*range(0, 160, 20), 199]
    found = option_scores(loaded.module, [encoded[number] for number in chosen])
    expected = np.empty_like(found)
    for row, number in enumerate(chosen):
        for column, option in enumerate(encoded[number].options):
            ids = torch.tensor([[*encoded[number].prefix, *option]])
            with torch.inference_mode():
                logits = loaded.module(ids, use_cache=False).logits[0].double()
            said = logits.log_softmax(-1)[-len(option) - 1 : -1]
            expected[row, column] = said.gather(1, torch.tensor(option)[:, None]).sum()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)
    right = [items[number].answer for number in chosen]
    assert np.mean(found.argmax(1) == right) > 0.5
