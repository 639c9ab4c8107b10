"""The shell command that repeats a run."""

import shlex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantwatch.domain import Json, RunResult

COMPARE = "compare"
"""Name under which `quantwatch compare` stores its runs; no quantwatch.toml has them."""


def repeat_command(result: "RunResult") -> str | None:
    """Return the command, None for a run of `quantwatch.compare` on modules in memory."""
    if result.check != COMPARE:
        return shlex.join(["quantwatch", "check", "run", result.check])
    reference = result.config.get("reference") or {}
    candidates = result.config.get("candidates") or [{}]
    models = [reference.get("model"), candidates[0].get("model")]
    suite = result.config.get("suite") or {}
    if None in models or not suite.get("files"):
        return None
    words = ["quantwatch", "compare", *models, *_options(suite, reference, candidates[0])]
    words += ["--threads", threads] if (threads := result.config.get("threads")) else []
    words += ["--prefill-chunk", size] if (size := result.config.get("prefill_chunk")) else []
    products = result.config.get("lens_products", "float32")
    words += ["--lens-products", products] if products != "float32" else []
    words += ["--allow-beyond-context"] if result.config.get("allow_beyond_context") else []
    return shlex.join(str(word) for word in words)


def _options(suite: "Json", reference: "Json", candidate: "Json") -> list[Any]:
    given = {
        "--window": suite.get("window"),
        "--limit": suite.get("limit"),
        "--score-start": suite.get("score_start") or None,
        "--recipe": candidate.get("recipe"),
        "--execution": candidate.get("execution") if candidate.get("recipe") else None,
        "--dtype": reference.get("dtype"),
        "--candidate-dtype": candidate.get("dtype"),
    }
    texts = [word for file in suite["files"] for word in ("--text", file)]
    said = [(name, value) for name, value in given.items() if value is not None]
    return texts + [word for pair in said for word in pair]
