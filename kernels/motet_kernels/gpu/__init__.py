"""Compute with Triton kernels, and decide when they run.

A public function of `motet_kernels` passes its checked tensors to the kernel of the same name here
where `takes` returns True: for tensors on a GPU, or for any tensor while the interpreter is on.
Importing this package does not import Triton; its modules do, so they are imported on first use.

    MOTET_TRITON   off: the torch twins compute on a GPU; interpret: Triton's interpreter runs the
                   kernels on CPU tensors, to check them (a thousand times slower).
                   Default: on GPUs, where Triton is installed.
    MOTET_TUNED    0: launch what ships, whatever `benchmarks/run.py gpu_tune` has chosen.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import torch
from torch import Tensor

from motet_kernels.runtime.errors import KernelError

# Triton 3.10 changes the default; these kernels expect fused multiplications and additions.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

MODES = ("off", "interpret", "on")
_mode: str | None = None
_reason = ""


def takes(tensor: Tensor) -> bool:
    """Return True if a Triton kernel computes with this tensor."""
    current = _mode or mode()
    return current == "interpret" or (current == "on" and tensor.is_cuda)


def is_gpu(device: torch.device) -> bool:
    """Return True if memory is laid out and steps are prepared as for a GPU.

    That is on GPUs, and on every device while the interpreter is on.
    """
    return device.type != "cpu" or mode() == "interpret"


def mode() -> str:
    """Return where kernels run: "on" (on GPUs), "interpret" (everywhere) or "off" (nowhere)."""
    return _mode or select(os.environ.get("MOTET_TRITON", ""))


def select(wanted: str) -> str:
    """Set and return the mode: "on", "interpret", "off", or "" for what this machine supports.

    Raises `KernelError` on another word, and on "interpret" where Triton is missing or was imported
    without its interpreter.
    """
    global _mode, _reason
    if wanted not in ("", *MODES):
        raise KernelError(f"MOTET_TRITON={wanted!r}: choose one of {', '.join(MODES)}")
    missing = find_spec("triton") is None
    _reason = "Triton is not installed (pip install motet[gpu])" if missing else ""
    if wanted == "interpret":
        if missing:
            raise KernelError(f"MOTET_TRITON=interpret: {_reason}")
        _interpret()
    _mode = "off" if missing else wanted or "on"
    if _mode == "on":
        from motet_kernels.gpu.tuning import use_tuned

        use_tuned()
    return _mode


def status() -> dict[str, str]:
    """Return what runs on a GPU, and why if it is not Triton."""
    return {"triton": mode(), "reason": _reason}


def _interpret() -> None:
    """Switch Triton to its interpreter.

    Triton chooses it when it decorates a function, for its own functions when it is imported.
    Raises `KernelError` where that has happened already.
    """
    if "triton" in sys.modules and not interpreted():
        raise KernelError(
            "MOTET_TRITON=interpret: Triton was imported before; set TRITON_INTERPRET=1 as well"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    from motet_kernels.gpu import interpreter

    interpreter.patch()


def interpreted() -> bool:
    """Return True if Triton's own functions were created for its interpreter."""
    from triton.language import cdiv
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(cdiv, InterpretedFunction)
