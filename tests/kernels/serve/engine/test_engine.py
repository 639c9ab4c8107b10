"""The engine on small models of several families: tokens are those of `generate()`, whatever happens."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.serve.engine.models import MODELS, build, generated, prompt
from torch import Tensor

from quantwatch_kernels.serve.block_hash import extra_keys
from quantwatch_kernels.serve.engine.adaptive import AdaptiveRule
from quantwatch_kernels.serve.engine.batch import Limits
from quantwatch_kernels.serve.engine.engine import Engine, EngineConfig, eos_ids
from quantwatch_kernels.serve.engine.request import Outcome, Request
from quantwatch_kernels.serve.eviction import POLICIES
from quantwatch_kernels.serve.kv_cache import QuantizedCache
from quantwatch_kernels.serve.kv_scheme import SCHEMES, scheme_named
from quantwatch_kernels.serve.preemption import PreemptionCosts

LENGTHS = (1, 3, 4, 5, 11, 12, 29)  # around pages of 4 and windows of 11
NEW = 9


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


def asked(lengths: tuple[int, ...] = LENGTHS, new: int = NEW, **given: Any) -> list[Request]:
    return [Request(str(n), prompt(length, n), new, **given) for n, length in enumerate(lengths)]


def alone(model: Any, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    return {one.name: generated(model, one.prompt, one.max_new_tokens) for one in requests}


def tokens(engine: Engine, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    return {name: outcome.tokens for name, outcome in engine.run(requests).items()}


SETTINGS = {
    "plenty": EngineConfig(128, 4, Limits(64, 8)),
    "chunks of five, pool too small": EngineConfig(12, 4, Limits(5, 4)),
    "pages of two, no cache": EngineConfig(64, 2, Limits(16, 3), prefix_caching=False),
    "pool too small, host": EngineConfig(12, 4, Limits(16, 6, reserve=0), host_pages=40),
}


QUICK = [
    ("llama", "chunks of five, pool too small"),
    ("mistral, sliding", "pool too small, host"),
    ("gemma2, soft-capped, every second slides", "plenty"),
]
PAIRS = [
    pytest.param(*pair, id=" - ".join(pair), marks=[] if pair in QUICK else pytest.mark.slow)
    for pair in product(MODELS, SETTINGS)
]


@pytest.mark.parametrize(("name", "settings"), PAIRS)
def test_tokens_are_those_of_generate(name: str, settings: str) -> None:
    """Chunked prefill, batched decode, preemption by swap and recompute, sliding windows, soft-cap."""
    model, requests = build(name), asked()
    expected = alone(model, requests)
    with Engine(model, SETTINGS[settings]) as engine:
        assert tokens(engine, requests) == expected
        # And again, now that pages of all of them may be found.
        assert tokens(engine, requests) == expected
    assert alone(model, requests[:1]) == {"0": expected["0"]}, "the model isn't given back"


def test_preempted_by_swap_and_by_recompute(llama: Any) -> None:
    """Both ways really happen, and neither changes a token."""
    requests = asked((12, 11, 10, 9), 16)
    expected = alone(llama, requests)
    for host, costs in ((0, None), (40, None), (40, PreemptionCosts(10.0, 1.0, 1e-9))):
        config = EngineConfig(
            14, 4, Limits(32, 4, reserve=0), host_pages=host, preemption_costs=costs
        )
        with Engine(llama, config) as engine:
            assert tokens(engine, requests) == expected
            swaps = host > 0 and costs is None
            assert (engine.stats.swapped > 0, engine.stats.recomputed > 0) == (swaps, not swaps)


def test_the_host_may_be_a_file(llama: Any, tmp_path: Path) -> None:
    requests = asked((12, 11, 10, 9), 16)
    expected = alone(llama, requests)
    limits = Limits(32, 4, reserve=0)
    with Engine(llama, EngineConfig(14, 4, limits, host_pages=40, host_folder=tmp_path)) as engine:
        assert tokens(engine, requests) == expected
        assert engine.stats.swapped > 0


def test_a_host_without_room_is_counted(llama: Any) -> None:
    requests = asked((12, 11, 10, 9), 16)
    expected = alone(llama, requests)
    with Engine(llama, EngineConfig(14, 4, Limits(32, 4, reserve=0), host_pages=1)) as engine:
        assert tokens(engine, requests) == expected
        assert (engine.stats.swapped, engine.blocks.host_refused > 0) == (0, True)


@pytest.mark.parametrize("policy", POLICIES)
def test_prefixes_are_found_across_requests(llama: Any, policy: str) -> None:
    """Shared beginnings are computed once; under every policy, with evictions, tokens stay."""
    begin = prompt(20)
    requests = [Request(str(n), begin + prompt(n + 1, n), 5) for n in range(6)]
    others = [Request(f"other {n}", prompt(30, 50 + n), 5) for n in range(4)]
    expected, of_others = alone(llama, requests), alone(llama, others)
    with Engine(llama, EngineConfig(16, 4, Limits(32, 1), eviction=policy)) as engine:
        ended = engine.run(requests)
        assert {name: one.tokens for name, one in ended.items()} == expected
        assert [ended[str(n)].num_cached for n in range(6)] == [0, 20, 20, 20, 20, 20]
        assert tokens(engine, others) == of_others
        assert engine.blocks.manager.cache is not None
        assert engine.blocks.manager.cache.stats.evictions > 0
        assert tokens(engine, requests) == expected


def logits_of(engine_seen: dict[str, Tensor]) -> Any:
    return lambda name, _, logits: engine_seen.setdefault(name, logits.clone())


@pytest.mark.parametrize(("chunk", "same"), [(16, True), (24, False)], ids=["agree", "differ"])
def test_logits_with_a_cached_prefix(llama: Any, chunk: int, same: bool) -> None:
    """Bit-equal where chunk boundaries agree (32 of 37 tokens are cached), else to 1e-4."""
    seen: dict[str, Tensor] = {}
    with Engine(llama, EngineConfig(64, 4, Limits(chunk, 1)), logits_of(seen)) as engine:
        ids = prompt(36)
        engine.run([Request("cold", ids, 1)])
        warm = engine.run([Request("warm", ids, 1)])["warm"]
    assert warm.num_cached == 32
    assert torch.equal(seen["cold"], seen["warm"]) or not same
    torch.testing.assert_close(seen["cold"], seen["warm"], rtol=0, atol=1e-4)


def test_pages_are_not_shared_beyond_a_salt(llama: Any) -> None:
    """vllm#44701, aibrix#2329: the same tokens of another tenant are other content."""
    ids = prompt(20)
    salted = [Request(name, ids, 3, extra=extra_keys(salt=name)) for name in ("a", "b")]
    with Engine(llama, EngineConfig(64, 4, Limits(32, 1))) as engine:
        ended = engine.run(salted)
        assert (ended["b"].num_cached, ended["a"].tokens) == (0, ended["b"].tokens)


