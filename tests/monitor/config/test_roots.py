"""Paths of the service's checks: nothing that a file names leads out of the allowed folders."""

from pathlib import Path
from typing import Any

import pytest

from quantwatch.config import recipes, roots
from quantwatch.config.load import parse
from quantwatch.config.schema import Config
from quantwatch.errors import ConfigError


def config(model: str = "m", *, files: list[str] | None = None, **more: Any) -> Config:
    suite = {"files": files} if files else {"name": "core-v1:demo"}
    gguf = more.pop("gguf_file", None)
    reference = {"model": model} | ({"gguf_file": gguf} if gguf else {})
    check = {
        "suite": suite,
        "reference": reference,
        "candidates": [{"name": "int8", "model": "org/hub-model", "recipe": "int8-channel"}],
    }
    return parse(Config, {"schema_version": 1, "checks": {"nightly": check}, **more}, "test")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with a model in it, beside one that is none of its business."""
    for name in ("conf/model", "conf/deep", "secret/model", "shared/model"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "secret/prompts.txt").write_text("x")
    (tmp_path / "conf/prompts.txt").write_text("x")
    (tmp_path / "conf/link").symlink_to(tmp_path / "secret/model")
    (tmp_path / "conf/inner").symlink_to(tmp_path / "conf/model")
    return tmp_path / "conf"


@pytest.mark.parametrize(
    "model",
    ["../secret/model", "{tmp}/secret/model", "./link", "link", "./deep/../../secret/model", "~/x"],
)
def test_a_model_outside_is_refused(
    model: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches `..`, an absolute path, a link that leads out, a home folder."""
    monkeypatch.setenv("HOME", str(base.parent / "secret"))
    written = model.format(tmp=base.parent)
    with pytest.raises(ConfigError, match=r"checks\.nightly\.reference\.model: .*lies outside"):
        roots.require_inside(config(written), base)


@pytest.mark.parametrize("model", ["./model", "model", "./inner", "./deep/../model", "org/name"])
def test_a_model_inside_and_hub_ids_are_allowed(model: str, base: Path) -> None:
    """Catches a guard that forbids what everybody needs."""
    roots.require_inside(config(model), base)


def test_a_sibling_with_the_same_beginning_is_outside(base: Path) -> None:
    """Catches a comparison of texts: /srv/conf-evil begins with /srv/conf."""
    (base.parent / "conf-evil").mkdir()
    with pytest.raises(ConfigError, match="lies outside"):
        roots.require_inside(config("../conf-evil"), base)


def test_prompt_files_are_held_to_it_too(base: Path) -> None:
    """Catches a suite that reads what is none of its business into the database."""
    roots.require_inside(config(files=["prompts.txt"]), base)
    with pytest.raises(ConfigError, match=r"suite\.files\[1\]: .*secret/prompts\.txt lies outside"):
        roots.require_inside(config(files=["prompts.txt", "../secret/prompts.txt"]), base)


@pytest.mark.parametrize("file", ["../../secret/x.gguf", "/etc/x.gguf"])
def test_a_gguf_file_does_not_climb_out_of_its_folder(file: str, base: Path) -> None:
    """Catches the second path of a variant."""
    with pytest.raises(ConfigError, match=r"reference\.gguf_file: .*lies outside"):
        roots.require_inside(config("./model", gguf_file=file), base)


def test_other_roots_can_be_allowed(base: Path) -> None:
    """Catches a setting that does nothing, and one that keeps the default besides."""
    service = {"allowed_roots": ["../shared"]}
    roots.require_inside(config("../shared/model", service=service), base)
    with pytest.raises(ConfigError, match=r"allowed: .*shared \(service\.allowed_roots\)"):
        roots.require_inside(config("./model", service=service), base)


def test_a_link_that_is_moved_later_is_found_before_the_run(base: Path) -> None:
    """Catches a check of paths that only ever happens at the start."""
    checked = config("./inner")
    allowed = roots.allowed_roots(checked, base)
    assert roots.outside(checked.checks["nightly"], base, allowed) == []
    (base / "inner").unlink()
    (base / "inner").symlink_to(base.parent / "secret")
    (problem,) = roots.outside(checked.checks["nightly"], base, allowed)
    assert "reference.model" in problem


def test_variants_with_code_of_their_own_are_named() -> None:
    """Catches an opt-in that nobody sees."""
    data = config().model_dump(mode="json")
    data["checks"]["nightly"]["candidates"].append(
        {"name": "fused", "factory": "ours.serve:build", "allow_code": True}
    )
    check = parse(Config, data, "test").checks["nightly"]
    assert roots.runs_own_code(check) == ("fused",)


TEXTS = 'calibration = { suite = { files = ["FILE"] }, limit = 4 }'
RECIPE = f'weights = "int4"\ngranularity = "channel"\nmethod = "gptq"\n{TEXTS}\n'


@pytest.mark.parametrize("last", range(1, 7))
def test_what_was_looked_at_is_what_is_used(
    last: int, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a recipe file that is written anew between two readings, after whichever of them."""
    data = config("./model").model_dump(mode="json")
    check = data["checks"]["nightly"]
    check["reference"]["recipe"] = "r.toml"
    check["candidates"] = [check["candidates"][0] | {"name": n, "recipe": "r.toml"} for n in "ab"]
    check = parse(Config, data, "test").checks["nightly"]
    (base / "r.toml").write_text(RECIPE.replace("FILE", "prompts.txt"))
    load, readings = recipes.load_recipe, []

    def changing(path: Path) -> recipes.RecipeConfig:
        readings.append(load(path))
        if len(readings) == last:
            path.write_text(RECIPE.replace("FILE", "../secret/prompts.txt"))
        return readings[-1]

    for module in (roots, recipes):
        monkeypatch.setattr(module, "load_recipe", changing)
    # Three times it is only looked at, for each variant; the fourth reading is the one that counts.
    if last < 4:
        with pytest.raises(ConfigError, match=r"secret/prompts\.txt lies outside"):
            roots.read_inside(check, base, [base], ("checks", "nightly"), "test")
        return
    whole = roots.read_inside(check, base, [base], ("checks", "nightly"), "test")
    assert len(readings) == 4
    recipe = whole.reference.recipe
    assert isinstance(recipe, recipes.RecipeConfig)
    assert recipe.calibration is not None
    assert recipe.calibration.suite.files == ("prompts.txt",)
    assert all(candidate.recipe is recipe for candidate in whole.candidates)
