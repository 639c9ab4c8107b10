"""A trained mixture of experts, checked end to end: what is stored is what float64 says by hand."""

import copy
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tests.monitor.moe_models import gates, routed, save_bytes
from torch import Tensor
from transformers import AutoModelForCausalLM

from quantwatch.config.schema import CheckConfig
from quantwatch.domain import RunResult, Scope, Verdict
from quantwatch.kernel_lab.tiny_moe import Family, train_tiny_moe
from quantwatch.pipeline import RunRequest, run_check
from quantwatch.prompts.shipped import shipped_suite
from quantwatch.report import document, html, markdown
from quantwatch.store import blocks, runs
from quantwatch.store.session import Database
from quantwatch_kernels.quantize.affine import quantize_weight
from quantwatch_kernels.quantize.recipe import Recipe

pytestmark = pytest.mark.slow

TEXTS = [prompt.text for prompt in shipped_suite("core-v1") if prompt.text]
PROMPTS = [text[:90] for text in TEXTS[::5][:8]]
BEST = {
    **{"router_overlap": 1.0, "router_weight_l1": 0.0, "router_flips": 0.0},
    "router_load_tv": 0.0,
}
RULES = [
    {"name": "routers", "metric": "router_overlap", "scope": "layers.*", "threshold": 0.9},
    {"name": "loads", "metric": "router_load_tv", "scope": "layers.1", "threshold": 0.2},
]


class Quiet:
    def start(self, stage: str, total_tokens: int) -> None: ...

    def advance(self, tokens: int) -> None: ...


@pytest.fixture(scope="module", params=get_args(Family))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model, and one whose second router has its rows in another order."""
    folder = tmp_path_factory.mktemp(request.param)
    model: Any = train_tiny_moe(TEXTS, steps=60, family=request.param).model
    save_bytes(model, folder / "moe")
    turned = copy.deepcopy(model)
    weight = gates(turned)["layers.1"].weight
    weight.data = weight.data[[1, 2, 0, 4, 5, 3]]
    save_bytes(turned, folder / "turned")
    (folder / "prompts.json").write_text(json.dumps(PROMPTS))
    return folder


def check(folder: Path, database: Database | None = None) -> RunResult:
    config = {
        "reference": {"model": "moe"},
        "candidates": [
            {"name": "same", "model": "moe"},
            {"name": "int4", "model": "moe", "serve": {"experts": "int4"}},
            {"name": "turned", "model": "turned"},
        ],
        "suite": {"files": ["prompts.json"]},
        "rules": RULES,
        "threads": 1,
    }
    request = RunRequest("moe", CheckConfig.model_validate(config), folder, folder / "cache")
    return run_check(request, database=database, progress=Quiet())


@pytest.fixture(scope="module")
def run(folder: Path) -> RunResult:
    return check(folder)


def plain(folder: Path, name: str, *, int4: bool = False) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder / name).eval().requires_grad_(False)
    spec = Recipe.named("uint4-g32").weights
    for layer in model.model.layers if int4 else ():
        for stack in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            for expert in stack:
                expert.copy_(quantize_weight(expert, spec).values)
    return model


def expected(theirs: list[Tensor], ours: list[Tensor]) -> dict[str, float]:
    """The means of one layer over all tokens, and the loads over all of them together."""
    w, v = torch.cat(theirs), torch.cat(ours)
    shared = ((w > 0) & (v > 0)).sum(-1) / (w > 0).sum(-1)
    a, b = ((each > 0).sum(0) / (each > 0).sum() for each in (w, v))
    return {
        "router_overlap": float(shared.double().mean()),
        "router_weight_l1": float((w - v).abs().sum(-1).mean()),
        "router_flips": float((shared < 1).double().mean()),
        "router_load_tv": float((a - b).abs().sum() / 2),
        "router_load_max": float(b.max() * len(b)),
    }


def test_stored_values_are_right(folder: Path, db: Database) -> None:
    """Values of int4 experts and of the turned router; the same model is exactly the same.

    As the store gives them back, on SQLite and on PostgreSQL.
    """
    run = check(folder, db)
    assert runs.get_result(db, run.run_id) == run
    sequences = [list(text.encode()) for text in PROMPTS]
    assert run.num_tokens == sum(map(len, sequences))
    reference = routed(plain(folder, "moe"), sequences)
    others = {
        "int4": routed(plain(folder, "moe", int4=True), sequences),
        "turned": routed(plain(folder, "turned"), sequences),
    }
    for name, ours in others.items():
        candidate = run.find(name)
        assert candidate is not None
        for scope, theirs in reference.items():
            for metric, value in expected(theirs, ours[scope]).items():
                row = candidate.find(metric, scope)
                assert row is not None
                assert row.mean == pytest.approx(value, abs=2e-6), (name, metric, scope)
    same = run.find("same")
    assert same is not None
    for scope in reference:
        for metric, best in BEST.items():
            row = same.find(metric, scope)
            assert row is not None
            assert (row.mean, row.min, row.max, row.num_nonfinite) == (best, best, best, 0)
    block = blocks.get_block(db, run.run_id, "int4", "per_token", "router_weight_l1", 0)
    assert block is not None
    assert block.scopes == tuple(reference)
    assert block.values.shape == (2, len(sequences[0]))


def test_a_turned_router_is_located_and_judged(run: RunResult) -> None:
    """Catches a fault that is blamed on another layer, and rules that routers can't breach."""
    turned, int4 = run.find("turned"), run.find("int4")
    assert turned is not None
    assert int4 is not None
    before, there = (turned.find("router_overlap", f"layers.{n}") for n in (0, 1))
    assert before is not None
    assert there is not None
    assert (before.mean, before.min) == (1.0, 1.0)
    assert there.mean is not None
    assert there.mean < 0.8
    assert turned.culprit is not None
    assert turned.culprit.scope == "layers.1.mlp.gate"
    fired = {(a.rule, a.candidate, a.scope) for a in run.alerts if a.rule in ("routers", "loads")}
    assert ("routers", "turned", "layers.1") in fired
    assert not [each for each in fired if each[1] == "same" or each[2] == "layers.0"]
    assert turned.verdict == Verdict.REGRESSION
    assert int4.variant is not None
    assert turned.variant is not None
    assert turned.variant.size_bytes is not None
    assert int4.variant.size_bytes is not None
    assert 0.3 * turned.variant.size_bytes < int4.variant.size_bytes < turned.variant.size_bytes
    assert any(note.startswith("experts int4: ") for note in int4.variant.notes)


def test_the_reports_show_them(run: RunResult) -> None:
    """Catches figures that are stored and never seen."""
    turned = next(c for c in document.document(run)["candidates"] if c["name"] == "turned")
    router = turned["layers"][1]["router"]
    row = run.candidates[2].find("router_flips", "layers.1")
    assert row is not None
    assert router["flips"] == row.mean
    assert set(router) == {"overlap", "weight_l1", "flips", "load_tv", "load_max"}
    assert "| router overlap | flips |" in markdown.render(run)
    assert "<th>router_load_tv</th>" in html.render(run)
    assert run.capture["routers"][Scope("layers.0")]["int4"] == "model.layers.0.mlp.gate"
    assert not run.capture["unrouted"]
