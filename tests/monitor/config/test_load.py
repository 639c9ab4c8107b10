"""Reading quantwatch.toml: every mistake names file, key, value and what is allowed."""

import subprocess
import sys
from pathlib import Path

import pytest

from quantwatch.config.load import EXAMPLE, find_config, load_config, parse, validate_files
from quantwatch.config.schema import CheckConfig
from quantwatch.errors import ConfigError

HEAD = """
schema_version = 1
[checks.nightly]
suite = "core-v1:demo"
{check}
reference = {{ model = "ref" }}
[[checks.nightly.candidates]]
name = "a"
model = "cand"
[[checks.nightly.candidates]]
name = "b"
{candidate}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "quantwatch.toml"
    path.write_text(text, encoding="utf-8")
    return path


def complaint(folder: Path, text: str) -> str:
    path = written(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


CANDIDATE = "checks.nightly.candidates[1]"
MISTAKES = {
    "group size": (
        'model = "m"\nrecipe = { weights = "int4", granularity = "group", group_size = 7 }',
        f"{CANDIDATE}.recipe.group_size: 7 is not allowed; allowed: 8 or more",
    ),
    "group size per channel": (
        'model = "m"\nrecipe = { weights = "int4", granularity = "channel", group_size = 64 }',
        f'{CANDIDATE}.recipe: group_size is required with granularity = "group"',
    ),
    "recipe name": (
        'model = "m"\nrecipe = "int4-g65"',
        f"{CANDIDATE}.recipe: unknown recipe 'int4-g65'; known names: int8-channel, int4-g32, "
        "int4-g64, int4-g128",
    ),
    "recipe of another type": (
        'model = "m"\nrecipe = 4',
        f"{CANDIDATE}.recipe: 4 is not allowed; allowed: a table",
    ),
    "unknown key": (
        'model = "m"\ndtyp = "x"',
        f"{CANDIDATE}.dtyp: unknown key; did you mean dtype?",
    ),
    "unknown key unlike any": (
        'model = "m"\nrecipe = { weights = "int8", granularity = "channel", zzz = 1 }',
        f"{CANDIDATE}.recipe.zzz: unknown key; allowed: activations, calibration, clip, embedding, "
        "exclude, granularity, group_size, layers, method, residual_dtype, rotation, rounding, "
        "scale_dtype, scales, smooth, weights, zero",
    ),
    "choice": (
        'model = "m"\ndtype = "fp16"',
        f'{CANDIDATE}.dtype: "fp16" is not allowed; allowed: "float32", "bfloat16" or "float16"',
    ),
    "text for a number": (
        'model = "m"\nfaults = [{ scope = "head", scale = "2" }]',
        f'{CANDIDATE}.faults[0].scale: "2" is not allowed; allowed: a number',
    ),
    "number for a switch": (
        'model = "m"\nallow_code = 1',
        f"{CANDIDATE}.allow_code: 1 is not allowed; allowed: true or false",
    ),
    "date for a text": (
        'model = "m"\nfaults = [{ scope = "head", scale = 2026-01-01 }]',
        f'{CANDIDATE}.faults[0].scale: "2026-01-01" is not allowed; allowed: a number',
    ),
    "infinite": (
        'model = "m"\nfaults = [{ scope = "head", scale = inf }]',
        f"{CANDIDATE}.faults[0].scale: Infinity is not allowed; allowed: a finite number",
    ),
    "fault nowhere": (
        'model = "m"\nfaults = [{ scope = "layers.14.feed_forward", scale = 2 }]',
        f"{CANDIDATE}.faults[0].scope: 'layers.14.feed_forward' can never match a scope",
    ),
    "glob as a fault": (
        'model = "m"\nfaults = [{ scope = "layers.*", scale = 2 }]',
        f"{CANDIDATE}.faults[0].scope: 'layers.*' is a glob",
    ),
    "two kinds of fault": (
        'model = "m"\nfaults = [{ scope = "head", scale = 2, nan_at = [1, 2] }]',
        f"{CANDIDATE}.faults[0]: exactly one of scale and nan_at",
    ),
    "half a place": (
        'model = "m"\nfaults = [{ scope = "head", nan_at = [1] }]',
        f"{CANDIDATE}.faults[0].nan_at[1]: required, but missing",
    ),
    "no source": ("", f"{CANDIDATE}: exactly one of model, factory and served"),
    "code without leave": ('factory = "a:b"', f"{CANDIDATE}: factory runs your own code"),
    "factory of another form": (
        'factory = "a.b"\nallow_code = true',
        f'{CANDIDATE}.factory: "a.b" is not allowed; allowed: text that matches',
    ),
    "gguf of a factory": (
        'factory = "a:b"\nallow_code = true\ngguf_file = "x.gguf"',
        f"{CANDIDATE}: gguf_file and revision belong to model",
    ),
    "execution without recipe": (
        'model = "m"\nexecution = "aten"',
        f'{CANDIDATE}: execution = "aten" needs a recipe',
    ),
    "unknown KV cache": (
        'model = "m"\nserve = { kv_cache = "int5" }',
        f"{CANDIDATE}.serve.kv_cache: 'int5' is no KV cache; allowed: float16, bfloat16, int8, ",
    ),
    "KV cache with another end": (
        'model = "m"\nserve = { kv_cache = "int4+low1" }',
        f"{CANDIDATE}.serve.kv_cache: 'int4+low1': after + comes highN,M…",
    ),
    "served by nothing": (
        'model = "m"\nserve = {}',
        f"{CANDIDATE}.serve: serve names nothing: give kv_cache or attention, experts, or both",
    ),
    "experts in an unknown format": (
        'model = "m"\nserve = { experts = "int3" }',
        f"{CANDIDATE}.serve.experts: ",
    ),
    "experts quantized twice": (
        'model = "m"\nrecipe = "int8-channel"\nserve = { experts = "int4" }',
        f"{CANDIDATE}: serve.experts quantizes experts itself: leave recipe out",
    ),
    "a KV cache with an option twice": (
        'model = "m"\nserve = { kv_cache = "int4+r4+r8" }',
        f"{CANDIDATE}.serve.kv_cache: 'int4+r4+r8': r is said twice",
    ),
    "floats that are compensated": (
        'model = "m"\nserve = { kv_cache = "float16+top4" }',
        f"{CANDIDATE}.serve.kv_cache: 'float16+top4': float16 has no codes",
    ),
    "a gain without texts": (
        'model = "m"\nserve = { kv_cache = "int2+gain" }',
        f"{CANDIDATE}.serve: kv_cache = 'int2+gain' needs calibration",
    ),
    "texts without a gain": (
        'model = "m"\nserve = { kv_cache = "int2", calibration = { suite = "core-v1" } }',
        f"{CANDIDATE}.serve: calibration is given, but this cache has no gain",
    ),
    "a KV cache and an attention": (
        'model = "m"\nattention = "eager"\nserve = { kv_cache = "int4" }',
        f"{CANDIDATE}: serve has an attention of its own",
    ),
    "unknown served attention": (
        'model = "m"\nserve = { attention = "int8" }',
        f'{CANDIDATE}.serve.attention: "int8" is not allowed; allowed: "int8-plain", ',
    ),
    "two attentions": (
        'model = "m"\nserve = { attention = "int8-both", kv_cache = "int8" }',
        f"{CANDIDATE}.serve: kv_cache and attention both replace the attention: give one of them",
    ),
    "flash attention on a CPU": (
        'model = "m"\nattention = "flash_attention_2"',
        f'{CANDIDATE}: attention = "flash_attention_2" needs device = "cuda"',
    ),
    "the reference's name": (
        'model = "m"\n[[checks.nightly.candidates]]\nname = "reference"\nmodel = "m"',
        'checks.nightly.candidates[2].name: "reference" is not allowed; it names the other side',
    ),
    "same name twice": (
        'model = "m"\n[[checks.nightly.candidates]]\nname = "a"\nmodel = "m"',
        "checks.nightly: candidate names must be unique; twice: a",
    ),
    "same rule twice": (
        'model = "m"\nrules = [{ name = "x" }, { name = "x" }]',
        f"{CANDIDATE}.rules: rule names must be unique; twice: x",
    ),
}


@pytest.mark.parametrize(("lines", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_candidate_names_key_value_and_what_is_allowed(
    tmp_path: Path, lines: str, words: str
) -> None:
    """Catches a mistake that is accepted, or reported as pydantic words it."""
    message = complaint(tmp_path, HEAD.format(check="", candidate=lines))
    assert message.startswith(words)
    assert "\n" not in message


RULES = {
    "metric": (
        '{ name = "x", metric = "lens_kll", threshold = 1 }',
        "'lens_kll' is unknown; did you mean lens_kl?; allowed: logit_kl, ",
    ),
    "neutral metric": (
        '{ name = "x", metric = "delta_p", threshold = 1 }',
        "'delta_p' has no worse direction; allowed: ",
    ),
    "statistic": (
        '{ name = "x", metric = "ppl_ratio", statistic = "p99", threshold = 1 }',
        "ppl_ratio has only the statistic mean, not p99",
    ),
    "scope that never matches": (
        '{ name = "x", metric = "lens_kl", scope = "layer.*", threshold = 1 }',
        "'layer.*' can never match a scope; scopes are embedding, layers.N, ",
    ),
    "scope of another metric": (
        '{ name = "x", metric = "logit_kl", scope = "layers.*", threshold = 1 }',
        "logit_kl is never measured at 'layers.*'; it is measured at model",
    ),
    "no scope": ('{ name = "x", metric = "lens_kl", scope = [], threshold = 1 }', "scope is empty"),
    "unknown name": (
        '{ name = "layer-kk", threshold = 1 }',
        "rule 'layer-kk' is unknown, and a new",
    ),
    "median of a percentage": (
        '{ name = "x", metric = "cosine", scope = "layers.*", kind = "median_ratio", factor = 3 }',
        'kind = "median_ratio" needs one of topk_logit_deviation_k5, ',
    ),
    "a baseline of values that may be infinite": (
        '{ name = "x", metric = "sqnr_db", scope = "layers.*", kind = "baseline", min_effect = 1 }',
        'kind = "baseline" needs one of logit_kl, ',
    ),
    "headroom against a baseline": (
        '{ name = "x", metric = "headroom_bits", scope = "head", kind = "baseline", '
        'statistic = "min", min_effect = 1 }',
        'kind = "baseline" needs one of logit_kl, ',
    ),
    "NaN may pass": (
        '{ name = "nonfinite", enabled = false }',
        "the rule nonfinite can't be changed",
    ),
}


@pytest.mark.parametrize(("rule", "words"), RULES.values(), ids=RULES)
def test_a_mistake_in_a_rule_is_found_before_anything_runs(
    tmp_path: Path, rule: str, words: str
) -> None:
    """Catches a rule that silently never fires."""
    of_check = complaint(tmp_path, HEAD.format(check=f"rules = [{rule}]", candidate='model = "m"'))
    of_candidate = complaint(
        tmp_path, HEAD.format(check="", candidate=f'model = "m"\nrules = [{rule}]')
    )
    assert of_check.startswith("checks.nightly.rules[0]: ")
    assert of_candidate.startswith(f"{CANDIDATE}.rules[0]: ")
    assert words in of_check
    assert words in of_candidate


CHECKS = {
    "suite": ('suite = "core"', "checks.n.suite.name: unknown suite 'core'; known: core-v1, "),
    "suite type": ("suite = 3", "checks.n.suite: 3 is not allowed; allowed: a table"),
    "two sources": (
        'suite = { name = "core-v1", files = ["a"] }',
        "checks.n.suite: exactly one of name and files",
    ),
    "number for a file": (
        "suite = { files = [3] }",
        "checks.n.suite.files[0]: 3 is not allowed; allowed: text in quotes",
    ),
    "text for a list": (
        'suite = { files = "a.txt" }',
        'checks.n.suite.files: "a.txt" is not allowed; allowed: a list in brackets',
    ),
    "window of a shipped suite": (
        'suite = { name = "core-v1", window = 8 }',
        "checks.n.suite: window cuts plain text files",
    ),
    "nothing to score": (
        'suite = { files = ["a"], window = 8, score_start = 8 }',
        "checks.n.suite: score_start = 8 leaves nothing of a window of 8",
    ),
    "share": (
        'suite = "core-v1"\nisolated_fraction = 1.5',
        "checks.n.isolated_fraction: 1.5 is not allowed; allowed: at most 1",
    ),
    "nan": (
        'suite = "core-v1"\nisolated_fraction = nan',
        "checks.n.isolated_fraction: NaN is not allowed",
    ),
    "number in quotes": (
        'suite = "core-v1"\nlens_positions = "8"',
        'checks.n.lens_positions: "8" is not allowed; allowed: a whole number',
    ),
    "half a position": (
        'suite = "core-v1"\nlens_positions = 8.5',
        "checks.n.lens_positions: 8.5 is not allowed; allowed: a whole number",
    ),
    "more threads than any machine has": (
        'suite = "core-v1"\nthreads = 100000',
        "checks.n.threads: 100000 is not allowed; allowed: at most 1024",
    ),
    "misspelt": (
        'suite = "core-v1"\nlens_position = 8',
        "checks.n.lens_position: unknown key; did you mean lens_positions?",
    ),
}


@pytest.mark.parametrize(("lines", "words"), CHECKS.values(), ids=CHECKS)
def test_a_mistake_in_a_check(tmp_path: Path, lines: str, words: str) -> None:
    """Catches lenient types: `"8"` and `true` are no numbers."""
    text = f"""schema_version = 1
