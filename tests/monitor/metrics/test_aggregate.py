"""The sink: order of arrival must not matter, nothing may be lost, blocks tell what was measured."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from quantwatch.domain import (
    MODEL,
    Measurement,
    NonFinite,
    Observation,
    Prompt,
    Scope,
    Suite,
    TokenMatrix,
    TopLogits,
)
from quantwatch.metrics import aggregate
from quantwatch.metrics.aggregate import Aggregator

LAYERS = (Scope("layers.0"), Scope("layers.1"))
LENGTHS = (4, 1, 3)


def suite() -> Suite:
    prompts = tuple(
        Prompt(i, "prose", "test", tuple(range(n)), tuple("abcd"[:n]))
        for i, n in enumerate(LENGTHS)
    )
    return Suite("tiny", "hash", prompts)


def observation(prompt: int, **changes: object) -> Observation:
    """A prompt whose values say where they belong: 100·prompt + 10·row + position."""
    n = LENGTHS[prompt]
    at = np.arange(n)
    kl = TokenMatrix("logit_kl", (MODEL,), (100.0 * prompt + at)[None].astype(np.float64))
    rel = TokenMatrix(
        "rel_error", LAYERS, (100.0 * prompt + 10.0 * np.arange(2)[:, None] + at).astype(np.float64)
    )
    lens = TokenMatrix("lens_kl", LAYERS, np.full((2, 1), float(prompt)), np.array([n - 1]))
    worst = TokenMatrix("lens_kl", LAYERS, np.full((2, 1), 77.0), np.array([0]), role="extra")
    return Observation("cand", prompt, (kl, rel, lens, worst), **changes)  # type: ignore[arg-type]


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Aggregator]:
    with Aggregator(suite(), tmp_path) as sink:
        for prompt in (2, 0, 1):
            sink.observe(observation(prompt))
        yield sink


def row(sink: Aggregator, metric: str, scope: str = MODEL) -> Measurement:
    return next(m for m in sink.measurements("cand") if (m.metric, m.scope) == (metric, scope))


def test_means_take_every_token_once(filled: Aggregator) -> None:
    """Catches prompts weighted equally instead of tokens, or a prompt lost on arrival."""
    expected = [0, 1, 2, 3, 100, 200, 201, 202]
    kl = row(filled, "logit_kl")
    assert (kl.n, kl.mean, kl.max) == (8, float(np.mean(expected)), 202.0)
    assert (kl.max_prompt, kl.max_position) == (2, 2)
    assert kl.method == "all positions"
    assert row(filled, "rel_error", "layers.1").mean == np.mean(expected) + 10


def test_arrival_order_gives_the_same_bits(tmp_path: Path, filled: Aggregator) -> None:
    """Catches sums folded in arrival order: shards would then disagree in the last bit."""
    with Aggregator(suite(), tmp_path) as other:
        for prompt in (0, 1, 2):
            other.observe(observation(prompt))
        assert set(other.measurements("cand")) == set(filled.measurements("cand"))


def test_extra_positions_never_enter_a_mean(filled: Aggregator) -> None:
    """Catches worst tokens, read in addition, that bias the sampled mean."""
    lens = row(filled, "lens_kl", "layers.0")
    assert (lens.n, lens.mean, lens.max) == (3, 1.0, 2.0)
    assert lens.method == "sampled positions"


def test_token_blocks_tell_measured_from_unmeasured(filled: Aggregator) -> None:
    """Catches a 0 where nothing was measured; extras are shown, samples win on the same position."""
    blocks = {
        b.prompt: b for b in filled.blocks("cand") if (b.kind, b.metric) == ("per_token", "lens_kl")
    }
    first = blocks[0]
    assert first.missing is not None
    np.testing.assert_array_equal(first.missing[0], [False, True, True, False])
    np.testing.assert_array_equal(first.values[0, [0, 3]], [77.0, 0.0])
    assert blocks[1].values[0, 0] == 1.0


def test_per_prompt_blocks_hold_the_partials(filled: Aggregator) -> None:
    """Catches partials that paired tests would need and can't be back-filled."""
    block = next(
        b for b in filled.blocks("cand") if (b.kind, b.metric) == ("per_prompt", "logit_kl")
    )
    np.testing.assert_array_equal(block.values[2, 0], [3, 603, 200**2 + 201**2 + 202**2, 202])


def test_scopes_of_one_metric_share_a_block(tmp_path: Path) -> None:
    """Catches two blocks under one key: output and lens deviations have the same slug."""
    n = LENGTHS[0]
    model = TokenMatrix("topk_logit_deviation_k5", (MODEL,), np.ones((1, n)))
    lens = TokenMatrix("topk_logit_deviation_k5", LAYERS, np.full((2, 1), 3.0), np.array([1]))
    with Aggregator(suite(), tmp_path) as sink:
        sink.observe(Observation("cand", 0, (model, lens)))
        block = next(b for b in sink.blocks("cand") if b.kind == "per_token")
    assert block.scopes == (MODEL, *LAYERS)
    assert block.missing is not None
    np.testing.assert_array_equal(block.missing.sum(axis=1), [0, n - 1, n - 1])


