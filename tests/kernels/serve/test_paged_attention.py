"""Attention through block tables, against a float64 loop over each query's own keys."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from quantwatch_kernels.serve.paged_attention import AttentionRule, paged_attention
from quantwatch_kernels.serve.paged_plan import PagedPlan

PAGE, FEATURES, KV_HEADS, HEADS = 4, 8, 2, 6
RULES = {
    "plain": AttentionRule(),
    "scaled": AttentionRule(scaling=0.7),
    "soft-capped": AttentionRule(softcap=1.3),
    "window 1": AttentionRule(window=1),
    "window of a page": AttentionRule(window=4),
    "window, a page and one": AttentionRule(window=5),
}


class Batch:
    """Sequences of these lengths with these many queries, in pages that are strewn about."""

    def __init__(self, lengths: list[int], queries: list[int], dropped: int = 0) -> None:
        generator = torch.Generator().manual_seed(sum(lengths) + 7 * sum(queries))
        counts = [-(-n // PAGE) for n in lengths]
        order = torch.randperm(sum(counts) + 3, generator=generator).to(torch.int32)
        self.pages = (
            torch.full((sum(counts) + 3, PAGE, KV_HEADS, FEATURES), torch.nan),
            torch.full((sum(counts) + 3, PAGE, KV_HEADS, FEATURES), torch.nan),
        )
        self.keys, self.values, self.queries = [], [], []
        indptr, indices, at = [0], [], 0
        for length, count, pages in zip(lengths, queries, counts, strict=True):
            k, v = (torch.randn(length, KV_HEADS, FEATURES, generator=generator) for _ in "kv")
            ids = order[at : at + pages].long()
            for plane, x in zip(self.pages, (k, v), strict=True):
                for token in range(length):
                    plane[ids[token // PAGE], token % PAGE] = x[token]
            self.keys.append(k)
            self.values.append(v)
            self.queries.append(torch.randn(count, HEADS, FEATURES, generator=generator))
            kept = ids[dropped:]
            indices += kept.tolist()
            indptr.append(len(indices))
            at += pages
        last = [(n - 1) % PAGE + 1 for n in lengths]
        ints = [torch.tensor(x, dtype=torch.int32) for x in (indptr, indices, last)]
        start = torch.full((len(lengths),), dropped * PAGE, dtype=torch.int32)
        self.plan = PagedPlan(ints[0], ints[1], ints[2], start, PAGE)
        self.q_indptr = torch.tensor([0, *queries]).cumsum(0)

    def attend(self, rule: AttentionRule, **settings: Any) -> tuple[Tensor, Tensor]:
        whole = torch.cat(self.queries)
        return paged_attention(whole, self.q_indptr, self.pages, self.plan, rule, **settings)

    def by_hand(self, rule: AttentionRule) -> tuple[Tensor, Tensor]:
        out, lse = [], []
        for q, k, v in zip(self.queries, self.keys, self.values, strict=True):
            for row in range(len(q)):
                t = len(k) - len(q) + row
                first = 0 if rule.window is None else max(t - rule.window + 1, 0)
                for head in range(HEADS):
                    shared = head // (HEADS // KV_HEADS)
                    s = k[first : t + 1, shared].double() @ q[row, head].double()
                    s = s * (rule.scaling or 1 / math.sqrt(FEATURES))
                    s = rule.softcap * torch.tanh(s / rule.softcap) if rule.softcap else s
                    out.append(s.softmax(0) @ v[first : t + 1, shared].double())
                    lse.append(s.logsumexp(0))
        return torch.stack(out).reshape(-1, HEADS, FEATURES), torch.stack(lse).reshape(-1, HEADS)


BATCHES = {
    "decode": ([1, 3, 4, 5, 8, 9, 17], [1] * 7),
    "prefill": ([1, 4, 5, 11], [1, 4, 5, 11]),
    "chunks": ([9, 12, 13], [3, 4, 1]),
    "one without a query": ([6, 7], [0, 2]),
}


@pytest.mark.parametrize("part", [None, 1, 2], ids=["whole", "page by page", "two pages"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize(("lengths", "queries"), BATCHES.values(), ids=BATCHES.keys())
def test_each_query_sees_its_own_keys(
    lengths: list[int], queries: list[int], rule: AttentionRule, part: int | None
) -> None:
    """Catches another's page, a stale tail, a window off by one, an empty part that gives NaN."""
    batch = Batch(lengths, queries)
    out, lse = batch.attend(rule, pages_per_part=part)
    expected, expected_lse = batch.by_hand(rule)
    assert torch.allclose(out.double(), expected, atol=2e-6)
    assert torch.allclose(lse.double(), expected_lse, atol=2e-6)


