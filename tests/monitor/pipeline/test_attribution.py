"""Attribution of a stored run: the same models again, shares by hand, and a recipe that passes."""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.monitor.tiny_models import SIZES, byte_tokenizer, save_word_model, word_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from quantwatch.config.load import parse
from quantwatch.config.recipes import RecipeConfig
from quantwatch.config.schema import CheckConfig
from quantwatch.domain import CandidateResult, Prompt, RunResult, Scope, Suite, Verdict
from quantwatch.errors import UserError
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.streaming.stream import LayerStream
from quantwatch.pipeline.attribution import (
    Wish,
    attribute_shares,
    chosen_prompts,
    restorable,
)
from quantwatch.pipeline.reloading import Reloaded, choose_candidate, reload
from quantwatch.pipeline.request import RunRequest
from quantwatch.pipeline.restoring import (
    Bench,
    own_recipe,
    restore,
    restored_recipe,
    smallest_prefix,
)
from quantwatch.pipeline.run import run_check
from quantwatch.report.attribution import lines

INT6 = {"weights": "int6", "granularity": "channel", "exclude": ["router"]}
INT3 = {"weights": "int3", "granularity": "group", "group_size": 8, "exclude": ["router"]}


class Silent:
    def start(self, stage: str, total_tokens: int) -> None: ...
    def advance(self, tokens: int) -> None: ...


def measure(folder: Path, *candidates: dict[str, Any], **more: Any) -> RunResult:
    check = {
        "reference": {"model": "tiny"},
        "candidates": [{"model": "tiny", **candidate} for candidate in candidates],
        "suite": {"files": ["prompts.json"]},
        **more,
    }
    config = parse(CheckConfig, check, "test")
    request = RunRequest("nightly", config, folder, folder / "cache")
    return run_check(request, database=None, progress=Silent())


@pytest.fixture(scope="module")
def run(folder: Path) -> RunResult:
    """A check that fails at a KL that some layers of the candidate exceed."""
    rule = {"name": "kl", "metric": "logit_kl", "threshold": 1e-12}
    return measure(folder, {"name": "int3", "recipe": INT3}, rules=[rule])


def reloaded(run: RunResult, folder: Path, name: str | None = None) -> Reloaded:
    return reload(run, choose_candidate(run, name), folder, folder / "cache")


def test_shares_of_a_run(run: RunResult, folder: Path) -> None:
    """Catches shares of other tokens than the run's, and a part that is another module's."""
    models = reloaded(run, folder)
    found = attribute_shares(models, Wish(tokens=10_000, detail="linear"))
    measured = run.candidates[0].find("logit_kl")
    assert measured is not None
    assert found.num_scored == measured.n
    assert found.kl == pytest.approx(measured.mean, rel=1e-3)
    assert found.num_boundaries == 4
    assert found.together_kl == found.kl
    assert found.notes == ()
    scopes = {part.scope: part for part in found.parts}
    assert {p.scope for p in found.parts if p.is_whole} == {
        "embedding", "layers.0", "layers.1", "final_norm", "head"
    }  # fmt: skip
    assert scopes[Scope("layers.1.mlp.down_proj")].kind == "linear"
    assert scopes[Scope("embedding")].kl == scopes[Scope("final_norm")].kl == 0
    for scope in ("layers.0", "layers.1.mlp", "layers.0.attention.q_proj", "head"):
        path = models.reference.anatomy.scopes_by_path
        where = next(p for p, s in path.items() if s == scope)
        theirs = models.candidate.module.get_submodule(where)
        own = models.reference.module.get_submodule(where)
        models.reference.module.set_submodule(where, theirs)
        changed = models.reference.module
        swapped = _logits(changed, models.suite)
        models.reference.module.set_submodule(where, own)
        expected = _kl(_logits(models.reference.module, models.suite), swapped)
        assert scopes[Scope(scope)].kl == pytest.approx(expected, rel=1e-3), scope


