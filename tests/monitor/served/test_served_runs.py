"""A served candidate from quantwatch.toml to a page: the figures are those of the local pass."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streamlit as st
from tests.dashboard.pages import html as markup
from tests.dashboard.pages import open_page
from tests.monitor.served.front_end import Document, FrontEnd, Reply

from quantwatch.capture.outputs import Head
from quantwatch.config.load import load_config
from quantwatch.domain import CandidateResult, RunResult, RunStatus, Verdict
from quantwatch.errors import ModelError, UserError
from quantwatch.pipeline import RunRequest, estimate, run_check
from quantwatch.pipeline.measure import measure_check
from quantwatch.pipeline.reasons import reason_of
from quantwatch.pipeline.reloading import choose_candidate, reload
from quantwatch.report import document, html, junit, markdown, table
from quantwatch.store import baselines, blocks, runs
from quantwatch.store.session import Database, open_database
from quantwatch_dashboard import text as shown

LOCAL = {"name": "local", "model": "tiny", "recipe": "int8-channel"}
EXACT = ("nll_reference", "nll_candidate", "nll_difference", "delta_p")
APIS = ("vllm", "sglang", "llamacpp", "openai")
Request = Callable[..., RunRequest]


class Quiet:
    def start(self, stage: str, total_tokens: int) -> None:
        pass

    def advance(self, tokens: int) -> None:
        pass


def run(request: RunRequest, database: Database | None = None) -> RunResult:
    return run_check(request, database=database, progress=Quiet())


def candidate(result: RunResult, name: str = "served") -> CandidateResult:
    found = result.find(name)
    assert found is not None
    return found


def fail_after(count: int, change: Callable[[FrontEnd, Document], Any]) -> Any:
    """Let the first prompts pass, then do something to every answer."""
    seen = [0]

    def fault(front_end: FrontEnd, path: str, document: Document) -> Any:
        if path not in ("/v1/completions", "/generate", "/completion"):
            return document
        seen[0] += 1
        return document if seen[0] <= count else change(front_end, document)

    return fault


@pytest.mark.parametrize("api", APIS)
def test_served_figures_are_those_of_the_local_pass(api: str, request_of: Request) -> None:
    """Catches any offset, filter or definition between what is told and what is computed here."""
    with measure_check(request_of(LOCAL, api=api), Quiet()) as measured:
        rows = {
            name: {m.metric: m for m in measured.sink.measurements(name)}
            for name in ("served", "local")
        }
        served, local = rows["served"], rows["local"]
        last = len(measured.suite.prompts)
        assert served["served_kl"].n == local["logit_kl"].n - last > 100
        assert 0 < served["served_kl"].mean < local["logit_kl"].mean  # type: ignore[operator]
        for name in ("top1_agreement", "topk_overlap_k5"):
            block = measured.sink.per_prompt("local", name)
            assert block is not None
            # The local pass scores the last token, too.
            gap = abs(served[name].mean - local[name].mean)  # type: ignore[operator]
            assert gap <= last / served[name].n
        if api == "llamacpp":
            assert served["nll_difference"].n_missing > 0
            return
        for name in EXACT:
            assert served[name].n == local[name].n
            assert served[name].mean == pytest.approx(local[name].mean, abs=2e-6)
            assert served[name].se == pytest.approx(local[name].se, abs=2e-6)
            ours = measured.sink.per_prompt("served", name)
            theirs = measured.sink.per_prompt("local", name)
            assert ours is not None
            assert theirs is not None
            np.testing.assert_allclose(ours.values, theirs.values, atol=2e-4, rtol=1e-5)


def test_told_the_whole_vocabulary_the_bound_is_the_kl(request_of: Request) -> None:
    with measure_check(request_of(LOCAL, top_k=96), Quiet()) as measured:
        found = {p: measured.sink.per_prompt(p, m) for p, m in (("served", "served_kl"),)}
        bound = found["served"]
        tokens = {
            block.prompt: block.values[0, :-1]
            for block in measured.sink.blocks("local")
            if block.kind == "per_token" and block.metric == "logit_kl"
        }
        assert bound is not None
        whole = [tokens[n].sum() for n in range(len(bound.values))]
        np.testing.assert_allclose(bound.values[:, 0, 1], whole, rtol=2e-2, atol=2e-7)


# -- from the file to the page -------------------------------------------------------------------

TOML = """
schema_version = 1