def test_float64_stays_float64() -> None:
    """Catches parts that are merged in float32: a twin for float32 kernels needs more digits."""
    batch = Batch([9, 17], [2, 1])
    batch.pages = (batch.pages[0].double(), batch.pages[1].double())
    batch.queries = [q.double() for q in batch.queries]
    out, lse = batch.attend(AttentionRule(), pages_per_part=1)
    expected, expected_lse = batch.by_hand(AttentionRule())
    assert torch.allclose(out, expected, rtol=0, atol=1e-13)
    assert torch.allclose(lse, expected_lse, rtol=0, atol=1e-13)


def test_pages_that_a_window_left_behind() -> None:
    """Catches positions that begin anew at the first page that is still there."""
    rule = AttentionRule(window=6)
    whole, cut = Batch([17, 14], [2, 1]), Batch([17, 14], [2, 1], dropped=2)
    for found, wanted in zip(cut.attend(rule), whole.attend(rule), strict=True):
        assert torch.allclose(found, wanted, atol=1e-6)


def test_an_empty_batch() -> None:
    """Catches the maximum of nothing."""
    none = torch.zeros(0, dtype=torch.int32)
    plan = PagedPlan(torch.zeros(1, dtype=torch.int32), none, none, none, PAGE)
    pages = torch.zeros(1, PAGE, KV_HEADS, FEATURES)
    out, lse = paged_attention(
        torch.zeros(0, HEADS, FEATURES), torch.zeros(1, dtype=torch.long), (pages, pages), plan
    )
    assert out.shape == (0, HEADS, FEATURES)
    assert lse.shape == (0, HEADS)


def test_rows_are_alone() -> None:
    """Catches a NaN in one sequence that reaches another."""
    batch = Batch([5, 6], [5, 6])
    expected = batch.attend(AttentionRule())[0]
    batch.pages[1][batch.plan.kv_indices[0].long(), 2] = torch.nan
    found = batch.attend(AttentionRule())[0]
    assert torch.equal(found[5:], expected[5:])
    assert torch.equal(found[:2], expected[:2]) or found[:2].isnan().any()
    assert found[2:5].isnan().all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"q_indptr": torch.tensor([0, 1])}, "over 2 sequences", id="sequences"),
        pytest.param({"q_indptr": torch.tensor([0, 6, 7])}, "at most as many", id="more than keys"),
        pytest.param({"queries": torch.zeros(7, 5, 8)}, "don't fit pages", id="heads"),
        pytest.param({"page": 3}, r"\[P, 3, Hkv, D\]", id="page size"),
    ],
)
def test_refused(change: dict[str, Any], said: str) -> None:
    """Catches an index that is read wherever it points."""
    batch = Batch([5, 6], [3, 4])
    plan = batch.plan._replace(page_size=change.get("page", PAGE))
    queries = change.get("queries", torch.zeros(7, HEADS, FEATURES))
    with pytest.raises(ValueError, match=said):
        paged_attention(queries, change.get("q_indptr", batch.q_indptr), batch.pages, plan)


def test_a_window_holds_a_key() -> None:
    """Catches a query that sees nothing."""
    with pytest.raises(ValueError, match="it is 0"):
        AttentionRule(window=0)
