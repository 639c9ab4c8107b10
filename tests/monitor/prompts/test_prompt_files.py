"""Users' own prompt files: what is read, and every way in which they can be wrong."""

import json
from pathlib import Path

import pytest

from quantwatch.errors import PromptError
from quantwatch.prompts.files import read_files
from quantwatch.prompts.records import RawPrompt


def _read(folder: Path, name: str, content: str | bytes) -> list[RawPrompt]:
    data = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(data)
    return read_files([name], folder)


def test_plain_text_is_one_windowed_prompt(tmp_path: Path) -> None:
    """Catches a text that is split into lines or loses its ends."""
    [raw] = _read(tmp_path, "book.txt", "one\n\ntwo\n")
    assert (raw.text, raw.windowed, raw.category, raw.source) == (
        "one\n\ntwo\n",
        True,
        "book",
        "book.txt",
    )


@pytest.mark.parametrize("name", ["notes", "notes.md", "NOTES.TXT"])
def test_any_other_ending_is_plain_text(tmp_path: Path, name: str) -> None:
    """Catches text files that are refused for their name."""
    assert _read(tmp_path, name, "x")[0].windowed


@pytest.mark.parametrize(
    "content",
    [b"\xef\xbb\xbfone\ntwo", b"one\r\ntwo", b"\xef\xbb\xbfone\r\ntwo", b"one\rtwo"],
    ids=["bom", "crlf", "bom and crlf", "cr"],
)
def test_windows_files_give_the_same_text(tmp_path: Path, content: bytes) -> None:
    """Catches tokens that differ between two check-outs of the same file."""
    assert _read(tmp_path, "a.txt", content)[0].text == "one\ntwo"


def test_json_list(tmp_path: Path) -> None:
    """Catches a lost order, and line ends inside of strings that are rewritten."""
    raws = _read(tmp_path, "my.json", '\ufeff["first", "a\\r\\nb",\r\n "x\u2028y"]')
    assert [raw.text for raw in raws] == ["first", "a\r\nb", "x\u2028y"]
    assert [raw.source for raw in raws] == ["my.json[0]", "my.json[1]", "my.json[2]"]
    assert {raw.category for raw in raws} == {"my"}
    assert not any(raw.windowed for raw in raws)


def test_json_lines(tmp_path: Path) -> None:
    """Catches mixed kinds, labels that are lost, and U+2028 taken for a line end."""
    lines = [
        '{"text": "x\u2028y\x85z", "id": "a", "category": "odd"}',
        "",
        '{"messages": [{"role": "user", "content": "hi"}]}\r',
        '{"token_ids": [1, 2]}',
    ]
    raws = _read(tmp_path, "mixed.jsonl", "\n".join(lines) + "\n")
    assert [raw.text for raw in raws] == ["x\u2028y\x85z", None, None]
    assert raws[1].messages == ({"role": "user", "content": "hi"},)
    assert raws[2].token_ids == (1, 2)
    assert [raw.source for raw in raws] == [
        "mixed.jsonl/a",
        "mixed.jsonl, line 3",
        "mixed.jsonl, line 4",
    ]
    assert [raw.category for raw in raws] == ["odd", "mixed", "mixed"]


def test_tool_calls_may_stand_without_content(tmp_path: Path) -> None:
    """Catches a real tool conversation that is refused for its null content."""
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    [raw] = _read(tmp_path, "a.jsonl", json.dumps({"messages": [message]}))
    assert raw.messages == (message,)


