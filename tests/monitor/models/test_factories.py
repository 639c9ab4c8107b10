"""Models from the user's own code."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quantwatch.config.variants import VariantConfig
from quantwatch.errors import ModelError

FACTORY = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def build():
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=300)).to(torch.bfloat16)

def pair():
    return build(), "a tokenizer"

def nothing():
    return 7

def breaks():
    raise RuntimeError("no weights today")

value = 1
"""


@pytest.fixture
def factory_name(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """Write a factory module under a name of its own (imports are cached per process)."""
    name = f"factory_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(FACTORY)
    return name


def test_factory_decides_its_dtype(factory_name: str, load: Any) -> None:
    """Catches the default dtype being forced on a module that chose another."""
    own = load(factory=f"{factory_name}:build", allow_code=True)
    cast = load(factory=f"{factory_name}:build", allow_code=True, dtype="float32")
    assert (own.dtype, own.tokenizer, own.num_tokens) == (torch.bfloat16, None, 300)
    assert cast.dtype == torch.float32
    assert own.variant.fingerprint.weights_sha == cast.variant.fingerprint.weights_sha


def test_a_stored_variant_still_lets_its_factory_decide() -> None:
    """Catches a default that a queue's dump turns into a wish: every queued factory in float32."""
    written = VariantConfig(factory="module:build", allow_code=True)
    stored = VariantConfig.model_validate_json(written.model_dump_json())
    assert stored.dtype is None
    assert stored.loading_dtype == "float32"


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ("{}:pair", r"its tokenizer, a str, has no get_vocab\(\)"),
        ("{}:nothing", "returned int; a torch.nn.Module or"),
        ("{}:breaks", "failed: no weights today"),
        ("{}:absent", "has no function 'absent'"),
        ("{}:value", "has no function 'value'"),
        ("{}_elsewhere:build", "can't import"),
    ],
    ids=["no tokenizer", "returns int", "raises", "no such name", "no function", "no module"],
)
def test_bad_factory(spec: str, wanted: str, factory_name: str, load: Any) -> None:
    """Catches a traceback from the user's module, or a guess at what was meant."""
    with pytest.raises(ModelError, match=wanted):
        load(factory=spec.format(factory_name), allow_code=True)