def test_kept_pages_do_not_outlive_the_weights() -> None:
    """kvcached#362: what was computed with other weights must not be found."""
    model = build("llama")
    one = Request("a", prompt(20), 5)
    with Engine(model, EngineConfig(64, 4, Limits(32, 2))) as engine:
        engine.run([one])
        engine.add(one)
        with pytest.raises(ValueError, match="1 requests are there"):
            engine.weights_changed()
        engine.cancel("a")
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.neg_()
        engine.weights_changed()
        ended = engine.run([one])["a"]
    assert (ended.num_cached, ended.tokens) == (0, generated(model, one.prompt, 5))


def test_stale_pages_may_hold_nan(llama: Any) -> None:
    """0 · NaN is NaN: a slot that its request hasn't written is never read (transformers#37574)."""
    requests = asked()
    expected = alone(llama, requests)
    with Engine(llama, EngineConfig(40, 4, Limits(16, 4), prefix_caching=False)) as engine:
        for plane in engine.pages.planes:
            plane[1:] = torch.nan
        assert tokens(engine, requests) == expected


def test_the_null_block_stays_zero(llama: Any) -> None:
    with Engine(llama, EngineConfig(40, 4, Limits(16, 4))) as engine:
        engine.run(asked())
        assert not any(bool(plane[0].any()) for plane in engine.pages.planes)


@pytest.mark.parametrize("after", [1, 3, 6, 12])
def test_a_cancelled_request_harms_nobody(llama: Any, after: int) -> None:
    requests = asked((12, 11, 10, 9), 12)
    expected = alone(llama, requests)
    with Engine(llama, EngineConfig(14, 4, Limits(16, 4, reserve=0), host_pages=6)) as engine:
        for one in requests:
            engine.add(one)
        ended: dict[str, Outcome] = {}
        for _ in range(after):
            ended |= {one.name: one for one in engine.step()}
        gone = engine.cancel("2")
        assert gone.tokens == expected["2"][: len(gone.tokens)]
        while engine.busy:
            ended |= {one.name: one for one in engine.step()}
        assert {name: one.tokens for name, one in ended.items()} == {
            name: said for name, said in expected.items() if name != "2"
        }
        assert engine.blocks.manager.pool.num_used == 0


