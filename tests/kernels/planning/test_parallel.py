"""The cost model's limits and laws, and its counts against what two processes really send."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantwatch_kernels.planning.alpha_beta import AlphaBeta, fit_alpha_beta
from quantwatch_kernels.planning.parallel import (
    Device,
    Layer,
    all_reduce_cost,
    all_to_all_cost,
    as_transfer,
    sequence_parallel,
    sequence_parallel_from,
    tensor_parallel,
    token_shards,
)

LAYER = Layer(hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336)
FREE = AlphaBeta(0.0, 0.0)
LINK = AlphaBeta(10e-6, 1 / 200e9)
DEVICE = Device(300e12, 2e12, LINK, LINK)


def test_weights_of_llama_8b() -> None:
    """q, o: 4096², k, v: 4096 · 1024, three of 4096 · 14336."""
    assert LAYER.weights == 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336


@pytest.mark.parametrize("tokens", [1, 7, 4096])
def test_one_device_sends_nothing(tokens: int) -> None:
    for cost in (tensor_parallel, sequence_parallel):
        communication, work = cost(LAYER, DEVICE, tokens, 1)
        assert communication == 0
        assert work == pytest.approx(
            max(2 * tokens * LAYER.weights / 300e12, 2 * LAYER.weights / 2e12)
        )


def test_a_case_by_hand() -> None:
    """p = 4, 8 tokens: two ring all-reduces of 64 KiB; two all-to-alls of two tokens each."""
    sent = 2 * 3 / 4 * 8 * 4096 * 2
    assert tensor_parallel(LAYER, DEVICE, 8, 4)[0] == pytest.approx(2 * (6 * 10e-6 + sent / 200e9))
    shard = 2 * 128 * 2
    both = 3 / 4 * shard * (32 + 16) + 3 / 4 * shard * 32
    assert sequence_parallel(LAYER, DEVICE, 8, 4)[0] == pytest.approx(2 * 3 * 10e-6 + both / 200e9)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 3000), st.sampled_from([1, 2, 4, 8]))
def test_communication_grows(tokens: int, more: int, p: int) -> None:
    """Monotone in tokens, α and β for both; in p for tensor parallel."""
    slower = [
        AlphaBeta(LINK.alpha_s * 2, LINK.beta_s_per_byte),
        AlphaBeta(LINK.alpha_s, LINK.beta_s_per_byte * 2),
    ]
    for cost in (tensor_parallel, sequence_parallel):
        now = cost(LAYER, DEVICE, tokens, p)
        then = cost(LAYER, DEVICE, tokens + more, p)
        assert then[0] >= now[0]
        assert then[1] >= now[1]
        for link in slower:
            assert cost(LAYER, Device(300e12, 2e12, link, link), tokens, p)[0] >= now[0]
    assert (
        p == 1
        or tensor_parallel(LAYER, DEVICE, tokens, p)[0]
        > tensor_parallel(LAYER, DEVICE, tokens, p // 2)[0]
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.integers(1, 9))
def test_token_shards_are_even(tokens: int, p: int) -> None:
    shards = token_shards(tokens, p)
    assert sum(shards) == tokens
    assert max(shards) - min(shards) <= 1
    assert shards == sorted(shards, reverse=True)


def test_latency_decides_decode_and_bytes_decide_prefill() -> None:
    """Catches a threshold without α, or without the weights that decode reads.

    One token: sequence parallel reads whole weights on one device, four times as long as a quarter.
    """
    sends, works = sequence_parallel(LAYER, DEVICE, 1, 4)
    sums, quarter = tensor_parallel(LAYER, DEVICE, 1, 4)
    assert works == pytest.approx(4 * quarter)
    assert sends < sums
    assert sends + works > sums + quarter
    start = sequence_parallel_from(LAYER, DEVICE, 4, 8192)
    assert start is not None
    assert 1 < start < 8192
    for tokens in (start, start + 1, 8192):
        assert sum(sequence_parallel(LAYER, DEVICE, tokens, 4)) <= sum(
            tensor_parallel(LAYER, DEVICE, tokens, 4)
        )
    before = start - 1
    assert sum(sequence_parallel(LAYER, DEVICE, before, 4)) > sum(
        tensor_parallel(LAYER, DEVICE, before, 4)
    )
    assert sequence_parallel_from(LAYER, DEVICE, 4, 1) is None


def test_links_are_fitted_from_collectives_of_any_size() -> None:
    """Catches a fit that mixes two and eight devices without counting steps."""
    samples = [
        as_transfer(cost, LINK.seconds(cost.num_bytes, cost.steps))
        for p in (2, 4, 8)
        for n in (2**12, 2**20, 2**28)
        for cost in (all_reduce_cost(n, p),)
    ]
    found = fit_alpha_beta(samples)
    assert found.alpha_s == pytest.approx(LINK.alpha_s)
    assert found.bytes_per_s == pytest.approx(200e9)
    with pytest.raises(ValueError, match="one device"):
        as_transfer(all_reduce_cost(8, 1), 1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": 0}, "hidden"),
        ({"kv_heads": 5}, "share 5 KV heads"),
        ({"weight_bytes": -1}, "weight_bytes"),
    ],
)
def test_bad_layers(changes: dict[str, int], words: str) -> None:
    sizes = {"hidden": 8, "heads": 4, "kv_heads": 2, "head_dim": 2, "intermediate": 16}
    with pytest.raises(ValueError, match=words):
        Layer(**{**sizes, **changes})


@pytest.mark.parametrize(
    ("tokens", "p", "words"),
    [
        (0, 2, "at least 1"),
        (4, 0, "at least 1"),
        (4, 3, "don't divide kv_heads = 8"),
        (4, 16, "kv_heads"),
    ],
)
def test_bad_splits(tokens: int, p: int, words: str) -> None:
    for cost in (tensor_parallel, sequence_parallel):
        with pytest.raises(ValueError, match=words):
            cost(LAYER, DEVICE, tokens, p)


def test_only_tensor_parallel_cuts_the_mlp() -> None:
    """Sequence parallel splits tokens and heads; an odd MLP is no obstacle to it."""
    odd = Layer(hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=15)
    assert sequence_parallel(odd, DEVICE, 4, 2)[1] > 0
    with pytest.raises(ValueError, match="intermediate = 15"):
        tensor_parallel(odd, DEVICE, 4, 2)


def test_bad_ceilings() -> None:
    with pytest.raises(ValueError, match="ceilings"):
        tensor_parallel(LAYER, Device(0.0, 1.0, FREE, FREE), 1, 2)


def test_two_processes_prove_both_splits(tmp_path: Path) -> None:
    """A decoder layer split over two gloo processes equals the whole; bytes sent are the model's."""
    script = Path(__file__).with_name("gloo_split.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        ends = [process.communicate(timeout=120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], ends
    layer = Layer(hidden=24, heads=4, kv_heads=2, head_dim=6, intermediate=20, activation_bytes=8)
    row = layer.head_dim * layer.activation_bytes
    for rank, (out, _) in enumerate(ends):
        found = json.loads(out)
        assert found["tensor_error"] < 1e-13
        assert found["sequence_error"] < 1e-13
        # Every rank sends half of what an all-reduce of two holds, twice: 2 (p − 1) / p = 1.
        assert found["all_reduce_bytes"] == 2 * all_reduce_cost(5 * 24 * 8, 2).num_bytes
        # Tokens become heads: a part of this rank's; heads become tokens: a part of the other's.
        mine, others = token_shards(5, 2)[rank], token_shards(5, 2)[1 - rank]
        sends = [all_to_all_cost(mine * row * (4 + 2 * 2), 2), all_to_all_cost(others * row * 4, 2)]
        assert found["all_to_all_bytes"] == sum(send.num_bytes for send in sends)
        fullest = sequence_parallel(layer, Device(1e30, 1e30, FREE, AlphaBeta(0.0, 1.0)), 5, 2)[0]
        assert found["all_to_all_bytes"] <= fullest
