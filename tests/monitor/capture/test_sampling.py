"""The same tokens every night, whatever else is in the suite."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantwatch.capture.layers import worst_positions
from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.sampling import isolated_prompts, lens_positions, stratified_positions
from quantwatch.domain import Prompt, Suite

FROZEN = [10, 60, 88, 118, 157, 170, 208, 230]


def _prompt(length: int, start: int = 0, index: int = 0, category: str = "c") -> Prompt:
    return Prompt(index, category, "s", tuple(range(length)), (), score_start=start)


def _suite(prompts: list[Prompt], digest: str = "ab") -> Suite:
    return Suite("s", digest, tuple(prompts))


@given(st.integers(1, 600), st.integers(0, 40), st.integers(1, 80))
def test_positions_are_one_per_stratum(length: int, start: int, count: int) -> None:
    """Would catch positions that repeat, cluster, or lie before the scored part."""
    start = min(start, length - 1)
    prompt = _prompt(length, start)
    chosen = stratified_positions("ab", prompt, count, "lens")
    scored = prompt.num_scored
    assert len(chosen) == len(set(chosen)) == min(count, scored)
    assert list(chosen) == sorted(chosen)
    for k, position in enumerate(chosen):
        stratum = range(start + scored * k // len(chosen), start + scored * (k + 1) // len(chosen))
        assert position in stratum


@pytest.mark.parametrize(
    ("length", "start", "per_256", "count"),
    [(256, 0, 8, 8), (1024, 0, 8, 32), (512, 256, 8, 8), (20, 0, 8, 1), (256, 0, 0, 0)],
)
def test_number_of_lens_positions(length: int, start: int, per_256: int, count: int) -> None:
    """Would catch a budget per prompt instead of per token, or a short prompt without any."""
    assert len(lens_positions("ab", _prompt(length, start), per_256)) == count


def test_positions_are_frozen() -> None:
    """Would catch another choice after an upgrade: paired tests need the same tokens."""
    chosen = lens_positions("ab" * 32, _prompt(256, index=3), 8)
    assert chosen.tolist() == FROZEN


def test_positions_depend_on_suite_and_index_only() -> None:
    """Would catch a random state that is carried from prompt to prompt."""
    one = [lens_positions("ab", _prompt(256, index=n), 8).tolist() for n in range(4)]
    assert lens_positions("ab", _prompt(256, index=2), 8).tolist() == one[2]
    assert len({tuple(positions) for positions in one}) == 4
    assert lens_positions("cd", _prompt(256, index=2), 8).tolist() != one[2]
    other = stratified_positions("ab", _prompt(256, index=2), 8, "linears")
    assert other.tolist() != one[2]


def test_every_position_has_its_chance() -> None:
    """Would catch a draw that never reaches the end of a stratum."""
    drawn = [
        position
        for n in range(400)
        for position in stratified_positions("ab", _prompt(12, index=n), 3, "lens")
    ]
    counts = np.bincount(drawn, minlength=12)
    assert counts.min() > 50
    assert counts.sum() == 1200


@given(
    st.lists(st.tuples(st.integers(2, 90), st.integers(0, 3)), min_size=1, max_size=40),
    st.floats(0.01, 1.0),
)
def test_isolated_prompts_keep_to_their_share(
    shapes: list[tuple[int, int]], fraction: float
) -> None:
    """Would catch a night that takes three times as long because of one long document."""
    prompts = [_prompt(k, index=n, category=f"c{c}") for n, (k, c) in enumerate(shapes)]
    chosen = isolated_prompts(_suite(prompts), fraction)
    assert chosen
    tokens = sum(len(prompts[n].token_ids) for n in chosen)
    budget = fraction * sum(k for k, _ in shapes)
    assert tokens <= budget or len(chosen) == 1
    if fraction == 1.0:
        assert len(chosen) == len(prompts)
    assert chosen == isolated_prompts(_suite(prompts[::-1]), fraction)


def test_isolated_prompts_take_turns_through_the_categories() -> None:
    """Would catch eight prompts of the largest category and none of the others."""
    prompts = [
        _prompt(10, index=n, category="large" if n < 60 else f"small{n % 4}") for n in range(80)
    ]
    chosen = isolated_prompts(_suite(prompts), 0.125)
    categories = [prompts[n].category for n in chosen]
    assert len(categories) == 10
    assert {categories.count(c) for c in set(categories)} == {2}
    assert isolated_prompts(_suite(prompts), 0) == frozenset()
    assert chosen != isolated_prompts(_suite(prompts, "cd"), 0.125)


@pytest.mark.parametrize(
    ("kl", "sampled", "count", "wanted"),
    [
        ([0.1, 0.9, 0.3], [], 1, [6]),
        ([0.1, 0.9, 0.3], [6], 1, [7]),
        ([0.1, 0.9, 0.3], [6, 7, 5], 1, []),
        ([0.1, np.nan, np.inf], [], 1, [6]),
        ([0.1, 0.9, 0.3], [], 2, [6, 7]),
        ([0.1, 0.9, 0.3], [], 0, []),
    ],
)
def test_worst_positions(
    kl: list[float], sampled: list[int], count: int, wanted: list[int]
) -> None:
    """Would catch the worst token being read twice, or a NaN that sorts last."""
    chosen = worst_positions(np.array(kl), 5, np.array(sampled, dtype=np.int64), count)
    assert chosen.tolist() == wanted


def test_lens_reads_the_sample_and_the_worst_position(kit: Any) -> None:
    """Would catch extra positions that enter a mean, or positions of another batch layout."""
    model = kit.build("llama")
    candidate, suite = kit.perturb(model), kit.suite([30, 9, 50, 1], score_start=0)
    for budget in (1, 200):
        captured = kit.capture(model, {"c": candidate}, suite, CapturePlan(batch_tokens=budget))
        for prompt in suite.prompts:
            sink, wanted = captured.sink, lens_positions(suite.hash, prompt, 8)
            _, positions = sink.row("c", prompt.index, "lens_kl", "layers.1")
            assert positions.tolist() == wanted.tolist()
            if len(prompt.token_ids) == 1:
                continue
            kl, _ = sink.row("c", prompt.index, "logit_kl", "model")
            _, extra = sink.row("c", prompt.index, "lens_kl", "layers.1", "extra")
            left = [n for n in range(len(kl)) if n not in wanted]
            assert extra.tolist() == [max(left, key=kl.__getitem__)]


def test_plan_digest_tells_captures_apart() -> None:
    """Would catch two runs being compared that measured different tokens."""
    plans = [
        CapturePlan(),
        CapturePlan(lens_positions=9),
        CapturePlan(isolated_fraction=0.5),
        CapturePlan(isolated_positions=9),
        CapturePlan(batch_tokens=9),
    ]
    assert len({plan.sha for plan in plans}) == len(plans)
    assert CapturePlan().sha == CapturePlan().sha
