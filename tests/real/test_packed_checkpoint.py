"""The plug-in on the real model: packed, saved, loaded again, and measured as a candidate."""

from pathlib import Path
from typing import Any

import platformdirs
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quantwatch.config.schema import VariantConfig
from quantwatch.models import fingerprints
from quantwatch.models.gguf_cache import converted_folder
from quantwatch.models.loading import load_variant
from quantwatch.models.quiet import quiet
from quantwatch.models.sources import resolve_source
from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.hf_quantizer import QuantwatchConfig
from quantwatch_kernels.quantize.packed_embedding import TiedHead
from quantwatch_kernels.quantize.recipe import PerGroup, Recipe, WeightSpec

pytestmark = [pytest.mark.model, pytest.mark.slow]
CACHE = Path(platformdirs.user_cache_dir("quantwatch"))
RECIPE = Recipe(
    WeightSpec(INT_FORMATS["int5"], PerGroup(64), scale_dtype=torch.bfloat16),
    embedding=WeightSpec(INT_FORMATS["int6"], PerGroup(64), scale_dtype=torch.bfloat16),
)
IDS = torch.arange(100, 132)[None]


@pytest.fixture(scope="module")
def plain() -> Path:
    source = resolve_source(VariantConfig(model="smollm2-135m"), Path.cwd())
    return converted_folder(source.path, fingerprints.file_sha(source.path, CACHE), CACHE)


def test_round_trip_of_the_real_model(plain: Path, tmp_path: Path) -> None:
    """Catches what only real sizes show: 576 columns, short groups, 49152 tied ids."""
    with quiet():
        settings: dict[str, Any] = {"dtype": torch.float32}
        first = AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=QuantwatchConfig(RECIPE), **settings
        )
        report = first.hf_quantizer.report
        first.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path, **settings)
    assert len(report.converted) == 30 * 7 + 1
    assert [name for name, _ in report.skipped] == ["head"]
    assert not report.fallbacks
    assert isinstance(again.get_output_embeddings(), TiedHead)
    a, b = first.state_dict(), again.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())
    with torch.no_grad():
        logits = again(IDS).logits
        assert torch.equal(first(IDS).logits, logits)
    stored = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    # What quantize_ counts and no file holds: the rotary frequencies.
    computed = sum(buffer.nbytes for _, buffer in again.named_non_persistent_buffers())
    assert stored == report.size_bytes - computed
    config = VariantConfig(model=str(tmp_path))
    candidate = load_variant("packed", config, base_dir=tmp_path, cache_dir=tmp_path / "cache")
    assert candidate.variant.size_bytes == stored
    assert candidate.variant.bits_per_weight == pytest.approx(report.bits_per_weight, rel=1e-5)
    with torch.no_grad():
        assert torch.equal(candidate.module(IDS).logits, logits)
