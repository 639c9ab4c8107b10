"""Who types: the name that stands beside what was changed."""

import getpass
import os
import platform


def actor() -> str:
    """Return the user's name; the number where the system knows no name (a container)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return f"uid {os.getuid()}"


def who() -> str:
    """Return user@host: a team has several hosts, and the same user name on many of them."""
    return f"{actor()}@{platform.node() or 'localhost'}"
