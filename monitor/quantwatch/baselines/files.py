"""Runs as files: everything that a comparison needs, for a machine without the database.

Strict JSON. A number that is not finite is written as ``{"$float": "nan" | "inf" | "-inf"}``, so
that reading a file back gives the very same run.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from quantwatch.baselines.file_sums import decode_sums, encode_sums
from quantwatch.config.problems import config_error, sentences
from quantwatch.domain import Block, RunResult, RunStatus
from quantwatch.errors import UserError
from quantwatch.telemetry import write_whole

FORMAT = "quantwatch-run"
VERSION = 1
_FLOAT = "$float"
_SUMS = "prompt_sums"
_TRANSIENT = {"outcomes"}
"""What a run has only while it is judged."""
_RUN = TypeAdapter(RunResult)
_FLOOR = TypeAdapter(dict[Literal["noise_floor"], list[tuple[str, str, float]]])


def export_run(result: RunResult, path: Path, blocks: Iterable[Block] = ()) -> None:
    """Write a succeeded run to a file, whole or not at all.

    `blocks` are prompt sums: without them another run is compared with its means alone.

    Raises UserError when the run has no verdict or the folder is missing, ResourceError on a full
    disk.
    """
    if result.status != RunStatus.SUCCEEDED:
        raise UserError(
            f"run {result.run_id} is {result.status}: only a succeeded run can be a baseline"
        )
    write_whole(path, dumps(result, blocks))


def import_run(path: Path) -> RunResult:
    """Return the run in a file. Raises UserError when it is no such file, cut off or too new."""
    return loads(_text(path), str(path))


def import_sums(path: Path) -> tuple[Block, ...]:
    """Return the prompt sums in a file, none when it has none. Raises UserError."""
    origin, text = str(path), _text(path)
    return decode_sums(
        _opened(text, origin).get(_SUMS, []), origin, loads(text, origin).num_prompts
    )


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not an exported run: it is not UTF-8 text") from None


def dumps(result: RunResult, blocks: Iterable[Block] = ()) -> str:
    """Return a run as the text of a file."""
    document: dict[str, Any] = {"format": FORMAT, "version": VERSION, "run": encode(result)}
    if sums := encode_sums(blocks):
        document[_SUMS] = sums
    return f"{json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1)}\n"


def loads(text: str, origin: str) -> RunResult:
    """Return the run in the text of a file; `origin` says where it comes from. Raises UserError."""
    document = _opened(text, origin)
    try:
        run = _decode(document.get("run"))
    except ValidationError as error:
        raise UserError(str(config_error(origin, sentences(error)))) from None
    if unknown := next(_unknown(document.get("run"), encode(run), "run"), None):
        raise UserError(f"{origin}: {unknown} is unknown here; a newer quantwatch wrote the file")
    return run


def _opened(text: str, origin: str) -> dict[str, Any]:
    """Return the document of a file whose format and version are known."""
    document = _document(text, origin)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UserError(
            f"{origin}: not an exported run; make one with `quantwatch baseline export`"
        )
    if document.get("version") != VERSION:
        found = document.get("version")
        raise UserError(f"{origin}: version {found!r} of the file; this program reads {VERSION}")
    return document


def encode(value: Any) -> Any:
    """Return a record as strict JSON values."""
    if is_dataclass(value):
        return {
            f.name: _encode_field(f.name, getattr(value, f.name))
            for f in fields(value)
            if f.name not in _TRANSIENT
        }
    if isinstance(value, Mapping):
        return {key: encode(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [encode(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    return value.isoformat() if isinstance(value, datetime) else value


def _decode(run: Any) -> RunResult:
    """Return the run that was encoded; raises pydantic's ValidationError naming the field."""
    plain = dict(run) if isinstance(run, dict) else {}
    rows = {"noise_floor": plain.pop("noise_floor", [])}
    # Types are taken literally, but lists become tuples and texts become dates: JSON mode.
    floor = _FLOOR.validate_json(json.dumps(rows), strict=True)["noise_floor"]
    result = _RUN.validate_json(json.dumps(plain), strict=True)
    return replace(result, noise_floor={(m, s): value for m, s, value in floor})


def _encode_field(name: str, value: Any) -> Any:
    """Keys of JSON objects are texts: the noise floor's pairs become rows."""
    if name == "noise_floor":
        return [[metric, scope, encode(floor)] for (metric, scope), floor in value.items()]
    return encode(value)


def _document(text: str, origin: str) -> Any:
    try:
        return json.loads(text, object_hook=_revive, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{origin}: not JSON, or cut off: {error.msg} in line {error.lineno}"
        ) from None
    except RecursionError:
        raise UserError(f"{origin}: not an exported run: nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{origin}: {error}") from None


def _revive(table: dict[str, Any]) -> Any:
    return float(table[_FLOAT]) if table.keys() == {_FLOAT} else table


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON; an exported run never has it")


def _unknown(given: Any, known: Any, at: str) -> Iterator[str]:
    """Yield the keys that were read but are not understood."""
    if isinstance(given, dict) and isinstance(known, dict):
        for key, inner in given.items():
            if key not in known:
                yield f"{at}.{key}"
            else:
                yield from _unknown(inner, known[key], f"{at}.{key}")
    elif isinstance(given, list) and isinstance(known, list):
        for index, (inner, ours) in enumerate(zip(given, known, strict=True)):
            yield from _unknown(inner, ours, f"{at}[{index}]")
