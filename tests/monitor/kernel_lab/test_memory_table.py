"""The table of the int4 pipeline on a tiny checkpoint, and the speed of whole models."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.monitor.tiny_models import llama, save_byte_model

from quantwatch.config.recipes import load_recipe
from quantwatch.errors import UserError
from quantwatch.kernel_lab import throughput as speed
from quantwatch.kernel_lab.kept import kept_share
from quantwatch.kernel_lab.measure import Yardstick, scored_logits
from quantwatch.kernel_lab.pipeline import FILE, nearest, steps
from quantwatch.kernel_lab.tables import memory, registry
from quantwatch.kernel_lab.tables.ladder import recipes_folder
from quantwatch.kernel_lab.tables.model import TableRequest
from quantwatch.kernel_lab.texts import Text
from quantwatch.models.recipes import kernel_recipe
from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.recipe import Recipe

SIZES = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 512}


RECIPE = """
weights = "uint4"
granularity = "group"
group_size = 32
clip = "mse"
method = "gptq"
scale_dtype = "bfloat16"

[embedding]
weights = "int8"
granularity = "channel"
scale_dtype = "bfloat16"

[calibration.suite]
name = "core-v1"

[[layers]]
match = "layers.1.mlp.down_proj"
weights = "int8"
granularity = "channel"
method = "gptq"
scale_dtype = "bfloat16"
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The pipeline's recipe file for a model of two layers."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / FILE).write_text(RECIPE)
    monkeypatch.setattr(memory, "recipes_folder", lambda: folder)
    return kernel_recipe(load_recipe(folder / FILE))


@pytest.fixture
def request_(tmp_path: Path, recipe: Recipe) -> TableRequest:
    """A byte model whose layers matter, a text of 11 windows of which 2 are measured, 100 items."""
    save_byte_model(tmp_path / "model", scale=4.0, tie_word_embeddings=True, **SIZES)
    text = tmp_path / "text.txt"
    drawn = torch.randint(32, 127, (512 * 11,), generator=torch.Generator().manual_seed(0))
    text.write_text("".join(map(chr, drawn.tolist())))
    items = [
        {
            "question": f"item {n:03}",
            **{"A": "a", "B": "bb", "C": "c", "D": "ddd"},
            "answer": "ABCD"[n % 4],
        }
        for n in range(100)
    ]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(item) + "\n" for item in items))
    return TableRequest(tmp_path, str(tmp_path / "model"), text, windows=2, tasks=tasks)


@pytest.mark.slow
def test_the_table_from_end_to_end(request_: TableRequest, recipe: Recipe) -> None:
    """Catches steps under each other's name, and a column of another figure."""
    table = registry.build("memory", request_)
    names = [column.name for column in table.columns]
    rows: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in table.rows]
    assert [row["step"] for row in rows] == ["bfloat16", *(step.name for step in steps(recipe))]
    assert rows[1]["bytes"] == rows[2]["bytes"] > rows[3]["bytes"]
    reference = rows[0]["accuracy"] / rows[0]["kept"]
    assert reference > 0
    for row in rows:
        assert row["saved"] == pytest.approx(1 - row["bytes"] / rows[0]["bytes"])
        assert row["kept"] == pytest.approx(row["accuracy"] / reference)
        assert 0 <= row["choice"] <= 1
    assert rows[0]["kl"] < min(row["kl"] for row in rows[1:])
    assert rows[0]["same_choice"] > 0.9
    # Steps 1 and 2 run the same kernels, so they share their speed; the third is another model.
    assert rows[1]["decode"] == rows[2]["decode"] != rows[3]["decode"]
    assert all(row["decode_low"] <= row["decode"] <= row["decode_high"] for row in rows[1:])
    notes = " ".join(table.notes)
    assert "tasks.jsonl, 100 items" in notes
    assert "computed dequantized" not in notes
    # One down projection of 64 x 128 among 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64).
    assert f"int8 {64 * 128 / 73728:.1%}; exceptions: layers.1.mlp.down_proj" in notes


def test_tasks_belong_to_one_table(request_: TableRequest) -> None:
    """Catches a file that is given, and silently not used."""
    with pytest.raises(UserError, match=r"table ladder has no multiple choice.*: memory"):
        registry.build("ladder", request_)


