"""Recipes as JSON: read back exactly, and refused with key, value and what is allowed."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantwatch_kernels.formats import INT_FORMATS
from quantwatch_kernels.quantize.recipe import (
    ActivationSpec,
    LayerRule,
    PerChannel,
    PerGroup,
    PerTensor,
    Recipe,
    RotationSpec,
    WeightSpec,
)
from quantwatch_kernels.quantize.recipe_json import recipe_from_json, spec_from_json

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GRANULARITIES = st.one_of(
    st.just(PerTensor()), st.just(PerChannel()), st.builds(PerGroup, st.integers(2, 512))
)
GLOBS = st.text("abc*?.0123[]", min_size=1, max_size=8)


@st.composite
def specs(draw: Any) -> WeightSpec:
    fmt = draw(st.sampled_from(sorted(INT_FORMATS)).map(INT_FORMATS.__getitem__))
    zero: Any = "none" if fmt.symmetric else draw(st.sampled_from(["integer", "float"]))
    methods = ["nearest", "gptq", "awq"] + ["hqq"] * (zero == "float")
    method = draw(st.sampled_from(methods))
    rounding: Any = (
        draw(st.sampled_from(["nearest", "stochastic"])) if method == "nearest" else "nearest"
    )
    clip = draw(st.sampled_from(["none", "mse"]))
    dtype = draw(st.sampled_from(DTYPES))
    try:
        return WeightSpec(fmt, draw(GRANULARITIES), zero, clip, method, dtype, rounding)
    except ValueError:  # a combination that the spec itself refuses
        return WeightSpec(fmt, PerChannel(), zero)


@st.composite
def activations(draw: Any) -> ActivationSpec:
    fmt = INT_FORMATS[draw(st.sampled_from(["int4", "int8", "uint8"]))]
    if draw(st.booleans()):
        observer = draw(st.sampled_from(["minmax", "moving_average", "mse", "percentile"]))
        return ActivationSpec(fmt, PerTensor(), static=True, observer=observer)
    return ActivationSpec(fmt, draw(GRANULARITIES), clip_ratio=draw(st.floats(0.1, 1.0)))


ROTATIONS = st.builds(
    RotationSpec, st.booleans(), st.booleans(), st.booleans(), st.integers(0, 99),
    st.one_of(st.none(), st.sampled_from([32, 64])),
)  # fmt: skip
RECIPES = st.builds(
    Recipe,
    weights=specs(),
    exclude=st.lists(GLOBS, max_size=3).map(tuple),
    layers=st.lists(st.builds(LayerRule, GLOBS, st.none() | specs()), max_size=3).map(tuple),
    embedding=st.none() | specs(),
    activations=st.none() | activations(),
    smooth=st.none() | st.floats(0, 1),
    rotation=st.none() | ROTATIONS,
    residual_dtype=st.lists(st.tuples(GLOBS, st.sampled_from(DTYPES)), max_size=3).map(tuple),
)


@given(RECIPES)
def test_every_recipe_comes_back(recipe: Recipe) -> None:
    """Catches a property that is lost or altered on the way to a file and back."""
    assert recipe_from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    # As digests are made, and as some stores keep it: the order of keys is lost.
    stored = json.dumps(recipe.to_json(), sort_keys=True)
    assert recipe_from_json(json.loads(stored)) == recipe


@given(specs())
def test_every_spec_comes_back(spec: WeightSpec) -> None:
    """Catches the same for one layer's spec, as checkpoints store it."""
    assert spec_from_json(json.loads(json.dumps(spec.to_json()))) == spec


PLAIN = {
    "int8-channel": ("int8", [-127, 127], "channel", None),
    "int4-g64": ("int4", [-7, 7], "group", 64),
}


@pytest.mark.parametrize("name", PLAIN)
def test_the_json_of_plain_recipes_is_what_it_always_was(name: str) -> None:
    """Catches a changed fingerprint: stored baselines would no longer be found."""
    weights, span, granularity, size = PLAIN[name]
    assert Recipe.named(name).to_json() == {
        "weights": weights,
        "range": span,
        "granularity": granularity,
        "group_size": size,
        "exclude": ["head", "router"],
    }


