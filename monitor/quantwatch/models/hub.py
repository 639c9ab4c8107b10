"""Files of hub repositories: from the local cache, else downloaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantwatch.errors import ModelError
from quantwatch.models.quiet import explained

_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


def snapshot(repository: str, revision: str | None, similar: str | None = None) -> Path:
    """Return the folder with all but the weights of a repository; it is named after the commit.

    `similar` is a file or folder of such a name: it is suggested when there is no repository.

    Raises:
        ModelError: no such repository or revision, no access, or no network and nothing cached.
    """
    from huggingface_hub import snapshot_download

    with _reached(f"hub model {repository!r}", similar):
        folder = snapshot_download(repository, revision=revision, allow_patterns=list(_SMALL_FILES))
    return Path(folder)


def gguf_file(repository: str, name: str, revision: str | None) -> Path:
    """Return one GGUF file of a repository; raises ModelError as `snapshot` does."""
    from huggingface_hub import hf_hub_download

    with _reached(f"GGUF file {name!r} of hub model {repository!r}"):
        return Path(hf_hub_download(repository, name, revision=revision)).resolve()


def cached_folder(repository: str, revision: str | None) -> Path | None:
    """Return the folder of a repository whose weights are in the cache, None without them.

    Raises:
        ModelError: no repository can have such a name.
    """
    from huggingface_hub import try_to_load_from_cache

    with _reached(f"hub model {repository!r}"):
        found = [try_to_load_from_cache(repository, name, revision=revision) for name in _WEIGHTS]
    return next((Path(path).parent for path in found if isinstance(path, str)), None)


@contextmanager
def _reached(what: str, similar: str | None = None) -> Iterator[None]:
    """Say in words why something of the hub can't be had."""
    from huggingface_hub import errors

    # The order matters: a gated repository is a repository that isn't found, too.
    reasons: list[tuple[type[Exception], str]] = [
        (errors.GatedRepoError, "access is restricted: ask for it and run `hf auth login`"),
        (errors.RepositoryNotFoundError, "no such repository, or a private one"),
        (errors.RevisionNotFoundError, "no such revision"),
        (errors.RemoteEntryNotFoundError, "no such file in it"),
        (errors.LocalEntryNotFoundError, "not in the cache, and the hub can't be reached"),
        (errors.OfflineModeIsEnabled, "not in the cache, and offline mode is on"),
    ]
    with explained(what):
        try:
            yield
        except tuple(kind for kind, _ in reasons) as error:
            reason = next(words for kind, words in reasons if isinstance(error, kind))
            hint = "" if similar is None else f"; no folder either: did you mean {similar!r}?"
            raise ModelError(f"{what}: {reason}{hint}") from error