[checks.n]
{lines}
reference = {{ model = "r" }}
candidates = [{{ name = "a", model = "m" }}]
"""
    assert complaint(tmp_path, text).startswith(words)


SERVED = '{ name = "s", served = { url = "http://127.0.0.1:8000", api = "vllm" } }'
LOADED = '{ name = "a", model = "m" }'
CANARIES = {
    "streamed": (
        'memory = "streamed"\ncanary = {}',
        LOADED,
        'checks.n.memory: "streamed" is not allowed with a canary, which is planted in weights that '
        'stay in memory; allowed: "resident"',
    ),
    "nothing isolated": (
        "isolated_fraction = 0\ncanary = {}",
        LOADED,
        "checks.n.isolated_fraction: 0 is not allowed with a canary, which is located by isolated "
        "errors; allowed: more than 0",
    ),
    "servers only": (
        "canary = {}",
        SERVED,
        "checks.n.candidates: all of them are served, and a canary is judged as a candidate that "
        "is loaded; allowed: at least one with model or factory",
    ),
    "outside of the layers": (
        'canary = { scope = ["layers.*", "head"] }',
        LOADED,
        "checks.n.canary.scope: 'head' has no linear layer of a decoder layer; allowed with "
        'fault = "channel": * and globs that begin with layers.',
    ),
    "a part for a layer": (
        'canary = { fault = "layer", scope = "layers.*.mlp" }',
        LOADED,
        "checks.n.canary.scope: 'layers.*.mlp' is no decoder layer; allowed with "
        'fault = "layer": * and layers.N',
    ),
    "several": (
        'memory = "streamed"\nisolated_fraction = 0\ncanary = {}',
        LOADED,
        "2 errors\n  checks.n.memory: ",
    ),
    "a server beside a model": ("canary = {}", f"{SERVED}, {LOADED}", None),
    "everywhere": ('canary = { fault = "layer", scope = ["*", "layers.1?"] }', LOADED, None),
    "inside of layers": ('canary = { scope = "layers.*.mlp.*" }', LOADED, None),
    "no canary": ('memory = "streamed"\nisolated_fraction = 0', SERVED, None),
}


@pytest.mark.parametrize(("lines", "candidates", "words"), CANARIES.values(), ids=CANARIES)
def test_a_canary_that_nothing_can_come_of(
    tmp_path: Path, lines: str, candidates: str, words: str | None
) -> None:
    """Catches a monitor that says "not measurable" of itself every night, and nobody looks."""
    text = f"""schema_version = 1
