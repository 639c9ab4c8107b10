"""Reads of a real SQLite database that the store's own functions wrote."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.dashboard.invented import NUM_TOKENS, UNSEEN, Spec

from quantwatch.domain import RunResult, RunStatus
from quantwatch.errors import StoreError, UserError
from quantwatch_dashboard.queries import connection, overview, runs, tokens


def test_empty_database_has_no_checks(empty_url: str) -> None:
    """Catches an error where there is simply nothing yet."""
    assert overview.checks(empty_url) == ()
    assert runs.recent_runs(empty_url) == ()


def test_checks_are_worst_first_with_trouble(demo_url: str) -> None:
    """Catches a lost failed run, and a trend that is not aligned with the runs."""
    brief = overview.checks(demo_url)
    demo, chat = overview.with_trends(demo_url, brief)

    assert [len(one.trends[0].values) for one in brief] == [1, 1], "of rows that are not shown"
    assert (demo.check, demo.decided.verdict if demo.decided else None) == ("demo", "regression")
    assert demo.candidates == ("bf16", "int8", "int4-g64", "int8-fault")
    assert len(demo.trends[3].values) == 7
    assert demo.trends[3].values[-1] > 10 * demo.trends[3].values[-2]  # type: ignore[operator]
    assert chat.trouble is not None
    assert chat.trouble.status == RunStatus.FAILED
    assert chat.trends[0].values[-1] is None


def test_grid_has_the_suite_s_tokens(save_run: Callable[[Spec], RunResult], empty_url: str) -> None:
    """Catches columns that are shifted against the token text."""
    run = save_run(Spec(num_prompts=2))
    grid = tokens.grid(empty_url, (run.run_id, "int8-fault", "rel_error", 1), run.suite_hash)
    stored = tokens.prompts(empty_url, run.suite_hash)[1]

    assert grid is not None
    assert [place.piece for place in grid.places] == list(stored.pieces or ())
    assert [place.position for place in grid.places] == list(range(64))
    assert not grid.missing.any()
    row = run.candidates[3].find("rel_error", "layers.14")
    assert row is not None
    assert row.max == pytest.approx(
        max(
            float(g.values[list(g.scopes).index("layers.14")].max())
            for p in (0, 1)
            if (
                g := tokens.grid(
                    empty_url, (run.run_id, "int8-fault", "rel_error", p), run.suite_hash
                )
            )
        ),
        rel=6e-3,
    )


def test_sampled_metric_keeps_what_was_not_measured(
    save_run: Callable[[Spec], RunResult], empty_url: str
) -> None:
    """Catches unmeasured cells that come back as 0."""
    run = save_run(Spec(num_prompts=3))
    one = tokens.grid(empty_url, (run.run_id, "int8", "lens_kl", 0), run.suite_hash)
    every = tokens.measured_tokens(empty_url, run.run_id, "int8", "lens_kl", run.suite_hash)

    assert one is not None
    assert one.num_measured == 30 * 8
    assert one.measured_only().values.min() > 0
    assert every is not None
    assert every.values.shape == (30, 3 * 8)
    assert {place.prompt for place in every.places} == {0, 1, 2}


def test_worst_tokens_are_the_largest(
    save_run: Callable[[Spec], RunResult], empty_url: str
) -> None:
    """Catches a search that stops at the first prompts."""
    run = save_run(Spec(num_prompts=6))
    found = tokens.worst_tokens(empty_url, run.run_id, "int8-fault", run.suite_hash, 3)
    grids = [
        tokens.grid(empty_url, (run.run_id, "int8-fault", "logit_kl", p), run.suite_hash)
        for p in range(6)
    ]
    values = np.sort(np.concatenate([g.values[0] for g in grids if g is not None]))[::-1]

    assert [token.value for token in found] == pytest.approx(list(values[:3]))


def test_top_logits_and_token_texts(save_run: Callable[[Spec], RunResult], empty_url: str) -> None:
    """Catches ids that lose precision in the blob, and texts of the suite's own tokens alone."""
    run = save_run(Spec(num_prompts=1))
    found = tokens.top_logits(empty_url, run.run_id, "int8", 0, run.suite_hash)
    texts = tokens.token_texts(empty_url, run)
    stored = tokens.prompts(empty_url, run.suite_hash)[0]

    assert found is not None
    assert found[0] == 0
    assert found[1].shape == (5, 64, 10)
    assert {int(i) for i in found[1][0].ravel()} - set(range(len(texts))) == {NUM_TOKENS}
    assert [texts[i] for i in stored.token_ids] == list(stored.pieces or ())
    assert texts[UNSEEN] == f"word{UNSEEN}"


def test_text_that_must_not_be_kept_is_not_named(
    save_run: Callable[[Spec], RunResult], empty_url: str
) -> None:
    """Catches first choices in words, by the vocabulary of another check with that tokenizer."""
    save_run(Spec())
    secret = save_run(Spec(check="secret", run_id="01JS", num_tokens=32, store_text=False))
    key = (secret.run_id, "int8", "logit_kl", 0)
    grid = tokens.grid(empty_url, key, secret.suite_hash)

    assert tokens.token_texts(empty_url, secret) == ()
    assert grid is not None
    assert grid.places[3].label() == f"id {grid.places[3].token_id}"


@pytest.mark.parametrize("status", [RunStatus.CANCELLED, RunStatus.FAILED], ids=str)
def test_check_that_never_succeeded_is_listed(
    end_run: Callable[..., None], empty_url: str, status: RunStatus
) -> None:
    """Catches a check that nobody sees, since all its runs so far were cancelled."""
    end_run(Spec(check="interrupted"), status, "Ctrl-C")
    (found,) = overview.checks(empty_url)

    assert (found.check, found.decided) == ("interrupted", None)
    assert found.trouble is not None
    assert found.trouble.reason == "Ctrl-C"


def test_unknown_run_is_a_user_error(empty_url: str) -> None:
    """Catches a traceback for a mistyped address."""
    with pytest.raises(UserError, match="nothing-like-this"):
        runs.resolve(empty_url, "nothing-like-this")


def test_missing_database_names_itself(tmp_path: Any) -> None:
    """Catches a database file that is created by looking at it."""
    with pytest.raises(StoreError, match=r"gone\.db"):
        overview.checks(f"sqlite:///{tmp_path}/gone.db")

    assert not (tmp_path / "gone.db").exists()


def test_output_row_does_not_blow_up_sampled_tokens(
    save_run: Callable[[Spec], RunResult], empty_url: str
) -> None:
    """Catches the output's own row, measured everywhere, that keeps every unmeasured token."""
    run = save_run(Spec(num_prompts=2))
    metric = "topk_logit_deviation_k5"
    every = tokens.measured_tokens(empty_url, run.run_id, "int8", metric, run.suite_hash)

    assert every is not None
    assert every.values.shape == (30, 2 * 8)
    assert not every.missing.any()


@pytest.mark.parametrize("url", ["postgresql://user:hunter2@127.0.0.1:1/db", "nonsense-hunter2"])
def test_password_is_never_shown(url: str) -> None:
    """Catches a password on the page, in the state card or in the error."""
    assert "hunter2" not in connection.shown_url(url)
    with pytest.raises((StoreError, UserError)) as caught:
        overview.checks(url)

    assert "hunter2" not in str(caught.value)
