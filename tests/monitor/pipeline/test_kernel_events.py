"""What kernels do unasked is told on the candidate that did it, with counts: never silent."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.pipeline.conftest import WORDS
from tests.monitor.tiny_models import llama, word_tokenizer

from quantwatch.capture.events import event_words
from quantwatch.config.parsing import parse
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import RunResult
from quantwatch.pipeline.request import RunRequest
from quantwatch.pipeline.run import run_check
from quantwatch.report import html, junit, markdown
from quantwatch.report.document import document
from quantwatch.store.reading import read_result
from quantwatch.store.session import Database
from quantwatch_kernels.registry import Fallback, Slow, Watch, fallbacks

INT4 = {"weights": "int4", "granularity": "group", "group_size": 32}
LOUD = 7
PROMPTS = [6 + number for number in range(16)]
"""Tokens of each prompt; the conftest makes them."""
LINEARS = 14


class Silent:
    """Tells nobody how far a run is."""

    def start(self, stage: str, total: int) -> None:
        """Nothing to show."""

    def advance(self, amount: int = 1) -> None:
        """Nothing to show."""


def request(folder: Path, cache: Path, *candidates: dict[str, Any]) -> RunRequest:
    check = {
        "suite": {"files": ["prompts.json"]},
        "isolated_fraction": 1.0,
        "reference": {"model": "tiny"},
        "candidates": candidates,
    }
    return RunRequest("c", parse(CheckConfig, check, "t"), folder, cache)


@pytest.fixture
def loud(folder: Path) -> str:
    """A model whose layer 0 adds more than float16 holds to one channel of every token."""
    model = llama(len(WORDS), tie_word_embeddings=False, scale=5.0)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[LOUD] *= 1e12
    model.save_pretrained(folder / "loud")
    word_tokenizer(len(WORDS)).save_pretrained(folder / "loud")
    return "loud"


def warned(result: RunResult) -> dict[str, tuple[str, ...]]:
    return {c.name: c.variant.warnings for c in result.candidates if c.variant is not None}


@pytest.mark.slow
def test_slow_calls_belong_to_the_candidate_that_made_them(
    folder: Path, tmp_path: Path, database: Database
) -> None:
    """Catches a kernel slower than bfloat16 that nobody hears of, or that all candidates get."""
    asked = request(
        folder,
        tmp_path,
        {"name": "plain", "model": "tiny", "recipe": INT4},
        {"name": "packed", "model": "tiny", "recipe": INT4, "execution": "aten"},
        {"name": "again", "model": "tiny", "recipe": INT4, "execution": "aten"},
    )
    result = run_check(asked, database=database, progress=Silent())
    calls = LINEARS * sum(tokens > 16 for tokens in PROMPTS)
    assert calls == 70
    told = warned(result)
    assert told["plain"] == ()
    assert told["again"] == told["packed"]
    [note] = told["packed"]
    assert note.startswith(
        f"warning: int4_linear (aten), {calls} calls: more than 16 rows are slow"
    )
    for written in (markdown.render(result), html.render(result), junit.render(result)):
        assert f"{calls} calls: more than 16 rows are slower" in written
    by_name = {c["name"]: c["notes"] for c in document(result)["candidates"]}
    assert note in by_name["packed"]
    with database.reader() as session:
        stored = read_result(session, result.run_id)
    assert stored is not None
    assert warned(stored) == told


@pytest.mark.slow
def test_an_overflowing_residual_stream_is_told(folder: Path, tmp_path: Path, loud: str) -> None:
    """Catches a float16 stream that overflows without a word, or modules counted twice."""
    recipe = {
        **{"weights": "int8", "granularity": "channel"},
        "residual_dtype": [{"match": "layers.0", "dtype": "float16"}],
    }
    asked = request(
        folder,
        tmp_path,
        {"name": "narrow", "model": loud, "recipe": recipe},
        {"name": "wide", "model": loud, "recipe": "int8-channel"},
    )
    told = warned(run_check(asked, database=None, progress=Silent()))
    # One channel of every token, and of the four on which observing is proved to change nothing.
    tokens = sum(PROMPTS) + 4
    words = f"the residual stream became infinite in its dtype: layers.0, {tokens} values"
    assert told == {"narrow": (f"warning: {words}",), "wide": ()}


@pytest.mark.slow
def test_a_fallback_while_running_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a back end that is replaced call by call, and fallbacks of the monitor's own."""
    from quantwatch_kernels.quantize import int4_linear

    backends = int4_linear.INT4_LINEAR._backends
    refusing = type(backends["aten"])(backends["aten"].run, lambda *_: "not today")
    asked = request(
        folder, tmp_path, {"name": "c", "model": "tiny", "recipe": INT4, "execution": "aten"}
    )
    monkeypatch.setitem(backends, "aten", refusing)
    told = warned(run_check(asked, database=None, progress=Silent()))
    # Every prompt and the four tokens of the proof.
    calls = LINEARS * (len(PROMPTS) + 1)
    [note] = told["c"]
    used = next(f.used for f in fallbacks() if f.reason == "not today")
    assert note == f"warning: int4_linear ({used} instead of aten), {calls} times: not today"


def test_words() -> None:
    """Catches "1 calls", a list as long as the model is deep, and words where nothing happened."""
    assert event_words(Watch(), {}) == ()
    slow = Counter(
        {Slow("int8_linear", "aten", "too many rows"): 1, Slow("b", "aten", "r"): 12_000}
    )
    watch = Watch(Counter({Fallback("op", "a", "b", "why"): 2}), slow)
    assert event_words(watch, {f"layers.{n}": n + 1 for n in range(5)}) == (
        "b (aten), 12,000 calls: r",
        "int8_linear (aten), 1 call: too many rows",
        "op (b instead of a), 2 times: why",
        "the residual stream became infinite in its dtype: layers.0, 1 value, layers.1, 2 values, "
        "layers.2, 3 values and 2 more",
    )
