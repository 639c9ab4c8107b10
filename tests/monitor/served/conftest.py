"""A tiny model, prompts, and a server that runs an int8 copy of it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.monitor.served.front_end import FrontEnd
from tests.monitor.tiny_models import save_word_model

from quantwatch.config.schema import CheckConfig, VariantConfig
from quantwatch.models.loading import load_variant
from quantwatch.pipeline import RunRequest

NUM_WORDS = 96
WORDS = [f"w{i}" for i in range(NUM_WORDS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and twelve prompts."""
    folder = tmp_path_factory.mktemp("served")
    save_word_model(folder / "tiny", NUM_WORDS, scale=5.0)
    texts = [" ".join(WORDS[(i * 5) % 70 : (i * 5) % 70 + 6 + i]) for i in range(12)]
    (folder / "prompts.json").write_text(json.dumps(texts))
    return folder


@pytest.fixture(scope="module")
def int8(folder: Path) -> Any:
    """The module that is served: the same weights, in int8 per channel."""
    config = VariantConfig(model=str(folder / "tiny"), recipe="int8-channel")
    return load_variant("int8", config, base_dir=folder, cache_dir=folder / "cache").module


@pytest.fixture
def server(int8: Any) -> Iterator[FrontEnd]:
    front_end = FrontEnd(int8, texts=tuple(WORDS))
    yield front_end
    front_end.close()


Request = Callable[..., RunRequest]


@pytest.fixture
def request_of(folder: Path, server: FrontEnd) -> Request:
    """Return a check with a served candidate, and others beside it."""

    def build(*others: dict[str, Any], api: str = "vllm", **settings: Any) -> RunRequest:
        rules = settings.pop("rules", [])
        lens = settings.pop("lens_positions", 8)
        memory = settings.pop("memory", "resident")
        reference = {"model": "tiny", **settings.pop("reference", {})}
        served = {"url": server.url, "api": api, "top_k": 10, **settings}
        check = CheckConfig.model_validate(
            {
                "reference": reference,
                "memory": memory,
                "candidates": [{"name": "served", "served": served}, *others],
                "suite": {"files": ["prompts.json"]},
                "rules": rules,
                "lens_positions": lens,
                # Nothing of a server is isolated, and the floor is of the reference.
                "isolated_fraction": 0,
            }
        )
        return RunRequest("served", check, folder, folder / "cache")

    return build
