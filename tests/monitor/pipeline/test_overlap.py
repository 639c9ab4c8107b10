"""A recipe or a KV cache calibrated on what a check measures: counted by token ids, told on the candidate."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantwatch.config.parsing import parse
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import RunResult
from quantwatch.pipeline.overlap import BLOCK, KEY, count_seen
from quantwatch.pipeline.request import RunRequest
from quantwatch.pipeline.run import run_check
from quantwatch.report import html, junit, markdown
from quantwatch.report.document import document


class Silent:
    """Tells nobody how far a run is."""

    def start(self, stage: str, total: int) -> None:
        """Nothing to show."""

    def advance(self, amount: int = 1) -> None:
        """Nothing to show."""


def ids(seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 5_000, (length,), generator=generator).tolist())


def texts(*rows: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.tensor([row]) for row in rows]


A, B, C = ids(0, 200), ids(1, 200), ids(2, 200)
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool]] = {
    "equal": (A, A, True),
    "another text": (A, B, False),
    "a window of a longer text": (A[70:140], A, True),
    "a text that is a window of the prompt": (A, A[60:130], True),
    "windows that begin elsewhere": (A, A[13:150], True),
    "a start token before each": ((1, *A), (2, *A), True),
    "a template before each": ((*A[: BLOCK - 1], *B), (*A[: BLOCK - 1], *C), False),
    "a short prompt inside": (A[20:40], A, True),
    "a short prompt that goes on otherwise": ((*A[20:40], 7), A, False),
    "a few tokens inside": (A[20 : 20 + KEY - 1], A, False),
    "a few tokens, the whole text": (A[:3], A[:3], True),
    "a text of a few tokens": (A, A[:3], False),
}


@pytest.mark.parametrize("name", CASES)
def test_what_counts_as_seen(name: str) -> None:
    """Catches an overlap that is missed because of another cut, and one that is none."""
    prompt, text, seen = CASES[name]
    assert count_seen([prompt, B[::-1]], texts(C, text)) == seen


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=150).map(tuple), max_size=6),
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=150).map(tuple), max_size=6),
)
def test_a_text_that_is_measured_is_seen(
    prompts: list[tuple[int, ...]], others: list[tuple[int, ...]]
) -> None:
    """Law: measured texts are all seen, without texts none; more texts never count fewer."""
    assert count_seen(prompts, texts(*prompts)) == len(prompts)
    assert count_seen(prompts, []) == 0
    few = count_seen(prompts, texts(*others[:3]))
    assert few <= count_seen(prompts, texts(*others)) <= len(prompts)


def run(folder: Path, cache: Path, calibration: Any) -> RunResult:
    recipe = {
        **{"weights": "int4", "granularity": "group", "group_size": 16, "method": "gptq"},
        "calibration": calibration,
    }
    check = {
        "suite": {"files": ["prompts.json"]},
        "reference": {"model": "tiny"},
        "candidates": [
            {"name": "calibrated", "model": "tiny", "recipe": recipe},
            {"name": "plain", "model": "tiny", "recipe": "int8-channel"},
            {
                "name": "gain",
                "model": "tiny",
                "serve": {"kv_cache": "int2-plain+gain", "calibration": calibration},
            },
        ],
    }
    request = RunRequest("c", parse(CheckConfig, check, "t"), folder, cache)
    return run_check(request, database=None, progress=Silent())


@pytest.fixture
def notes(folder: Path, tmp_path: Path) -> Any:
    """What is told of the candidates' calibration, in the run and in its report."""

    def told(calibration: Any) -> dict[str, list[str]]:
        result = run(folder, tmp_path, calibration)
        variants = [c.variant for c in result.candidates if c.variant is not None]
        found = {v.name: [n for n in v.notes if n.startswith("warning: calib")] for v in variants}
        assert [v.warnings for v in variants] == [tuple(said) for said in found.values()]
        formats = (markdown.render(result), html.render(result), junit.render(result))
        warned = any(found.values())
        assert all(("measured prompts" in written) == warned for written in formats)
        by_name = {c["name"]: c["notes"] for c in document(result)["candidates"]}
        assert all(set(said) <= set(by_name[name]) for name, said in found.items())
        return found

    return told


@pytest.mark.slow
def test_a_check_says_that_it_measures_what_it_calibrated_on(folder: Path, notes: Any) -> None:
    """Catches a KL that is half of the honest one, untold: calibrated on the measured prompts."""
    told = notes({"suite": {"files": ["prompts.json"]}, "skip": 2})
    [note] = told["calibrated"]
    assert note.startswith("warning: calibrated on 14 of the 16 measured prompts: ")
    assert told["plain"] == []
    assert told["gain"] == [note]
    copied = folder / "a copy.json"
    copied.write_bytes((folder / "prompts.json").read_bytes())
    [note] = notes({"suite": {"files": [copied.name]}, "limit": 3})["calibrated"]
    assert note.startswith("warning: calibrated on 3 of the 16")


def test_other_texts_are_not_warned_of(folder: Path, notes: Any) -> None:
    """Catches a warning that is always there."""
    (folder / "others.json").write_text(json.dumps(["w90 w91 w92 w93 w94 w95 w80 w81 w82"]))
    assert notes({"suite": {"files": ["others.json"]}}) == {
        "calibrated": [],
        "plain": [],
        "gain": [],
    }