[checks.n]
suite = "core-v1"
{lines}
reference = {{ model = "r" }}
candidates = [{candidates}]
"""
    if words is None:
        assert list(load_config(written(tmp_path, text)).checks) == ["n"]
    else:
        assert complaint(tmp_path, text).startswith(words)


def test_a_stored_check_with_such_a_canary_can_still_be_read() -> None:
    """Catches runs from before that can't be judged again because today's file couldn't say so."""
    check = {"reference": {"model": "r"}, "candidates": [{"name": "a", "model": "m"}]}
    stored = {**check, "suite": "core-v1", "memory": "streamed", "canary": {}}
    assert CheckConfig.model_validate(stored).canary is not None


FILES = {
    "no version": ("", "schema_version: required, but missing; write schema_version = 1"),
    "other version": ("schema_version = 2", "schema_version: 2 is not allowed; allowed: 1"),
    "a switch as a version": (
        "schema_version = true",
        "schema_version: true is not allowed; allowed: 1",
    ),
    "a fraction as a version": (
        "schema_version = 1.0",
        "schema_version: 1.0 is not allowed; allowed: 1",
    ),
    "nested too deeply": ("a = " + "[" * 5000, "not usable TOML: nested too deeply"),
    "no check": (
        "schema_version = 1\n[checks.n]",
        "3 errors\n  checks.n.reference: required, but missing",
    ),
    "name of a check": (
        'schema_version = 1\n[checks."a b"]\nsuite = "core-v1"\nreference = { model = "r" }\n'
        'candidates = [{ name = "a", model = "m" }]',
        'checks."a b": "a b" is not allowed; allowed: 1 to 64 letters, digits, dots, ',
    ),
    "database": (
        'schema_version = 1\n[database]\nurl = "mysql://u:secret@h/n"',
        "database.url: mysql is not allowed; allowed: sqlite, ",
    ),
    "no candidates": (
        'schema_version = 1\n[checks.n]\nsuite = "core-v1"\nreference = { model = "r" }\n'
        "candidates = []",
        "checks.n.candidates: allowed: at least 1 of them",
    ),
    "syntax": ("schema_version = 1\nchecks = [1,\nb", "not valid TOML: Invalid value (at line 3, "),
    "key twice": ("schema_version = 1\nschema_version = 1", "not valid TOML: Cannot overwrite"),
}


