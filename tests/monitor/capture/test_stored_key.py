"""The key of a stored reference: everything that can change a bit of it, and nothing else."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import quantwatch
import quantwatch_kernels
from quantwatch.capture.course import Course
from quantwatch.capture.plan import CapturePlan
from quantwatch.capture.stored import key as key_module
from quantwatch.capture.stored.key import ingredients
from quantwatch.domain import Fingerprint, Suite
from quantwatch.models.loaded import LoadedModel
from quantwatch.telemetry import canonical_sha, libraries

PLAN = CapturePlan(batch_tokens=16, isolated_fraction=0.5)
SHAS = ("weights_sha", "config_sha", "tokenizer_sha", "recipe_sha", "serve_sha", "fault_sha")


@pytest.fixture
def model(kit: Any) -> LoadedModel:
    model: LoadedModel = kit.load(kit.build("llama", num_hidden_layers=1))
    return model


@pytest.fixture
def suite(kit: Any) -> Suite:
    suite: Suite = kit.suite([9, 6, 12])
    return suite


def key(model: LoadedModel, suite: Suite, plan: CapturePlan = PLAN, context: int = 64) -> str:
    return canonical_sha(ingredients(model, Course(suite, plan, context)))


def _prompts(suite: Suite, **changes: Any) -> Suite:
    first, *others = suite.prompts
    return replace(suite, prompts=(replace(first, **changes), *others))


def _fingerprint(model: LoadedModel, name: str) -> LoadedModel:
    print_ = replace(Fingerprint(*[""] * 6), **{name: "1"})
    return replace(model, variant=replace(model.variant, fingerprint=print_))


Change = Callable[[LoadedModel, Suite], str]
CHANGES: dict[str, Change] = {
    **{sha: lambda m, s, sha=sha: key(_fingerprint(m, sha), s) for sha in SHAS},  # type: ignore[misc]
    "suite": lambda m, s: key(m, replace(s, hash="cd" * 32)),
    "one token": lambda m, s: key(m, _prompts(s, token_ids=(7, *s.prompts[0].token_ids[1:]))),
    "where scoring starts": lambda m, s: key(m, _prompts(s, score_start=3)),
    "which prompts are isolated": lambda m, s: key(m, s, replace(PLAN, isolated_fraction=1.0)),
    "batches": lambda m, s: key(m, s, replace(PLAN, batch_tokens=64)),
    "lens": lambda m, s: key(m, s, replace(PLAN, lens_positions=9)),
    "floor": lambda m, s: key(m, s, replace(PLAN, floor_tokens=9)),
    "conditions": lambda m, s: key(m, s, replace(PLAN, condition_tokens=9)),
    "context": lambda m, s: key(m, s, context=32),
    "dtype": lambda m, s: key(replace(m, dtype=torch.bfloat16), s),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_the_numbers_changes_the_key(
    what: str, model: LoadedModel, suite: Suite
) -> None:
    """Catches another reference's numbers taken for this one's."""
    assert CHANGES[what](model, suite) != key(model, suite)


def _cpu(name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    known = {"machine": "x86_64", "model": "a", name: value}
    return lambda patch: patch.setattr(key_module, "cpu", lambda: known)


def _version(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    real = libraries
    return lambda patch: patch.setattr(
        key_module, "libraries", lambda names: {**real(names), name: "0.0.1"}
    )


SURROUNDINGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "torch's build": lambda patch: patch.setattr(torch.__config__, "show", lambda: "other"),
    "transformers": _version("transformers"),
    "torch": _version("torch"),
    "quantwatch": _version("quantwatch"),
    "processor": _cpu("model", "b"),
    "instructions": lambda patch: patch.setattr(
        torch.backends.cpu, "get_cpu_capability", lambda: "AVX2"
    ),
    "instructions by variable": lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
    "sums by variable": lambda patch: patch.setenv("MKL_CBWR", "COMPATIBLE"),
    "threads": lambda patch: patch.setattr(torch, "get_num_threads", lambda: 3),
    "precision of products": lambda patch: patch.setattr(
        torch, "get_float32_matmul_precision", lambda: "medium"
    ),
    "no compiler for the lens": lambda patch: patch.setattr(
        key_module, "why_not_native", lambda: "no compiler"
    ),
    "code": lambda patch: patch.setattr(key_module, "code_sha", lambda: "other"),
    "format": lambda patch: patch.setattr(key_module, "FORMAT", 99),
    "capture": lambda patch: patch.setattr("quantwatch.capture.plan.VERSION", 99),
}


@pytest.mark.parametrize("what", SURROUNDINGS)
def test_other_surroundings_change_the_key(
    what: str, model: LoadedModel, suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches numbers of another library, machine or thread count read as if computed here."""
    before = key(model, suite)
    SURROUNDINGS[what](monkeypatch)
    assert key(model, suite) != before


def test_what_changes_nothing_keeps_the_key(model: LoadedModel, suite: Suite) -> None:
    """Catches a key that never meets again: names, texts, notes and sources are no numbers."""
    other = replace(model, variant=replace(model.variant, name="x", source={"a": 1}, notes=("b",)))
    renamed = replace(_prompts(suite, text="t", source="elsewhere"), name="y", notes=("c",))
    assert key(other, renamed) == key(model, suite)


def test_the_code_has_a_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Catches a checkout whose code changed under an equal version."""
    for name in ("quantwatch/capture", "quantwatch/models", "kernels"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.py").write_text("1")
    monkeypatch.setattr(quantwatch, "__file__", str(tmp_path / "quantwatch/i.py"))
    monkeypatch.setattr(quantwatch_kernels, "__file__", str(tmp_path / "kernels/i.py"))
    code_sha: Any = key_module.code_sha.__wrapped__
    seen = {code_sha()}
    (tmp_path / "kernels" / "lens.cpp").write_text("2")
    seen.add(code_sha())
    (tmp_path / "quantwatch/models/a.py").write_text("12")
    seen.add(code_sha())
    (tmp_path / "quantwatch/models/notes.md").write_text("no code")
    assert code_sha() in seen
    assert len(seen) == 3