[checks.nightly]
suite = {{ files = ["prompts.json"] }}
reference = {{ model = "tiny" }}

[[checks.nightly.candidates]]
name = "served"
served = {{ url = "{url}", api = "vllm", top_k = 10, token_env = "TINY_KEY" }}
rules = [{{ name = "kl", metric = "served_kl", threshold = 0.05 }}]

[[checks.nightly.candidates]]
name = "local"
model = "tiny"
recipe = "int8-channel"
"""


@dataclass(frozen=True)
class Kept:
    """A stored run, and what its server was asked."""

    result: RunResult
    database: Database
    url: str
    requests: list[Any]


@pytest.fixture(scope="module")
def night(
    folder: Path, int8: Any, migrated_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kept]:
    """A run of a file with every setting as it is by default."""
    server = FrontEnd(int8)
    (folder / "quantwatch.toml").write_text(TOML.format(url=server.url))
    config = load_config(folder / "quantwatch.toml")
    request = RunRequest("nightly", config.checks["nightly"], folder, folder / "cache")
    path = shutil.copy(migrated_file, tmp_path_factory.mktemp("stored") / "quantwatch.db")
    database = open_database(f"sqlite:///{path}", wait_s=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_KEY", "sk-tiny-0123456789")
        result = run(request, database)
    yield Kept(result, database, f"sqlite:///{path}", server.requests)
    database.close()
    server.close()


@pytest.fixture
def stored(night: Kept, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """The same, where the pages look for it."""
    monkeypatch.setenv("QUANTWATCH_DATABASE_URL", night.url)
    yield night
    st.cache_resource.clear()


def test_a_file_becomes_a_stored_run_a_report_and_a_page(stored: Kept) -> None:
    """Catches a stage that can't do with what a server doesn't tell."""
    result, database = stored.result, stored.database
    kept = runs.get_result(database, result.run_id)
    served = candidate(kept)
    assert replace(kept, outcomes=()) == replace(result, outcomes=())
    assert served.verdict == Verdict.PASS
    assert served.culprit is not None
    assert served.culprit.words == "Layers: not measurable: served."
    row = served.find("served_kl")
    assert row is not None
    assert row.mean is not None
    figure = f"{row.mean:.3g}"

    plain = document.document(kept)["candidates"][0]
    assert plain["served_kl"]["mean"] == row.mean
    assert plain["logit_kl"]["mean_kind"] == "missing"
    assert (plain["num_missing"], plain["bits_per_weight_kind"]) == (0, "missing")
    for text in (markdown.render(kept), html.render(kept)):
        assert f"≥ {figure}" in text
        assert "not measurable: served" in text
    assert f"served_kl.mean = {row.mean:.4g}" in junit.render(kept)
    table.renderable(kept)

    page = markup(open_page("run", run=result.run_id, candidate="served"))
    assert row.se is not None
    assert f"≥ {shown.plus_minus(row.mean, row.se)}" in page
    assert "served" in page
    everything = json.dumps(document.document(kept)) + page + json.dumps(kept.capture)
    assert "sk-tiny-0123456789" not in everything + json.dumps(kept.config)
    assert {h.get("authorization") for _, _, h in stored.requests} == {"Bearer sk-tiny-0123456789"}


@pytest.mark.parametrize("name", ["check", "compare", "overview"])
def test_other_pages_do_with_it(name: str, stored: Kept) -> None:
    result = stored.result
    query = {
        "check": {"check": "nightly"},
        "compare": {"run_a": result.run_id, "run_b": result.run_id, "candidate_b": "served"},
        "overview": {},
    }[name]
    assert "served" in markup(open_page(name, **query)) or name == "overview"


def test_the_inside_of_a_served_candidate_is_a_state(stored: Kept) -> None:
    """Catches an empty heatmap, and "dropped by retention" where nothing ever was."""
    page = open_page("run", run=stored.result.run_id, candidate="served")
    said = markup(page) + " ".join(one.value for one in (*page.markdown, *page.caption, *page.info))
    assert "not measurable: it is served" in said


def test_every_tap_is_not_measurable_and_blocks_are_kept(stored: Kept) -> None:
    result, database = stored.result, stored.database
    missing = result.capture["missing"]
    for scope in ("embedding", "layers.0", "layers.1.mlp.down_proj", "final_norm", "head"):
        assert missing[scope]["served"] == "not measurable: served"
    block = blocks.get_block(database, result.run_id, "served", "per_prompt", "served_kl")
    assert block is not None
    assert block.values.shape == (12, 1, 4)
    facts = result.capture["served"]["served"]
    assert (facts["read"], facts["missing"], facts["repeat_difference"]) == (126, {}, 0.0)


def test_attributing_a_served_candidate_is_refused(stored: Kept, folder: Path) -> None:
    result = stored.result
    chosen = choose_candidate(result, "served")
    with pytest.raises(UserError, match="measured served as a server: it has no layers to swap"):
        reload(result, chosen, folder, folder / "cache")


# -- candidates that fail, positions that are missing --------------------------------------------


def test_a_server_that_is_gone_fails_alone(request_of: Request, server: FrontEnd) -> None:
    server.fault = lambda *_: Reply(503)
    result = run(request_of(LOCAL, attempts=1))
    served = candidate(result)
    assert served.failure == "127.0.0.1 can't be reached: HTTP 503"
    assert served.verdict is None
    assert candidate(result, "local").verdict == Verdict.PASS
    assert result.status == RunStatus.SUCCEEDED


def test_a_server_alone_that_is_gone_fails_the_run(request_of: Request, server: FrontEnd) -> None:
    server.fault = lambda *_: Reply(503)
    with pytest.raises(ModelError, match="can't be reached") as caught:
        run(request_of(attempts=1))
    assert reason_of(caught.value) == ("download_failed", True)


def test_a_server_that_dies_on_the_way_fails_alone(request_of: Request, server: FrontEnd) -> None:
    """Catches half a candidate that is judged by its first prompts."""
    server.fault = fail_after(4, lambda *_: Reply(500))
    with measure_check(request_of(LOCAL, attempts=1), Quiet()) as measured:
        assert "no answer to 3 prompts in a row: HTTP 500" in measured.report.failed["served"]
        assert {block.candidate for block in measured.blocks()} == {"local"}
    server.fault = fail_after(4, lambda *_: Reply(500))
    served = candidate(run(request_of(LOCAL, attempts=1)))
    assert served.measurements == ()
    server.fault = fail_after(4, lambda *_: Reply(500))
    with pytest.raises(ModelError, match=r"served: 127\.0\.0\.1 gave no answer") as caught:
        run(request_of(attempts=1))
    assert reason_of(caught.value) == ("download_failed", True)


def test_a_server_restarted_with_another_model_fails(request_of: Request, server: FrontEnd) -> None:
    """Catches figures of two models under one name: at the end it isn't who it was."""

    def restart(front_end: FrontEnd, document: Document) -> Document:
        front_end.version = "0.12.0"
        return document

    server.fault = fail_after(6, restart)
    served = candidate(run(request_of(LOCAL)))
    assert served.failure is not None
    assert "the server changed while it was measured: its version" in served.failure


