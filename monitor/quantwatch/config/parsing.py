"""From bytes to a validated section; every mistake becomes one ConfigError."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from quantwatch.config.problems import config_error, sentences
from quantwatch.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)


def parse(model: type[Model], data: Mapping[str, Any], origin: str) -> Model:
    """Return a section built from plain data, types taken literally ("8" is no number).

    Raises ConfigError; `origin` says where the data comes from, e.g. the file or the command.
    """
    try:
        text = json.dumps(data, default=str, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        shown = ascii(error.object[max(error.start - 40, 0) : error.end])
        raise ConfigError(f"{origin}: not UTF-8 text: {shown}") from None
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise config_error(origin, sentences(error, model)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Return what a TOML file holds. Raises ConfigError naming file, line and problem."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}: not UTF-8: byte 0x{content[error.start]:02x} in line {line}"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not usable TOML: nested too deeply") from None
