"""A prompt in chunks gives what one pass over it gives: the values, the places, the proofs."""

from typing import Any

import numpy as np
import pytest
import torch

from quantwatch.capture.plan import CapturePlan
from quantwatch.domain import Scope
from quantwatch.errors import CaptureError, ModelError

PLAN = CapturePlan(batch_tokens=64, lens_positions=32, isolated_fraction=1.0, worst_positions=2)
_FLOAT32_INSIDE = {"bloom", "deepseek-v3", "gemma2"}
"""Their softmax or their router is float32 whatever the model is."""
_EVERYWHERE = {"llama", "gpt2", "gemma2", "gemma3", "deepseek-v3", "bloom", "opt", "mixtral"}


def joined(captured: Any, prompt: int) -> dict[tuple[str, str, str], dict[int, float]]:
    """Return (metric, scope, role) → position → value of one prompt, from all its pieces."""
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    for observation in captured.sink.observations:
        if observation.prompt != prompt:
            continue
        for matrix in observation.matrices:
            count, at = matrix.values.shape[1], matrix.positions
            start = observation.offset or 0
            where = np.arange(start, start + count) if at is None else at
            for scope, row in zip(matrix.scopes, matrix.values, strict=True):
                kept = found.setdefault((matrix.metric, scope, matrix.role), {})
                assert not kept.keys() & set(where.tolist()), "a position came twice"
                kept |= dict(zip(where.tolist(), row.tolist(), strict=True))
    return found


def with_chunk(size: int | None, **changes: Any) -> CapturePlan:
    names = {name: getattr(PLAN, name) for name in PLAN.__slots__}
    return CapturePlan(**{**names, **changes, "prefill_chunk": size})


def doubled(kit: Any, kind: str, amount: float = 0.01) -> tuple[Any, dict[str, Any]]:
    """Return a model and a candidate that compute in float64; logits are float32, as the heads'."""
    model = kit.build(kind)
    if kind in ("mixtral", "deepseek-v3"):
        model.set_experts_implementation("eager")  # the others know no float64
    pair = model, kit.perturb(model, amount)
    reference, candidate = (kit.load(each.double(), dtype=torch.float32) for each in pair)
    return reference, {"c": candidate}


def assert_equal(ours: dict[Any, Any], theirs: dict[Any, Any], taps: float = 1e-9) -> None:
    """Hold everything but isolated errors to `taps`, what comes from float32 logits to 1e-5."""
    ours, theirs = (
        {key: row for key, row in each.items() if key[0] != "isolated_error"}
        for each in (ours, theirs)
    )
    assert ours.keys() == theirs.keys()
    for key, row in theirs.items():
        assert ours[key].keys() == row.keys(), key
        a, b = (np.array([each[at] for at in sorted(row)]) for each in (ours[key], row))
        from_logits = key[1] in ("model", "head") or key[0] == "lens_kl" or "topk" in key[0]
        tolerance = 1e-5 if from_logits else taps
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance / 10, err_msg=str(key))


@pytest.mark.parametrize("size", [1, 5, 8, 29])
def test_float64_chunks_equal_one_pass(kit: Any, size: int) -> None:
    """Would catch wrong positions, masks, targets or samples. 29 leaves one token in the last."""
    model, pair = doubled(kit, "llama")
    captured = (
        kit.capture(model, pair, kit.suite([30]), with_chunk(each)) for each in (None, size)
    )
    whole, pieces = (joined(each, 0) for each in captured)
    assert_equal(pieces, whole)


def test_extras_are_the_worst_of_the_whole_prompt(kit: Any) -> None:
    """Would catch a worst position per chunk, or one that a later chunk took the place of."""
    model, pair = doubled(kit, "llama")
    captured = (kit.capture(model, pair, kit.suite([40]), with_chunk(each)) for each in (None, 6))
    whole, pieces = (joined(each, 0) for each in captured)
    key = ("lens_kl", "layers.1", "extra")
    assert len(whole[key]) == 2
    assert pieces[key].keys() == whole[key].keys()


