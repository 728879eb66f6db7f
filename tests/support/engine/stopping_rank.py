"""Be rank 1 of many pairs of ranks, and stop: `python -m support.engine.stopping_rank STORE NAMES SECONDS`.

Prints a line and stops itself once all pairs have met.
"""

from __future__ import annotations

import os
import signal
import sys

import torch.distributed as dist

from motet_llm.parallel.collectives import Collectives


def main() -> None:
    path, names, seconds = sys.argv[1:]
    store = dist.FileStore(path, 2)
    pairs = [Collectives(store, 1, 2, float(seconds), name) for name in names.split(",")]
    print("stops", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    del pairs


if __name__ == "__main__":
    main()