@pytest.mark.parametrize(("text", "words"), FILES.values(), ids=FILES)
def test_a_mistake_of_the_whole_file(tmp_path: Path, text: str, words: str) -> None:
    """Catches a traceback where a line and a column are known."""
    assert complaint(tmp_path, text).startswith(words)


def test_many_mistakes_are_listed_together_ten_at_most(tmp_path: Path) -> None:
    """Catches one run of the program per mistake, and a wall of text."""
    extra = "\n".join(f"k{n} = 1" for n in range(14))
    text = f"schema_version = 1\n{extra}\n"
    lines = complaint(tmp_path, text).splitlines()
    assert lines[0] == "14 errors"
    assert len(lines) == 12
    assert lines[-1] == "  … and 4 more"


def test_a_file_that_is_not_utf8_names_the_line(tmp_path: Path) -> None:
    """Catches a UnicodeDecodeError."""
    path = tmp_path / "quantwatch.toml"
    path.write_bytes(b"schema_version = 1\ndescription = '\xe4'\n")
    with pytest.raises(ConfigError, match="not UTF-8: byte 0xe4 in line 2"):
        load_config(path)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    """Catches files saved by Windows editors being refused."""
    path = tmp_path / "quantwatch.toml"
    path.write_bytes(b"\xef\xbb\xbfschema_version = 1\n")
    assert load_config(path).checks == {}


