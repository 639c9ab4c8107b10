"""`quantwatch.compare` called wrongly, and what it leaves of the modules it was given."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import quantwatch
from quantwatch.domain import Verdict
from quantwatch.errors import ConfigError, ModelError, PromptError, UserError


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


class Wrapped(nn.Module):
    """One's own module around a model, with one of the usual results."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = tiny(), kind

    def forward(self, ids: Tensor) -> Any:
        logits = self.inner(ids, use_cache=False).logits
        return {"tensor": logits, "tuple": (logits, None), "list": [logits]}[self.kind]


def state(module: nn.Module) -> tuple[Any, ...]:
    """Everything about a module that measuring might change."""
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
    parts: list[Any] = list(module.modules())
    caches = [part.config.use_cache for part in parts if hasattr(part, "config")]
    modes = [(name, m.training, "forward" in vars(m)) for name, m in module.named_modules()]
    weights = [(n, p.requires_grad, p.grad, p.sum().item()) for n, p in module.named_parameters()]
    return hooks, caches, modes, weights


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(5, id="a number"),
        pytest.param(None, id="nothing"),
        pytest.param("hello", id="text"),
        pytest.param(["hello"], id="texts"),
        pytest.param({"input_ids": [1]}, id="a mapping"),
        pytest.param([[1], 2], id="rows and ids"),
        pytest.param([1, [2]], id="ids and rows"),
        pytest.param([1.5, 2], id="fractions"),
        pytest.param([2**70], id="a huge id"),
        pytest.param(torch.tensor(5), id="0-d"),
        pytest.param(torch.ones(2, 2, 2, dtype=torch.long), id="3-d"),
        pytest.param(torch.ones(3), id="float tensor"),
        pytest.param(torch.ones(3, dtype=torch.bool), id="bool tensor"),
        pytest.param(torch.ones(3, dtype=torch.long, device="meta"), id="meta tensor"),
        pytest.param(torch.ones(2, 2).to_sparse(), id="sparse tensor"),
        pytest.param(torch.zeros(0, 4, dtype=torch.long), id="no rows"),
        pytest.param(torch.zeros(2, 0, dtype=torch.long), id="empty rows"),
    ],
)
def test_what_is_no_token_id_is_refused_in_one_line(ids: Any) -> None:
    """Catches TypeErrors from inside, which name neither the argument nor what is wanted."""
    with pytest.raises(PromptError, match="token") as caught:
        quantwatch.compare(tiny(), tiny(), ids)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "ids",
    [
        range(1, 4),
        iter([1, 2, 3]),
        torch.tensor([1, 2, 3], dtype=torch.uint8),
        list(torch.arange(3)),
    ],
    ids=["range", "iterator", "uint8", "list of 0-d tensors"],
)
def test_any_integers_are_token_ids(ids: Any) -> None:
    """Catches a list of scalar tensors that is read as many prompts."""
    run = quantwatch.compare(tiny(), tiny(), ids)
    assert (run.num_prompts, run.num_tokens) == (1, 3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"zork": 1}, "quantwatch.compare: zork: unknown key; allowed: "),
        ({"lens_positions": -1}, "lens_positions: -1 is not allowed; allowed: 0 or more"),
        ({"threads": 10_000_000}, "threads: 10000000 is not allowed"),
        ({"rules": 5}, "rules: 5 is not allowed"),
        ({"rules": [{"name": "zork", "threshold": 1.0}]}, "rule 'zork' is unknown"),
        ({"suite": "core-v1"}, "suite is no setting"),
        ({"candidates": []}, "candidates is no setting"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_settings_are_refused_before_anything_is_measured(
    settings: dict[str, Any], words: str
) -> None:
    """Catches pydantic's own words, and a misspelt rule found after an hour of measuring."""
    module = nn.Identity()
    with pytest.raises(ConfigError, match=words):
        quantwatch.compare(module, module, [1], **settings)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (5, "reference: a torch.nn.Module is wanted, got 5"),
        (None, "reference: a torch.nn.Module is wanted, got None"),
        (LlamaForCausalLM, "reference: a torch.nn.Module is wanted, got <class"),
        (tiny().to("meta"), "on the meta device and hold no values"),
        (tiny().double(), "computes in float64; allowed: float32, bfloat16, float16"),
        (nn.Linear(2, 2), "torch.nn.modules.linear.Linear: Linear has no token embedding"),
    ],
    ids=["number", "None", "class", "meta", "float64", "no model"],
)
def test_what_can_not_be_measured_is_named(module: Any, words: str) -> None:
    """Catches an AttributeError from inside, or a float64 model that is said to be inconsistent."""
    with pytest.raises(ModelError, match=words):
        quantwatch.compare(module, tiny(), [1, 2])


@pytest.mark.parametrize("kind", ["tensor", "tuple", "list"])
def test_modules_of_ones_own(kind: str) -> None:
    """Catches a module without a configuration, or a result of another form, that is refused."""
    run = quantwatch.compare(Wrapped(kind), Wrapped(kind), [[1, 2, 3], [4, 5]])
    assert run.verdict == Verdict.PASS
    assert run.candidates[0].bit_equal


@pytest.mark.parametrize("fails", [False, True], ids=["measured", "refused"])
def test_modules_are_given_back_as_they_were(fails: bool) -> None:
    """Catches a training loop that goes on without dropout, cache or hooks after a comparison."""
    reference, candidate = tiny().train(), tiny().train()
    reference.model.layers[1].eval()
    reference.config.use_cache, candidate.config.use_cache = True, False
    candidate.model.embed_tokens.weight.requires_grad_(False)
    before = state(reference), state(candidate)
    if fails:
        with pytest.raises(UserError):
            quantwatch.compare(reference, candidate, [96])
    else:
        quantwatch.compare(reference, candidate, [1, 2, 3])
    assert (state(reference), state(candidate)) == before


def test_a_module_can_be_compared_with_itself() -> None:
    """Catches hooks of the two sides that meet on one object."""
    module = tiny()
    run = quantwatch.compare(module, module, [1, 2, 3])
    assert run.candidates[0].bit_equal
