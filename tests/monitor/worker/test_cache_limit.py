"""What recorded references may take reaches the process of a run."""

from pathlib import Path

from quantwatch.config.schema import Config
from quantwatch.worker.child import _surroundings
from quantwatch.worker.performing import Surroundings


def test_the_limit_of_the_service_reaches_the_run(tmp_path: Path) -> None:
    """Catches a limit that only runs from the command line heed."""
    service = Config.model_validate({"schema_version": 1, "cache": {"reference_gb": 3}})
    job = {
        "cache_dir": str(tmp_path),
        "roots": [str(tmp_path)],
        "service": service.model_dump(mode="json"),
    }
    around = _surroundings(job)
    assert around.reference_bytes == 3 * 10**9
    assert around.settle is not None
    assert around.tell is not None
    assert Surroundings(tmp_path).reference_bytes == 20 * 10**9