def test_one_that_cannot_be_served_is_refused_and_the_others_go_on(llama: Any) -> None:
    """Prompt longer than the pool, than the model's positions, with an unknown token."""
    good = asked((5, 9))
    bad = [
        Request("long", prompt(60), 4),
        Request("positions", prompt(250), 8),
        Request("unknown", (1, 96), 4),
    ]
    with Engine(llama, EngineConfig(12, 4, Limits(16, 4))) as engine:
        ended = engine.run([bad[0], good[0], *bad[1:], good[1]])
    assert {one.name: ended[one.name].tokens for one in good} == alone(llama, good)
    assert [ended[one.name].reason for one in bad] == ["refused"] * 3
    errors = [str(ended[one.name].error) for one in bad]
    assert "60 tokens and 4 new ones take 16 pages of 4 tokens; the pool has 11" in errors[0]
    assert "250 tokens and 8 new ones; the model has 256 positions" in errors[1]
    assert "token 96 isn't one of 96" in errors[2]


@pytest.mark.parametrize(("length", "new"), [(256, 1), (250, 7)])
def test_all_positions_of_the_model_may_be_used(llama: Any, length: int, new: int) -> None:
    """The last token is never computed, so it takes no position."""
    one = Request("full", prompt(length), new)
    expected = alone(llama, [one])
    with Engine(llama, EngineConfig(66, 4, Limits(64, 4))) as engine:
        assert tokens(engine, [one]) == expected


