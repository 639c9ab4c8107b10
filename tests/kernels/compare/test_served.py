"""A few told log-probabilities against a whole distribution: bounds that are bounds."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantwatch_kernels.compare.exact import compare_exactly
from quantwatch_kernels.compare.output import output_statistics
from quantwatch_kernels.compare.served import ServedStatistics, Told, served_statistics

F32, BF16 = torch.float32, torch.bfloat16


def told_of(z: Tensor, targets: Tensor, k: int, *, with_target: bool = True) -> Told:
    """Return what a server with logits [n, V] tells: float32 log-probabilities of its top k."""
    log_q = torch.log_softmax(z.float(), -1)
    values, ids = log_q.sort(dim=-1, descending=True, stable=True)
    target = log_q.gather(-1, targets[:, None])[:, 0].double()
    missing = torch.full_like(target, torch.nan)
    return Told(ids[:, :k], values[:, :k].double(), target if with_target else missing)


def compare(
    z_ref: Tensor, told: Told, targets: Tensor, *, own: torch.dtype = F32, theirs: torch.dtype = F32
) -> ServedStatistics:
    return served_statistics(z_ref, told, targets, reference_dtype=own, candidate_dtype=theirs)


def pair(seed: int, n: int, width: int, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(n, width, generator=rng) * 3
    other = z + noise * torch.randn(n, width, generator=rng)
    return z, other, torch.randint(width, (n,), generator=rng)


def by_hand(z: list[float], told: dict[int, float]) -> tuple[float, float, float, float, float]:
    """Return KL, TV from below and above, and both rests, from the definitions alone."""
    top = max(z)
    norm = math.fsum(math.exp(v - top) for v in z)
    p = [math.exp(v - top) / norm for v in z]
    q = {i: math.exp(v) for i, v in told.items()}
    p_rest = math.fsum(p[i] for i in range(len(z)) if i not in q)
    q_rest = 1 - math.fsum(q.values())
    kl = math.fsum(p[i] * math.log(p[i] / q[i]) for i in q) + p_rest * math.log(p_rest / q_rest)
    apart = math.fsum(abs(p[i] - q[i]) for i in q)
    return kl, (apart + abs(p_rest - q_rest)) / 2, (apart + p_rest + q_rest) / 2, p_rest, q_rest


@pytest.mark.parametrize("noise", [0.01, 0.3, 2.0])
@pytest.mark.parametrize("with_target", [True, False], ids=["target told", "top k only"])
def test_sums_are_those_of_the_definition(noise: float, with_target: bool) -> None:
    """Catches a cell that counts twice, or a rest that keeps what was told."""
    z, other, targets = pair(1, 40, 60, noise)
    told = told_of(other, targets, 6, with_target=with_target)
    found = compare(z, told, targets)
    for row in range(len(z)):
        known = dict(zip(told.ids[row].tolist(), told.logprobs[row].tolist(), strict=True))
        if with_target:
            known[int(targets[row])] = float(told.target[row])
        kl, least, most, unseen, rest = by_hand(z[row].tolist(), known)
        # The server's rest is known to 1e-6, which moves KL by that times its slope 1 − p/q.
        blur = 1e-6 * abs(1 - unseen / rest) + 1e-9
        assert found.served_kl[row].item() == pytest.approx(kl, abs=blur)
        assert found.served_kl[row].item() <= kl + 1e-9
        assert found.served_tv[row].item() == pytest.approx(least, abs=1e-6)
        assert found.served_tv_most[row].item() == pytest.approx(min(most, 1), abs=1e-6)
        assert found.served_unseen[row].item() == pytest.approx(unseen, rel=1e-9)


@settings(max_examples=60)
@given(
    st.integers(0, 10_000), st.integers(5, 30), st.sampled_from([0.0, 1e-4, 0.05, 1.0, 6.0]),
    st.booleans(),
)  # fmt: skip
def test_a_bound_is_never_beyond_the_truth(
    seed: int, k: int, noise: float, with_target: bool
) -> None:
    """Catches an estimate that is called a bound: the truth lies on the other side."""
    z, other, targets = pair(seed, 12, 30, noise)
    found = compare(z, told_of(other, targets, k, with_target=with_target), targets)
    truth = compare_exactly(z, other)
    rounding = 1e-6  # of the float32 log-probabilities that are told
    assert (found.served_kl >= 0).all()
    assert (found.served_kl <= truth.kl * (1 + rounding) + rounding).all()
    assert (found.served_tv <= truth.tv + rounding).all()
    assert (found.served_tv_most >= truth.tv - rounding).all()


def test_told_everything_is_the_whole_kl() -> None:
    """Catches a rest that is counted where there is none."""
    z, other, targets = pair(2, 30, 25, 0.2)
    found, truth = compare(z, told_of(other, targets, 25), targets), compare_exactly(z, other)
    assert found.served_kl.tolist() == pytest.approx(truth.kl.tolist(), rel=1e-4)
    assert found.served_unseen.max() == 0


def test_more_told_ids_tighten_the_bound() -> None:
    z, other, targets = pair(3, 50, 80, 0.5)
    means = [compare(z, told_of(other, targets, k), targets).served_kl for k in (5, 10, 40, 80)]
    for few, more in itertools.pairwise(means):
        assert (few <= more + 1e-6).all()
    assert means[0].mean() < 0.8 * means[-1].mean()


def test_an_equal_model_is_zero() -> None:
    """Catches the trap of truncated estimates: rounding that looks like a difference."""
    z, _, targets = pair(4, 200, 300, 0.0)
    found = compare(z, told_of(z, targets, 20), targets)
    assert found.served_kl.max() < 1e-12
    assert found.nll_difference.abs().max() < 2e-6
    assert (found.top1_agreement == 1).all()
    assert (found.topk_overlap_k5 == 1).all()


def test_a_peaked_row_without_a_rest_is_zero() -> None:
    """Catches a rest of 1e-9 against one of rounding: 1 − Σ q is not known to more than 1e-6."""
    z = torch.zeros(1, 50)
    z[0, 3] = 22.0
    found = compare(z, told_of(z, torch.tensor([3]), 5), torch.tensor([3]))
    assert found.served_kl.item() < 1e-9


def test_a_reordered_tail_is_not_seen_and_said_so() -> None:
    """What is told says nothing of the tail: the bound is small and the unseen mass is large."""
    z = torch.linspace(2, 0, 400)[None]
    other = torch.cat([z[:, :10], z[:, 10:].flip(-1)], -1)
    targets = torch.tensor([0])
    found, truth = compare(z, told_of(other, targets, 10), targets), compare_exactly(z, other)
    assert found.served_kl.item() < 1e-9
    assert truth.kl.item() > 0.3
    assert found.served_unseen.item() > 0.9
    assert found.served_tv_most.item() >= truth.tv.item()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_what_is_known_exactly_is_what_the_whole_computation_says(dtype: torch.dtype) -> None:
    """Catches another definition under the same name."""
    z, other, targets = pair(5, 300, 120, 0.3)
    z, other = z.to(dtype).float(), other.to(dtype).float()
    found = compare(z, told_of(other, targets, 8), targets, own=dtype, theirs=dtype)
    whole = output_statistics(z, other, targets, reference_dtype=dtype, candidate_dtype=dtype)
    for name in ("nll_reference", "nll_candidate", "nll_difference", "delta_p"):
        gap = (getattr(found, name) - getattr(whole, name)).abs().max().item()
        assert gap < 3e-6, name
    # A tie's width is that of the reference's logit: at most a factor of two beside the server's.
    same = (found.top1_agreement == whole.top1_agreement).double().mean().item()
    assert same == 1.0 if dtype == F32 else same > 0.98
    if dtype == F32:
        assert torch.equal(found.topk_overlap_k5, whole.topk_overlap_k5)


TOP = [math.log(p) for p in (0.4, 0.3, 0.1, 0.05, 0.05)]
Z = torch.tensor([[math.log(p) for p in (0.4, 0.3, 0.1, 0.05, 0.05, 0.06, 0.04)]])
TARGET = torch.tensor([0])


def told(ids: list[int], logprobs: list[float] = TOP, target: float = TOP[0]) -> Told:
    return Told(
        torch.tensor([ids]),
        torch.tensor([logprobs], dtype=torch.float64),
        torch.tensor([target], dtype=torch.float64),
    )


def test_ids_beyond_the_vocabulary_are_the_rest_and_never_win() -> None:
    """Catches padding ids that win top-1, or take probability of a real id."""
    wide = told([99, 0, 1, 2, 3], [math.log(0.5), *TOP[:4]])
    found = compare(Z, wide, TARGET)
    assert found.top1_agreement.item() == 1
    assert math.isnan(found.topk_overlap_k5.item()), "five real ids are not told"
    kl, *_ = by_hand(Z[0].tolist(), dict(zip([0, 1, 2, 3], TOP, strict=False)))
    assert found.served_kl.item() == pytest.approx(kl, abs=1e-6)


def test_ids_that_are_not_known_are_the_rest() -> None:
    """Catches a text without an id that is taken for some id."""
    found = compare(Z, told([-1, 1, 2, 3, 4]), TARGET)
    assert math.isnan(found.top1_agreement.item())
    assert math.isnan(found.topk_overlap_k5.item())
    # The target's own log-probability is told apart, so its cell is known.
    assert found.served_kl.item() < 1e-9
    without = compare(Z, told([-1, 1, 2, 3, 4], target=math.nan), TARGET)
    assert without.served_unseen.item() == pytest.approx(0.5)
    assert math.isnan(without.nll_difference.item())
    assert math.isnan(without.delta_p.item())
    # The two models' means have to be of the same tokens.
    assert math.isnan(without.nll_reference.item())


@pytest.mark.parametrize(
    ("gap", "dtype", "agrees"),
    [(0.0, F32, 1), (1e-3, F32, 0), (1e-3, BF16, 1), (0.1, BF16, 0)],
)
def test_a_tie_is_no_flip(gap: float, dtype: torch.dtype, agrees: int) -> None:
    """Catches flips that are nothing but the rounding of the server's head."""
    logprobs = [TOP[0], TOP[0] - gap, *TOP[2:]]
    found = compare(Z, told([1, 0, 2, 3, 4], logprobs, logprobs[1]), TARGET, theirs=dtype)
    assert found.top1_agreement.item() == agrees


