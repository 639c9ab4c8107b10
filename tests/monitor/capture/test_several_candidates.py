"""Several candidates beside one reference: each as if it were alone."""

from typing import Any

import numpy as np
import torch

from quantwatch.capture.plan import CapturePlan

_TOGETHER = {
    "lens_kl": (1e-4, 1e-10),
    "topk_logit_deviation_k5": (1e-4, 5e-7),
    "topk_logit_deviation_k3": (1e-4, 5e-7),
}
"""What is read off together → tolerance: a rounding of the logits (1e-7) on differences of 1e-2."""


def test_a_candidate_is_measured_as_if_it_were_alone(kit: Any) -> None:
    """Catches another candidate's rows, positions or births; groups of unlike layers or dtypes.

    What is read off together may round otherwise: products of few rows in other shapes.
    """
    reference = kit.build("llama", num_hidden_layers=2)
    others = {
        "one": kit.perturb(reference),
        "two": kit.perturb(reference, 0.1, seed=2),
        "half": kit.perturb(reference, seed=3).to(torch.bfloat16),
        "same": kit.perturb(reference, 0.0),
    }
    suite, plan = kit.suite([9, 12, 7]), CapturePlan(batch_tokens=32, isolated_fraction=0.3)
    together = kit.capture(reference, others, suite, plan)
    assert together.report.bit_equal["same"]
    for name, module in others.items():
        alone = kit.capture(reference, {name: module}, suite, plan)
        for seen in alone.sink.observations:
            also = together.sink.of(name, seen.prompt)
            assert [(m.metric, m.scopes, m.role) for m in also.matrices] == [
                (m.metric, m.scopes, m.role) for m in seen.matrices
            ]
            for ours, theirs in zip(also.matrices, seen.matrices, strict=True):
                is_lens = ours.scopes[0].startswith("layers.")
                rtol, atol = _TOGETHER.get(ours.metric, (0, 0)) if is_lens else (0, 0)
                what = f"{name} {ours.metric} {ours.scopes}"
                np.testing.assert_allclose(ours.values, theirs.values, rtol, atol, err_msg=what)
                where = [np.asarray(m.positions) for m in (ours, theirs) if m.positions is not None]
                assert all(np.array_equal(at, where[0]) for at in where)