@pytest.mark.parametrize("scheme", ["int8-symmetric", "int4", "int2-plain"])
def test_numbers_that_no_code_can_hold_fail_their_request_only(scheme: str) -> None:
    """Catches one request whose keys stop every other one, step after step."""
    model = build("llama")
    good = asked((5, 9, 13))
    with Engine(model, EngineConfig(64, 4, Limits(16, 4), kv_scheme=scheme)) as engine:
        expected = tokens(engine, good)
    said = {token for one in good for token in (*one.prompt, *expected[one.name])}
    poison = next(token for token in range(1, 96) if token not in said)

    def enlarge(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        is_poison = args[0].isclose(marked, atol=1e-5).all(-1, keepdim=True)
        return (args[0] * torch.where(is_poison, 1e9, 1.0),)

    layer = model.model.layers[0]
    marked = layer.input_layernorm(model.get_input_embeddings().weight[poison])
    layer.self_attn.v_proj.register_forward_pre_hook(enlarge)
    with Engine(model, EngineConfig(64, 4, Limits(16, 4), kv_scheme=scheme)) as engine:
        ended = engine.run([Request("bad", (3, poison, 5), 4), *good])
    assert {one.name: ended[one.name].tokens for one in good} == expected
    assert (ended["bad"].reason, ended["bad"].tokens) == ("failed", ())


def test_logits_that_are_not_finite_fail_their_request_only() -> None:
    """One token's embedding is NaN: whoever says it fails, the others' tokens stay."""
    model = build("llama")
    good = asked((5, 9, 13))
    expected = alone(model, good)
    said = {token for one in good for token in (*one.prompt, *expected[one.name])}
    poison = next(token for token in range(96) if token not in said)
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = torch.nan
    with Engine(model, EngineConfig(64, 4, Limits(16, 4))) as engine:
        ended = engine.run([Request("bad", (3, poison, 5), 4), *good])
    assert {one.name: ended[one.name].tokens for one in good} == expected
    assert (ended["bad"].reason, ended["bad"].tokens) == ("failed", ())
    assert ended["bad"].error == "the logits after token 3 aren't finite."


class Fails:
    def run(self, *_: object) -> Tensor:
        raise MemoryError("no room")


def test_a_step_that_raises_loses_nothing(llama: Any) -> None:
    requests = asked((5, 12, 9))
    expected = alone(llama, requests)
    with Engine(llama, EngineConfig(64, 4, Limits(16, 4))) as engine:
        for one in requests:
            engine.add(one)
        ended = {one.name: one for one in engine.step()}
        runner, engine.runner = engine.runner, Fails()
        with pytest.raises(MemoryError):
            engine.step()
        engine.runner = runner
        while engine.busy:
            ended |= {one.name: one for one in engine.step()}
        assert {name: one.tokens for name, one in ended.items()} == expected


def test_latency_decides_how_many_run(llama: Any) -> None:
    """30 ms for each who runs, at most 0.1 s: three keep it, four don't."""
    requests = asked((3,) * 12, 20)
    expected = alone(llama, requests)
    limits = Limits(32, 8)
    config = EngineConfig(128, 4, limits, adaptive=AdaptiveRule(0.1, 8, patience=1, dwell=0))
    with Engine(llama, config) as engine:
        now = 0.0

        def clock() -> float:
            nonlocal now
            now += 0.03 * len(engine.scheduler.running) / 2
            return 2 * now

        engine.clock = clock
        assert tokens(engine, requests) == expected
        assert engine.adaptive is not None
        assert (engine.adaptive.limit, engine.adaptive.ceiling) == (3, 4)
    assert limits.max_running == 8, "the caller's limits aren't the engine's"


def test_eos_ends_a_text(llama: Any) -> None:
    said = generated(llama, prompt(7), 12)
    eos = said[5]
    want = generated(llama, prompt(7), 12, eos=eos)
    with Engine(llama, EngineConfig(64, 4, Limits(16, 4))) as engine:
        outcome = engine.run([Request("a", prompt(7), 12, frozenset([eos]))])["a"]
    assert (outcome.tokens, outcome.reason) == (want, "eos")
    assert len(want) < 12


@pytest.mark.parametrize(
    ("said", "ids"), [(None, set()), (3, {3}), ([3, 5], {3, 5})], ids=["none", "one", "several"]
)
def test_eos_ids(llama: Any, said: Any, ids: set[int]) -> None:
    before, llama.generation_config.eos_token_id = llama.generation_config.eos_token_id, said
    assert eos_ids(llama) == ids
    llama.generation_config.eos_token_id = before


def test_half_precision_keeps_its_dtype() -> None:
    model = build("llama").bfloat16()
    with Engine(model, EngineConfig(64, 4, Limits(16, 4))) as engine:
        ended = engine.run(asked())
        assert {plane.dtype for plane in engine.pages.planes} == {torch.bfloat16}
    assert {one.reason for one in ended.values()} == {"length"}


IN_PAGES = tuple(
    name
    for name, one in SCHEMES.items()
    if one.flush == 1 and not (one.window or one.sinks or one.high_layers or one.keys.floats)
)
"""Every scheme that stores each token by itself, as codes."""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", IN_PAGES)
def test_pages_of_codes_say_what_a_quantized_cache_says(llama: Any, scheme: str) -> None:
    """Codes of each token by itself don't depend on chunks, swaps or who else is there."""
    requests = asked((3, 12, 9), 8)
    expected = {
        one.name: generated(llama, one.prompt, 8, cache=QuantizedCache(scheme_named(scheme), 2))
        for one in requests
    }
    config = EngineConfig(12, 4, Limits(6, 3, reserve=0), host_pages=9, kv_scheme=scheme)
    with Engine(llama, config) as engine:
        assert tokens(engine, requests) == expected


@pytest.mark.parametrize(
    "scheme", [*(name for name in SCHEMES if name not in IN_PAGES), "int8+high0"]
)
def test_all_other_schemes_are_refused(llama: Any, scheme: str) -> None:
    """Catches one that was added since and neither runs nor is refused."""
    floats = "pages of codes hold no 16-bit floats"
    words = floats if "float" in scheme else "pages hold schemes that store every token by itself"
    with pytest.raises(ValueError, match=words):
        Engine(llama, EngineConfig(12, 4, kv_scheme=scheme))
    assert generated(llama, (1, 2), 1), "the model isn't given back"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"page_size": 1}, "page_size must be at least 2"),
        ({"host_pages": -1}, "host_pages must be at least 0"),
        ({"adaptive": AdaptiveRule(0.1, 9)}, "adaptive.most is 9; limits.max_running allows 8"),
        ({"eviction": "fifo"}, "no eviction policy 'fifo'"),
        ({"kv_scheme": "int9"}, "unknown KV scheme 'int9'"),
        ({"num_blocks": 1}, "num_blocks must be at least 2"),
    ],
    ids=str,
)
def test_bad_config(llama: Any, config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Engine(llama, EngineConfig(**{"num_blocks": 12, **config}))
    assert generated(llama, (1, 2), 1), "the model isn't given back"


def test_a_held_model_does_nothing_else(llama: Any) -> None:
    with Engine(llama, EngineConfig(12, 4)):
        with pytest.raises(ValueError, match="held by an engine"):
            generated(llama, (1, 2), 1)
        with pytest.raises(ValueError, match="held by an engine"):
            Engine(llama, EngineConfig(12, 4))
