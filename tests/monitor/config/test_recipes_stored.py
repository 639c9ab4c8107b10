"""A recipe that waits in the queue is the recipe that was written: whole documents, parsed again."""

import json
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from quantwatch.config.apply import check_document, document_sha
from quantwatch.config.parsing import parse
from quantwatch.config.recipe_parts import (
    ActivationsConfig,
    CalibrationConfig,
    LayerConfig,
    ResidualConfig,
    RotationConfig,
    Selection,
    WeightFormat,
)
from quantwatch.config.recipes import RECIPES, RecipeConfig, recipe_digest
from quantwatch.config.schema import CheckConfig
from quantwatch.models.recipes import kernel_recipe
from quantwatch.store.queue import NewRun
from quantwatch_kernels.quantize.recipe_json import recipe_from_json

INT4 = {"weights": "int4", "granularity": "channel"}
STEPPED = {"weights": "uint4", "granularity": "group", "group_size": 64, "scales": "stepped"}
TEXTS = {"suite": "core-v1"}
FILES = {"suite": {"files": ["a.txt"], "window": 256, "score_start": 3, "limit": 9}}
STATIC = {"format": "uint8", "granularity": "tensor", "static": True, "observer": "mse"}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": INT4,
    "groups": {"weights": "int4", "granularity": "group", "group_size": 64, "scale_dtype": "float16"},
    "float zero": {"weights": "uint4", "granularity": "tensor", "zero": "float", "method": "hqq"},
    "stochastic, clipped": INT4 | {"rounding": "stochastic", "clip": "mse"},
    "a kept layer": INT4 | {"layers": [{"match": "*.down_proj"}]},
    "layers": INT4
    | {
        "layers": [
            {"match": "layers.0.*"},
            {"match": "layers.1.*", "weights": "int8"},
            {"match": "*.up_proj", "weights": "uint8", "granularity": "group", "group_size": 32}
            | {"zero": "float", "clip": "mse", "scale_dtype": "bfloat16"},
            {"match": "layers.2.*", "weights": "int8", "rounding": "stochastic"},
            {"match": "layers.3.*", "weights": "int8", "method": "gptq"},
        ],
        "calibration": TEXTS,
    },
    "gptq": INT4 | {"method": "gptq", "calibration": TEXTS},
    "texts of its own": INT4 | {"method": "awq", "calibration": FILES | {"skip": 8, "limit": 16}},
    "drawn": INT4 | {"smooth": 0.5, "calibration": TEXTS | {"selection": "random", "seed": 3}},
    "drawn with seed 0": INT4 | {"smooth": 0.0, "calibration": TEXTS | {"selection": "random"}},
    "chosen": INT4 | {"method": "gptq", "calibration": TEXTS | {"selection": "coverage"}},
    "nothing excluded": INT4 | {"exclude": [], "embedding": {"weights": "int8"} | {"granularity": "tensor"}},
    "dynamic": INT4 | {"activations": {"format": "int8", "clip_ratio": 0.9}},
    "stepped": STEPPED | {"activations": {"format": "uint8"}},
    "a stepped layer": INT4
    | {"layers": [STEPPED | {"match": "*.up_proj"}], "activations": {"format": "int8"}},
    "groups of inputs": INT4
    | {"activations": {"format": "int8", "granularity": "group", "group_size": 32}},
    "static": INT4 | {"activations": STATIC, "calibration": TEXTS},
    "rotation": INT4
    | {"rotation": {"residual": False, "values": True, "down": True, "seed": 5, "block": 32}},
    "residual stream": INT4
    | {"residual_dtype": [{"match": "1", "dtype": "float16"}, {"match": "*", "dtype": "bfloat16"}]},
}  # fmt: skip
PARTS: tuple[type[BaseModel], ...] = (
    RecipeConfig, LayerConfig, ActivationsConfig, RotationConfig, ResidualConfig, CalibrationConfig,
)  # fmt: skip