def _logits(model: Any, suite: Suite) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(torch.tensor([p.token_ids])).logits[0].double() for p in suite.prompts]


def _kl(reference: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    rows = [
        (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
        for p, q in zip(reference, other, strict=True)
    ]
    return torch.cat(rows).mean().item()


@pytest.mark.slow
def test_the_fewest_restored(folder: Path) -> None:
    """Catches a recipe that says something else than what was run, and a set with one too many."""
    plain = measure(folder, {"name": "int6", "recipe": INT6})
    models = reloaded(plain, folder)
    found = attribute_shares(models, Wish(tokens=10_000))
    order = [part.scope for part in found.ranked if part.kl > 0]
    assert len(order) == 3
    recipe = restored_recipe(own_recipe(models), [])
    runs = [Bench(models, Silent()).run(restored_recipe(recipe, order[:n])) for n in (1, 2)]
    kls = [one.find("logit_kl") for one in runs]
    one, two = (row.mean or 0 for row in kls if row is not None)
    assert 0 < two < one < found.kl
    rule = {"name": "kl", "metric": "logit_kl", "threshold": math.sqrt(one * two)}
    alone = {"name": "isolated-error-outlier", "enabled": False}  # whoever is left stands out
    strict = measure(folder, {"name": "int6", "recipe": INT6}, rules=[rule, alone])
    assert strict.candidates[0].verdict == Verdict.REGRESSION
    told: list[str] = []
    bench = Bench(reloaded(strict, folder), Silent(), tell=told.append)
    restored = restore(bench, found, strict.candidates[0].verdict, most=8)
    assert restored.scopes == tuple(order[:2]), told
    assert (restored.verdict, restored.is_smallest) == (Verdict.PASS, True)
    assert restored.kl == two
    assert restored.recipe is not None
    again = RecipeConfig.model_validate_json(json.dumps(restored.recipe))
    assert measure(folder, {"name": "int6", "recipe": again.model_dump(mode="json")},
                   rules=[rule, alone]).candidates[0].verdict == Verdict.PASS  # fmt: skip
    never = [{**rule, "threshold": 1e-12}]
    strictest = reloaded(measure(folder, {"name": "int6", "recipe": INT6}, rules=never), folder)
    nothing = restore(Bench(strictest, Silent()), found, Verdict.REGRESSION, most=8)
    assert (nothing.scopes, nothing.verdict, nothing.recipe) == ((), None, None)
    assert re.fullmatch(
        r"none is enough that leaves anything to quantize; 2 of 3 parts restored reach KL "
        r"\d\S+, verdict regression",
        nothing.words,
    )


def test_nothing_to_restore_and_nothing_that_helps(run: RunResult, folder: Path) -> None:
    """Catches a recipe that is written although the check passes, or never does."""
    models = reloaded(run, folder)
    found = attribute_shares(models, Wish(tokens=200))
    bench = Bench(models, Silent())
    passing = restore(bench, found, Verdict.PASS, most=8)
    assert (passing.scopes, passing.recipe, passing.num_tries) == ((), None, 0)
    short = restore(bench, found, Verdict.REGRESSION, most=1)
    assert (short.verdict, short.recipe) == (None, None)
    kl = bench.run(restored_recipe(own_recipe(models), restorable(models, found)[:2]))
    row = kl.find("logit_kl")
    assert row is not None
    assert short.words == (
        "none is found with the tries that are allowed (1); 2 of 3 parts restored reach KL "
        f"{row.mean:.4g}, verdict regression"
    )
    assert f"to restore: {short.words}" in lines(replace(found, restoration=short), run)
    assert "to restore: nothing (the check passes as it is)" in lines(
        replace(found, restoration=passing), run
    )


def test_restoring_everything_does_not_help(run: RunResult, folder: Path) -> None:
    """Catches a search that ends in "nothing to restore" although the check fails."""
    models = reloaded(run, folder)
    found = attribute_shares(models, Wish(tokens=60))

    class Same(Bench):
        """A bench on which restoring changes nothing."""

        def run(self, recipe: RecipeConfig) -> CandidateResult:
            return run.candidates[0]

    row = run.candidates[0].find("logit_kl")
    assert row is not None
    restored = restore(Same(models, Silent()), found, Verdict.REGRESSION, most=8)
    words = f"none is enough; all 3 parts restored reach KL {row.mean:.4g}, verdict regression"
    assert (restored.words, restored.num_tries, restored.is_smallest) == (words, 2, True)
    free = replace(found, parts=tuple(replace(part, kl=0.0) for part in found.parts))
    none = restore(Same(models, Silent()), free, Verdict.REGRESSION, most=8)
    assert none.words == "no part costs anything, so there is none to restore"
    assert none.named is None


def test_what_was_measured_must_be_there(run: RunResult, folder: Path, tmp_path: Path) -> None:
    """Catches shares of a model that has changed since, or of another suite, under an old run."""
    assert run.reference is not None
    print_ = replace(run.reference.fingerprint, weights_sha="ab" * 32)
    other = replace(run, reference=replace(run.reference, fingerprint=print_))
    with pytest.raises(UserError, match=r"reference is not what was measured: weights_sha was ababababab"):  # fmt: skip
        reloaded(other, folder)
    variant = run.candidates[0].variant
    assert variant is not None
    print_ = replace(variant.fingerprint, recipe_sha="")
    changed = replace(run.candidates[0], variant=replace(variant, fingerprint=print_))
    with pytest.raises(UserError, match=r"int3 is not what was measured: recipe_sha was empty, is"):
        reloaded(replace(run, candidates=(changed,)), folder)
    with pytest.raises(UserError, match=r"its suite 'prompts\.json' reads otherwise now"):
        reloaded(replace(run, suite_hash="0" * 64), folder)


def test_candidates_are_named(run: RunResult) -> None:
    """Catches the shares of whichever candidate came first."""
    two = replace(run, candidates=(run.candidates[0], replace(run.candidates[0], name="b")))
    assert choose_candidate(run, None).name == "int3"
    assert choose_candidate(two, "b").name == "b"
    with pytest.raises(UserError, match="name one with --candidate; measured were: int3, b"):
        choose_candidate(two, None)
    with pytest.raises(UserError, match="did not measure 'c'; measured were: int3"):
        choose_candidate(run, "c")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"recipe": INT3 | {"rotation": {"residual": True}}},
            r"layers\.0 can't be put into the reference: its hidden states are rotated",
        ),
        ({"dtype": "bfloat16"}, r"odd has no recipe that a layer could be left out of"),
    ],
    ids=["another basis", "another checkpoint"],
)
def test_candidates_that_are_refused(change: dict[str, Any], message: str, folder: Path) -> None:
    """Catches shares of layers that live in another basis, and a recipe for who has none."""
    run = measure(folder, {"name": "odd", **change})
    models = reloaded(run, folder)
    with pytest.raises(UserError, match=message):
        own_recipe(models) if "dtype" in change else attribute_shares(models, Wish(tokens=100))


