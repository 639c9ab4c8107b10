"""Every emitted value against an independent float64 computation, on every architecture.

The hidden states come from hooks of this file's own and from `output_hidden_states`, the logits from
the model's own forward; nothing of capture or of the kernels is used to compute what is expected.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantwatch.capture.plan import CapturePlan
from quantwatch.domain import FINAL_NORM, HEAD, Scope
from quantwatch.metrics.registry import METRICS, OF_SERVED_ALONE
from quantwatch.models.anatomy import Anatomy, resolve

LENGTHS = [24, 9, 17]
PLAN = CapturePlan(lens_positions=64, isolated_fraction=1.0, isolated_positions=6)

Vector = NDArray[np.float64]


def as_tensor(output: Any) -> Tensor:
    while isinstance(output, tuple):
        output = output[0]
    assert isinstance(output, Tensor)
    return output


class Watched:
    """What one model computes on one prompt, every module's arguments and output kept."""

    def __init__(self, model: nn.Module, ids: tuple[int, ...]) -> None:
        self.model = model
        self.calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.outputs: dict[str, Tensor] = {}
        handles = []
        for path, module in model.named_modules():
            handles += [
                module.register_forward_pre_hook(self._before(path), with_kwargs=True),
                module.register_forward_hook(self._after(path)),
            ]
        with torch.no_grad():
            # With a cache, feeding attention again would append to it.
            output = model(
                torch.tensor([ids]), **({"use_cache": False} if hasattr(model, "config") else {})
            )
        for handle in handles:
            handle.remove()
        self.logits = getattr(output, "logits", output)[0]

    def hidden(self, path: str) -> Vector:
        tensor = self.outputs[path]
        return tensor.reshape(-1, tensor.shape[-1]).double().numpy()

    def _before(self, path: str) -> Callable[..., None]:
        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.calls[path] = (
                tuple(a.clone() if isinstance(a, Tensor) else a for a in args),
                {k: v.clone() if isinstance(v, Tensor) else v for k, v in kwargs.items()},
            )

        return keep

    def _after(self, path: str) -> Callable[..., None]:
        def keep(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor):
                self.outputs[path] = first.clone()

        return keep