@pytest.mark.parametrize(
    ("name", "words"), [("absent.toml", "No such file"), (".", "Is a directory")]
)
def test_a_file_that_can_not_be_read(tmp_path: Path, name: str, words: str) -> None:
    """Catches a traceback for a misspelt path."""
    with pytest.raises(ConfigError, match=words):
        load_config(tmp_path / name)


def test_the_example_is_valid_and_says_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an example that a newcomer copies and that does not even load."""
    config = load_config(EXAMPLE)
    names = [candidate.name for candidate in config.checks["nightly"].candidates]
    assert names == ["bf16", "int8", "int4", "int8-fault"]
    assert config.checks["kernels"].suite.window == 512


def test_the_demo_is_valid() -> None:
    """Catches a schema change that breaks `make demo`."""
    assert "demo" in load_config(EXAMPLE.with_name("demo.toml")).checks


def test_values_that_are_not_from_a_file_are_read_the_same_way() -> None:
    """Catches pydantic's own error reaching the user of the command line."""
    with pytest.raises(ConfigError, match=r"^compare: suite: exactly one of name and files"):
        parse(
            CheckConfig,
            {"reference": {"model": "r"}, "candidates": [{"name": "a", "model": "m"}], "suite": {}},
            "compare",
        )


def test_a_word_that_is_not_utf8_is_named() -> None:
    """Catches a file name in another encoding that is reported as invalid JSON."""
    models = {"reference": {"model": "r\udcff"}, "candidates": [{"name": "a", "model": "m"}]}
    with pytest.raises(ConfigError, match=r"^compare: not UTF-8 text: .*r\\udcff'$"):
        parse(CheckConfig, {**models, "suite": "core-v1"}, "compare")


