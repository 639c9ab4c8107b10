"""Checkpoints that whoever may read their configuration may read whole.

safetensors 0.8 writes weights for their owner alone (mode 0600), whatever the umask is: a service
that runs as another user could open everything of a checkpoint but its numbers.
"""

from pathlib import Path
from typing import Any

__all__ = ["save_whole"]


def save_whole(model: Any, folder: Path | str, **settings: Any) -> None:
    """Save a transformers model, weights with the permissions of its config.json."""
    model.save_pretrained(folder, **settings)
    config = Path(folder) / "config.json"
    if config.is_file():
        for path in Path(folder).glob("*.safetensors"):
            path.chmod(config.stat().st_mode & 0o777)
