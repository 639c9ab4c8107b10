"""GGUF files, converted once to a folder that loads fifteen times faster.

The conversion is transformers' own, into float32, and keeps every value. A folder in the cache is
complete or absent: it is written under another name and renamed.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from quantwatch.errors import ModelError
from quantwatch.models.fingerprints import file_sha
from quantwatch.models.gguf_header import GgufHeader, read_gguf_header
from quantwatch.models.pretrained import refuse_incomplete
from quantwatch.models.quiet import explained
from quantwatch_kernels.quantize.saved import save_whole


def converted_folder(gguf: Path, content_sha: str, cache_dir: Path) -> Path:
    """Return the folder a GGUF file converts to, converting it if this was not done before.

    The key is the file's content and the version of transformers. Processes may race: the first
    rename wins and the others use its folder.

    Raises:
        ModelError: the file is corrupt, changes meanwhile, or is of an architecture that
            transformers can't convert.
        ResourceError: not enough memory or disk.
    """
    import transformers

    header = read_gguf_header(gguf)
    target = cache_dir / "gguf" / f"{content_sha}-transformers-{transformers.__version__}"
    if target.is_dir():
        return target
    with explained(f"{gguf}: transformers can't convert it"):
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=target.parent))
        try:
            _convert(gguf, header, work)
            if file_sha(gguf, cache_dir) != content_sha:  # else its folder would hold another's
                raise ModelError(f"{gguf} changed while it was converted: run it again")
            _publish(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _publish(work: Path, target: Path) -> None:
    try:
        work.rename(target)
    except OSError:
        # Another process finished first; its folder is complete. Anything else is a real error.
        if not target.is_dir():
            raise


def _convert(gguf: Path, header: GgufHeader, work: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = (str(gguf.parent),)
    module, info = AutoModelForCausalLM.from_pretrained(
        *place,
        gguf_file=gguf.name,
        dtype=torch.float32,
        output_loading_info=True,
        **_unpacked(),
    )
    refuse_incomplete(str(gguf), info)
    save_whole(module, work)
    if "tokenizer.ggml.model" in header.keys:
        AutoTokenizer.from_pretrained(*place, gguf_file=gguf.name).save_pretrained(work)


def _unpacked() -> dict[str, Any]:
    # Since transformers 5.2x weights may stay in their blocks, and such a model can't be saved.
    import transformers

    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}