@pytest.mark.parametrize(
    "name", ["~nobody-of-that-name/model", "x" * 5000 + ".gguf", "./a\\u0000b"],
    ids=["unknown home", "too long", "NUL"],
)  # fmt: skip
def test_a_name_that_no_system_knows_is_a_missing_file(tmp_path: Path, name: str) -> None:
    """Catches an internal error (exit 3) for a path that merely can't exist."""
    text = HEAD.format(check="", candidate=f'model = "{name}"')
    config = load_config(written(tmp_path, text))
    with pytest.raises(ConfigError, match=r"candidates\[1\]\.model: .* does not exist$"):
        validate_files(config, tmp_path)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["folder"], "suite.files[0]: {here}/folder is a folder; name the files in it"),
        (["a.txt", "./folder/../a.txt"], "suite.files: ./folder/../a.txt is listed twice"),
        (["a.txt", "link.txt"], "suite.files: link.txt is listed twice"),
    ],
    ids=["folder", "two spellings", "link"],
)
def test_files_that_are_no_prompts_or_count_double(
    tmp_path: Path, files: list[str], words: str
) -> None:
    """Catches a mistake that only the run would find, after the models are loaded."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "link.txt").symlink_to("a.txt")
    (tmp_path / "folder").mkdir()
    text = HEAD.format(check="", candidate='model = "m"')
    suite = "suite = { files = [" + ", ".join(f'"{file}"' for file in files) + "] }"
    config = load_config(written(tmp_path, text.replace('suite = "core-v1:demo"', suite)))
    with pytest.raises(ConfigError) as caught:
        validate_files(config, tmp_path)
    assert words.format(here=tmp_path) in str(caught.value)


def test_missing_files_are_named_by_key_and_path(tmp_path: Path) -> None:
    """Catches a run that starts loading models before it looks for the prompts."""
    (tmp_path / "here.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    text = f"""schema_version = 1
