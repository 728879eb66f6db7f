"""Read a compiled kernel's resource usage from its machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton.backends.nvidia as nvidia

_CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
_MATRIX = ("HGMMA", "QGMMA", "IGMMA", "HMMA", "IMMA")  # matrix instructions of NVIDIA, best first


@dataclass(frozen=True)
class Resources:
    """Hold the resource usage of a compiled kernel.

    registers: per thread.
    spills: instructions (NVIDIA) or registers (AMD).
    stack, shared: bytes.
    mma: the matrix instruction, or empty.
    """

    registers: int
    spills: int
    stack: int
    shared: int
    mma: str

    def __str__(self) -> str:
        matrix = f", {self.mma}" if self.mma else ""
        return f"{self.registers} registers, {self.shared} bytes shared{matrix}"


def read_resources(kernel: Any) -> Resources:
    """Return the resources of a Triton `CompiledKernel`."""
    shared = kernel.metadata.shared
    return (
        _nvidia(kernel.asm["cubin"], shared)
        if "cubin" in kernel.asm
        else _amd(kernel.asm["amdgcn"], shared)
    )


def _nvidia(cubin: bytes, shared: int) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (_dump(flag, file.name) for flag in ("-res-usage", "-sass"))
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", usage)}
    spills = len(re.findall(r"\b(?:STL|LDL)\b", code))
    mma = next((name for name in _MATRIX if re.search(rf"\b{name}\b", code)), "")
    return Resources(used["REG"], spills, used["STACK"], shared, mma)


def _dump(flag: str, path: str) -> str:
    return subprocess.run(
        [str(_CUOBJDUMP), flag, path], capture_output=True, text=True, check=True
    ).stdout


def _amd(code: str, shared: int) -> Resources:
    used = {
        name: int(value) for name, value in re.findall(r"^\s*\.(\w+):\s+(\d+)$", code, re.MULTILINE)
    }
    spills = used[
        "vgpr_spill_count"
    ]  # scalar registers spill into lanes of vector registers, not into memory
    mma = "MFMA" if "v_mfma" in code else ""
    return Resources(used["vgpr_count"], spills, used["private_segment_fixed_size"], shared, mma)
