"""Graphs by bucket, on a graph that replays operators on fixed memory: padding, re-capture, tokens."""

from functools import partial
from typing import Any

import pytest
import torch
from tests.kernels.serve.engine.fake_graph import FakeGraph
from tests.kernels.serve.engine.models import MODELS, build, generated, prompt
from torch import nn

from quantwatch_kernels.serve.engine.batch import Limits
from quantwatch_kernels.serve.engine.buckets import Buckets, GraphKey, sizes_up_to
from quantwatch_kernels.serve.engine.engine import Engine, EngineConfig
from quantwatch_kernels.serve.engine.graphs import GraphRunner
from quantwatch_kernels.serve.engine.request import Request
from quantwatch_kernels.serve.engine.runner import ModelRunner

CONFIG = EngineConfig(40, 4, Limits(24, 6))


def graphed(engine: Engine, *, prefill: bool = True) -> GraphRunner:
    runner = GraphRunner(
        ModelRunner(engine.model, engine.pages), FakeGraph, Buckets((2, 4)), Buckets((16, 48)),
        Buckets((8, 24)) if prefill else None,
    )  # fmt: skip
    engine.runner = runner
    return runner


def asked(lengths: tuple[int, ...], new: int = 7) -> list[Request]:
    return [Request(str(n), prompt(length, n), new) for n, length in enumerate(lengths)]


def tokens(engine: Engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    return {name: outcome.tokens for name, outcome in engine.run(requests).items()}


@pytest.mark.parametrize(
    ("largest", "step", "sizes"),
    [(1, 8, (1,)), (3, 8, (1, 2, 3)), (8, 8, (1, 2, 4, 8)), (20, 8, (1, 2, 4, 8, 16, 20))],
    ids=str,
)
def test_sizes(largest: int, step: int, sizes: tuple[int, ...]) -> None:
    assert sizes_up_to(largest, step) == sizes


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, None)], ids=str)
def test_the_smallest_bucket_that_holds_it(count: int, size: int | None) -> None:
    assert Buckets((1, 2, 4)).holding(count) == size


@pytest.mark.parametrize("sizes", [(), (2, 1), (1, 1), (0, 1)], ids=str)
def test_bad_buckets(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="distinct, ascending and at least 1"):
        Buckets(sizes)
    with pytest.raises(ValueError, match="no bucket for 0 rows"):
        Buckets((1,)).holding(0)


@pytest.mark.parametrize("prefill", [True, False], ids=["prefill", "decode"])
def test_what_decides_on_the_host_is_not_captured(prefill: bool) -> None:
    """A model that reads a number back: a clear error, and its requests still wait."""
    model = build("llama")
    hook = model.model.norm.register_forward_hook(lambda *given: (given[-1].sum().item(), None)[1])
    with Engine(model, CONFIG) as engine:
        plain = engine.runner
        graphed(engine, prefill=prefill)
        engine.add(asked((5,))[0])
        with pytest.raises(ValueError, match=r"can't be captured \(.*set graphs=False"):
            finish(engine)
        engine.runner = plain
        hook.remove()
        assert len(finish(engine)["0"]) == 7


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_generate(name: str) -> None:
    """Whole for decode, in pieces for prefill; what is too large runs eagerly. All are used."""
    model, requests = build(name), asked((3, 11, 5, 17, 30))
    expected = {one.name: generated(model, one.prompt, 7) for one in requests}
    with Engine(model, CONFIG) as engine:
        runner = graphed(engine)
        assert tokens(engine, requests) == expected
        kinds = {key.kind for key in runner.captured}
        assert kinds == {"decode", "prefill"}
        assert runner.stats.eager > 0
        assert runner.stats.padded_rows > 0
        assert runner.stats.replayed > runner.stats.captured


def test_the_engine_chooses_its_own_buckets(llama: Any) -> None:
    requests = asked((3, 11, 5))
    expected = {one.name: generated(llama, one.prompt, 7) for one in requests}
    with Engine(llama, CONFIG, make_graph=FakeGraph) as engine:
        assert isinstance(engine.runner, GraphRunner)
        assert tokens(engine, requests) == expected
        assert engine.runner.stats.eager == 0


def test_pages_of_codes_run_eagerly(llama: Any) -> None:
    config = EngineConfig(40, 4, Limits(24, 6), kv_scheme="int8")
    with Engine(llama, config, make_graph=FakeGraph) as engine:
        assert isinstance(engine.runner, ModelRunner)


def captured_decode(engine: Engine, lengths: tuple[int, ...]) -> GraphRunner:
    """An engine whose requests have had their prompts and one decode step."""
    runner = graphed(engine, prefill=False)
    for one in asked(lengths, 12):
        engine.add(one)
    while not runner.captured:
        engine.step()
    return runner


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