[checks.n]
suite = {{ files = ["here.txt", "gone.txt"] }}
reference = {{ model = "./gone" }}
candidates = [
  {{ name = "hub", model = "owner/name" }},
  {{ name = "gguf", model = "gone.gguf" }},
  {{ name = "abs", model = "{tmp_path}/folder", gguf_file = "gone.gguf" }},
  {{ name = "here", model = "./folder" }},
  {{ name = "code", factory = "pkg.mod:build", allow_code = true }},
]
"""
    config = load_config(written(tmp_path, text))
    with pytest.raises(ConfigError) as caught:
        validate_files(config, tmp_path)
    assert str(caught.value).splitlines() == [
        "quantwatch.toml: 4 errors",
        f"  checks.n.suite.files[1]: {tmp_path}/gone.txt does not exist",
        f"  checks.n.reference.model: {tmp_path}/gone does not exist",
        f"  checks.n.candidates[1].model: {tmp_path}/gone.gguf does not exist",
        f"  checks.n.candidates[2].gguf_file: {tmp_path}/folder/gone.gguf does not exist",
    ]


def test_the_variable_wins_then_the_nearest_file_upward(tmp_path: Path) -> None:
    """Catches the wrong file being read from a subfolder."""
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    top = written(tmp_path, "schema_version = 1")
    assert find_config(deep, {}) == top
    near = written(tmp_path / "a", "schema_version = 1")
    assert find_config(deep, {}) == near
    assert find_config(deep, {"QUANTWATCH_CONFIG": str(top)}) == top


def test_a_variable_that_names_no_file_is_an_error(tmp_path: Path) -> None:
    """Catches falling back to another file without a word."""
    with pytest.raises(ConfigError, match=r"QUANTWATCH_CONFIG: .*gone\.toml does not exist"):
        find_config(tmp_path, {"QUANTWATCH_CONFIG": str(tmp_path / "gone.toml")})


def test_reading_the_configuration_imports_no_framework() -> None:
    """Catches `quantwatch --help` taking seconds."""
    code = (
        "import sys, quantwatch.config.load, quantwatch.alerts.rules, quantwatch.alerts.overrides;"
        "print([m for m in ('torch', 'transformers', 'sqlalchemy', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


GPTQ = 'weights = "int4", granularity = "channel", method = "gptq"'
RECIPES_AT_FAULT = {
    "unknown method": ('"bad.toml"', r"\.recipe: .*bad\.toml: method"),
    "no file": ('"none.toml"', r"\.recipe: .*none\.toml does not exist or is not a file"),
    "folder": ('"folder.toml"', r"\.recipe: .*folder\.toml does not exist or is not a file"),
    "home of nobody": ('"~nobody-of-that-name/x.toml"', r"~nobody-of-that-name/x\.toml does not"),
    "texts of a file's recipe": ('"texts.toml"', r"calibration\.suite\.files\[1\]: .*nowhere\.txt"),
    "texts of a table": (
        f'{{ {GPTQ}, calibration = {{ suite = {{ files = ["nowhere.txt"] }} }} }}',
        r"\.recipe\.calibration\.suite\.files\[0\]: .*nowhere\.txt does not exist",
    ),
    "a folder of texts": (
        f'{{ {GPTQ}, calibration = {{ suite = {{ files = ["folder.toml"] }} }} }}',
        r"\.recipe\.calibration\.suite\.files\[0\]: .* is a folder",
    ),
    "a text twice": (
        f'{{ {GPTQ}, calibration = {{ suite = {{ files = ["a.txt", "./a.txt"] }} }} }}',
        r"\.recipe\.calibration\.suite\.files: \./a\.txt is listed twice",
    ),
}


@pytest.mark.parametrize("name", RECIPES_AT_FAULT)
def test_a_recipe_is_looked_at_before_models_are_loaded(tmp_path: Path, name: str) -> None:
    """Catches a mistake in a recipe that shows only once the reference is loaded."""
    recipe, words = RECIPES_AT_FAULT[name]
    (tmp_path / "m").mkdir()
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "folder.toml").mkdir()
    head = 'weights = "int4"\ngranularity = "channel"\nmethod = "gptq"\n'
    (tmp_path / "bad.toml").write_text(head.replace("gptq", "gptqq"))
    suite = '[calibration]\nsuite = { files = ["a.txt", "nowhere.txt"] }\n'
    (tmp_path / "texts.toml").write_text(head + suite)
    text = HEAD.format(check="", candidate=f'model = "./m"\nrecipe = {recipe}')
    config = load_config(written(tmp_path, text))
    with pytest.raises(ConfigError, match=words):
        validate_files(config, tmp_path)
