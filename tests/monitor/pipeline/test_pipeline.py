"""Where stages meet: one run, from a check to rows, on tiny real models and a real database."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.tiny_models import llama, save_word_model

import quantwatch
from quantwatch.capture import long_prompts, prefill
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import RunResult, RunStatus, Verdict
from quantwatch.errors import IncompatibleError, ModelError, PromptError, UserError
from quantwatch.pipeline import RunRequest, estimate, run_check
from quantwatch.store import baselines, blocks, runs, suites
from quantwatch.store.session import Database

WORDS = [f"w{i}" for i in range(96)]


class Quiet:
    """A progress that may interrupt, as Ctrl-C would, at the n-th report."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.left = stop_at
        self.reports = 0
        self.stages: list[str] = []

    def start(self, stage: str, total_tokens: int) -> None:
        self.stages.append(stage)

    def advance(self, tokens: int) -> None:
        self.reports += 1
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt


def tiny() -> Any:
    return llama(len(WORDS), num_hidden_layers=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A base folder with a model, a damaged copy of its tokenizer, and prompts."""
    save_word_model(tmp_path / "tiny", len(WORDS), num_hidden_layers=4)
    texts = [" ".join(WORDS[i * 7 : i * 7 + 5 + 3 * i]) for i in range(6)]
    (tmp_path / "prompts.json").write_text(json.dumps(texts))
    return tmp_path


def request_for(folder: Path, *candidates: dict[str, Any], **settings: Any) -> RunRequest:
    check = CheckConfig.model_validate(
        {
            "reference": {"model": "tiny"},
            "candidates": candidates or [{"name": "same", "model": "tiny"}],
            "suite": {"files": ["prompts.json"]},
            "threads": 1,
            **settings,
        }
    )
    return RunRequest("nightly", check, folder, folder / "cache")


FAULT = {"scope": "layers.2.mlp.down_proj", "scale": 1.05}
FAULTY = {"name": "faulty", "model": "tiny", "faults": [FAULT]}


def test_an_identical_candidate_is_exactly_equal(folder: Path) -> None:
    """Catches rounding anywhere on the path: equal models must give 0, not 1e-12."""
    run = run_check(request_for(folder), database=None, progress=Quiet())
    (same,) = run.candidates

    assert (run.verdict, same.verdict, same.bit_equal) == (Verdict.PASS, Verdict.PASS, True)
    best = {"logit_kl": 0.0, "rel_error": 0.0, "isolated_error": 0.0, "lens_kl": 0.0, "cosine": 1.0}
    seen = {m.metric for m in same.measurements}
    assert set(best) <= seen
    for m in same.measurements:
        if m.metric in best:
            assert (m.mean, m.min, m.max) == (best[m.metric],) * 3, m


def test_a_planted_fault_is_named_and_judged(folder: Path) -> None:
    """Catches a fault that is seen but not blamed, or blamed on a layer before it."""
    run = run_check(request_for(folder, FAULTY), database=None, progress=Quiet())
    (faulty,) = run.candidates

    assert run.verdict == Verdict.REGRESSION
    assert faulty.culprit is not None
    assert faulty.culprit.scope == "layers.2.mlp.down_proj"
    assert faulty.culprit.first_difference == "layers.2.mlp"
    assert {(a.rule, a.scope) for a in run.alerts} == {("isolated-error-outlier", "layers.2")}
    before = [m for m in faulty.measurements if m.metric == "rel_error" and m.scope < "layers.2"]
    assert before
    assert all(m.max == 0.0 for m in before if m.scope.startswith("layers"))
    mlp = faulty.find("rel_error", "layers.2.mlp")
    assert mlp is not None
    assert mlp.mean == pytest.approx(0.05, rel=1e-5)


def test_a_serving_choice_is_a_candidate(folder: Path) -> None:
    """Catches a KV cache that costs nothing because nobody runs through it, or the reference does.

    Prompts are padded in batches here: each query must find what it would alone.
    """
    caches = [
        {"name": name, "model": "tiny", "serve": {"kv_cache": name}}
        for name in ("int8", "int2-plain")
    ]
    run = run_check(request_for(folder, *caches), database=None, progress=Quiet())
    kl = [candidate.find("logit_kl", "model") for candidate in run.candidates]
    means = [m.mean for m in kl if m is not None and m.mean is not None]
    assert 0 < means[0] < 0.01 * means[1]
    alone = request_for(folder, *caches, batch_tokens=1)
    again = run_check(alone, database=None, progress=Quiet())
    for one, other in zip(run.candidates, again.candidates, strict=True):
        first, second = (c.find("logit_kl", "model") for c in (one, other))
        assert first is not None
        assert second is not None
        assert first.mean == pytest.approx(second.mean, rel=1e-3)


def test_the_store_gives_back_the_run(folder: Path, database: Database) -> None:
    """Catches anything lost or rounded between the pipeline and the database."""
    request = request_for(
        folder, FAULTY, {"name": "int8", "model": "tiny", "recipe": "int8-channel"}
    )
    run = run_check(request, database=database, progress=Quiet())

    assert runs.get_result(database, run.run_id) == run
    prompts = suites.get_prompts(database, run.suite_hash)
    assert [p.num_tokens for p in prompts] == [5, 8, 11, 14, 17, 20]
    block = blocks.get_block(database, run.run_id, "int8", "per_token", "rel_error", 3)
    assert block is not None
    assert block.values.shape == (len(block.scopes), 14)
    listed = blocks.list_blocks(database, run.run_id, "int8")
    kinds = {(info.kind, info.metric) for info in listed}
    assert {("per_prompt", "logit_kl"), ("per_token", "lens_kl"), ("topk", "logits")} <= kinds


def test_two_runs_of_one_check_measure_the_same(folder: Path) -> None:
    """Catches unseeded sampling: two nights must score the same tokens."""
    request = request_for(folder, FAULTY)
    first = run_check(request, database=None, progress=Quiet())
    second = run_check(request, database=None, progress=Quiet())
    assert first.candidates == second.candidates
    assert first.run_id < second.run_id


def test_a_candidate_that_cannot_load_does_not_stop_the_others(folder: Path) -> None:
    """Catches one bad path that costs a whole night."""
    missing = {"name": "gone", "model": "./nowhere"}
    run = run_check(request_for(folder, missing, FAULTY), database=None, progress=Quiet())
    gone, faulty = run.candidates
    assert gone.verdict is None
    assert gone.failure is not None
    assert "nowhere" in gone.failure
    assert faulty.verdict == Verdict.REGRESSION


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        pytest.param({"reference": {"model": "./nowhere"}}, ModelError, "nowhere", id="reference"),
        pytest.param(
            {"candidates": [{"name": "a", "model": "./gone"}]},
            ModelError,
            "gone",
            id="all-candidates",
        ),
        pytest.param({"suite": {"files": ["none.txt"]}}, PromptError, "none.txt", id="prompts"),
    ],
)
def test_what_the_user_named_wrong_ends_the_run(
    folder: Path, database: Database, changes: dict[str, Any], error: type[UserError], words: str
) -> None:
    """Catches a run left as running, or results of a run that had none."""
    with pytest.raises(error, match=words):
        run_check(request_for(folder, **changes), database=database, progress=Quiet())
    (summary,) = runs.list_runs(database)
    assert (summary.status, summary.verdict) == (RunStatus.FAILED, None)
    assert summary.reason is not None
    assert words in summary.reason


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
def test_an_interrupted_run_leaves_no_results(
    folder: Path, database: Database, share: float
) -> None:
    """Catches half-written results, and Ctrl-C that is reported as a failure."""
    whole = Quiet()
    run_check(request_for(folder), database=None, progress=whole)
    stop_at = round(share * (whole.reports - 1))
    with pytest.raises(KeyboardInterrupt):
        run_check(request_for(folder), database=database, progress=Quiet(stop_at))
    (summary,) = runs.list_runs(database)
    assert (summary.status, summary.verdict) == (RunStatus.CANCELLED, None)
    assert runs.get_result(database, summary.run_id).candidates == ()
    assert list((folder / "cache" / "spool").iterdir()) == []


def test_a_pinned_baseline_is_compared(folder: Path, database: Database) -> None:
    """Catches a baseline that is pinned and never read."""
    first = run_check(request_for(folder, FAULTY), database=database, progress=Quiet())
    baselines.pin(database, "nightly", first.run_id)
    worse = {**FAULTY, "faults": [{**FAULT, "scale": 1.5}]}
    run = run_check(request_for(folder, worse), database=database, progress=Quiet())
    assert run.baseline_run_id == first.run_id
    assert run.baseline_mismatch == ()
    assert any(
        d["name"] == "fault_sha" for d in run.candidates[0].baseline_differences if "name" in d
    )


def test_a_baseline_of_other_prompts_is_never_compared(folder: Path) -> None:
    """Catches other prompts reported as a regression (competitors.md, trap 7)."""
    request = request_for(folder)
    before = run_check(request, database=None, progress=Quiet())
    other = replace(
        request_for(folder, suite={"files": ["prompts.json"], "limit": 3}), baseline=before
    )
    run = run_check(other, database=None, progress=Quiet())
    assert run.verdict == Verdict.INCONCLUSIVE
    assert any("suite" in problem for problem in run.baseline_mismatch)


def test_a_reference_that_is_not_finite_blames_nobody(folder: Path) -> None:
    """Catches a clean candidate called a regression because the reference is broken."""
    broken = {"model": "tiny", "faults": [{"scope": "layers.1.mlp.up_proj", "nan_at": [0, 0]}]}
    request = request_for(folder, {"name": "clean", "model": "tiny"}, reference=broken)
    run = run_check(request, database=None, progress=Quiet())
    assert (run.verdict, run.alerts) == (Verdict.INCONCLUSIVE, ())
    culprit = run.candidates[0].culprit
    assert culprit is not None
    assert culprit.scope is None
    assert "The reference itself is not finite, first at layers.1.mlp" in culprit.words


def test_prompts_of_one_token_have_no_perplexity_to_judge(folder: Path) -> None:
    """Catches 'not measurable' taken for 'missing': there is no next token, nothing was lost."""
    (folder / "prompts.json").write_text('["w1", "w2"]')
    run = run_check(request_for(folder), database=None, progress=Quiet())
    assert run.verdict == Verdict.PASS


def test_text_can_stay_out_of_the_database(folder: Path, database: Database) -> None:
    """Catches private prompts kept against the owner's wish."""
    request = request_for(folder, store_text=False)
    run = run_check(request, database=database, progress=Quiet())
    prompts = suites.get_prompts(database, run.suite_hash)
    assert all(p.text is None and not p.pieces for p in prompts)


def test_the_estimate_counts_tokens_and_bytes(folder: Path) -> None:
    """Catches an estimate that needs the weights, or counts one model instead of all."""
    expected = estimate(request_for(folder, FAULTY, {"name": "same", "model": "tiny"}))
    weights = sum(p.numel() for p in tiny().parameters()) * 4
    assert expected.num_tokens == 75
    assert expected.memory_bytes is not None
    assert expected.memory_bytes - (400 << 20) == 3 * weights
    assert expected.seconds is not None
    assert expected.free_bytes > 0


def test_every_model_is_tried_in_chunks_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches five passes more per candidate: streamed, each of them reads all of its layers."""
    tried: list[str] = []
    real = prefill.prefill_effect

    def noted(model: Any, prompt: Any, *, is_reference: bool) -> float:
        tried.append(model.variant.name)
        return real(model, prompt, is_reference=is_reference)

    monkeypatch.setattr(long_prompts, "prefill_effect", noted)
    two = (FAULTY, {"name": "same", "model": "tiny"})
    run = run_check(request_for(folder, *two, prefill_chunk=4), database=None, progress=Quiet())
    names = ["reference", "faulty", "same"]
    assert sorted(tried) == sorted(names)
    assert run.capture["prefill_effect"].keys() == set(names)
    assert all(0 <= effect < 1e-3 for effect in run.capture["prefill_effect"].values())


def test_the_estimate_counts_the_caches_of_long_prompts(folder: Path) -> None:
    """Catches a run of 32,768 tokens that is started although only its weights fit."""
    plain, chunked = (
        estimate(
            request_for(
                folder,
                FAULTY,
                {"name": "b", "model": "tiny", "dtype": "bfloat16"},
                prefill_chunk=size,
            )
        )
        for size in (1000, 4)
    )
    settings = tiny().config
    longest = max(len(text.split()) for text in json.loads((folder / "prompts.json").read_text()))
    heads = settings.num_key_value_heads * settings.head_dim
    caches = 2 * heads * settings.num_hidden_layers * longest * (4 + 4 + 2)
    assert plain.memory_bytes is not None
    assert chunked.memory_bytes == plain.memory_bytes + caches + 5 * 4 * longest
    assert not chunked.more_caches
    assert plain.recorded_bytes is None


def test_a_corrupt_candidate_spoils_no_other(folder: Path) -> None:
    """Catches an estimate that reads all headers and ends the run for one broken candidate."""
    shutil.copytree(folder / "tiny", folder / "corrupt")
    weights = folder / "corrupt" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-500])
    broken = {"name": "broken", "model": "corrupt"}
    alone = estimate(request_for(folder))
    assert estimate(
        request_for(folder, {"name": "same", "model": "tiny"}, broken)
    ).memory_bytes == (alone.memory_bytes)
    with pytest.raises(ModelError, match="truncated or corrupt"):
        estimate(request_for(folder, broken))


class TestCompare:
    """The Python entry point."""

    def test_modules_in_memory(self) -> None:
        """Catches a comparison that needs files, a tokenizer, or a padded batch."""
        reference, candidate = tiny(), tiny()
        with torch.no_grad():
            candidate.model.layers[1].self_attn.o_proj.weight *= 1.1
        run = quantwatch.compare(reference, candidate, [[1, 2, 3, 4], [5, 6, 7]])
        assert isinstance(run, RunResult)
        culprit = run.candidates[0].culprit
        assert culprit is not None
        assert culprit.scope == "layers.1.attention.o_proj"
        assert run.num_tokens == 7

    @pytest.mark.parametrize(
        "ids", [[3, 1, 2], torch.tensor([3, 1, 2]), torch.tensor([[3, 1, 2]]), [torch.tensor([3, 1, 2])]],
        ids=["list", "1-d", "2-d", "list-of-tensors"],
    )  # fmt: skip
    def test_any_shape_of_token_ids(self, ids: Any) -> None:
        """Catches a prompt read as many prompts of one token."""
        run = quantwatch.compare(tiny(), tiny(), ids)
        assert (run.num_prompts, run.num_tokens) == (1, 3)

    @pytest.mark.parametrize(
        ("ids", "words"),
        [
            pytest.param([], "no token ids|no tokens|empty", id="none"),
            pytest.param([[1, 96]], "96", id="id-out-of-range"),
            pytest.param([list(range(65))], "64", id="beyond-the-context"),
        ],
    )
    def test_bad_token_ids(self, ids: Any, words: str) -> None:
        """Catches an index error from inside torch."""
        with pytest.raises(PromptError, match=words):
            quantwatch.compare(tiny(), tiny(), ids)

    def test_another_architecture(self) -> None:
        """Catches a shape error from inside torch."""
        other = llama(len(WORDS), num_hidden_layers=3, num_key_value_heads=4)
        with pytest.raises(IncompatibleError, match="layers"):
            quantwatch.compare(tiny(), other, [[1, 2, 3]])