def test_other_checkpoints_have_shares(folder: Path) -> None:
    """Catches an attribution that needs a recipe."""
    run = measure(folder, {"name": "half", "dtype": "bfloat16"})
    found = attribute_shares(reloaded(run, folder), Wish(tokens=60))
    assert all(part.kl > 0 for part in found.parts if part.kind == "layer")
    assert found.num_boundaries == 4


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often layers were read from files, by the number of the layer."""
    found: Counter[int] = Counter()
    read = LayerStream._read

    def counted(stream: LayerStream, index: int) -> None:
        found[index] += 1
        read(stream, index)

    monkeypatch.setattr(LayerStream, "_read", counted)
    return found


def test_streamed_layers_are_read_a_few_times(folder: Path, reads: Counter[int]) -> None:
    """Catches a layer that is read for every part, prompt or stub, and other figures than in memory."""
    save_word_model(folder / "deep", 96, scale=5.0, num_hidden_layers=4)
    deep = {"name": "it", "model": "deep", "recipe": INT6}
    found = []
    for memory in ("resident", "streamed"):
        run = measure(folder, deep, reference={"model": "deep"}, memory=memory)
        models = reloaded(run, folder)
        reads.clear()
        found.append(attribute_shares(models, Wish(tokens=30, detail="linear")))
    resident, streamed = found
    assert len(resident.parts) == 3 + 4 * 10
    assert streamed.num_prompts == resident.num_prompts > 1
    assert streamed.parts == resident.parts
    assert (streamed.kl, streamed.together_kl) == (resident.kl, resident.together_kl)
    # Its own pass, all parts together, part by part, of both models; and what is found out of each
    # about how its layers are called: layer 0, while the next is read.
    once = 2 * 3
    assert reads == {0: once + 2, 1: once + 2} | dict.fromkeys(range(2, 4), once)


class Elsewhere(LoadedModel):
    """A model on another device."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda:1")


