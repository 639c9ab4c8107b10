"""Globs that match nothing are refused by name; those that match anything at all are not."""

import copy
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from quantwatch_kernels.formats import INT4, INT8
from quantwatch_kernels.quantize.api import quantize_
from quantwatch_kernels.quantize.recipe import LayerRule, PerChannel, Recipe, WeightSpec
from quantwatch_kernels.quantize.unmatched import own_globs

SPEC, OTHER = WeightSpec(INT8, PerChannel()), WeightSpec(INT4, PerChannel())
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, **changes)).eval()


def moe() -> Any:
    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    config = Qwen2MoeConfig(**SIZES, **HEADS, **experts, num_experts=3, num_experts_per_tok=2)
    return Qwen2MoeForCausalLM(config).eval()


def scopes(model: Any) -> dict[str, str]:
    """As the monitor names places: without the wrapper's name."""
    found = {path: path.removeprefix("model.") for path, _ in model.named_modules() if path}
    return found | {"lm_head": "head", "model.embed_tokens": "embedding"}


MISSPELT_RULES = {
    "layer.*.mlp.dwn_proj": "layers.0.mlp.down_proj|layers.1.mlp.down_proj|down_proj",
    "layers.2.*": "layers",
    "layers.0": "layers.0",
    "*.DOWN_PROJ": ".*",
    "embedding": ".*",
    "norm": ".*",
}


@pytest.mark.parametrize("weights", [OTHER, None], ids=["other", "kept"])
@pytest.mark.parametrize(("glob", "near"), MISSPELT_RULES.items(), ids=MISSPELT_RULES)
def test_a_rule_for_nothing_is_refused(glob: str, near: str, weights: Any) -> None:
    """Catches a layer that was to be kept and is quantized, and a whole layer named as a matrix."""
    recipe = Recipe(SPEC, layers=(LayerRule("*.up_proj", OTHER), LayerRule(glob, weights)))
    model = llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="matches nothing in the model") as caught:
        quantize_(model, recipe, scopes=scopes(model))
    assert f"recipe int8-channel: the rule {glob!r} matches" in str(caught.value)
    offered = str(caught.value).rpartition("are ")[2].rstrip(".").split(", ")
    assert near == ".*" or any(part in name for name in offered for part in near.split("|"))
    for name in offered:
        own = Recipe(SPEC, layers=(LayerRule(name, OTHER),))
        assert quantize_(llama(), own, scopes=scopes(model)).converted
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("glob", ["haed", "lm_haed", "layers.7.*", "layers.1", "router*", "heads"])
def test_an_exclusion_of_nothing_is_refused(glob: str) -> None:
    """Catches a misspelt head that is quantized with the rest."""
    model = llama()
    with pytest.raises(ValueError, match="matches nothing in the model") as caught:
        quantize_(model, Recipe(SPEC, exclude=("router", glob)), scopes=scopes(model))
    assert f"the exclusion {glob!r} matches" in str(caught.value)


EXCLUSIONS = ["head", "router", "lm_head", "*norm*", "norm", "embedding", "embed_tokens", "q_proj",
              "layers.0.*", "layers.[01].mlp.*", "model.layers.1.self_attn.o_proj", "*"]  # fmt: skip


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("glob", EXCLUSIONS)
def test_an_exclusion_of_anything_is_taken(glob: str, tied: bool) -> None:
    """Catches a check that refuses names of norms, of tied heads, of paths and of last parts."""
    model = llama(tie_word_embeddings=tied)
    recipe = Recipe(SPEC, exclude=(glob,))
    if glob == "*":
        with pytest.raises(ValueError, match="would convert no layer"):
            quantize_(model, recipe, scopes=scopes(model))
    else:
        assert quantize_(model, recipe, scopes=scopes(model)).converted


RULES = ["head", "q_proj", "layers.0.*", "model.layers.1.*", "*.mlp.down_proj", "*"]


@pytest.mark.parametrize("glob", RULES)
def test_a_rule_for_anything_is_taken(glob: str) -> None:
    """Catches a check that only knows scopes, or forgets what is excluded or tied."""
    for tied in (False, True):
        model = llama(tie_word_embeddings=tied)
        recipe = Recipe(SPEC, layers=(LayerRule(glob, OTHER),))
        assert quantize_(model, recipe, scopes=scopes(model)).converted


EXPERTS = ["*.experts.*", "*.experts.down_proj", "*.experts.1.gate_up_proj", "*.shared_expert.*"]


@pytest.mark.parametrize("glob", EXPERTS)
def test_experts_can_be_named(glob: str) -> None:
    """Catches stacked experts, which are no modules of their own."""
    for recipe in (Recipe(SPEC, exclude=(glob,)), Recipe(SPEC, layers=(LayerRule(glob, None),))):
        model = moe()
        assert quantize_(model, recipe, scopes=scopes(model)).converted
    with pytest.raises(ValueError, match=r"'\*\.experts\.3\.\*' matches nothing"):
        quantize_(moe(), Recipe(SPEC, exclude=("*.experts.3.*",)))


def test_defaults_may_match_nothing() -> None:
    """Catches a plain recipe that fails on a model without routers, or without a head."""
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4)).eval()
    for model in (llama(), gpt2, gpt2.transformer):
        assert quantize_(model, Recipe(SPEC)).converted


def test_a_module_is_named_by_what_it_holds() -> None:
    """Catches experts that aren't excluded with their module, and globs that match nothing."""
    model = moe()
    for path, module in model.named_modules():
        globs = own_globs(path, module)
        assert bool(globs) == bool(list(module.parameters(recurse=False)))
        if globs:
            report = quantize_(copy.deepcopy(model), Recipe(SPEC, exclude=tuple(globs)))
            assert not [n for n in report.converted if n == path or n.startswith(f"{path}.")]