def test_a_bad_task_file_is_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    """Catches half an hour that ends in a wrong letter."""
    file = tmp_path / "bad.jsonl"
    file.write_text('{"question": "a"}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl, line 1: no key 'A'"):
        memory.build(TableRequest(tmp_path, "no such model", tasks=file))


def test_the_steps_say_what_they_do(recipe: Recipe) -> None:
    """Catches a step that does what another one says."""
    first, second, third = (step.recipe for step in steps(recipe))
    assert (first.weights.method, second.weights.method) == ("nearest", "gptq")
    assert first.with_weights(method="gptq") == second
    assert second.embedding is None
    assert not second.layers
    assert third == recipe
    assert nearest(first) == nearest(second) != nearest(third)
    assert not nearest(third).calibrated


def test_the_shipped_pipeline_is_int4() -> None:
    """Catches a pipeline that is int4 by name: most layers are, and every exception is int8."""
    shipped = kernel_recipe(load_recipe(recipes_folder() / FILE))
    assert [step.recipe.weights.format.name for step in steps(shipped)] == ["uint4"] * 3
    specs = [rule.weights for rule in shipped.layers]
    assert {spec.format.name for spec in specs if spec is not None} == {"int8"}
    assert None not in specs


@pytest.mark.parametrize(
    "other",
    ["method", "bits", "embedding"],
)
def test_what_is_no_int4_pipeline_is_refused(recipe: Recipe, other: str) -> None:
    """Catches steps that are all the same."""
    wrong = {
        "method": recipe.with_weights(method="nearest"),
        "bits": recipe.with_weights(format=INT_FORMATS["uint5"]),
        "embedding": replace(recipe, embedding=None),
    }
    with pytest.raises(ValueError, match="an int4 pipeline has int4 or uint4"):
        steps(wrong[other])


def test_kept_accuracy_is_that_of_the_logits() -> None:
    """Catches hits of another position: by hand from both models' logits."""
    model, other = llama(96, scale=4.0), llama(96, scale=4.2)
    windows = tuple(
        torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(n)) for n in range(6)
    )
    for window in windows:  # the model's own likeliest tokens, so that some are right
        with torch.no_grad():
            window[0, 1::2] = model(window).logits[0, ::2].argmax(-1)
    text = Text("t", windows)
    found = Yardstick(model, text, {}).measure(other)
    right: list[list[Any]] = [[], []]
    for window in windows:
        for which, one in enumerate((other, model)):
            logits = scored_logits(one, text, window).double()
            targets = window[0, text.scored(window) + 1]
            right[which].append(
                np.array(
                    [
                        row.tolist().index(max(row.tolist())) == t
                        for row, t in zip(logits, targets.tolist(), strict=True)
                    ]
                )
            )
    shares = [np.concatenate(hits).mean() for hits in right]
    assert 0 < shares[0] != shares[1] > 0
    assert (found.accuracy, found.accuracy_reference) == tuple(shares)
    assert (found.kept, found.kept_se) == (kept_share(*right).share, kept_share(*right).se)
    assert found.kept == pytest.approx(shares[0] / shares[1])


def test_speed_is_a_ratio_of_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a ratio upside down, and a decode whose cache grows."""
    model = llama(96).to(torch.bfloat16)
    seen: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args[0].shape[1], kwargs["use_cache"])),
        with_kwargs=True,
    )
    times = iter(range(10_000))
    factors = {0: 3.0, 1: 1.0}

    def fake(runs: list[Any], copies: int, rounds: int) -> list[list[float]]:
        for run in runs:
            for _ in range(3):
                run(next(times))
        return [[factors[n]] * rounds for n in range(len(runs))]

    monkeypatch.setattr(speed, "interleaved", fake)
    prompt = torch.arange(20)[None]
    found = speed.throughput(model, [model], prompt, rounds=5)
    assert found == [speed.Throughput(speed.Ratio(3, 3, 3), speed.Ratio(3, 3, 3))]
    assert seen.count((1, True)) == 6
    assert seen.count((20, False)) == 6


def test_a_decoded_token_sees_the_prompt_and_no_more() -> None:
    """Catches a cache that keeps the tokens of earlier rounds."""
    model = llama(96, scale=4.0)
    prompt = torch.arange(20)[None]
    outputs: list[torch.Tensor] = []
    model.register_forward_hook(lambda _m, _a, out: outputs.append(out.logits[0, -1]))
    with torch.inference_mode():
        run = speed._decoder(model, prompt)
        run(0), run(1), run(2)
        expected = model(torch.cat([prompt, prompt[:, -1:]], 1)).logits[0, -1]
    for got in outputs[1:4]:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("prompt", "rounds", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), 5, r"one row \[1, T\]; it is \[2, 3\]"),
        (torch.zeros(1, 0, dtype=torch.int64), 5, r"one row \[1, T\]; it is \[1, 0\]"),
        (torch.zeros(1, 3, dtype=torch.int64), 4, "at least 5; they are 4"),
    ],
    ids=["two rows", "no token", "too few rounds"],
)
def test_bad_requests_for_speed(prompt: torch.Tensor, rounds: int, message: str) -> None:
    """Catches an interval over one ratio."""
    with pytest.raises(ValueError, match=message):
        speed.throughput(llama(96), [], prompt, rounds=rounds)