def softmax(z: Vector) -> Vector:
    e = np.exp(z - z.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def kl(z: Vector, w: Vector) -> Vector:
    p, q = softmax(z), softmax(w)
    return np.asarray((p * (np.log(p) - np.log(q))).sum(-1))


def relative(a: Vector, b: Vector, base: Vector) -> Vector:
    return np.asarray(np.linalg.norm(a - b, axis=-1) / np.linalg.norm(base, axis=-1))


def top_deviation(z: Vector, w: Vector, k: int) -> Vector:
    ids = np.argsort(-z, axis=-1, kind="stable")[:, :k]
    gap = np.take_along_axis(z, ids, -1) - np.take_along_axis(w, ids, -1)
    return np.asarray(np.abs(gap).mean(-1))


def output_expectations(z: Vector, w: Vector, ids: tuple[int, ...]) -> dict[str, Vector]:
    p, q = softmax(z), softmax(w)
    m = (p + q) / 2
    order, other = np.argsort(-z, -1, kind="stable"), np.argsort(-w, -1, kind="stable")
    targets = np.array(ids[1:])
    p_target = p[np.arange(len(targets)), targets]
    q_target = q[np.arange(len(targets)), targets]
    return {
        "logit_kl": kl(z, w),
        "reverse_kl": kl(w, z),
        "js": ((p * np.log(p / m)).sum(-1) + (q * np.log(q / m)).sum(-1)) / 2,
        "tv": np.abs(p - q).sum(-1) / 2,
        "top1_agreement": (order[:, 0] == other[:, 0]).astype(float),
        "topk_overlap_k5": np.array(
            [len(set(a) & set(b)) / 5 for a, b in zip(order[:, :5], other[:, :5], strict=True)]
        ),
        "topk_logit_deviation_k5": top_deviation(z, w, 5),
        "topk_logit_deviation_k3": top_deviation(z, w, 3),
        "delta_p": q_target - p_target,
        "nll_reference": -np.log(p_target),
        "nll_candidate": -np.log(q_target),
        "nll_difference": np.log(p_target) - np.log(q_target),
    }


def tap_expectations(h: Vector, g: Vector) -> dict[str, Vector]:
    norms = np.linalg.norm(h, axis=-1) * np.linalg.norm(g, axis=-1)
    largest = np.abs(g).max(-1)
    return {
        "rel_error": relative(h, g, h),
        "sqnr_db": 20 * np.log10(np.linalg.norm(h, axis=-1) / np.linalg.norm(h - g, axis=-1)),
        "cosine": (h * g).sum(-1) / norms,
        "max_abs": largest,
        "headroom_bits": np.log2(float(torch.finfo(torch.float32).max)) - np.log2(largest),
    }


def lens(model: nn.Module, anatomy: Anatomy, h: Vector, soft: tuple[float, float | None]) -> Vector:
    """Final norm, projection and head of the reference in float64."""
    scale, cap = soft
    paths = (anatomy.taps.get(FINAL_NORM), anatomy.projection, anatomy.taps[HEAD])
    z = torch.from_numpy(h)
    twin = {p: model.get_submodule(p) for p in paths if p is not None}
    with torch.no_grad():
        for module in twin.values():
            dtype = next(module.parameters()).dtype
            z = module.double()(z)
            module.to(dtype)
    z = z * scale
    return (z if cap is None else cap * torch.tanh(z / cap)).numpy()


SOFT = {"gemma2": (1.0, 1.0), "cohere": (0.25, None), "granite": (0.25, None)}


class Case:
    def __init__(self, kit: Any, architecture: str) -> None:
        self.reference = kit.build(architecture)
        self.candidate = kit.perturb(self.reference)
        self.suite = kit.suite(LENGTHS)
        self.captured = kit.capture(self.reference, {"c": self.candidate}, self.suite, PLAN)
        self.anatomy = resolve(self.reference)
        self.soft = SOFT.get(architecture, (1.0, None))
        self.pairs = [
            (Watched(self.reference, p.token_ids), Watched(self.candidate, p.token_ids))
            for p in self.suite.prompts
        ]
        self.layers = [Scope(f"layers.{n}") for n in range(self.anatomy.num_layers)]

    def check(self, prompt: int, metric: str, scope: str, wanted: Vector, rel: float) -> None:
        values, positions = self.captured.sink.row("c", prompt, metric, scope)
        wanted = wanted if positions is None else wanted[positions]
        assert values == pytest.approx(wanted, rel=rel, abs=1e-11), (metric, scope, prompt)


@pytest.fixture(scope="module")
def cases(kit: Any) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def case(architecture: str) -> Case:
        if architecture not in made:
            made.clear()
            made[architecture] = Case(kit, architecture)
        return made[architecture]

    return case


def test_output_statistics(cases: Callable[[str], Case], architecture: str) -> None:
    """Would catch shifted targets, a lost scale or soft-capping, a mixed-up direction of KL."""
    case = cases(architecture)
    for prompt, (ours, theirs) in zip(case.suite.prompts, case.pairs, strict=True):
        z, w = ours.logits.double().numpy(), theirs.logits.double().numpy()
        for metric, wanted in output_expectations(z, w, prompt.token_ids).items():
            case.check(prompt.index, metric, "model", wanted, 1e-4)


def test_taps(cases: Callable[[str], Case], architecture: str) -> None:
    """Would catch a tap on the wrong module, a tuple's wrong element, rows of another prompt."""
    case = cases(architecture)
    for prompt, (ours, theirs) in zip(case.suite.prompts, case.pairs, strict=True):
        for scope, path in case.anatomy.taps.items():
            if scope == "head":
                h, g = (watched.logits.double().numpy() for watched in (ours, theirs))
            else:
                h, g = ours.hidden(path), theirs.hidden(path)
            for metric, wanted in tap_expectations(h, g).items():
                case.check(prompt.index, metric, scope, wanted, 1e-5)


def test_layers(cases: Callable[[str], Case], architecture: str) -> None:
    """Would catch a lens through the candidate's head, or without norm, projection or capping."""
    case = cases(architecture)
    for prompt, (ours, theirs) in zip(case.suite.prompts, case.pairs, strict=True):
        for scope in case.layers:
            path = case.anatomy.taps[scope]
            h, g = ours.hidden(path), theirs.hidden(path)
            case.check(prompt.index, "feature_kl", scope, kl(h, g), 1e-4)
            z, w = (lens(case.reference, case.anatomy, x, case.soft) for x in (h, g))
            case.check(prompt.index, "lens_kl", scope, kl(z, w), 2e-3)
            for k in (3, 5):
                wanted = top_deviation(z, w, k)
                case.check(prompt.index, f"topk_logit_deviation_k{k}", scope, wanted, 2e-3)


def test_layers_are_the_hidden_states_that_transformers_gives(
    cases: Callable[[str], Case], architecture: str
) -> None:
    """Would catch layers numbered from 1, or taken before their residual was added."""
    case = cases(architecture)
    if architecture == "own":
        assert not hasattr(case.reference, "config")
        return
    for prompt in case.suite.prompts:
        ids = torch.tensor([prompt.token_ids])
        with torch.no_grad():
            states = [
                [h[0].double().numpy() for h in model(ids, output_hidden_states=True).hidden_states]
                for model in (case.reference, case.candidate)
            ]
        for n, scope in enumerate(case.layers[:-1], start=1):  # the last one comes normed
            wanted = relative(states[0][n], states[1][n], states[0][n])
            case.check(prompt.index, "rel_error", scope, wanted, 1e-5)


def test_isolated_errors(cases: Callable[[str], Case], architecture: str) -> None:
    """Would catch a module fed its own input, a residual counted as the layer's update."""
    case = cases(architecture)
    for prompt, (ours, theirs) in zip(case.suite.prompts, case.pairs, strict=True):
        for scope, path in {**case.anatomy.taps, **case.anatomy.linears}.items():
            args, kwargs = ours.calls[path]
            with torch.no_grad():
                fed = as_tensor(
                    theirs.model.get_submodule(path)(
                        *(a.clone() if isinstance(a, Tensor) else a for a in args), **kwargs
                    )
                )
            f, g = (x.reshape(-1, x.shape[-1]).double().numpy() for x in (ours.outputs[path], fed))
            if scope == "head" and case.soft[1] is not None:
                f, g = (case.soft[1] * np.tanh(x / case.soft[1]) for x in (f, g))
            update = f
            if scope in case.layers:
                entry = args[0] if args else kwargs["hidden_states"]
                update = f - entry.reshape(f.shape).double().numpy()
            case.check(prompt.index, "isolated_error", scope, relative(f, g, update), 1e-4)


def test_top_logits(cases: Callable[[str], Case], architecture: str) -> None:
    """Would catch ids of one model beside logits of the other."""
    case = cases(architecture)
    for prompt, (ours, theirs) in zip(case.suite.prompts, case.pairs, strict=True):
        top = case.captured.sink.of("c", prompt.index).top
        assert top is not None
        assert top.reference_ids.dtype == np.int32
        z, w = ours.logits.numpy(), theirs.logits.numpy()
        for logits, ids, kept in (
            (z, top.reference_ids, top.reference_logits),
            (w, top.candidate_ids, top.candidate_logits),
            (w, top.reference_ids, top.candidate_at_reference),
        ):
            assert kept.shape == (len(prompt.token_ids), PLAN.keep_top)
            assert kept == pytest.approx(np.take_along_axis(logits, ids, -1), rel=1e-5, abs=1e-5)
        assert top.reference_logits[:, 0] == pytest.approx(z.max(-1), rel=1e-5)


def test_every_metric_is_emitted_once_per_place(
    cases: Callable[[str], Case], architecture: str
) -> None:
    """Would catch a metric that nobody measures, or one that is measured twice."""
    case = cases(architecture)
    for prompt in case.suite.prompts:
        places = [
            (matrix.metric, scope, matrix.role)
            for matrix in case.captured.sink.of("c", prompt.index).matrices
            for scope in matrix.scopes
        ]
        assert len(places) == len(set(places))
        # Loads are no values of tokens (`Observation.loads`), a dense model has no routers, and
        # estimates are made on request (test_estimates.py).
        absent = {"leaked_mass", "router_load_tv", "router_load_max"} | OF_SERVED_ALONE
        absent |= {slug for slug in METRICS if slug.startswith("lens_kl_")}
        if not case.captured.report.routers:
            absent |= {slug for slug, spec in METRICS.items() if spec.where == "router"}
        assert {metric for metric, _, _ in places} == set(METRICS) - absent


def test_coverage_is_proven(cases: Callable[[str], Case], architecture: str) -> None:
    """Would catch a report that claims what did not happen."""
    case = cases(architecture)
    report = case.captured.report
    assert set(report.firings) == set(case.anatomy.taps) == set(report.taps)
    for scope, counts in report.firings.items():
        assert counts == report.num_forwards
        assert report.taps[scope] == dict.fromkeys(("reference", "c"), case.anatomy.taps[scope])
    # observer check + one forward per prompt; the reference once more for each of its floor, and
    # for the other conditions once as it is and once under each
    observed = case.captured.floor.observations
    floor = [case.suite.prompts[o.prompt] for o in observed if o.candidate == "reference"]
    conditions = len(observed) - len(floor)
    assert floor
    assert conditions == list(report.noise_floor_sources.values()).count("measured") > 0
    assert report.num_forwards == {"reference": 4 + len(floor) + 1 + conditions, "c": 4}
    assert max(report.observer_effect.values()) == pytest.approx(0, abs=1e-5)
    tokens = 2 * sum(LENGTHS) + sum(len(prompt.token_ids) for prompt in floor)
    assert case.captured.steps.done == case.captured.steps.total == tokens
    assert math.isfinite(sum(report.timings_s.values()))