def test_several_files_keep_their_order_and_categories(tmp_path: Path) -> None:
    """Catches results of different files that are mixed up, even with equal stems."""
    for name in ("b.txt", "a.json", "x/same.txt", "y/same.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('["t"]')
    raws = read_files(["b.txt", "a.json", "x/same.txt", "y/same.txt"], tmp_path)
    assert [raw.category for raw in raws] == ["b", "a", "x/same.txt", "y/same.txt"]


def test_an_absolute_path_needs_no_base(tmp_path: Path) -> None:
    """Catches a base folder that is glued to absolute paths."""
    (tmp_path / "a.txt").write_text("x")
    assert read_files([str(tmp_path / "a.txt")], Path("/elsewhere"))[0].text == "x"


BAD_FILES: dict[str, tuple[str, str | bytes, str]] = {
    "empty": ("a.txt", b"", "prompt file a.txt is empty"),
    "only a byte order mark": ("a.txt", b"\xef\xbb\xbf", "prompt file a.txt is empty"),
    "only white space": ("a.txt", b" \n\t ", "prompt file a.txt is empty"),
    "not utf-8": ("a.txt", b"abc\xe4\xf6", "a.txt is not UTF-8: byte 0xE4 at offset 3"),
    "not utf-8 after a mark": ("a.txt", b"\xef\xbb\xbfab\xff", "byte 0xFF at offset 5"),
    "utf-16": ("a.txt", "hi".encode("utf-16"), "it looks like UTF-16"),
    "json syntax": ("a.json", '["a",\n "b" "c"]', r"a.json, line 2, column 6: not valid JSON"),
    "json object": ("a.json", '{"text": "a"}', "a .json file holds one list of strings"),
    "json empty list": ("a.json", "[]", "a.json: the list is empty"),
    "json empty prompt": ("a.json", '["a", ""]', r"a.json\[1\]: the prompt is empty"),
    "json blank prompt": ("a.json", '["a", "b", " \\n"]', r"a.json\[2\]: the prompt is empty"),
    "json number": ("a.json", '["a", 5]', r"a.json\[1\]: expected a string, got an integer"),
    "json null": ("a.json", "[null]", r"a.json\[0\]: expected a string, got null"),
    "json nested": ("a.json", "[" * 100_000, "nested too deeply"),
    "json half surrogate": ("a.json", '["ab\\ud83d"]', r"character 2 is '\\ud83d'"),
    "jsonl syntax": ("a.jsonl", '{"text": "a"}\n{"text": }', "line 2, column 10: not valid JSON"),
    "jsonl no object": ("a.jsonl", '"a"', "a.jsonl, line 1: expected an object"),
    "jsonl unknown key": (
        "a.jsonl",
        '{"txt": "a"}',
        "unknown key 'txt'; allowed: text, messages, token_ids, id, category",
    ),
    "jsonl nothing": ("a.jsonl", '{"id": "a"}', "exactly one of text, messages, token_ids"),
    "jsonl two": ("a.jsonl", '{"text": "a", "token_ids": [1]}', "exactly one of"),
    "jsonl key twice": ("a.jsonl", '{"text": "a", "text": "b"}', "key 'text' is given twice"),
    "jsonl id twice": (
        "a.jsonl",
        '{"text": "a", "id": "x"}\n\n{"text": "b", "id": "x"}',
        "line 3: id 'x' was used in line 1",
    ),
    "jsonl id number": ("a.jsonl", '{"text": "a", "id": 4}', "id must be a string"),
    "jsonl empty category": ("a.jsonl", '{"text": "a", "category": ""}', "category must be"),
    "ids no list": ("a.jsonl", '{"token_ids": "1 2"}', "token_ids must be a list of integers"),
    "ids float": ("a.jsonl", '{"token_ids": [1, 2.0]}', r"token_ids\[1\] must be an integer"),
    "ids bool": ("a.jsonl", '{"token_ids": [true]}', r"token_ids\[0\].* got true"),
    "ids nan": ("a.jsonl", '{"token_ids": [NaN]}', "line 1: not usable JSON: NaN is no JSON"),
    "ids empty": ("a.jsonl", '{"token_ids": []}', "token_ids is empty"),
    "messages empty": ("a.jsonl", '{"messages": []}', "list of at least one object"),
    "message string": ("a.jsonl", '{"messages": ["hi"]}', "message 1: expected an object"),
    "message key": (
        "a.jsonl",
        '{"messages": [{"role": "user", "text": "hi"}]}',
        "message 1: unknown key 'text'; allowed: role, content",
    ),
    "message role": ("a.jsonl", '{"messages": [{"content": "hi"}]}', "role must be a string"),
    "message content": (
        "a.jsonl",
        '{"messages": [{"role": "user", "content": ["hi"]}]}',
        "message 1, content: expected a string, got a list",
    ),
}


@pytest.mark.parametrize(("name", "content", "words"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_files_are_named(tmp_path: Path, name: str, content: str | bytes, words: str) -> None:
    """Catches tracebacks, and messages that don't lead to the place."""
    with pytest.raises(PromptError, match=words) as caught:
        _read(tmp_path, name, content)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    """Catches a message without the folder that was searched."""
    with pytest.raises(PromptError, match=f"no.txt doesn't exist .*{tmp_path}"):
        read_files(["no.txt"], tmp_path)


def test_directory(tmp_path: Path) -> None:
    """Catches a bare IsADirectoryError."""
    (tmp_path / "sub").mkdir()
    with pytest.raises(PromptError, match="sub is a directory"):
        read_files(["sub"], tmp_path)


def test_unreadable_file(tmp_path: Path) -> None:
    """Catches any other trouble of the operating system (here: a name that is too long)."""
    with pytest.raises(PromptError, match="can't be read: File name too long"):
        read_files(["x" * 300 + ".txt"], tmp_path)


def test_a_file_listed_twice(tmp_path: Path) -> None:
    """Catches prompts that count double and make an error look surer than it is."""
    with pytest.raises(PromptError, match=r"a\.txt is listed twice"):
        read_files(["a.txt", "b.txt", "a.txt"], tmp_path)


def test_a_file_listed_under_two_names(tmp_path: Path) -> None:
    """Catches prompts that count double through a link or another spelling."""
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").symlink_to("a.txt")
    for other in ("b.txt", "./a.txt", str(tmp_path / "a.txt")):
        with pytest.raises(PromptError, match="is listed twice; its prompts would count double"):
            read_files(["a.txt", other], tmp_path)
