"""Settings of served candidates: what is allowed beside them, and which rules reach them."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from quantwatch.alerts.overrides import out_of_reach, rules_for
from quantwatch.config.default_rules import DEFAULT_RULES
from quantwatch.config.load import load_config
from quantwatch.config.schema import CheckConfig, VariantConfig
from quantwatch.errors import ConfigError

SERVED = {"url": "http://127.0.0.1:8000", "api": "vllm"}


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://localhost:8000/v1", "http://localhost:8000"),
        ("https://llm.internal/team/v1/", "https://llm.internal/team"),
        (
            "http://vllm.default.svc.cluster.local:8000/",
            "http://vllm.default.svc.cluster.local:8000",
        ),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_urls_of_own_servers(url: str, base: str) -> None:
    served = VariantConfig.model_validate({"served": SERVED | {"url": url}}).served
    assert served is not None
    assert str(served.base) == base


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": "http://me:secret@host"}, "user or password"),
        ({"url": "http://host?key=secret"}, "a query"),
        ({"url": "http://host#part"}, "a fragment"),
        ({"url": "ftp://host"}, "neither https nor http"),
        ({"url": "http://host:6379"}, "another kind of service"),
        ({"url": "http://2130706433"}, "no dotted quad"),
        ({"url": "http://ho st"}, "a blank"),
        ({"api": "ollama"}, "vllm"),
        ({"top_k": 4}, "greater than or equal to 5"),
        ({"top_k": 2001}, "less than or equal to 2000"),
        ({"timeout_s": 0}, "greater than 0"),
        ({"token_env": "not a name"}, "pattern"),
        ({"key": "sk-1"}, "Extra inputs"),
    ],
)
def test_settings_that_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words) as caught:
        VariantConfig.model_validate({"served": SERVED | change})
    shown = " ".join(one["msg"] for one in caught.value.errors())
    assert "secret" not in shown


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": "int8-channel"}, {"device": "cuda"}, {"attention": "eager"},
        {"faults": [{"scope": "layers.0", "scale": 2}]}, {"serve": {"kv_cache": "int8"}},
        {"revision": "main"}, {"allow_code": True},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_what_the_server_decides_is_refused_beside_it(change: dict[str, Any]) -> None:
    """Catches a recipe that is thought to be measured and is not."""
    with pytest.raises(ValidationError, match=f"{next(iter(change))}: the server decides that"):
        VariantConfig.model_validate({"served": SERVED} | change)


def test_the_dtype_of_its_head_may_be_told() -> None:
    assert VariantConfig.model_validate({"served": SERVED, "dtype": "bfloat16"}).served


@pytest.mark.parametrize("other", [{"model": "m"}, {"factory": "a:b", "allow_code": True}])
def test_a_variant_has_one_source(other: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="exactly one of model, factory and served"):
        VariantConfig.model_validate({"served": SERVED} | other)


def check(**settings: Any) -> CheckConfig:
    return CheckConfig.model_validate(
        {
            "reference": {"model": "m"},
            "candidates": [
                {"name": "s", "served": SERVED},
                {"name": "c", "served": SERVED | {"api": "llamacpp"}},
                {"name": "l", "model": "m"},
            ],
            "suite": {"files": ["p.txt"]},
        }
        | settings
    )


def test_a_reference_runs_here() -> None:
    with pytest.raises(ValidationError, match="all of the reference's logits are needed"):
        check(reference={"served": SERVED})


def test_each_candidate_has_the_rules_that_reach_it() -> None:
    """Catches a served candidate that is inconclusive for ever: its layers are never measured."""
    whole = check(rules=[{"name": "tv", "metric": "tv", "threshold": 0.1}])
    served, llamacpp, local = (
        {rule.name for rule in rules_for(whole, each)} for each in whole.candidates
    )
    common = {"nonfinite", "top1-agreement", "baseline-top1-agreement"}
    assert served == common | {"baseline-served-kl", "perplexity-ratio"}
    assert llamacpp == common | {"baseline-served-kl"}
    assert local == {rule.name for rule in DEFAULT_RULES} - {"baseline-served-kl"} | {"tv"}
    assert "layer-kl" in out_of_reach(whole, whole.candidates[0])
    assert "tv" in out_of_reach(whole, whole.candidates[0])
    assert out_of_reach(whole, whole.candidates[2]) == ()


TOML = """
schema_version = 1
[checks.c]
suite = {{ files = ["p.txt"] }}
reference = {{ model = "m" }}
[[checks.c.candidates]]
name = "one"
{source}
rules = [{rule}]
"""
VLLM = 'served = { url = "http://127.0.0.1:8000", api = "vllm" }'
LLAMACPP = VLLM.replace("vllm", "llamacpp")


@pytest.mark.parametrize(
    ("source", "rule", "words"),
    [
        (
            VLLM,
            '{ name = "x", metric = "logit_kl", threshold = 1.0 }',
            "logit_kl is not measurable",
        ),
        (VLLM, '{ name = "layer-kl", threshold = 0.3 }', "lens_kl is not measurable"),
        (LLAMACPP, '{ name = "x", metric = "ppl_ratio", threshold = 1.1 }', "ppl_ratio is not"),
        ('model = "m"', '{ name = "x", metric = "served_kl", threshold = 1.0 }', "no served"),
        (VLLM, '{ name = "layer-kl", enabled = false }', None),
        (VLLM, '{ name = "x", metric = "served_kl", threshold = 1.0 }', None),
        (VLLM, '{ name = "x", metric = "ppl_ratio", threshold = 1.1 }', None),
    ],
)
def test_a_candidates_own_rule_must_reach_it(
    source: str, rule: str, words: str | None, tmp_path: Path
) -> None:
    """Catches a rule that somebody relies on and that never decides."""
    file = tmp_path / "quantwatch.toml"
    file.write_text(TOML.format(source=source, rule=rule))
    if words is None:
        load_config(file)
        return
    with pytest.raises(ConfigError, match=words):
        load_config(file)
