"""A candidate that is served through a quantized KV cache, or attends in int8."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tests.monitor.tiny_models import byte_tokenizer, save_byte_model
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from quantwatch.config.recipe_parts import CalibrationConfig
from quantwatch.config.schema import VariantConfig
from quantwatch.config.serving import KV_CACHES, Int8Attention, ServeConfig
from quantwatch.errors import ModelError
from quantwatch.models.fingerprints import serve_sha
from quantwatch.models.loaded import LoadedModel
from quantwatch.models.loading import load_variant
from quantwatch.models.recipes import CalibrationInputs
from quantwatch.models.serving import serve
from quantwatch.telemetry import canonical_sha
from quantwatch_kernels.serve.attention_int8 import ATTENTIONS
from quantwatch_kernels.serve.int8_single_pass import attention_in_int8
from quantwatch_kernels.serve.kv_scheme import SCHEMES, scheme_named
from quantwatch_kernels.serve.kv_single_pass import calibrate_gains, quantized_kv

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


@pytest.mark.parametrize(
    "name",
    [
        "int4", "int4+high0", "int4+high0,1+sinks4+window0", "int4+r4+top2", "int2+gain", "int4+x",
        "int4+", "int4+high", "int4+high,1", "int4+r0", "int4+top0", "int4+top00", "int4+r04",
        "int4+r4+r8", "int4+gain+gain", "int4+gain4", "int4+sinks-1", "int4+r٤", "float16",
        "float16+r4", "float16+top4", "float16+gain", "float16+sinks4", "int5", "", "+r4",
    ],
)  # fmt: skip
def test_configuration_and_kernels_read_names_alike(name: str) -> None:
    """Catches a name that a check takes and the kernels refuse, or the other way round."""
    texts = {"calibration": {"suite": {"name": "core-v1"}}} if "gain" in name else {}

    def taken(read: Any) -> bool:
        try:
            read()
        except ValueError:
            return False
        return True

    configured = taken(lambda: ServeConfig.model_validate({"kv_cache": name, **texts}))
    assert configured == taken(lambda: scheme_named(name))


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
    with pytest.raises(ModelError, match=r"serve\.attention = .int8-both.: Linear is no model of"):
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
    module, served = nn.Linear(2, 2), loaded(folder, serve={"kv_cache": "int4"})
    told = {
        "dtype": "torch.float32",
        "device": "cpu",
        "attention": None,
        "execution": "dequantized",
    }
    expected = canonical_sha({**told, "serve": {"kv_cache": "int4"}})
    assert serve_sha(module, torch.float32, "cpu", "dequantized", {"kv_cache": "int4"}) == expected
    execution = served.variant.execution
    sha = serve_sha(served.module, torch.float32, "cpu", execution, {"kv_cache": "int4"})
    assert served.variant.fingerprint.serve_sha == sha


def test_experts_as_codes(tmp_path: Path) -> None:
    """Catches experts that are written down and stay floats, and a size that is the plain one's."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = MixtralConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4
    )
    model = MixtralForCausalLM(config)
    model.save_pretrained(tmp_path / "m")
    byte_tokenizer().save_pretrained(tmp_path / "m")
    plain, served = loaded(tmp_path), loaded(tmp_path, serve={"experts": "int4"})
    both = loaded(tmp_path, serve={"experts": "int4", "kv_cache": "int4"})
    with torch.no_grad():
        one, two, three = (m.module(IDS, use_cache=False).logits for m in (plain, served, both))
    assert not torch.equal(one, two)
    assert not torch.equal(two, three)
    before, after = plain.variant.size_bytes, served.variant.size_bytes
    assert before is not None
    assert after is not None
    assert after == sum(v.numel() * v.element_size() for v in served.module.state_dict().values())
    assert served.variant.bits_per_weight == pytest.approx(32 * after / before)
    assert served.variant.source["serve"] == {"experts": "int4"}
    assert plain.variant.fingerprint.serve_sha != served.variant.fingerprint.serve_sha
    assert len(both.variant.notes) == len(served.variant.notes) + 1


def test_a_dense_model_has_no_experts(folder: Path) -> None:
    with pytest.raises(
        ModelError, match=r"serve.experts = 'int8': LlamaForCausalLM has no stacked"
    ):
        loaded(folder, serve={"experts": "int8"})


def test_gains_are_calibrated_on_the_texts_that_are_named(folder: Path) -> None:
    """Catches gains that nobody calibrates, and a digest that doesn't know what was read."""
    seen: list[CalibrationConfig] = []

    def calibrate(config: CalibrationConfig, module: nn.Module, _: Any) -> CalibrationInputs:
        seen.append(config)
        assert isinstance(module, nn.Module)
        return CalibrationInputs([IDS.roll(config.skip, 1)], ("calibration: a note",))

    found = []
    for skip in (0, 3):
        serve_config: Any = {
            "kv_cache": "int2-plain+gain",
            "calibration": {"suite": {"name": "core-v1"}, "skip": skip},
        }
        config = VariantConfig(model=str(folder / "m"), serve=serve_config)
        cache_dir = folder / "cache"
        found.append(
            load_variant("c", config, base_dir=folder, cache_dir=cache_dir, calibrate=calibrate)
        )
    assert [config.skip for config in seen] == [0, 3]
    plain = loaded(folder)
    scheme = scheme_named("int2-plain+gain")
    gains = calibrate_gains(plain.module, scheme, [IDS])
    with torch.no_grad(), quantized_kv(plain.module, scheme, gains=gains):
        expected = plain.module(IDS, use_cache=False).logits
    with torch.no_grad():
        assert torch.equal(found[0].module(IDS, use_cache=False).logits, expected)
    shas = {one.variant.fingerprint.serve_sha for one in found}
    assert len(shas) == 2
    assert torch.equal(found[0].calibrated_on[0], IDS)
    assert "calibration: a note" in found[0].variant.notes


def test_a_gain_needs_somebody_who_reads(folder: Path) -> None:
    """Catches a cache that runs without its gains."""
    serve_config = {"kv_cache": "int4+gain", "calibration": {"suite": {"name": "core-v1"}}}
    with pytest.raises(ModelError, match="needs calibration texts, which nobody gave"):
        loaded(folder, serve=serve_config)
    with pytest.raises(ModelError, match=r"'int4\+gain': no calibration text has passed"):
        serve(loaded(folder).module, ServeConfig.model_validate(serve_config), ())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("int4-plain+top2", " and 8.000 in host memory at 512 tokens"),
        ("int8-plain+high0", "KV cache int8-plain+high0: 13.500 bits per cached number at 512"),
        ("int8-policy", "KV cache int8-policy: "),
    ],
)
def test_what_is_said_of_compensation(folder: Path, name: str, said: str) -> None:
    """Catches high layers and fetched pages that cost nothing."""
    assert any(said in note for note in loaded(folder, serve={"kv_cache": name}).variant.notes)