def _holes(*at: int) -> Callable[[FrontEnd, Document], Document]:
    def change(_: FrontEnd, document: Document) -> Document:
        rows = document["choices"][0]["prompt_logprobs"]
        for place in at:
            rows[place] = None
        return document

    return change


def test_missing_positions_are_counted_and_keep_rules_from_passing(
    request_of: Request, server: FrontEnd
) -> None:
    """Catches a mean over what happened to be answered that passes as if it were everything."""
    server.fault = fail_after(2, _holes(3))
    served = candidate(
        run(request_of(rules=[{"name": "kl", "metric": "served_kl", "threshold": 1}]))
    )
    rows = {m.metric: m for m in served.measurements}
    for name in ("served_kl", "nll_difference", "top1_agreement"):
        assert (rows[name].n, rows[name].n_missing) == (116, 10)
        assert rows[name].method == "all positions"
    assert served.verdict == Verdict.INCONCLUSIVE
    assert served.variant is not None
    assert any("10 of 126 positions are missing: 10 × null" in w for w in served.variant.warnings)


def test_one_missing_position_in_a_hundred_is_tolerated(
    request_of: Request, server: FrontEnd
) -> None:
    server.fault = fail_after(11, _holes(3))
    served = candidate(run(request_of()))
    row = served.find("served_kl")
    assert row is not None
    assert (row.n, row.n_missing) == (125, 1)
    assert served.verdict == Verdict.PASS