def test_two_devices_are_refused(run: RunResult, folder: Path) -> None:
    """Catches torch's own error in the middle of the work."""
    models = reloaded(run, folder)
    candidate = models.candidate
    moved = Elsewhere(**{name: getattr(candidate, name) for name in LoadedModel.__slots__})
    with pytest.raises(UserError, match=r"int3 is on cuda:1, the reference on cpu: .*load both"):
        attribute_shares(replace(models, candidate=moved), Wish(tokens=60))


def test_prompts_are_whole_and_drawn() -> None:
    """Catches a prompt that is cut, a budget that is exceeded, and a choice that no seed repeats."""
    prompts = tuple(Prompt(i, "", "", tuple(range(5 + i)), ()) for i in range(20))
    suite = Suite("s", "", prompts)
    for seed in range(5):
        chosen = chosen_prompts(suite, 60, seed)
        assert chosen == chosen_prompts(suite, 60, seed)
        assert sum(len(p.token_ids) for p in chosen) <= 60
        assert [p.index for p in chosen] == sorted(p.index for p in chosen)
    assert len({tuple(p.index for p in chosen_prompts(suite, 60, s)) for s in range(5)}) > 1
    assert chosen_prompts(suite, 10**6, 0) == list(prompts)
    with pytest.raises(UserError, match="--tokens 4: the shortest prompt of the suite has 5"):
        chosen_prompts(suite, 4, 0)
    for tokens, seed in ((0, 0), (1, -1)):
        with pytest.raises(UserError, match="at least"):
            Wish(tokens=tokens, seed=seed)


@given(count=st.integers(0, 70), needed=st.integers(1, 80), most=st.integers(1, 8))
def test_halving_finds_the_fewest(count: int, needed: int, most: int) -> None:
    """Catches one too many, one too few, a set that was never run, and endless tries."""
    tried: list[int] = []

    def passes(size: int) -> bool:
        tried.append(size)
        return size >= needed

    found = smallest_prefix(count, passes, most)
    assert found.num_tries == len(tried) <= most
    if found.size is not None:
        assert found.size in tried
        assert found.size >= needed
    if found.is_smallest:
        assert found.size == (needed if needed <= count else None)
    if most >= math.ceil(math.log2(count + 1)):
        assert found.is_smallest


def test_restored_recipes_keep_what_else_they_say() -> None:
    """Catches a rule that loses to the recipe's own, a layer 1 that takes 10 along, lost keys."""
    recipe = RecipeConfig.model_validate_json(
        '{"weights": "uint4", "granularity": "channel", "embedding": {"weights": "int8", '
        '"granularity": "channel"}, "layers": [{"match": "layers.1.*", "weights": "int8"}]}'
    )
    found = restored_recipe(recipe, [Scope("layers.1"), Scope("embedding"), Scope("head")])
    assert [(rule.match, rule.weights) for rule in found.layers] == [
        ("layers.1.*", None), ("head", None), ("layers.1.*", "int8")
    ]  # fmt: skip
    assert found.embedding is None
    assert (found.weights, found.exclude) == ("uint4", recipe.exclude)
    assert restored_recipe(recipe, []) == recipe


