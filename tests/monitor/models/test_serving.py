"""A candidate that is served through a quantized KV cache, or attends in int8."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tests.monitor.tiny_models import save_byte_model
from torch import nn

from quantwatch.config.schema import VariantConfig
from quantwatch.config.serving import KV_CACHES, Int8Attention, ServeConfig
from quantwatch.errors import ModelError
from quantwatch.models.fingerprints import serve_sha
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.loading import load_variant
from quantwatch.models.serving import serve
from quantwatch.telemetry import canonical_sha
from quantwatch_kernels.serve.attention_int8 import ATTENTIONS
from quantwatch_kernels.serve.int8_single_pass import attention_in_int8
from quantwatch_kernels.serve.kv_scheme import SCHEMES
from quantwatch_kernels.serve.kv_single_pass import quantized_kv

IDS = torch.tensor([[7, 99, 3, 250, 17, 42, 8, 91, 5, 6, 77, 1]])


def loaded(folder: Path, **settings: Any) -> LoadedModel:
    config = VariantConfig(model=str(folder / "m"), **settings)
    return load_variant("c", config, base_dir=folder, cache_dir=folder / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_byte_model(tmp_path / "m", scale=4.0)
    return tmp_path


def test_the_names_are_those_of_the_kernels() -> None:
    """Catches a cache that can't be named in a check, and a name that leads nowhere."""
    assert list(KV_CACHES) == list(SCHEMES)
    assert get_args(Int8Attention) == tuple(ATTENTIONS)


def test_it_runs_through_the_cache(folder: Path) -> None:
    """Catches a choice that is written down and not carried out, or is another fingerprint's."""
    plain, served = loaded(folder), loaded(folder, serve={"kv_cache": "int4-plain"})
    with torch.no_grad():
        expected = plain.module(IDS, use_cache=False).logits
        found = served.module(IDS, use_cache=False).logits
        with quantized_kv(plain.module, SCHEMES["int4-plain"]):
            through = plain.module(IDS, use_cache=False).logits
    assert torch.equal(found, through)
    assert not torch.allclose(found, expected, atol=1e-3)
    assert plain.variant.fingerprint.serve_sha != served.variant.fingerprint.serve_sha
    assert plain.variant.fingerprint.weights_sha == served.variant.fingerprint.weights_sha
    assert served.variant.source["serve"] == {"kv_cache": "int4-plain"}
    assert "serve" not in plain.variant.source
    note = "KV cache int4-plain: 6.500 bits per cached number at 512 tokens, attention in float32"
    assert note in served.variant.notes


def test_layers_in_full_precision(folder: Path) -> None:
    """Catches a suffix that is lost on the way: with all layers high nothing is quantized."""
    plain = loaded(folder, attention="eager")
    served = loaded(folder, serve={"kv_cache": "int2-plain+high0,1"})
    with torch.no_grad():
        one, other = (each.module(IDS, use_cache=False).logits for each in (plain, served))
    assert torch.allclose(one, other, atol=1e-5)


def test_what_can_not_be_served(folder: Path) -> None:
    """Catches a layer that isn't there, and a module without attention, as internal errors."""
    with pytest.raises(ModelError, match=r"serve.kv_cache = 'int4\+high9': layers \[9\] are to"):
        loaded(folder, serve={"kv_cache": "int4+high9"})
    with pytest.raises(ModelError, match="Linear is no model of transformers"):
        serve(nn.Linear(2, 2), ServeConfig(kv_cache="int8"))
    with pytest.raises(ModelError, match="serve.attention = 'int8-both': Linear is no model of"):
        serve(nn.Linear(2, 2), ServeConfig(attention="int8-both"))


def test_it_attends_in_int8(folder: Path) -> None:
    """Catches a choice that is written down and not carried out, or is another fingerprint's."""
    plain, served = loaded(folder), loaded(folder, serve={"attention": "int8-smooth"})
    both = loaded(folder, serve={"attention": "int8-both"})
    with torch.no_grad():
        expected, found, near = (
            each.module(IDS, use_cache=False).logits for each in (plain, served, both)
        )
        with attention_in_int8(plain.module, ATTENTIONS["int8-smooth"]):
            through = plain.module(IDS, use_cache=False).logits
    assert torch.equal(found, through)
    assert float((near - expected).norm()) < 1e-3 * float((found - expected).norm())
    assert len({each.variant.fingerprint.serve_sha for each in (plain, served, both)}) == 3
    assert served.variant.source["serve"] == {"attention": "int8-smooth"}
    note = "attention int8-smooth: scores from int8 codes, each text quantized at once"
    assert note in served.variant.notes


def test_the_fingerprint_of_a_cache_is_what_it_was(folder: Path) -> None:
    """Catches a new key of `serve` that makes every stored baseline of a cache another one."""
    module, config = nn.Linear(2, 2), ServeConfig(kv_cache="int4")
    told = {"dtype": "torch.float32", "device": "cpu", "attention": None, "execution": "dequantized"}
    expected = canonical_sha({**told, "serve": {"kv_cache": "int4"}})
    assert serve_sha(module, torch.float32, "cpu", "dequantized", config) == expected