def check(recipe: Any, reference: Any = None) -> CheckConfig:
    variant = {"name": "c", "model": "m", "recipe": recipe}
    written = {"reference": {"model": "m", "recipe": reference}, "candidates": [variant]}
    return parse(CheckConfig, written | {"suite": "core-v1:demo"}, "test")


def assert_survives(written: CheckConfig) -> None:
    """As the queue keeps a check and the worker, the scheduler and rejudging read it again."""
    config = NewRun.of("nightly", written, ".", "m:1").config
    for document in (config, json.loads(json.dumps(config, sort_keys=True))):
        for again in (parse(CheckConfig, document, "run"), CheckConfig.model_validate(document)):
            assert again == written
            assert check_document(again) == check_document(written)
            assert document_sha(check_document(again)) == document_sha(config)
            before, after = (c.candidates[0].recipe for c in (written, again))
            assert isinstance(before, RecipeConfig)
            assert isinstance(after, RecipeConfig)
            assert recipe_digest(after) == recipe_digest(before)
            assert kernel_recipe(after) == kernel_recipe(before)


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_comes_back_from_the_queue(name: str) -> None:
    """Catches a validator that asks what was written: in a stored recipe every key is."""
    assert_survives(check(SHAPES[name], SHAPES[name]))


@pytest.mark.parametrize("name", RECIPES)
def test_named_ones_as_tables_too(name: str) -> None:
    """Catches a name whose table can't be read again."""
    assert_survives(check(RECIPES[name].model_dump(mode="json")))


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parents[3].glob("recipes/**/*.toml")), ids=str
)
def test_shipped_files_as_tables_too(path: Path) -> None:
    """Catches a recipe that works as a file only: the worker turns files into tables."""
    assert_survives(check(tomllib.loads(path.read_text())))


def test_every_key_of_a_recipe_is_among_the_shapes() -> None:
    """Catches a new key that the table above doesn't know, so that nobody stores it."""
    seen: dict[type, set[str]] = {}

    def look(part: BaseModel) -> None:
        seen.setdefault(type(part), set()).update(part.model_dump(exclude_defaults=True))
        for name in type(part).model_fields:
            value = getattr(part, name)
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, BaseModel):
                    look(inner)

    for shape in SHAPES.values():
        look(RecipeConfig.model_validate(shape))
    assert {part: set(part.model_fields) - seen[part] for part in PARTS} == {
        part: set() for part in PARTS
    }


FORMATS = st.sampled_from(get_args(WeightFormat))
GLOBS = st.text("abc*?.0123[]", min_size=1, max_size=8)
FLOATS = st.sampled_from(["float32", "bfloat16", "float16"])


