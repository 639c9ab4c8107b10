"""Names of an entry's files."""

CONDITIONS = "conditions"


def batch_part(number: int) -> str:
    """Return the name of a batch's trace."""
    return f"batch-{number:05}"


def floor_part(number: int) -> str:
    """Return the name of the noise floor that was measured on a batch."""
    return f"floor-{number:05}"


def sketch_part(number: int) -> str:
    """Return the name of what the lens saw of a batch, where it was kept."""
    return f"sketch-{number:05}"


def file_of(part: str) -> str:
    """Return the file that a part is in."""
    return f"{part}.safetensors"
