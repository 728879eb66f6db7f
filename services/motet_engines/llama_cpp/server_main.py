"""Run llama-server in an environment that has its Python package: `PYTHON server_main.py '{…}'`.

It needs no package of Motet. The argument is JSON: model, port, context, slots, threads, options. It
prints `listening` when requests may come, and ends with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from importlib import import_module
from typing import Any


def parameters(library: Any, given: dict[str, Any]) -> Any:
    """Return `CommonParams` of the argument. Raises ValueError for an unknown option."""
    found = library.CommonParams()
    found.model.path = given["model"]
    found.port = given["port"]  # on loopback, unless `hostname` is given
    found.n_parallel = given["slots"]
    found.n_ctx = given["context"] * given["slots"]
    if given["threads"]:
        found.cpuparams.n_threads = found.cpuparams_batch.n_threads = given["threads"]
    found.endpoint_metrics = True
    for name, value in given["options"].items():
        if not hasattr(found, name):
            raise ValueError(f"llama.cpp has no option {name!r}")
        setattr(found, name, type(getattr(found, name))(value))
    return found


def main() -> None:
    """Serve until the parent ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        return
    library = import_module("xllamacpp")
    try:
        server = library.Server(parameters(library, json.loads(sys.argv[1])))
    except (ValueError, TypeError) as error:
        print(f"llama.cpp: {error}", file=sys.stderr, flush=True)
        sys.exit(78)
    print(f"listening {server.listening_address}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
