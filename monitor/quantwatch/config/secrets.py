"""Secrets: read from the environment or from files, never shown."""

from collections.abc import Mapping
from pathlib import Path

from quantwatch.errors import ConfigError
from quantwatch.observability import redaction

_MOST_BYTES = 64 * 1024


class Secret:
    """A value that is neither printed nor compared by accident; `reveal` returns it.

    Whoever makes one has it kept out of logs and messages from then on.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value
        redaction.register(value)

    def __repr__(self) -> str:
        return "Secret([redacted])"

    def __format__(self, _spec: str) -> str:
        return repr(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __reduce__(self) -> str:
        raise TypeError("a secret is not pickled")

    def reveal(self) -> str:
        """Return the value, for the one place that needs it."""
        return self._value


def from_environment(key: str, variable: str, env: Mapping[str, str]) -> Secret:
    """Read a secret from a variable. `key` is the setting's dotted name, for messages.

    Raises ConfigError when the variable is missing or empty.
    """
    value = env.get(variable, "").strip()
    if not value:
        state = "empty" if variable in env else "not set"
        raise ConfigError(f"{key}: environment variable {variable} is {state}")
    return Secret(value)


def from_file(key: str, file: str, base_dir: Path) -> Secret:
    """Read a secret from a small text file; a relative path starts at `base_dir`.

    Raises ConfigError when the file is missing, unreadable, empty, too long or no UTF-8.
    """
    path = base_dir / Path(file).expanduser()
    try:
        with path.open("rb") as stream:
            data = stream.read(_MOST_BYTES + 1)
        value = data.decode("utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{key}: {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        # The decoder's own words quote the bytes.
        raise ConfigError(f"{key}: {path}: is no UTF-8 text") from None
    if not value or len(data) > _MOST_BYTES:
        raise ConfigError(f"{key}: {path}: is {'empty' if not value else 'longer than 64 KiB'}")
    return Secret(value)