@pytest.mark.parametrize("kind", sorted(_EVERYWHERE))
def test_architectures_go_in_chunks(kit: Any, kind: str) -> None:
    """Would catch a sliding window, a latent cache or a learned position that counts from 0 again."""
    model, pair = doubled(kit, kind)
    suite = kit.suite([20])
    plans = (with_chunk(None, isolated_fraction=0), with_chunk(7, isolated_fraction=0))
    whole, pieces = (kit.capture(model, pair, suite, plan) for plan in plans)
    assert_equal(joined(pieces, 0), joined(whole, 0), 1e-5 if kind in _FLOAT32_INSIDE else 1e-9)
    assert pieces.report.num_forwards == {"reference": 4, "c": 4}  # the observer's and three
    for fired in pieces.report.firings.values():
        assert fired == {"reference": 4, "c": 4}


def test_only_long_prompts_go_in_chunks(kit: Any) -> None:
    """Would catch other numbers for prompts that are short enough: they are the same bits."""
    model = kit.build("llama")
    suite, pair = kit.suite([8, 30, 5, 7]), {"c": kit.perturb(model)}
    same = {"isolated_fraction": 0.3, "batch_tokens": 16}
    plans = (with_chunk(None, **same), with_chunk(16, **same))
    whole, pieces = (kit.capture(model, pair, suite, plan) for plan in plans)
    for prompt in (0, 2, 3):
        assert joined(pieces, prompt) == joined(whole, prompt)
    offsets = [o.offset for o in pieces.sink.observations if o.prompt == 1]
    assert offsets == [0, 16]
    assert pieces.report.chunked_prompts == 1
    assert pieces.steps.done == pieces.steps.total


def test_a_plan_over_a_suite_of_short_prompts_is_todays(kit: Any) -> None:
    """Would catch a baseline that stops being comparable though no number changed."""
    suite = kit.suite([8, 30])
    assert with_chunk(30).over(suite).sha == PLAN.sha
    assert with_chunk(29).over(suite).sha != PLAN.sha
    assert with_chunk(29).over(suite).sha != with_chunk(28).over(suite).sha
    assert PLAN.sha == CapturePlan.sha.fget(PLAN)  # type: ignore[attr-defined]


def test_isolated_errors_and_floor_are_of_the_first_chunk(kit: Any) -> None:
    """Would catch attention that is run again on a cache that already holds its tokens."""
    model, pair = doubled(kit, "llama")
    pieces, whole = (kit.capture(model, pair, kit.suite([30]), with_chunk(n)) for n in (12, None))
    ours, theirs = joined(pieces, 0), joined(whole, 0)
    for scope in ("layers.0", "layers.2.attention", "layers.1.mlp", "embedding"):
        key = ("isolated_error", scope, "sample")
        assert sorted(ours[key]) == list(range(12))
        for at, value in ours[key].items():
            assert value == pytest.approx(theirs[key][at], rel=1e-9, abs=1e-12)
    assert {o.candidate for o in pieces.floor.observations} >= {"reference"}
    assert max(pieces.floor.largest("reference", "rel_error").values()) < 1e-12


@pytest.mark.parametrize("start", [5, 8, 21])
def test_scoring_may_begin_in_any_chunk(kit: Any, start: int) -> None:
    """Would catch an empty chunk that fails, or positions that count from its start."""
    model, pair = doubled(kit, "llama")
    suite = kit.suite([26], score_start=start)
    whole, pieces = (kit.capture(model, pair, suite, with_chunk(size)) for size in (None, 8))
    ours, theirs = joined(pieces, 0), joined(whole, 0)
    assert_equal(ours, theirs)
    has_isolated = any(key[0] == "isolated_error" for key in ours)
    assert has_isolated == (start < 8)
    if start >= 8:
        assert "not measurable" in pieces.report.noise_floor_sources["threads"]


def test_first_nonfinite_value_is_the_prompts(kit: Any) -> None:
    """Would catch the first chunk's birth winning over an earlier layer's in a later chunk."""
    model = kit.build("llama")
    suite = kit.suite([30])
    ids = suite.prompts[0].token_ids
    candidate = kit.perturb(model)

    def spoil(_: Any, args: Any, output: Any) -> Any:
        changed = output.clone()
        changed[torch.tensor([[int(i) == ids[20] for i in args[0][0]]])] = float("nan")
        return changed

    candidate.model.embed_tokens.register_forward_hook(spoil)
    found = []
    for size in (None, 8):
        captured = kit.capture(
            model, {"c": candidate}, suite, with_chunk(size, isolated_fraction=0)
        )
        births = [o.first_nonfinite for o in captured.sink.observations if o.first_nonfinite]
        found.append((births, captured.report.first_nonfinite))
    assert found[0] == found[1]
    assert found[1][0][0].scope == Scope("embedding")


