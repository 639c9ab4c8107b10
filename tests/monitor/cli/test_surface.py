"""What users and scripts rely on: names of commands and options, a quick --help, quiet pipes."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from quantwatch.cli.app import app

Run = Callable[..., Any]
HEAVY = ("torch", "transformers", "sqlalchemy", "numpy", "streamlit")

SURFACE = {
    "": "--config --database --debug --install-completion --show-completion --version",
    "alerts ack": "--comment --episode alert",
    "alerts close": "--reason alert",
    "alerts evaluate": "--force --json run",
    "alerts list": "--all --json",
    "alerts silence": "--candidate --check --comment --for --rule --severity",
    "alerts silences": "--json",
    "alerts unsilence": "silence",
    "attribute": "--candidate --detail --json --no-store --out --seed --store --tokens --tries run",
    "baseline export": "file run",
    "baseline import": "file",
    "baseline pin": "run",
    "baseline show": "--json",
    "baseline unpin": "check",
    "cache clear": "keys",
    "cache list": "--json",
    "check list": "--json",
    "check release": "name",
    "check run": "--baseline --format --json --key --limit --no-store --output --queue --store "
    "--wait --yes name",
    "check validate": "",
    "compare": "--allow-beyond-context --candidate-dtype --dtype --execution --executor --format --json "
    "--lens-products --limit --no-store --output --prefill-chunk --recipe --reference-cache "
    "--score-start --shards --store --text "
    "--threads --window --yes candidate reference",
    "dashboard": "--address --port",
    "db backup": "target",
    "db check": "",
    "db prune": "--dry-run --json",
    "db restore": "source",
    "db sizes": "--json",
    "db upgrade": "",
    "deliveries failed": "--by --json",
    "deliveries list": "--json --limit --state",
    "deliveries replay": "--again --dead --since event",
    "demo": "--dashboard --no-dashboard --port",
    "config apply": "--json",
    "config plan": "--json",
    "config validate": "",
    "doctor": "--json --preflight",
    "endpoints enable": "name",
    "endpoints list": "--json",
    "endpoints preview": "--event --json --run name",
    "endpoints secret": "",
    "endpoints test": "name",
    "kernels allocate": "--calibrate-on --calibration-windows --clip --detail --embedding --formats --json "
    "--method --out --probe --scale-dtype --target-bpw --text --threads --tokens --windows model",
    "kernels bench": "--json --no-store --out --quick --rounds --store --threads",
    "kernels bounds": "--json --model --out --quick --recipe --threads",
    "kernels off-grid": "--out --seed --threads model",
    "kernels plan bandwidth": "--above --json --out --peak --samples samples",
    "kernels plan offload": "--json --no-overlap --out plan",
    "kernels plan parallel": "--devices --gb-per-s --gflop-per-s --head-dim --heads --hidden "
    "--intermediate --json --kv-heads --out --tokens --weight-bytes samples",
    "kernels plan pareto": "--budget --epsilon --head-dim --json --kv-bits --kv-heads --layers "
    "--length-counts --out --page-tokens --scale-bits --zero-bits samples",
    "kernels plan roofline": "--gb-per-s --gflop-per-s --json --out --threshold profile",
    "kernels table": "--json --model --out --quick --seed --tasks --text --threads --windows name",
    "kernels test": "--case --device --json --no-store --op --out --quick --store --threads",
    "report": "--format --output run",
    "runs cancel": "--reason run",
    "runs diff": "--json after before",
    "runs list": "--check --json --limit",
    "runs show": "--json run",
    "schedule list": "--json",
    "schedule pause": "--reason check",
    "schedule resume": "check",
    "schedule show": "--json check",
    "start": "--device --standby parts",
}


def surface(command: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every command with its arguments and options."""
    subcommands = getattr(command, "commands", {})
    if not subcommands or not path:
        names = [
            name
            for parameter in command.params
            for name in (
                [*parameter.opts, *parameter.secondary_opts]
                if parameter.param_type_name == "option"
                else [parameter.name]
            )
        ]
        yield path, " ".join(sorted(name for name in names if name not in ("-h", "--help")))
    for name, subcommand in subcommands.items():
        yield from surface(subcommand, f"{path} {name}".strip())