INT4 = {"weights": "int4", "granularity": "group", "group_size": 64}
BAD: dict[str, tuple[Any, str]] = {
    "no object": (["int4"], r"recipe must be a JSON object; it is \['int4'\]"),
    "unknown key": (INT4 | {"bits": 4}, r"recipe has the unknown key 'bits' = 4; allowed: activ"),
    "no format": ({"granularity": "channel"}, "recipe lacks 'weights'; it has granularity"),
    "format": (INT4 | {"weights": "int9"}, r"recipe\.weights is 'int9'; allowed: int2, uint2"),
    "float format": (INT4 | {"weights": 4}, r"recipe\.weights is 4; allowed: int2"),
    "other range": (INT4 | {"range": [-8, 7]}, r"range is \[-8, 7\]; allowed: \[-7, 7\], the codes"),
    "granularity": (INT4 | {"granularity": "row"}, "granularity is 'row'; allowed: tensor, chan"),
    "no group size": ({"weights": "int4", "granularity": "group"}, "lacks 'group_size'"),
    "group size of channel": (INT4 | {"granularity": "channel"}, "group_size is 64; allowed: null"),
    "true as a size": (INT4 | {"group_size": True}, "group_size is True; allowed: a whole number"),
    "size of a half": (INT4 | {"group_size": 64.0}, "group_size is 64.0; allowed: a whole number"),
    "size of one": (INT4 | {"group_size": 1}, "recipe: group size must be at least 2; it is 1"),
    "method": (INT4 | {"method": "best"}, "method is 'best'; allowed: nearest, gptq, awq, hqq"),
    "hqq of symmetric": (INT4 | {"method": "hqq"}, "recipe: hqq fits a float zero"),
    "zero of symmetric": (INT4 | {"zero": "float"}, "recipe: int4 goes with zero none, not 'float'"),
    "zero missing": (INT4 | {"weights": "uint4"}, "recipe: uint4 goes with zero integer or float"),
    "dtype": (INT4 | {"scale_dtype": "float64"}, "scale_dtype is 'float64'; allowed: float32, bf"),
    "exclude": (INT4 | {"exclude": "head"}, "recipe.exclude is 'head'; allowed: a list"),
    "exclude numbers": (INT4 | {"exclude": [1]}, r"exclude is \[1\]; allowed: a list of globs"),
    "rule": (INT4 | {"layers": [INT4]}, r"recipe\.layers\[0\] lacks 'match'"),
    "rule's key": (
        INT4 | {"layers": [{"match": "*", "bits": 4}]},
        r"recipe\.layers\[0\] has the unknown key 'bits'",
    ),
    "embedding": (INT4 | {"embedding": "int8"}, "recipe.embedding must be a JSON object"),
    "embedding's key": (
        INT4 | {"embedding": INT4 | {"exclude": []}},
        r"recipe\.embedding has the unknown key 'exclude'",
    ),
    "static per token": (
        INT4 | {"activations": {"format": "int8", "granularity": "channel", "static": True}},
        r"recipe\.activations: static activation scales are per tensor",
    ),
    "smooth": (INT4 | {"smooth": "half"}, "recipe.smooth is 'half'; allowed: a number"),
    "smooth of two": (INT4 | {"smooth": 2}, "recipe: smooth lies in 0 … 1; it is 2"),
    "rotation": (INT4 | {"rotation": {"R1": True}}, r"recipe\.rotation has the unknown key 'R1'"),
    "rotation's flag": (INT4 | {"rotation": {"down": 1}}, r"rotation\.down is 1; allowed: true or"),
    "residual": (
        INT4 | {"residual_dtype": [{"match": "layers.*", "dtype": "int8"}]},
        r"recipe\.residual_dtype\[0\]\.dtype is 'int8'; allowed: float32",
    ),
    "residual without an order": (
        INT4 | {"residual_dtype": {"layers.*": "float16"}},
        r"recipe\.residual_dtype is {'layers\.\*': 'float16'}; allowed: a list",
    ),
    "residual's key": (
        INT4 | {"residual_dtype": [{"match": "*", "dtype": "float16", "glob": "*"}]},
        r"recipe\.residual_dtype\[0\] has the unknown key 'glob'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_understood_is_refused(name: str) -> None:
    """Catches a misspelt key, a wrong type or an impossible recipe that quantizes something else."""
    values, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        recipe_from_json(values)
