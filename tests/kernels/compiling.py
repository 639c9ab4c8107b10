"""Compile Triton kernels for a GPU that isn't there, and say what they multiply with.

Scripts that use it run in a process of their own, because Triton decides at import whether it
interprets: `python -m tests.kernels.compare.triton.compile_compare 90 fp32 fp16`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Kernel = tuple[Any, dict[str, Any], dict[str, str]]
"""A kernel, its constants, and the types of its other arguments; what isn't named is an i32."""


def instructions(kernel: Kernel, capability: int) -> list[str]:
    """Compile down to machine code; return the kinds of matrix instruction in between."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, constants, types = kernel
    signature = {
        n: "constexpr" if n in constants else types.get(n, "i32") for n in function.arg_names
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    target, options = GPUTarget("cuda", capability, 32), {"enable_fp_fusion": False}
    done = triton.compile(source, target=target, options=options)
    assert done.asm["cubin"]
    lines = (line.split()[0] for line in done.asm["ptx"].splitlines() if "mma" in line)
    return sorted({line for line in lines if line.startswith(("mma", "wgmma.mma_async"))})


def tell(kernels: Callable[[str], dict[str, Kernel]]) -> None:
    """Print kernel and dtype → instructions as JSON, for the words of the command line."""
    capability, *dtypes = sys.argv[1:]
    found = {
        f"{name} {dtype}": instructions(kernel, int(capability))
        for dtype in dtypes
        for name, kernel in kernels(dtype).items()
    }
    print(json.dumps(found))


def compiled(module: str, capability: int, cache: Path, *dtypes: str) -> dict[str, list[str]]:
    """Run such a script for Triton's names of dtypes and return what it printed."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-m", module, str(capability), *dtypes],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found