def test_padding_rows_write_to_the_null_block_only(llama: Any) -> None:
    """llama.cpp#7492: three real rows and one of padding leave every other page as it was."""
    with Engine(llama, CONFIG) as engine:
        runner = captured_decode(engine, (5, 9, 13))
        before = [plane.clone() for plane in engine.pages.planes]
        starts = {name: engine.blocks.manager.table(name).num_tokens for name in "012"}
        engine.step()
        assert runner.captured == (GraphKey("decode", 4, 16),)
        written = {
            int(engine.blocks.manager.table(name).slot_mapping(at, at + 1)[0])
            for name, at in starts.items()
        }
        padding = engine.pages.page_size - 1
        for old, new in zip(before, engine.pages.planes, strict=True):
            moved = (old != new) & ~(old.isnan() & new.isnan())  # what nobody wrote is poisoned
            changed = moved.flatten(2).any(-1).flatten().nonzero().flatten().tolist()
            assert set(changed) <= written | {padding}
            assert written <= set(changed)
            assert not bool(new[0, 0].any()), "slot 0 is read as padding and must stay zero"


def note(to: dict[Any, torch.Tensor], size: int, name: str, position: int, z: torch.Tensor) -> None:
    to[size, name, position] = z.clone()


def test_padding_rows_change_no_logits(llama: Any) -> None:
    """Three rows in a bucket of four, and in one of three, to the bit of what the shape allows."""
    seen: dict[tuple[int, str, int], torch.Tensor] = {}
    for size in (3, 4):
        with Engine(llama, CONFIG, partial(note, seen, size)) as engine:
            eager = ModelRunner(engine.model, engine.pages)
            engine.runner = GraphRunner(eager, FakeGraph, Buckets((size,)), Buckets((48,)), None)
            engine.run(asked((5, 9, 13)))
    for (_, name, position), logits in seen.items():
        torch.testing.assert_close(logits, seen[(3, name, position)], rtol=1e-5, atol=1e-5)
    assert len(seen) == 2 * 3 * 7


def replace_pool(engine: Engine) -> None:
    """Another pool: the planes' memory moves."""
    for layer in engine.pages._layers:  # type: ignore[attr-defined]
        for plane in layer:
            plane.set_(plane.clone())


def replace_weight(engine: Engine) -> None:
    """New weights, in other memory."""
    head: nn.Linear = engine.model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.flip(0).clone())


def replace_adapter(engine: Engine) -> None:
    runner: Any = engine.runner
    runner.adapter = "another"


CHANGES = {"pool": replace_pool, "weight": replace_weight, "adapter": replace_adapter}


@pytest.mark.parametrize("what", CHANGES)
def test_captured_again_when_what_it_read_is_elsewhere(what: str) -> None:
    """xllm#1939, TRT-LLM#18242: a graph that keeps old pointers answers with the old weights."""
    model, twin = build("llama"), build("llama")
    requests = asked((5, 9, 13), 12)
    with Engine(model, CONFIG) as engine, Engine(twin, CONFIG) as eager:
        runner = captured_decode(engine, (5, 9, 13))
        for one in requests:
            eager.add(one)
        while eager.stats.steps < engine.stats.steps:
            eager.step()
        for each in (engine, eager):
            if each is engine or what != "adapter":
                CHANGES[what](each)
        first = len(FakeGraph.made)
        outcomes = [finish(engine), finish(eager)]
        assert outcomes[0] == outcomes[1]
        assert runner.stats.dropped == 1
        assert len(FakeGraph.made) > first


def finish(engine: Engine) -> dict[str, tuple[int, ...]]:
    ended: dict[str, tuple[int, ...]] = {}
    while engine.busy:
        ended |= {one.name: one.tokens for one in engine.step()}
    return ended


def test_an_unchanged_engine_captures_once(llama: Any) -> None:
    with Engine(llama, CONFIG) as engine:
        runner = captured_decode(engine, (5, 5))
        finish(engine)
        assert runner.stats.dropped == 0
        assert {key.rows for key in runner.captured} == {2}
        assert runner.stats.captured == len(runner.captured)


def test_the_fake_replays_memory_and_not_python() -> None:
    """The fake itself: new inputs are read where they were, a replaced tensor is not."""
    x, w = torch.ones(3), torch.full((3,), 2.0)
    graph = FakeGraph()
    graph.begin()
    y = (x * w)[1:] + 1
    graph.end()
    x.fill_(5)
    w = torch.zeros(3)
    graph.replay()
    assert y.tolist() == [11.0, 11.0]
    graph.begin()
    with pytest.raises(RuntimeError, match="can't be captured"):
        x[0].item()
    graph.end()
