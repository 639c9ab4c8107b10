"""Who types: the name that stands beside what was changed."""

import getpass
import os


def actor() -> str:
    """Return the user's name; the number where the system knows no name (a container)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return f"uid {os.getuid()}"
