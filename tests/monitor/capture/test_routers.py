"""Where the routers of two models send the same tokens, against float64 on the inputs they had."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor.capture.conftest import Captured, Kit
from tests.monitor.moe_models import gates, routed
from torch import Tensor, nn

from quantwatch.capture.events import unrouted_words
from quantwatch.capture.plan import CapturePlan
from quantwatch.domain import Scope, Suite

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2-moe": {"norm_topk_prob": False},
    "qwen3-moe": {"norm_topk_prob": True},
    "deepseek-v3": {
        **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
        **{"routed_scaling_factor": 2.5, "num_hidden_layers": 3},
    },
}
LENGTHS = (9, 14, 5, 20)
METRICS = ("router_overlap", "router_weight_l1", "router_flips")


def build(kit: Kit, family: str) -> Any:
    model = kit.build(family, **FAMILIES[family])
    generator = torch.Generator().manual_seed(2)
    for gate in gates(model).values():
        if hasattr(gate, "e_score_correction_bias"):
            gate.e_score_correction_bias.normal_(0, 0.1, generator=generator)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(kit: Kit, family: str) -> tuple[Any, Any]:
    reference = build(kit, family)
    return reference, kit.perturb(reference, 0.1)


@pytest.fixture(scope="module")
def suite(kit: Kit) -> Suite:
    return kit.suite(LENGTHS, score_start=2)


@pytest.fixture(scope="module")
def captured(kit: Kit, pair: tuple[Any, Any], suite: Suite) -> Captured:
    return kit.capture(pair[0], {"other": pair[1], "same": copy.deepcopy(pair[0])}, suite)


def test_values_of_every_token(
    captured: Captured, pair: tuple[Any, Any], suite: Suite, family: str
) -> None:
    """Catches a batch whose rows are shifted, weights of another rule, and a replayed router."""
    theirs, ours = (routed(model, [p.token_ids for p in suite.prompts]) for model in pair)
    assert set(theirs) == {f"layers.{n}" for n in range(family == "deepseek-v3", 3)}
    turned = 0
    for scope in theirs:
        for n in range(len(LENGTHS)):
            w, v = theirs[scope][n][2:], ours[scope][n][2:]
            overlap = ((w > 0) & (v > 0)).sum(-1) / (w > 0).sum(-1)
            found = [captured.sink.row("other", n, metric, scope)[0] for metric in METRICS]
            np.testing.assert_allclose(found[0], overlap.numpy(), atol=1e-12)
            np.testing.assert_allclose(found[1], (w - v).abs().sum(-1).numpy(), atol=2e-6)
            np.testing.assert_array_equal(found[2], (overlap < 1).numpy())  # nothing ties here
            turned += int((overlap < 1).sum())
    assert turned > 5


def test_loads_are_whole_slots(
    captured: Captured, pair: tuple[Any, Any], suite: Suite, family: str
) -> None:
    theirs, ours = (routed(model, [p.token_ids for p in suite.prompts]) for model in pair)
    for n in range(len(LENGTHS)):
        loads = {load.scope: load for load in captured.sink.of("other", n).loads}
        assert set(loads) == set(theirs)
        for scope, load in loads.items():
            for counts, weights in ((load.reference, theirs), (load.candidate, ours)):
                wanted = (weights[scope][n][2:] > 0).sum(0)
                assert counts.tolist() == wanted.tolist()


def test_the_same_model_is_exactly_the_same(captured: Captured) -> None:
    for metric, best in zip(METRICS, (1.0, 0.0, 0.0), strict=True):
        for matrix in captured.sink.matrices("same", metric):
            assert (matrix.values == best).all()
    for observation in captured.sink.observations:
        if observation.candidate == "same":
            assert all((load.reference == load.candidate).all() for load in observation.loads)
    assert len(captured.sink.matrices("same", "router_flips")) == len(LENGTHS)
    assert not captured.report.unrouted


def test_the_floor_has_flips_of_rounding_only(captured: Captured) -> None:
    """Catches a floor without routers: the reference beside another text flips nothing."""
    found = {m.metric for o in captured.floor.observations for m in o.matrices}
    assert set(METRICS) <= found
    assert captured.floor.largest("reference", "router_flips").values()
    assert max(captured.floor.largest("reference", "router_flips").values()) == 0


def test_the_report_says_where_they_are(captured: Captured, family: str) -> None:
    first = 1 if family == "deepseek-v3" else 0
    assert captured.report.routers == {
        f"layers.{n}": dict.fromkeys(("reference", "other", "same"), f"model.layers.{n}.mlp.gate")
        for n in range(first, 3)
    }


def test_a_fault_in_one_router_is_there(kit: Kit, suite: Suite) -> None:
    """Two rows of one gate changed places: before it everything agrees exactly, there it doesn't."""
    reference = build(kit, "mixtral")
    faulty = copy.deepcopy(reference)
    weight = gates(faulty)["layers.1"].weight
    with torch.no_grad():
        weight[[0, 1]] = weight[[1, 0]]
    found = kit.capture(reference, {"faulty": faulty}, suite)
    lowest = {
        scope: min(
            m.values[m.scopes.index(scope)].min() for m in found.sink.matrices("faulty", METRICS[0])
        )
        for scope in map(Scope, ("layers.0", "layers.1"))
    }
    assert lowest[Scope("layers.0")] == 1
    assert lowest[Scope("layers.1")] < 1