@pytest.fixture(scope="module")
def mixture(folder: Path) -> None:
    """A mixture with a shared expert beside the tiny model."""
    torch.manual_seed(0)
    more = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32}
    sizes = SIZES | {"vocab_size": 96, "moe_intermediate_size": 16, **more}
    model: Any = Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes))
    model.to(torch.bfloat16).save_pretrained(folder / "mixture")
    word_tokenizer(96).save_pretrained(folder / "mixture")


_TEXTS = {"suite": {"files": ["prompts.json"]}, "limit": 4}


_OF_32 = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
STATEFUL: dict[str, dict[str, Any]] = {
    "mamba": _OF_32 | {"state_size": 8},
    "lfm2": _OF_32 | _HEADS | {"layer_types": ["conv", "full_attention"]},
    "jamba": _OF_32 | _HEADS | _EXPERTS
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "qwen3_next": _OF_32 | _HEADS | _EXPERTS
    | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "head_dim": 8}
    | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    | {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", STATEFUL)
def test_layers_whose_weights_are_read_and_never_called(family: str, folder: Path) -> None:
    """Catches a convolution that its block reads alone, which took all other shares with it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, bos_token_id=0, eos_token_id=1, **STATEFUL[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
    byte_tokenizer().save_pretrained(folder / family)
    candidate = {"name": "it", "model": family, "recipe": INT6}
    run = measure(folder, candidate, reference={"model": family})
    found = attribute_shares(reloaded(run, folder), Wish(tokens=60, detail="linear"))
    left_out = {note.partition(" ")[0] for note in found.notes if "never called" in note}
    assert any("conv" in scope for scope in left_out)
    assert not left_out & {part.scope for part in found.parts}
    assert found.together_kl == pytest.approx(found.kl, rel=1e-6)
    assert sum(part.kl for part in found.parts if part.kind == "linear") > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "left_out"),
    [
        ({"recipe": INT6, "execution": "reference"}, 0),
        ({"recipe": INT6 | {"weights": "uint4", "activations": {"format": "int8"}}}, 0),
        ({"recipe": INT6 | {"smooth": 0.5, "calibration": _TEXTS}}, 4),
        ({"serve": {"kv_cache": "int4"}}, 0),
        ({"serve": {"attention": "int8-both"}}, 0),
        ({"faults": [{"scope": "layers.1.mlp.down_proj", "scale": 1.5}]}, 0),
        ({"model": "mixture", "dtype": "bfloat16", "recipe": INT6}, 0),
    ],
    ids=["packed", "activations", "smoothed", "kv cache", "int8 attention", "fault", "16-bit moe"],
)
def test_candidates_of_every_kind(
    change: dict[str, Any], left_out: int, folder: Path, mixture: None
) -> None:
    """Catches a state outside of the modules that a swap leaves behind."""
    reference = {"model": "tiny"} | {k: change[k] for k in ("model", "dtype") if k in change}
    run = measure(folder, {"name": "it", **change}, reference=reference)
    found = attribute_shares(reloaded(run, folder), Wish(tokens=60, detail="part"))
    assert found.num_boundaries == 4
    assert found.kl > 0
    assert found.together_kl == pytest.approx(found.kl, rel=1e-6)
    assert len(found.notes) == left_out
    assert sum(part.kl for part in found.parts if part.is_whole) > 0
    if "faults" in change:
        culprits = {part.scope for part in found.parts if part.kl > 0}
        assert culprits == {"layers.1", "layers.1.mlp"}
