"""Compile the GPU's attention kernels for GPUs that are not there; print one JSON list.

A program of its own: the tests' process has Triton's interpreter in the compiler's place.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from valuspec.engine import triton_kernels
from valuspec.engine.kv_cache import BLOCK, ONES
from valuspec.engine.rows import NEAR
from valuspec.engine.triton_attention import PRODUCT, SLICE, TILE

#: An 8B model of the Llama family.
GROUP, KV_HEADS, HEAD_SIZE = 4, 8, 128
SIZES = {
    "group": GROUP,
    "num_kv_heads": KV_HEADS,
    "size": HEAD_SIZE,
    "size_pad": HEAD_SIZE,
    "block": BLOCK,
    "ones": ONES,
}
#: By compute capability: without and with.
SOFTCAPS = {80: 0.0, 90: 30.0}
ZONES = SIZES | {"softcap": 0.0, "near": NEAR, "slice_keys": SLICE}
KERNELS = {
    "store_rows": SIZES,
    "far_zone": ZONES | {"group_pad": GROUP, "rows_per_tile": TILE // GROUP, "product": PRODUCT},
    "near_zone": ZONES | {"group_rows": 16},
}
TYPES = dict.fromkeys(("qkv", "keys", "values", "out"), "*bf16")
TYPES |= dict.fromkeys(("sums", "weights", "peaks"), "*fp32")
TYPES |= dict.fromkeys(("width", "table_width", "window"), "i32")


def compile_kernel(name: str, capability: int) -> dict[str, Any]:
    kernel, constants = getattr(triton_kernels, name), dict(KERNELS[name])
    if "softcap" in constants:
        constants["softcap"] = SOFTCAPS[capability]
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "*i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"
    }
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    ptx = compiled.asm["ptx"]
    return {
        "kernel": name,
        "compute_capability": capability,
        "atomics": re.findall(r"\b(?:atom|red)\.\S+", ptx),
        "tensor_cores": "mma" in ptx,
        "shared_bytes": compiled.metadata.shared,
        "spilled_bytes": _stack_bytes(compiled.asm["cubin"]),
    }


def _stack_bytes(cubin: bytes) -> int:
    """Bytes of each thread's stack: where registers go that do not fit."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        arguments = [tool, "-res-usage", file.name]
        usage = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[1])


if __name__ == "__main__":
    print(json.dumps([compile_kernel(name, c) for name in KERNELS for c in SOFTCAPS]))
