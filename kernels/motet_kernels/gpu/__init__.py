"""The Triton kernels, and when they run.

A public function of `motet_kernels` hands its checked tensors to the kernel of the same name here where `takes` says
so: tensors on a GPU, or any tensor while the interpreter is on. Importing this package imports no Triton; its modules
do, so they are imported on first use.

    MOTET_TRITON   off: the torch twins compute on a GPU; interpret: Triton's interpreter runs the kernels on tensors of
                   the CPU, to see that they are right (a thousand times slower). Default: on GPUs, where Triton is.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import torch
from torch import Tensor

from ..errors import KernelError

# Triton 3.10 changes its default; multiplications and additions are fused here.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

MODES = ("off", "interpret", "on")
_mode: str | None = None
_reason = ""


def takes(tensor: Tensor) -> bool:
    """Whether a Triton kernel computes with this tensor."""
    current = _mode or mode()
    return current == "interpret" or (current == "on" and tensor.is_cuda)


def is_gpu(device: torch.device) -> bool:
    """Whether memory is laid out and steps are made as for a GPU: there, and in the interpreter everywhere."""
    return device.type != "cpu" or mode() == "interpret"


def mode() -> str:
    """Where kernels run: on GPUs ("on"), everywhere, in the interpreter ("interpret"), or nowhere ("off")."""
    return _mode or select(os.environ.get("MOTET_TRITON", ""))


def select(wanted: str) -> str:
    """Choose: "on", "interpret", "off", or "" for what this machine can do. Returns what was chosen.

    Raises `KernelError` on another word, and on "interpret" where Triton is missing or was imported without it.
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
    return _mode


def status() -> dict[str, str]:
    """What runs on a GPU, and why if it is not Triton."""
    return {"triton": mode(), "reason": _reason}


def _interpret() -> None:
    """Triton decides when it decorates a function, its own ones when it is imported."""
    if "triton" in sys.modules and not interpreted():
        raise KernelError("MOTET_TRITON=interpret: Triton was imported before; set TRITON_INTERPRET=1 as well")
    os.environ["TRITON_INTERPRET"] = "1"
    from . import interpreter

    interpreter.mend()


def interpreted() -> bool:
    """Whether Triton's own functions were made for its interpreter."""
    from triton.language import cdiv
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(cdiv, InterpretedFunction)