def test_a_breach_stays_a_breach_however_much_is_missing(
    request_of: Request, server: FrontEnd
) -> None:
    server.fault = fail_after(2, _holes(3))
    rules = [{"name": "kl", "metric": "served_kl", "threshold": 1e-9}]
    assert candidate(run(request_of(rules=rules))).verdict == Verdict.REGRESSION


def test_a_prompt_without_an_answer_is_missing_whole(request_of: Request, server: FrontEnd) -> None:
    """Its place in the blocks stays: the paired tests of another night need it."""
    bad = [5, 6]
    calls = [0]

    def fault(_: FrontEnd, path: str, document: Document) -> Any:
        if path == "/v1/completions":
            calls[0] += 1
            if calls[0] in bad:
                return Reply(500)
        return document

    server.fault = fault
    with measure_check(request_of(attempts=1), Quiet()) as measured:
        row = next(m for m in measured.sink.measurements("served") if m.metric == "served_kl")
        block = measured.sink.per_prompt("served", "served_kl")
    assert block is not None
    empty = [n for n in range(12) if block.values[n, 0, 0] == 0]
    assert len(empty) == 2
    assert row.n_missing == sum(5 + n for n in empty)
    assert row.n + row.n_missing == 126


def test_a_server_of_which_nothing_can_be_read_fails(request_of: Request, server: FrontEnd) -> None:
    """Catches a green candidate without a number: OpenAI gives 5 where 10 were asked for."""

    def few(_: FrontEnd, document: Document) -> Document:
        rows = document["choices"][0]["prompt_logprobs"]
        document["choices"][0]["prompt_logprobs"] = [
            None, *(dict(list(row.items())[:5]) for row in rows[1:])
        ]  # fmt: skip
        return document

    server.fault = fail_after(0, few)
    served = candidate(run(request_of(LOCAL)))
    assert served.failure == "no position could be read: 5 of 10 log-probabilities"


def test_a_forbidden_token_never_passes(request_of: Request, server: FrontEnd) -> None:
    """Catches −9999, which stands for −∞, as a finite NLL; and where it was must be told."""

    def forbid(_: FrontEnd, document: Document) -> Document:
        rows = document["choices"][0]["prompt_logprobs"]
        ids = document["choices"][0]["prompt_token_ids"]
        rows[4][str(ids[4])]["logprob"] = -9999.0
        return document

    server.fault = fail_after(11, forbid)
    served = candidate(run(request_of()))
    assert served.verdict == Verdict.REGRESSION
    assert served.first_nonfinite is not None
    assert served.first_nonfinite.position == 3
    assert served.culprit is not None
    assert "First non-finite value: head, prompt" in served.culprit.words


