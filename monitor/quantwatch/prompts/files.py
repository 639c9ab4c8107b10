"""Users' own prompt files: plain text, a JSON list of strings, or JSONL."""

import codecs
from collections.abc import Sequence
from pathlib import Path, PurePath

from quantwatch.config.files import listed_twice, local_path
from quantwatch.errors import PromptError
from quantwatch.prompts.records import RawPrompt, check_text, parse_json, parse_record

_JSON_LINES = (".jsonl", ".ndjson")


def read_files(names: Sequence[str], base_dir: Path) -> list[RawPrompt]:
    """Read prompt files in order; the ending decides: .json, .jsonl or .ndjson, else plain text.

    A prompt's category is the stem of its file unless it names one (the whole name where two
    files have the same stem). Raises PromptError naming file, place and problem.
    """
    if (again := listed_twice(names, base_dir)) is not None:
        raise PromptError(f"prompt file {again} is listed twice; its prompts would count double")
    stems = [PurePath(name).stem for name in names]
    prompts: list[RawPrompt] = []
    for name, stem in zip(names, stems, strict=True):
        category = stem if stems.count(stem) == 1 else name
        prompts += _parse(name, category, read_text(name, base_dir))
    return prompts


def is_plain_text(name: str) -> bool:
    """Say whether a file is cut into windows, by its ending."""
    return PurePath(name).suffix.lower() not in (".json", *_JSON_LINES)


def _parse(name: str, category: str, text: str) -> list[RawPrompt]:
    if is_plain_text(name):
        return [RawPrompt(name, name, category, text=_unified(text), windowed=True)]
    if PurePath(name).suffix.lower() == ".json":
        return _json_list(name, category, text)
    return _json_lines(name, category, text)


def read_text(name: str, base_dir: Path) -> str:
    """Return a file's text without a byte order mark. Raises PromptError."""
    path = local_path(name, base_dir)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise PromptError(f"prompt file {name} doesn't exist (looked for {path})") from None
    except IsADirectoryError:
        raise PromptError(f"prompt file {name} is a directory; name the files in it") from None
    except OSError as error:
        raise PromptError(f"prompt file {name} can't be read: {error.strerror}") from None
    text = _decode(name, data)
    if not text.strip():
        raise PromptError(f"prompt file {name} is empty")
    return text


def _decode(name: str, data: bytes) -> str:
    mark = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    try:
        return data[mark:].decode()
    except UnicodeDecodeError as error:
        offset = error.start + mark
        wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        hint = " (it looks like UTF-16)" if wide else ""
        problem = f"byte 0x{data[offset]:02X} at offset {offset}"
        raise PromptError(f"prompt file {name} is not UTF-8: {problem}{hint}") from None


def _unified(text: str) -> str:
    """Read line ends as Python's text mode does, so that a Windows copy gives the same tokens."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _json_list(name: str, category: str, text: str) -> list[RawPrompt]:
    values = parse_json(text, name)
    if not isinstance(values, list):
        raise PromptError(f"{name}: a .json file holds one list of strings; use .jsonl for objects")
    if not values:
        raise PromptError(f"{name}: the list is empty")
    labels = [f"{name}[{index}]" for index in range(len(values))]
    return [
        RawPrompt(label, label, category, text=check_text(value, label))
        for label, value in zip(labels, values, strict=True)
    ]


def _json_lines(name: str, category: str, text: str) -> list[RawPrompt]:
    prompts: list[RawPrompt] = []
    seen: dict[str, int] = {}
    # Not splitlines(): a JSON string may hold U+2028 and others that it takes for line ends.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        value = parse_json(line, name, number)
        prompt = parse_record(value, f"{name}, line {number}", name, category)
        if prompt.source in seen:
            first = seen[prompt.source]
            raise PromptError(f"{prompt.where}: id {value['id']!r} was used in line {first}")
        seen[prompt.source] = number
        prompts.append(prompt)
    return prompts
