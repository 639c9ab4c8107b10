"""QAT against PTQ on a tiny model: rows that are what they say, and a student that is put back."""

import copy
import math
from pathlib import Path

import pytest
import torch
from tests.monitor.kernel_lab.references import tied_llama, token_ids
from torch import nn

from quantwatch.kernel_lab.measure import Yardstick
from quantwatch.kernel_lab.qat_bench import QatBench
from quantwatch.kernel_lab.tables import qat_ptq
from quantwatch.kernel_lab.tables.model import TableRequest, to_json
from quantwatch.kernel_lab.texts import Text
from quantwatch_kernels.quantize.qat import QatOptions, QatStep
from quantwatch_kernels.quantize.recipe import Recipe

NEAREST = Recipe.named("uint3-g16")


def tiny() -> nn.Module:
    model: nn.Module = tied_llama(scale=5.0, num_hidden_layers=3)
    return model.requires_grad_(True)


@pytest.fixture
def bench() -> QatBench:
    measured = Yardstick(tiny(), Text("t", tuple(token_ids(3, 24, 1))), scopes={})
    return QatBench(measured, token_ids(4, 16, 2), 2)


def test_a_student_run_from_a_block_is_the_whole_student(bench: QatBench) -> None:
    """Catches cached states of another window, and figures that the whole model doesn't have."""
    for start in bench.quantize(NEAREST):
        start.layer.weight.copy_(start.quantized.values)
    found = bench.measure()
    whole = bench.measured.measure(bench.student)
    assert found.kl > 0
    for name in ("kl", "kl_se", "kl_max", "same_top1", "ppl", "accuracy", "num_tokens"):
        assert getattr(found, name) == getattr(whole, name), name


def test_only_the_last_blocks_change_and_only_for_a_while(bench: QatBench) -> None:
    """Catches a second method that starts from what the first one left."""
    before = copy.deepcopy(bench.student.state_dict())
    starts = bench.quantize(NEAREST.with_weights(method="gptq"))
    assert {start.layer.path.split(".")[2] for start in starts} == {"1", "2"}
    first, loss = bench.untrained(starts)
    run = bench.train(starts, QatOptions(steps=16, lr=3e-4))
    again, loss_again = bench.untrained(starts)
    assert (first, loss) == (again, loss_again)
    assert run.record.final_loss < loss
    assert run.figures.kl != first.kl
    assert run.seconds > 0
    for name, value in bench.student.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.slow
def test_table(tmp_path: Path) -> None:
    """Catches a cell under another heading, and means that aren't over the seeds."""
    said: list[str] = []
    measured = Yardstick(tiny(), Text("t", tuple(token_ids(3, 24, 1))), scopes={})
    request = TableRequest(tmp_path, quick=True, tell=said.append)
    table = qat_ptq.compare(measured, token_ids(4, 16, 2), request)
    rows = {str(row["method"]): row for row in to_json(table)["rows"]}
    assert len(rows) == 5
    for name, row in rows.items():
        assert row["kl"] > 0
        assert row["train_kl"] > 0
        trained = name.startswith(("QAT", "ranges"))
        assert (row["seeds"] == 3) == trained
        assert (row["steps"] is not None) == trained
        if trained:
            assert 2 <= row["steps"] <= 6
            assert row["kl_sd"] > 0
            assert row["variance"] > 0
            assert row["norm"] > 0
    assert rows["GPTQ"]["train_kl"] < rows["nearest"]["train_kl"]
    assert sum(line.startswith("seed") for line in said) == 9
    again = qat_ptq.compare(measured, token_ids(4, 16, 2), request)
    drop = [column.name for column in table.columns].index("seconds")
    for a, b in zip(table.rows, again.rows, strict=True):
        assert a[:drop] == b[:drop]


def steps(*losses: float) -> list[QatStep]:
    return [QatStep(loss, 2.0, 8.0 * (n + 1), 1e-3) for n, loss in enumerate(losses)]


def test_steps_to_converge() -> None:
    """Catches a single lucky batch that counts as converged, and a count from 0."""
    run = steps(4.0, 2.0, 1.0, 0.2, 1.0, 0.9, 0.9, 1.1)
    # Averages over 2: 3, 1.5, 0.6, 0.6, 0.95, 0.9, 1.0
    assert qat_ptq.steps_to_converge(run, 2) == 4
    assert qat_ptq.steps_to_converge(run, 1) == 4
    assert qat_ptq.steps_to_converge(run, 2, tolerance=0.6) == 4
    assert qat_ptq.steps_to_converge(run, 2, tolerance=1.5) == 3
    assert qat_ptq.steps_to_converge(run, 8) == 8
    with pytest.raises(ValueError, match="8 steps has no average over 9"):
        qat_ptq.steps_to_converge(run, 9)


def test_noise() -> None:
    """Catches a mean of ratios that one step with a small gradient decides, and a log of 0."""
    assert qat_ptq._noise(steps(1.0, 1.0)) == pytest.approx(math.sqrt(2.0 * 4.0))
    assert math.isnan(qat_ptq._noise([QatStep(1.0, 1.0, 0.0, 1e-3)]))


def test_bad_data_is_refused() -> None:
    """Catches training on fewer sequences than the table says."""
    texts = token_ids(2, 40, 1)
    pieces = qat_ptq.sequences(texts, 4, 16)
    assert [piece.shape for piece in pieces] == [(1, 16)] * 4
    assert torch.equal(pieces[2], texts[1][:, :16])
    with pytest.raises(ValueError, match="4 sequences of 16 tokens; 5 are needed"):
        qat_ptq.sequences(texts, 5, 16)
    measured = Yardstick(tiny(), Text("t", tuple(token_ids(3, 24, 1))), scopes={})
    with pytest.raises(ValueError, match="4 blocks are to be trained; the model has 3"):
        QatBench(measured, token_ids(4, 16, 2), 4)