def test_llamacpp_leaves_unlikely_targets_out_and_judges_no_perplexity(request_of: Request) -> None:
    """Catches a perplexity of the likely tokens alone that passes a rule."""
    result = run(request_of(api="llamacpp"))
    served = candidate(result)
    row = served.find("nll_difference")
    assert row is not None
    assert row.n_missing > 50
    assert served.variant is not None
    assert any("are beyond its 10 likeliest" in words for words in served.variant.warnings)
    assert "perplexity-ratio" not in {one.rule for one in result.outcomes}
    assert served.verdict == Verdict.PASS


def test_a_second_night_is_compared_with_the_first(
    request_of: Request, server: FrontEnd, int8: Any, sqlite_db: Database
) -> None:
    """Catches paired tests that don't know what a served candidate is measured by."""
    request = request_of(lens_positions=0)
    first = run(request, sqlite_db)
    baselines.pin(sqlite_db, "served", first.run_id)

    def shifted(ids: Any) -> Any:
        logits = int8(ids).logits
        return logits * 1.25

    server.model = shifted
    second = run(request, sqlite_db)
    served = candidate(second)
    assert served.verdict == Verdict.REGRESSION
    fired = {(alert.rule, alert.metric) for alert in second.alerts}
    assert ("baseline-served-kl", "served_kl") in fired
    changed = {row["metric"] for row in served.baseline_differences if "metric" in row}
    assert {"served_kl", "nll_difference"} <= changed


def test_a_broken_reference_says_nothing_about_a_server(request_of: Request) -> None:
    """Catches a NaN of ours that is taken for the server's."""
    fault = {"scope": "layers.1.mlp.down_proj", "nan_at": [0, 0]}
    served = candidate(run(request_of(reference={"faults": [fault]})))
    assert served.verdict == Verdict.INCONCLUSIVE
    assert served.first_nonfinite is None
    assert served.culprit is not None
    assert "The reference itself is not finite" in served.culprit.words


def test_a_streamed_reference_gives_the_same_figures(request_of: Request) -> None:
    rows = [
        candidate(run(request_of(memory=memory))).measurements
        for memory in ("resident", "streamed")
    ]
    assert rows[0] == rows[1]


def test_the_reference_is_read_off_once_for_all_servers(
    request_of: Request, server: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches the dearest product done once per server, and numbers that depend on the others."""
    read: list[int] = []
    real = Head.logits

    def counted(self: Head, rows: Any, *, into: str) -> Any:
        read.append(len(rows))
        return real(self, rows, into=into)

    monkeypatch.setattr(Head, "logits", counted)
    monkeypatch.setattr("quantwatch.capture.served.chunk_rows", lambda *_: 3)
    server.fault = fail_after(0, _holes(3))
    alone = request_of()
    (one,) = alone.check.candidates
    served = one.served
    assert served is not None
    other = one.model_copy(
        update={"name": "b", "served": served.model_copy(update={"top_k": 7}), "dtype": "bfloat16"}
    )
    both = replace(alone, check=alone.check.model_copy(update={"candidates": (other, one)}))
    first, rows = run(alone), list(read)
    read.clear()
    second = run(both)
    assert read == rows
    assert candidate(second).measurements == candidate(first).measurements
    assert candidate(second, "b").measurements != candidate(first).measurements
    missing = candidate(first).find("served_kl")
    assert missing is not None
    assert missing.n_missing > 0


def test_another_k_is_not_compared(request_of: Request, sqlite_db: Database) -> None:
    """Catches a regression that is nothing but a tighter bound."""
    first = run(request_of(LOCAL), sqlite_db)
    baselines.pin(sqlite_db, "served", first.run_id)
    second = run(request_of(LOCAL, top_k=40), sqlite_db)
    assert any(why.startswith("top_k of ") for why in second.baseline_mismatch)
    assert second.capture_sha == first.capture_sha  # a server more or less changes no reference
    assert candidate(second).verdict == Verdict.INCONCLUSIVE


def test_an_estimate_leaves_the_server_out(request_of: Request) -> None:
    found = estimate(request_of(LOCAL))
    assert found.memory_bytes is not None
