"""C++ helpers: which compiler builds them, where they are kept, and what happens without."""

import shutil
from collections.abc import Callable
from pathlib import Path

import platformdirs
import pytest

from quantwatch_kernels.native import library, why_not_built


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source of one function, and an empty cache."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda _: str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    path = tmp_path / "answer.cpp"
    path.write_text('extern "C" int answer() { return ANSWER; }\n')
    return path


@pytest.mark.parametrize("compiler", ["", "g++", "g++ -DUNUSED", "env LC_ALL=C g++"])
def test_the_compiler_may_have_arguments(
    source: Path, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a wrapper (`ccache g++`) that is looked for as one name."""
    monkeypatch.setenv("CXX", compiler)
    assert library(source, "-DANSWER=42").answer() == 42
    assert library(source, "-DANSWER=43").answer() == 43


def test_a_changed_header_is_built_anew(source: Path) -> None:
    """Catches a library of yesterday's header."""
    source.write_text('#include "number.h"\nextern "C" int answer() { return NUMBER; }\n')
    for number in (7, 8):
        (source.parent / "number.h").write_text(f"#define NUMBER {number}\n")
        assert library(source).answer() == number


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "a beginning": lambda whole: whole[:4],
    "cut off": lambda whole: whole[: len(whole) // 2],
    "zeros at the end": lambda whole: whole[: len(whole) // 2] + bytes(len(whole) // 2),
    "one bit": lambda whole: whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:],
    "as the compiler left it": lambda whole: whole[:-32],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_library_that_is_damaged_is_built_anew(
    source: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a machine that went down once and is slow ever after, and a process that dies of it."""
    library(source, "-DANSWER=1")
    (built,) = (source.parent / "cache" / "native").iterdir()
    # Elsewhere: the loader knows what it has loaded by its path.
    other = source.parent / "other" / "native" / built.name
    other.parent.mkdir(parents=True)
    other.write_bytes(DAMAGES[damage](built.read_bytes()))
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda _: str(source.parent / "other"))
    assert library(source, "-DANSWER=1").answer() == 1
    assert other.read_bytes() == built.read_bytes()


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("nobody++ -O1", "there is no C++ compiler 'nobody++'"),
        ("false", "Command '['false'"),
        ("true", "No such file"),
        ("g++ 'x", 'CXX is no command: "g++ \'x": No closing quotation'),
    ],
)
def test_no_compiler_says_why(
    source: Path, compiler: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a compiler that fails, or writes nothing, as an internal error."""
    monkeypatch.setenv("CXX", compiler)
    reason = str(why_not_built(source))
    assert reason.startswith("answer.cpp can't be built: ")
    assert said in reason


def test_a_compiler_may_say_anything(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches words in another encoding as an internal error."""
    compiler = source.parent / "cc"
    compiler.write_text("#!/bin/sh\nprintf 'no\\264' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert why_not_built(source) == "answer.cpp can't be built: no\N{REPLACEMENT CHARACTER}"


def test_a_cache_that_can_not_be_written_says_why(source: Path) -> None:
    (source.parent / "cache").write_text("a file")
    assert "Not a directory" in str(why_not_built(source, "-DANSWER=1"))
