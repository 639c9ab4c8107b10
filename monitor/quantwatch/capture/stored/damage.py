"""What makes an entry unusable."""


class DamagedError(Exception):
    """A file of an entry is missing, cut, changed or somebody else's; the words say which."""
