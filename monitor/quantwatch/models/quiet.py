"""Keep other libraries off the terminal while they load, and turn their errors into one line."""

import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import torch

from quantwatch.errors import ModelError, QuantwatchError, ResourceError
from quantwatch.telemetry import disk_is_full

_LOG = logging.getLogger(__name__)
_MAX_LENGTH = 300
_STARVED = ("can't allocate memory", "can't start new thread")


def one_line(error: BaseException) -> str:
    """Return the first line that says something, or the error's type when there is none."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    said = [line for line in lines if line] or [type(error).__name__]
    # A heading needs what it announces.
    first = " ".join(said[:2]) if said[0].endswith(":") else said[0]
    return first if len(first) <= _MAX_LENGTH else f"{first[:_MAX_LENGTH]}…"


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn whatever a library raises into one line that names `what`; our own errors pass.

    Raises:
        ResourceError: memory or disk ran out.
        ModelError: everything else.
    """
    try:
        yield
    except QuantwatchError:
        raise
    except Exception as error:
        text = f"{what}: {one_line(error)}"
        if _is_resource(error):
            raise ResourceError(text) from error
        raise ModelError(text) from error


def _is_resource(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # torch and Python raise a bare RuntimeError when the allocator or a thread's stack fails.
    starved = any(words in str(error) for words in _STARVED)
    return disk_is_full(error) or (isinstance(error, RuntimeError) and starved)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars, warnings and stderr of loading libraries; restore them afterwards.

    What was written to stderr goes to the debug log.
    """
    captured = io.StringIO()
    try:
        with warnings.catch_warnings(), redirect_stderr(captured), _transformers_silent():
            warnings.simplefilter("ignore")
            yield
    finally:
        if captured.getvalue():
            _LOG.debug("while loading: %s", captured.getvalue())


@contextmanager
def _transformers_silent() -> Iterator[None]:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    had_bar = transformers_logging.is_progress_bar_enabled()
    hub_had_none = are_progress_bars_disabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bar:
            transformers_logging.enable_progress_bar()
        if hub_had_none:
            disable_progress_bars()


def shorten(names: Sequence[str], limit: int = 3) -> str:
    """Join a few names and say how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def listing(folder: Path, limit: int = 6) -> str:
    """Say in words what a folder holds."""
    names = sorted(path.name for path in folder.iterdir())
    return f"it holds {shorten(names, limit)}" if names else "it is empty"