def test_nan_in_a_router(kit: Kit, suite: Suite) -> None:
    """Catches an overlap with experts that a NaN chose, and a reference that is blamed."""
    reference = build(kit, "mixtral")
    faulty = copy.deepcopy(reference)
    with torch.no_grad():
        gates(faulty)["layers.2"].weight[1, 3] = torch.nan
    found = kit.capture(reference, {"faulty": faulty}, suite)
    for metric in METRICS:
        for matrix in found.sink.matrices("faulty", metric):
            assert np.isnan(matrix.values[matrix.scopes.index(Scope("layers.2"))]).all()
            assert np.isfinite(matrix.values[matrix.scopes.index(Scope("layers.0"))]).all()
    loads = found.sink.of("faulty", 0).loads[2]
    assert loads.scope == "layers.2"
    assert not loads.reference.sum() + loads.candidate.sum()


class OwnRouter(nn.Module):
    """A gate that nobody knows, with the output of a known one."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.weight = gate.weight
        self.gate = [gate]

    def forward(self, x: Tensor) -> Any:
        return self.gate[0](x)


def swapped(model: Any, router: type[nn.Module]) -> Any:
    changed = copy.deepcopy(model)
    changed.model.layers[1].mlp.gate = router(changed.model.layers[1].mlp.gate)
    return changed


class MixtralTopKRouter(OwnRouter):
    """A module of a known name that doesn't do what that one does."""

    top_k = 2

    def forward(self, x: Tensor) -> Any:
        logits, weights, ids = super().forward(x)
        return logits, weights, (ids + 1) % 4


@pytest.mark.parametrize(
    ("router", "words"),
    [
        (OwnRouter, "how OwnRouter chooses experts is not known"),
        (MixtralTopKRouter, "tokens went to other experts than Router chooses, beyond rounding"),
    ],
)
def test_what_is_not_measured_says_why(
    kit: Kit, suite: Suite, router: type[nn.Module], words: str
) -> None:
    """Catches a router that is left out without a word, or believed to follow a rule it doesn't."""
    reference = build(kit, "mixtral")
    other = swapped(reference, router)
    plan = CapturePlan(batch_tokens=64)
    found = kit.capture(other, {"plain": reference}, suite, plan)
    assert words in found.report.unrouted[Scope("layers.1")]["reference"]
    for matrix in found.sink.matrices("plain", METRICS[0]):
        assert matrix.scopes == ("layers.0", "layers.2")
    if router is OwnRouter:
        found = kit.capture(reference, {"own": other}, suite, plan)
        assert found.report.unrouted == {"layers.1": {"own": words}}


def test_a_dense_model_has_none(kit: Kit) -> None:
    found = kit.capture(kit.build("llama"), {"same": kit.build("llama")}, kit.suite((6, 8)))
    assert not found.report.routers
    assert not found.report.unrouted
    assert not any(found.sink.matrices("same", metric) for metric in METRICS)
    assert not any(o.loads for o in found.sink.observations)


def test_reasons_in_words() -> None:
    """Catches a reason that is told once per layer, and the reasons of another candidate."""
    unrouted = {
        Scope(f"layers.{n}"): {"reference": "how X chooses is not known"} for n in range(5)
    } | {Scope("layers.7"): {"a": "it has 4 experts, the reference's 8", "b": "another"}}
    assert unrouted_words(unrouted, "a") == (
        "routing is not compared at layers.0, layers.1, layers.2 and 2 more "
        "(reference: how X chooses is not known)",
        "routing is not compared at layers.7 (a: it has 4 experts, the reference's 8)",
    )
    assert unrouted_words({}, "a") == ()