def test_no_probability_for_what_has_some_is_infinite() -> None:
    """Catches a forbidden token that becomes a large finite number."""
    found = compare(Z, told([1, 2, 3, 4, 5], target=-math.inf), TARGET)
    assert found.served_kl.item() == math.inf
    assert found.nll_candidate.item() == math.inf
    assert found.nll_difference.item() == math.inf
    assert found.delta_p.item() == pytest.approx(-0.4)


def test_a_reference_without_numbers_gives_none() -> None:
    z = Z.clone()
    z[0, 6] = math.nan
    found = compare(z, told([0, 1, 2, 3, 4]), TARGET)
    assert all(math.isnan(column.item()) for column in found)


def test_no_rows_are_no_rows() -> None:
    none = Told(
        torch.zeros(0, 5, dtype=torch.int64), torch.zeros(0, 5).double(), torch.zeros(0).double()
    )
    found = compare(torch.zeros(0, 9), none, torch.zeros(0, dtype=torch.int64))
    assert all(column.shape == (0,) for column in found)


@pytest.mark.parametrize(
    ("bad", "targets", "words"),
    [
        (told([0, 1, 2, 3]), TARGET, "K ≥ 5"),
        (told([0, 1, 2, 3, 4], TOP[:4]), TARGET, "1 rows like the logits"),
        (told([0, 1, 2, 3, 4]), torch.tensor([7]), "0 … 6"),
        (told([0, 1, 2, 3, 4]), torch.tensor([-1]), "0 … 6"),
        (told([0, 1, 2, 3, 4]), torch.tensor([0, 1]), "1 rows"),
    ],
    ids=["too few", "other shapes", "beyond", "no target", "two targets"],
)
def test_bad_input_is_named(bad: Told, targets: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compare(Z, bad, targets)