def test_commands_and_options_are_frozen() -> None:
    """Scripts break when an option disappears: changing this table is a decision, not a slip."""
    assert dict(surface(typer.main.get_command(app))) == SURFACE


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["--help"], (*HEAVY, "pydantic", "rich")),
        # Typer itself takes pydantic for the limits of numbers.
        (["compare", "--help"], HEAVY),
        (["check", "run", "--help"], HEAVY),
        (["kernels", "table", "--help"], HEAVY),
        (["kernels", "plan", "pareto", "--help"], HEAVY),
    ],
    ids=["root", "compare", "check run", "kernels table", "kernels plan"],
)
def test_help_loads_nothing_heavy(words: list[str], heavy: tuple[str, ...]) -> None:
    """torch alone takes seconds: --help answers at once because it isn't imported."""
    code = (
        "import sys\nfrom quantwatch.cli import main\n"
        f"try:\n    main({words!r})\n"
        f"finally:\n    print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Usage: quantwatch" in done.stdout
    assert done.stderr.strip() == "[]"


def test_version(run: Run) -> None:
    """--version answers without a command."""
    outcome = run("--version")
    assert (outcome.code, outcome.out) == (0, "quantwatch 0.1.0\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nope"], "No such option: --nope (try: quantwatch --help)"),
        (["chek"], "No such command 'chek'."),
        (["compare", "a"], "Missing argument 'CAND'. (try: quantwatch compare --help)"),
        (["check", "run", "x", "--limit", "many"], "'--limit': Input should be a valid integer"),
    ],
    ids=["option", "command", "argument", "value"],
)
def test_usage_errors_are_one_line(run: Run, words: list[str], said: str) -> None:
    """A slip of the finger is exit 2 in one line that names the help."""
    outcome = run(*words)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize("words", [[], ["check"], ["db"]], ids=["root", "check", "db"])
def test_a_group_alone_shows_its_help(run: Run, words: list[str]) -> None:
    """Typing only a group lists what it can do."""
    outcome = run(*words)
    assert outcome.code == 2
    assert "Commands:" in outcome.err


def test_check_list_and_validate(run: Run) -> None:
    """The checks of the configuration, without a database or a model."""
    assert "int8" in run("check", "list").out
    assert '"suite": "core-v1:demo"' in run("check", "list", "--json").out
    outcome = run("check", "validate")
    assert (outcome.code, outcome.out.endswith(": 1 check is valid\n")) == (0, True)


def test_check_validate_names_file_key_and_value(run: Run, place: Path) -> None:
    """A misspelt key is found with its place and what is allowed."""
    path = place / "quantwatch.toml"
    path.write_text(path.read_text().replace("description", "descriptoin"))
    outcome = run("check", "validate")
    assert outcome.code == 2
    for words in (str(path), "checks.nightly.descriptoin", "did you mean description?"):
        assert words in outcome.err


def test_check_validate_finds_missing_files(run: Run, place: Path) -> None:
    """A prompt file that isn't there is found before the night, not in it."""
    path = place / "quantwatch.toml"
    path.write_text(path.read_text().replace('"core-v1:demo"', '{ files = ["gone.txt"] }'))
    outcome = run("check", "validate")
    assert outcome.code == 2
    assert "gone.txt does not exist" in outcome.err


def test_config_option_wins(run: Run, place: Path) -> None:
    """--config names another file, from any folder."""
    other = place / "elsewhere"
    other.mkdir()
    (place / "quantwatch.toml").rename(other / "my.toml")
    assert run("--config", str(other / "my.toml"), "check", "list").code == 0
    assert run("--config", "absent.toml", "check", "list").code == 2


def test_a_reader_that_goes_away_is_no_error(place: Path) -> None:
    """`quantwatch check list | head -1`: no traceback, and the exit code stays the command's."""
    code = "from quantwatch.cli import main; main(['check', 'list', '--json'])"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, check=False, cwd=place
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