def test_routers_choices_add_up(kit: Any) -> None:
    """Would catch loads of one chunk only, or a router that is unknown because it fires per chunk."""
    model, pair = doubled(kit, "mixtral", 0.1)
    counts = []
    for size in (None, 7):
        captured = kit.capture(model, pair, kit.suite([30]), with_chunk(size, isolated_fraction=0))
        assert not captured.report.unrouted
        total: dict[str, Any] = {}
        for observation in captured.sink.observations:
            for load in observation.loads:
                total[load.scope] = total.get(load.scope, 0) + load.candidate
        counts.append({scope: value.tolist() for scope, value in total.items()})
    assert counts[0] == counts[1]
    assert sum(counts[0]["layers.0"]) == 60


@pytest.mark.parametrize(
    ("kind", "reason"), [("own", "takes no KV cache"), ("mamba", "carries a state")]
)
def test_models_without_a_kv_cache_are_refused(kit: Any, kind: str, reason: str) -> None:
    """Would catch numbers of a model that forgets everything between two chunks."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 8}
    heads = {"num_heads": 4, "head_dim": 16, "n_groups": 1, "expand": 2}
    built = Mamba2ForCausalLM(Mamba2Config(**sizes, **heads)) if kind == "mamba" else None
    model = kit.build("own") if built is None else built.eval()
    with pytest.raises(ModelError, match=reason):
        kit.capture(model, {"c": kit.perturb(model)}, kit.suite([30]), with_chunk(8))


def test_a_served_candidate_says_why_it_can_not(kit: Any) -> None:
    """Would catch an attention of whole texts that sees a chunk as a text of its own."""
    from quantwatch_kernels.serve.kv_scheme import scheme_named
    from quantwatch_kernels.serve.kv_single_pass import serve_through_

    model = kit.build("llama")
    served = kit.perturb(model, 0.0)
    serve_through_(served, scheme_named("int8"), gains=None)
    with pytest.raises(ModelError, match="whole texts in one pass, without a cache"):
        kit.capture(model, {"c": served}, kit.suite([30]), with_chunk(8))


def test_a_model_that_counts_wrongly_is_refused(kit: Any) -> None:
    """Would catch a cache that a model takes and ignores."""
    model = kit.build("llama")
    wrong = kit.perturb(model, 0.0)
    forward = wrong.forward

    def forgets(
        input_ids: Any = None, cache: Any = None, use_cache: Any = None, **more: Any
    ) -> Any:
        return forward(input_ids=input_ids, **more)

    wrong.forward = forgets
    with pytest.raises(ModelError, match="more than rounding"):
        kit.capture(model, {"c": wrong}, kit.suite([30]), with_chunk(8))


def test_caches_are_dropped(kit: Any) -> None:
    """Would catch a cache that lives on after its prompt, or after an interrupted one."""
    from quantwatch.capture.probe import Probe

    alive: list[Any] = []
    enter = Probe.__enter__

    def remember(self: Any) -> Any:
        alive.append(self)
        return enter(self)

    model = kit.build("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Probe, "__enter__", remember)
        kit.capture(model, {"c": kit.perturb(model)}, kit.suite([30]), with_chunk(8))
    assert len(alive) == 2
    assert all(probe.prefill is None for probe in alive)


def test_a_chunk_out_of_turn_is_refused(kit: Any) -> None:
    """Would catch a cache that holds other tokens than those before a chunk."""
    from quantwatch.capture.chunks import Chunk
    from quantwatch.capture.prefill import Prefill

    prompt = kit.suite([30]).prompts[0]
    prefill = Prefill(kit.load(kit.build("llama")), 30)
    prefill.options(Chunk(prompt, 0, 8))
    with pytest.raises(CaptureError, match="8 was due"):
        prefill.options(Chunk(prompt, 16, 24))


@pytest.mark.parametrize("size", [0, -3])
def test_no_chunk_is_empty(kit: Any, size: int) -> None:
    """Would catch an endless loop."""
    from quantwatch.capture.chunks import chunks_of

    with pytest.raises(ValueError, match="1 or more"):
        next(chunks_of(kit.suite([30]).prompts[0], size))
