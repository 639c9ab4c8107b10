"""What every Triton kernel keeps to, read from its source."""

import ast
from pathlib import Path

import pytest

import quantwatch_kernels

ROOT = Path(quantwatch_kernels.__file__).parent
FILES = sorted(p for p in ROOT.glob("*/triton/*.py") if "import triton\n" in p.read_text())


def calls(path: Path, name: str) -> list[ast.Call]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == name]


def test_there_are_kernels() -> None:
    """Catches a look at an empty folder."""
    assert {"lens.py", "rows.py", "paged_attention.py"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parts[-3]}/{path.stem}")
def test_every_load_says_what_is_outside(path: Path) -> None:
    """Catches lanes that the interpreter fills with zeros and a GPU with anything (bug log 26)."""
    for call in calls(path, "tl.load"):
        assert {"mask", "other"} <= {keyword.arg for keyword in call.keywords}, ast.unparse(call)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parts[-3]}/{path.stem}")
def test_every_kernel_is_compiled_by_a_test(path: Path) -> None:
    """Catches a kernel that only ever ran in the interpreter."""
    folder = Path(__file__).parent / path.parts[-3] / "triton"
    (script,) = folder.glob("compile_*.py")
    tree = ast.parse(path.read_text())
    kernels = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and [ast.unparse(d) for d in node.decorator_list] == ["triton.jit"]
    ]
    launched = [name for name in kernels if f"    {name}[" in path.read_text()]
    text = script.read_text()
    assert all(f"{path.stem}.{name}" in text for name in launched), launched
