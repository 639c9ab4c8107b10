"""What a stored reference depends on: all that can change a bit of it, and nothing else.

Not in it: how a streamed model is read (its numbers are the same), the check's name, the
candidates, the rules.
"""

import hashlib
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

import quantwatch
import quantwatch_kernels
from quantwatch.capture.batches import Batch
from quantwatch.capture.course import Course
from quantwatch.domain import Json
from quantwatch.models.loaded import LoadedModel
from quantwatch.telemetry import canonical_json, canonical_sha, cpu, libraries
from quantwatch_kernels.compare.lens_native import why_not_native
from quantwatch_kernels.compare.lens_words_native import WORDS, why_not_words
from quantwatch_kernels.compare.sketch_native import why_not_gathered

FORMAT = 1
"""Raised whenever files are written otherwise."""
_LIBRARIES = ("quantwatch", "torch", "transformers", "accelerate", "gguf", "numpy")
_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")
_SOURCES = (".py", ".cpp", ".h")


def ingredients(reference: LoadedModel, course: Course) -> Json:
    """Return everything the reference's numbers depend on, as plain JSON; its digest is the key."""
    fingerprint = reference.variant.fingerprint
    found = {
        "format": FORMAT,
        "fingerprint": {name: getattr(fingerprint, name) for name in fingerprint.__slots__},
        "suite": course.suite.hash,
        "plan": course.plan.sha,
        "batches": canonical_sha([_batch(batch) for batch in course.batches]),
        "floor": sorted(course.floor),
        "context": course.max_positions,
        "dtype": str(reference.dtype),
        **_device(reference.device),
        **_machine(),
        "libraries": libraries(_LIBRARIES),
        "torch": canonical_sha([torch.__version__, torch.__config__.show()]),
        "code": code_sha(),
    }
    plain: Json = json.loads(canonical_json(found))
    return plain


def _batch(batch: Batch) -> list[Any]:
    prompts = [[p.index, p.score_start, list(p.token_ids)] for p in batch.prompts]
    return [prompts, batch.isolated]


def _device(device: torch.device) -> Json:
    is_gpu = device.type == "cuda"
    return {
        "device": device.type,
        "gpu": torch.cuda.get_device_name(device) if is_gpu else None,
        "tf32": torch.backends.cuda.matmul.allow_tf32 if is_gpu else None,
    }


def _machine() -> Json:
    """Return what decides which instructions are used, in which order sums are taken."""
    processor = cpu()
    return {
        "cpu": processor.get("model") or processor["machine"],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
        "native lens": why_not_native() is None,
        "native products": [name for name in WORDS if why_not_words(name) is None],
        "native rows": why_not_gathered(torch.float32) is None,
    }


@cache
def code_sha() -> str:
    """Return the digest of the code that computes: a version says nothing about a checkout."""
    package = Path(quantwatch.__file__).parent
    kernels = Path(quantwatch_kernels.__file__).parent
    digest = hashlib.sha256()
    for root in (package / "capture", package / "models", kernels):
        for path in sorted(path for path in root.rglob("*") if path.suffix in _SOURCES):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root.parent)} {len(content)};".encode() + content)
    return digest.hexdigest()