def valid(part: type[BaseModel], **keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Tables of a section that it accepts, each key given or left out."""

    def accepted(table: dict[str, Any]) -> bool:
        try:
            part.model_validate(table)
        except ValidationError:
            return False
        return True

    return st.fixed_dictionaries({}, optional=keys).filter(accepted)


def weights(**more: Any) -> st.SearchStrategy[Any]:
    """Tables of weights; `more` are keys besides."""
    size = st.sampled_from([None, 32])
    plain = st.fixed_dictionaries(
        {"weights": FORMATS, "granularity": st.sampled_from(["tensor", "channel"])} | more,
        optional={"clip": st.sampled_from(["none", "mse"]), "scale_dtype": FLOATS},
    )
    groups = size.map(lambda n: {"granularity": "group", "group_size": n} if n else {})
    methods = st.sampled_from(
        [
            {},
            {"rounding": "stochastic"},
            {"method": "gptq"},
            {"weights": "uint4", "zero": "float", "method": "hqq"},
        ]
    )
    return st.builds(lambda a, b, c: a | b | c, plain, groups, methods)


RULES = weights(match=GLOBS) | st.fixed_dictionaries({"match": GLOBS})
CALIBRATION = st.builds(
    lambda table, seed: table | ({"seed": seed} if table["selection"] == "random" else {}),
    st.fixed_dictionaries(
        {"suite": st.sampled_from(["core-v1", FILES["suite"]]), "selection": st.sampled_from(get_args(Selection))},
        optional={"skip": st.integers(0, 9), "limit": st.integers(1, 99)},
    ),
    st.integers(0, 3),
)  # fmt: skip
ACTIVATIONS = valid(
    ActivationsConfig,
    format=FORMATS,
    granularity=st.sampled_from(["tensor", "token"]),
    static=st.booleans(),
    clip_ratio=st.sampled_from([0.5, 1.0]),
)
PARTS_OF_A_RECIPE = st.fixed_dictionaries(
    {},
    optional={
        "exclude": st.lists(GLOBS, max_size=2),
        "layers": st.lists(RULES, max_size=3),
        "embedding": st.none() | weights(),
        "activations": st.none() | ACTIVATIONS,
        "smooth": st.none() | st.floats(0, 1),
        "rotation": st.none() | st.fixed_dictionaries({}, optional={"seed": st.integers(0, 3)}),
        "residual_dtype": st.lists(
            st.fixed_dictionaries({"match": GLOBS, "dtype": FLOATS}), max_size=3
        ),
    },
)


@given(weights(), PARTS_OF_A_RECIPE, CALIBRATION)
def test_every_recipe_comes_back_from_the_queue(whole: Any, parts: Any, calibration: Any) -> None:
    """Catches a combination of keys that can be written but not stored."""
    recipe = whole | parts
    needed = any(
        spec and spec.get("method") == "gptq"
        for spec in (recipe, *recipe.get("layers", ()), recipe.get("embedding"))
    )
    static = (recipe.get("activations") or {}).get("static")
    if needed or static or recipe.get("smooth") is not None:
        recipe["calibration"] = calibration
    assert_survives(check(recipe))


def test_the_order_of_residual_rules_is_part_of_a_recipe() -> None:
    """Catches two recipes with other numbers and one fingerprint: the first rule decides."""
    one = SHAPES["residual stream"]
    other = one | {"residual_dtype": one["residual_dtype"][::-1]}
    checks = check(one), check(other)
    shas = {document_sha(check_document(each)) for each in checks}
    recipes = [RecipeConfig.model_validate(each) for each in (one, other)]
    assert len(shas) == len({recipe_digest(recipe) for recipe in recipes}) == 2
    for recipe in recipes:
        kernel = kernel_recipe(recipe)
        assert [glob for glob, _ in kernel.residual_dtype] == [
            rule.match for rule in recipe.residual_dtype
        ]
        stored = json.loads(json.dumps(kernel.to_json(), sort_keys=True))
        assert recipe_from_json(stored) == kernel


def test_stepped_scales_reach_the_kernels() -> None:
    """Catches a key that is stored, digested and then forgotten."""
    made = kernel_recipe(RecipeConfig.model_validate(SHAPES["a stepped layer"]))
    assert [rule.weights.scales for rule in made.layers if rule.weights] == ["stepped"]
    assert made.weights.scales == "free"
    other = SHAPES["stepped"] | {"scales": "free"}
    digests = {recipe_digest(RecipeConfig.model_validate(r)) for r in (SHAPES["stepped"], other)}
    assert len(digests) == 2


KEPT = {
    "scales": "stepped",
    "clip": "mse",
    "granularity": "tensor",
    "method": "gptq",
    "scale_dtype": "float16",
}


@pytest.mark.parametrize("key", KEPT)
def test_a_kept_layer_still_has_no_details(key: str) -> None:
    """Catches a rule that looks as if it quantized."""
    with pytest.raises(ValidationError, match=f"{key} needs weights"):
        LayerConfig.model_validate({"match": "*", key: KEPT[key]})