def test_top_logits_survive_exactly(tmp_path: Path) -> None:
    """Catches ids rounded in float32: 2²⁴ + 1 is no float32."""
    ids = np.array([[2**24 + 1]], dtype=np.int32)
    logits = np.array([[1.25]], dtype=np.float32)
    with Aggregator(suite(), tmp_path) as sink:
        sink.observe(Observation("cand", 1, (), TopLogits(ids, logits, ids, logits, logits)))
        block = next(iter(sink.blocks("cand")))
    assert block.kind == "topk"
    np.testing.assert_array_equal(block.values[:, 0, 0], [2**24 + 1, 1.25, 2**24 + 1, 1.25, 1.25])


def test_the_first_non_finite_prompt_wins(tmp_path: Path) -> None:
    """Catches the last arrival being reported as the birth place."""
    with Aggregator(suite(), tmp_path) as sink:
        for prompt in (2, 0):
            found = NonFinite(LAYERS[1], prompt, 0)
            sink.observe(observation(prompt, first_nonfinite=found))
        assert sink.first_nonfinite("cand") == NonFinite(LAYERS[1], 0, 0)
        assert sink.first_nonfinite("other") is None


def test_observing_twice_is_an_error(filled: Aggregator) -> None:
    """Catches a prompt counted double after a retry."""
    with pytest.raises(ValueError, match="logit_kl of cand on prompt 2 was observed twice"):
        filled.observe(observation(2))


def test_groups_of_scopes_give_the_same_rows(
    monkeypatch: pytest.MonkeyPatch, filled: Aggregator
) -> None:
    """Catches an off-by-one in the reading of scope groups."""
    whole = filled.measurements("cand")
    monkeypatch.setattr(aggregate, "_GROUP_BYTES", 1)
    assert filled.measurements("cand") == whole


def pieces_of(whole: Observation, size: int) -> Iterator[Observation]:
    """Cut an observation as capture does: by positions, what is of the prompt with the last one."""
    length = LENGTHS[whole.prompt]
    for start in range(0, length, size):
        stop, matrices = min(start + size, length), []
        for matrix in whole.matrices:
            at = matrix.positions
            here = (
                np.arange(start, stop)
                if at is None
                else np.flatnonzero((at >= start) & (at < stop))
            )
            if matrix.role == "extra":
                here = np.arange(len(matrix.values[0])) if stop == length else here[:0]
            if len(here):
                positions = None if at is None else at[here]
                values = np.ascontiguousarray(matrix.values[:, here])
                matrices.append(
                    TokenMatrix(matrix.metric, matrix.scopes, values, positions, matrix.role)
                )
        top = TopLogits(*(np.full((stop - start, 2), fill) for fill in (7, 1.5, 8, 2.5, 0.5)))
        yield Observation(whole.candidate, whole.prompt, tuple(matrices), top, offset=start)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_pieces_give_the_same_bits(tmp_path: Path, filled: Aggregator, size: int) -> None:
    """Catches sums per piece instead of per prompt, and columns that lie elsewhere."""
    with Aggregator(suite(), tmp_path) as other:
        for prompt in (1, 2, 0):
            for piece in pieces_of(observation(prompt), size):
                other.observe(piece)
        assert set(other.measurements("cand")) == set(filled.measurements("cand"))
        theirs = {(b.kind, b.metric, b.prompt): b for b in filled.blocks("cand")}
        for block in other.blocks("cand"):
            if block.kind == "topk":
                assert block.values.shape == (5, LENGTHS[block.prompt or 0], 2)
                continue
            same = theirs.pop((block.kind, block.metric, block.prompt))
            assert block.scopes == same.scopes
            np.testing.assert_array_equal(block.values, same.values)
            np.testing.assert_array_equal(block.missing, same.missing)
        assert not theirs


@pytest.mark.parametrize("order", [(1, 0), (0, 0), (0, 2)], ids=["late", "twice", "a gap"])
def test_pieces_out_of_turn_are_refused(tmp_path: Path, order: tuple[int, int]) -> None:
    """Catches a shard that loses or repeats a piece."""
    found = list(pieces_of(observation(0), 1))
    with Aggregator(suite(), tmp_path) as sink:
        if order[0] == 0:
            sink.observe(found[0])
        with pytest.raises(ValueError, match="was due"):
            sink.observe(found[order[0] or order[1]])


def test_positions_of_pieces_only_grow(tmp_path: Path) -> None:
    """Catches sampled positions that are counted twice."""
    lens = TokenMatrix("lens_kl", LAYERS, np.zeros((2, 1)), np.array([2]))
    with Aggregator(suite(), tmp_path) as sink:
        sink.observe(Observation("cand", 0, (lens,), offset=0))
        with pytest.raises(ValueError, match="position 2 came after 2"):
            sink.observe(Observation("cand", 0, (lens,), offset=3))
