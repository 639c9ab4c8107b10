"""Equal models: exactly nothing differs."""

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from quantwatch.capture.plan import CapturePlan
from quantwatch.metrics.registry import METRICS

_PROPERTIES_OF_ONE_MODEL = {"nll_reference", "nll_candidate", "max_abs", "headroom_bits"}


def test_equal_copy_is_exactly_equal(kit: Any, architecture: str) -> None:
    """Would catch noise of 1e-7 that hides a real fault, whatever is padded or run again."""
    model = kit.build(architecture)
    captured = kit.capture(
        model,
        {"copy": copy.deepcopy(model)},
        kit.suite([11, 5, 24, 24, 1, 30]),
        CapturePlan(batch_tokens=64, isolated_fraction=0.5),
    )
    assert captured.report.bit_equal == {"copy": True}
    assert captured.report.head_rows == {"copy": ()}
    assert captured.report.first_nonfinite == {}
    assert captured.report.num_padding_tokens > 0
    seen = set()
    for observation in captured.sink.observations:
        for matrix in observation.matrices:
            seen.add(matrix.metric)
            if matrix.metric not in _PROPERTIES_OF_ONE_MODEL:
                best = METRICS[matrix.metric].best_value
                assert (matrix.values == best).all(), (matrix.metric, matrix.scopes)
    assert {"isolated_error", "lens_kl", "logit_kl", "rel_error", "sqnr_db"} <= seen


def test_bit_equal_is_lost_by_one_bit_of_a_logit(kit: Any) -> None:
    """Would catch "bit-equal" derived from KL = 0: a constant added to all logits leaves KL at 0."""

    class Shifted(nn.Linear):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return super().forward(h) + 1.0

    model = kit.build("llama")
    candidate = copy.deepcopy(model)
    head = Shifted(32, 64, bias=False)
    head.weight = candidate.lm_head.weight
    candidate.lm_head = head
    captured = kit.capture(model, {"shifted": candidate}, kit.suite([9, 20]))
    assert captured.report.bit_equal == {"shifted": False}
    assert max(captured.sink.largest("shifted", "logit_kl").values()) < 1e-12
    taps = captured.sink.largest("shifted", "rel_error")
    assert {scope for scope, value in taps.items() if value > 0} == {"head"}


def test_repetition_gives_the_same_bits(kit: Any) -> None:
    """Would catch a measurement that depends on anything but models, suite and plan."""
    model = kit.build("qwen3-moe")
    candidate, suite = kit.perturb(model), kit.suite([9, 20, 33])
    first, second = (kit.capture(model, {"c": candidate}, suite) for _ in range(2))
    for ours, theirs in zip(first.sink.observations, second.sink.observations, strict=True):
        for a, b in zip(ours.matrices, theirs.matrices, strict=True):
            assert (a.metric, a.scopes, a.role) == (b.metric, b.scopes, b.role)
            np.testing.assert_array_equal(a.values, b.values)
            np.testing.assert_array_equal(a.positions, b.positions)


def test_several_candidates_do_not_disturb_one_another(kit: Any) -> None:
    """Would catch state of one candidate's pass leaking into the next one's."""
    model = kit.build("mixtral")
    two = {"a": kit.perturb(model, seed=1), "b": kit.perturb(model, 0.1, seed=2)}
    suite = kit.suite([9, 20, 33])
    together = kit.capture(model, two, suite)
    for name, candidate in two.items():
        alone = kit.capture(model, {name: candidate}, suite)
        for prompt in suite.prompts:
            ours = together.sink.of(name, prompt.index)
            theirs = alone.sink.of(name, prompt.index)
            for a, b in zip(ours.matrices, theirs.matrices, strict=True):
                np.testing.assert_array_equal(a.values, b.values)
    # 3 prompts, each once per model; the floor's prompt once more
    (isolated,) = {o.prompt for o in together.floor.observations}
    tokens = suite.num_tokens * 3 + len(suite.prompts[isolated].token_ids)
    assert together.steps.done == together.steps.total == tokens
