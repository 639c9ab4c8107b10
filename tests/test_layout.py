"""The shape of the tree: measures that keep rooms small, and what must never be importable."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import LONGEST, WHOLE

ROOT = Path(__file__).parents[1]
PACKAGES = (
    ROOT / "monitor/quantwatch",
    ROOT / "kernels/quantwatch_kernels",
    ROOT / "dashboard/quantwatch_dashboard",
)
SOURCES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 250, 30, 6
MAX_COMMAND, MAX_VIEW = 15, 120


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count from the first statement after the docstring to the end."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return node.end_lineno - body[0].lineno + 1 if body and node.end_lineno else 0


def positional(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    return len([a for a in given if a.arg not in ("self", "cls")])


@pytest.mark.parametrize("folder", ["monitor", "kernels", "dashboard"])
def test_role_folders_are_not_packages(folder: str) -> None:
    """Catches a package `kernels` that would shadow the Hugging Face package of that name."""
    assert not (ROOT / folder / "__init__.py").exists()


def test_kernels_is_not_ours() -> None:
    """Catches the repository root on the import path."""
    spec = importlib.util.find_spec("kernels")
    places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin]
    assert not [place for place in places if str(place).startswith(str(ROOT / "kernels"))]


@pytest.mark.parametrize("path", [p for p in SOURCES if "triton" not in p.parts], ids=relative)
def test_rooms_are_small(path: Path) -> None:
    """Catches files, functions and parameter lists that grew into several."""
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_FILE, f"{relative(path)} has {lines} lines"
    command_line = "cli" in path.parts
    for node in functions(path):
        size = body_lines(node)
        assert size <= MAX_FUNCTION, f"{relative(path)}:{node.name} has {size} lines"
        # Typer declares options as parameters.
        if not command_line:
            count = positional(node)
            assert count <= MAX_PARAMETERS, f"{relative(path)}:{node.name} takes {count}"


@pytest.mark.parametrize("path", [p for p in SOURCES if "views" in p.parts], ids=relative)
def test_views_only_arrange(path: Path) -> None:
    """Catches logic that creeps into a page."""
    assert len(path.read_text().splitlines()) <= MAX_VIEW


@pytest.mark.parametrize("path", [p for p in SOURCES if "cli" in p.parts], ids=relative)
def test_commands_are_short(path: Path) -> None:
    """Catches logic that creeps into a command: those are the functions that take a context."""
    for node in functions(path):
        if node.args.args and node.args.args[0].arg == "context":
            assert body_lines(node) <= MAX_COMMAND, f"{relative(path)}:{node.name}"


QUICK = (
    "quantwatch",
    "quantwatch.metrics.registry",
    "quantwatch.config.schema",
    "quantwatch.store.runs",
    # The service measures in processes of its own; 350 MB less of it stay in memory.
    "quantwatch.service.running",
)


@pytest.mark.parametrize("module", QUICK)
def test_light_modules_import_no_torch(module: str) -> None:
    """Catches a page, a --help or a service that takes five seconds to start."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", [*WHOLE, *LONGEST])
def test_what_is_slow_is_there(name: str) -> None:
    """Catches a mark, or a place in the order, that was lost when a file was renamed."""
    assert list(ROOT.glob(f"{name.rstrip('./')}*")), name
