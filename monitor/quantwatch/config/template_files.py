"""A template as an endpoint's settings name it: written in quantwatch.toml, or in a file."""

import os
from collections.abc import Sequence
from pathlib import Path

from quantwatch.config import templates
from quantwatch.config.files import local_path
from quantwatch.config.service import EndpointConfig
from quantwatch.config.templates import Template
from quantwatch.errors import ConfigError


def resolve_template(
    key: str, config: EndpointConfig, base_dir: Path, roots: Sequence[Path]
) -> Template | None:
    """Return the template of an endpoint, None when its format is another.

    A file has to lie inside `roots`, links followed. Raises ConfigError.
    """
    if config.format != "template":
        return None
    if config.body is not None:
        return templates.parse(f"{key}.body", config.body, config.content_type)
    assert config.body_file is not None
    key = f"{key}.body_file"
    path = Path(os.path.realpath(local_path(config.body_file, base_dir)))
    if not any(path.is_relative_to(root) for root in roots):
        raise ConfigError(
            f"{key}: {path} lies outside of what the service may read; allowed: "
            f"{', '.join(map(str, roots)) or 'nothing'} (service.allowed_roots)"
        )
    return templates.parse(key, _read(key, path), config.content_type)


def _read(key: str, path: Path) -> str:
    try:
        # A pipe would be waited for.
        if path.exists() and not path.is_file():
            raise ConfigError(f"{key}: {path} is no file")
        with path.open("rb") as stream:
            # One byte more tells that it is too long.
            data = stream.read(templates.MOST_BYTES + 1)
        return data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{key}: {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        if len(data) > templates.MOST_BYTES:
            raise ConfigError(
                f"{key}: the template is longer than {templates.MOST_BYTES} bytes"
            ) from None
        raise ConfigError(f"{key}: {path}: is no UTF-8 text") from None
